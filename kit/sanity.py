"""The sanity test: problems that can all be learned, and who learns them. `python -m kit experiment sanity`.

After Qi et al. (arXiv 2510.26788, section 4): sample each problem of a set many times, keep those that are right in 20
to 80 % of the samples, so that every one of them can be solved and none is solved already. An algorithm and a number
format that work should then bring the training accuracy above 95 %; one that does not, fails for no lack of ability.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kit.errors import ArgumentError
from kit.records import Run, free_path
from kit.summary import finite, number, plural, skipped_steps

LOW, HIGH = 0.2, 0.8  # share of right answers of a problem that is kept
CHUNK = 16  # problems sampled at once, between two lines of progress
CURVES = {"accuracy": "accuracy", "grad_norm": "grad_norm", "mismatch": "mismatch/abs_mean"}


@dataclass(frozen=True)
class SanitySettings:
    """`candidates` problems are sampled `samples` times each; an arm trains on the kept ones until the mean accuracy of
    `window` steps exceeds `target`, or for `steps` steps. `completions` a step, in groups of `group`."""

    model: str = "tiny"
    candidates: int = 96
    samples: int = 40
    steps: int = 100
    target: float = 0.95
    window: int = 5
    completions: int = 64
    group: int = 8
    seed: int = 0

    def __post_init__(self):
        for name in ("candidates", "samples", "steps", "window"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if self.samples < 2:
            raise ArgumentError(f"samples is {self.samples}; expected 2 or more (the paper takes 40).")
        if not 0 < self.target < 1:
            raise ArgumentError(f"target is {self.target}; expected an accuracy between 0 and 1.")


# ---- pure parts


def perfectible(shares: Sequence[float], low: float = LOW, high: float = HIGH) -> list[int]:
    """Indices of the problems of which a share between `low` and `high` (both included) was right.

    >>> perfectible([0.0, 0.2, 0.5, 0.8, 1.0])
    [1, 2, 3]
    """
    return [index for index, share in enumerate(shares) if low <= share <= high]


def first_reached(accuracies: Sequence[float | None], target: float, window: int) -> int | None:
    """The step (from 1) at which the mean of the last `window` accuracies first exceeds `target`; None if never.

    >>> first_reached([0.5, 0.9, 1.0, 1.0], target=0.94, window=2), first_reached([1.0], target=0.9, window=2)
    (3, None)
    """
    for step in range(window, len(accuracies) + 1):
        last = accuracies[step - window : step]
        if None not in last and statistics.fmean(last) > target:
            return step
    return None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed; None of none.

    >>> percentile([3.0, 1.0, 2.0], 0.5), percentile([], 0.5)
    (2.0, None)
    """
    ordered = sorted(values)
    place = -(-share * len(ordered) // 1)
    return ordered[max(int(place), 1) - 1] if ordered else None


def arm_figures(run: Run, target: float, window: int) -> dict:
    """What is reported of an arm: who got there, when, and on the way gradient norms, mismatch and skipped steps."""
    accuracies = finite(run, "accuracy")
    reached = first_reached(accuracies, target, window)
    norms = [value for value in finite(run, "grad_norm") if value is not None]
    mismatch = [value for value in finite(run, "mismatch/abs_mean") if value is not None]
    known = [value for value in accuracies if value is not None]
    return {
        "steps": len(run.records), "reached": reached, "accuracy_first": known[0] if known else None,
        "accuracy_final": _mean(known[-window:]),
        "accuracy_best": max((_mean(known[i : i + window]) for i in range(len(known) - window + 1)), default=None),
        "grad_norm_median": percentile(norms, 0.5), "grad_norm_p99": percentile(norms, 0.99),
        "mismatch_start": _mean(mismatch[:window]), "mismatch_end": _mean(mismatch[-window:]),
        "skipped": len(skipped_steps(run)), "seconds": sum(value or 0 for value in finite(run, "time/step")),
        "curves": {name: finite(run, key) for name, key in CURVES.items()},
    }  # fmt: skip


def _mean(values):
    return statistics.fmean(values) if values else None


# ---- the set


def perfectible_set(model, tokenizer, settings: SanitySettings):
    """(dataset of the kept problems, what is said of it) by sampling the base model.

    Raises:
        kit.errors.ArgumentError: none is kept, or fewer than a step needs; the shares found are said.
    """
    from kit import arithmetic
    from kit.evaluation import evaluate
    from kit.lesson import problems, stop_strings, suited_settings
    from kit.sampler import SamplingSettings

    candidates = problems(settings.model, "rl", settings.candidates, settings.seed)
    longest = suited_settings(settings.model, "float32").max_completion_length
    sampling = SamplingSettings(max_tokens=longest, stop=tuple(stop_strings(settings.model)))
    shares = []
    for start in range(0, len(candidates), CHUNK):
        part = candidates.select(range(start, min(start + CHUNK, len(candidates))))
        found = evaluate(
            model, tokenizer, part, arithmetic.correct_answer, samples=settings.samples, settings=sampling,
            seed=settings.seed + start,
        )  # fmt: skip
        shares += found.per_problem
        print(f"{len(shares)} of {plural(len(candidates), 'problem')} sampled {settings.samples} times", flush=True)
    kept = perfectible(shares)
    about = {
        "candidates": settings.candidates, "samples": settings.samples, "low": LOW, "high": HIGH, "kept": len(kept),
        "never_right": sum(share == 0 for share in shares),
        "always_right": sum(share == 1 for share in shares), "accuracy": statistics.fmean(shares),
    }  # fmt: skip
    check_set(about, settings.completions // settings.group)
    print(f"Kept {len(kept)} of {settings.candidates}: right in {LOW:.0%} to {HIGH:.0%} of the samples.")
    return candidates.select(kept), about


def check_set(about: dict, needed: int) -> None:
    """Refuse a set without enough perfectible problems for a step."""
    if about["kept"] < needed:
        raise ArgumentError(
            f"Of {about['candidates']} problems {about['kept']} are right in {about['low']:.0%} to {about['high']:.0%} "
            f"of {about['samples']} samples ({about['never_right']} never, {about['always_right']} always); a step "
            f"needs {needed}. Take more candidates, or a model that is neither lost nor done with these problems."
        )


# ---- the arms


class _UntilReached:
    """Sees the records and, as a run's control, stops it once the target is reached."""

    def __init__(self, settings: SanitySettings):
        self.settings, self.accuracies = settings, []

    def __call__(self, record: dict) -> None:
        self.accuracies.append(record.get("accuracy"))

    def check(self) -> str:
        """ "stop" or "run", as `kit.control.RunControl.check`."""
        reached = first_reached(self.accuracies, self.settings.target, self.settings.window)
        return "run" if reached is None else "stop"


def run_sanity(settings: SanitySettings, dtypes: Sequence[str], out: str | Path, *, view=None) -> dict:
    """Build the set in the first dtype, then train each dtype on it, one engine after the other.

    Each arm is recorded as a run in `out`/DTYPE. `view(runs so far)`, if given, returns a listener for an arm's
    records, for example a `kit.live.LiveView`.

    Raises:
        kit.errors.ArgumentError: no dtype, or no perfectible problems; kit.precision.PrecisionError.
    """
    from kit.loading import close_current
    from kit.precision import Precision

    if not dtypes:
        raise ArgumentError("No dtype was given; expected some of float32, float16, bfloat16.")
    for name in dtypes:
        Precision.of(name)
    dataset, about, arms, runs, started = None, None, {}, [], time.perf_counter()
    for name in dtypes:
        base, tokenizer, arm = _load(settings, name)
        if dataset is None:
            dataset, about = perfectible_set(base, tokenizer, settings)
            about |= {"sampled_in": name, "seconds": round(time.perf_counter() - started, 1)}
        listeners = [view(list(runs))] if view else []
        runs.append(_train(settings, arm, base, tokenizer, dataset, free_path(Path(out) / name), listeners))
        arms[name] = arm_figures(runs[-1], settings.target, settings.window) | {"run": str(runs[-1].path)}
        print(arm_text(name, arms[name], settings.target))
        del base
    close_current()
    return {"model": settings.model, "target": settings.target, "window": settings.window, "set": about, "arms": arms}


def _load(settings, dtype):
    """(base model, tokenizer, `TrainSettings` of the arm)."""
    from kit import FastLanguageModel
    from kit.lesson import suited_settings

    arm = replace(
        suited_settings(settings.model, dtype, settings.steps), completions=settings.completions, group=settings.group,
        seed=settings.seed, save_steps=settings.steps,
    )  # fmt: skip
    model, tokenizer = FastLanguageModel.from_pretrained(
        settings.model, max_seq_length=arm.max_prompt_length + arm.max_completion_length, dtype=dtype,
        max_lora_rank=arm.rank, max_num_seqs=max(arm.completions, 128),
    )  # fmt: skip
    return model, tokenizer, arm


def _train(settings, arm, base, tokenizer, dataset, out, listeners):
    from kit import FastLanguageModel, GRPOTrainer, arithmetic
    from kit.lesson import stop_strings
    from kit.training import training_arguments

    model = FastLanguageModel.get_peft_model(base, r=arm.rank, lora_alpha=arm.alpha, random_state=arm.seed)
    arguments = training_arguments(arm, out)
    arguments.generation_kwargs = {"stop": stop} if (stop := stop_strings(settings.model)) else None
    watcher = _UntilReached(settings)
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=arithmetic.correct_answer, args=arguments,
        train_dataset=dataset, on_record=[watcher, *listeners], run_control=watcher,
        run_info={"task": "perfectible arithmetic"},
    )  # fmt: skip
    trainer.train()
    return Run.load(out)


# ---- the experiment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit experiment sanity`."""
    parser.add_argument("--model", default="tiny", help="tiny, a folder, or a name on the hub")
    parser.add_argument("--dtypes", default="float32,float16,bfloat16", help="comma-separated")
    for name in ("candidates", "samples", "steps", "completions", "group", "seed"):
        default = getattr(SanitySettings, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--target", type=float, default=SanitySettings.target, help="training accuracy to exceed")


def measure(args: argparse.Namespace) -> dict:
    """`python -m kit experiment sanity`."""
    from kit.live import LiveView

    names = ("model", "candidates", "samples", "steps", "completions", "group", "seed", "target")
    settings = SanitySettings(**{name: getattr(args, name) for name in names})
    dtypes = [name.strip() for name in args.dtypes.split(",") if name.strip()]
    return run_sanity(settings, dtypes, args.out or "runs/experiments/sanity", view=lambda runs: LiveView())


def figure(result: dict):
    """Accuracy, gradient norm and mismatch of the arms by step."""
    from kit.study_plots import sanity_figure

    return sanity_figure(result)


def text(result: dict) -> str:
    """The set and every arm in words."""
    about = result["set"]
    first = (
        f"{about['kept']} of {about['candidates']} problems are right in {about['low']:.0%} to {about['high']:.0%} of "
        f"{about['samples']} samples of {result['model']} and were trained on."
    )
    return "\n".join([first, *(arm_text(name, arm, result["target"]) for name, arm in result["arms"].items())])


def arm_text(name: str, arm: dict, target: float) -> str:
    """One arm in a sentence."""
    final = "unknown" if arm["accuracy_final"] is None else f"{arm['accuracy_final']:.3f}"
    got = f"above {target:.0%} at step {arm['reached']}" if arm["reached"] else f"not above {target:.0%}"
    shown = {key: "none" if arm[key] is None else number(arm[key]) for key in
             ("grad_norm_median", "grad_norm_p99", "mismatch_start", "mismatch_end")}  # fmt: skip
    return (
        f"{name:>8}: {got} of {plural(arm['steps'], 'step')}, final accuracy {final}; gradient norm median "
        f"{shown['grad_norm_median']}, 99th percentile {shown['grad_norm_p99']}; mean |d| {shown['mismatch_start']} at "
        f"first, {shown['mismatch_end']} at last; {plural(arm['skipped'], 'update')} skipped; {arm['seconds']:.0f} s."
    )
