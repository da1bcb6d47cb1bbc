"""Do corrections help? The mismatch widened on purpose, each correction on the same tokens, then in training.

`python -m kit experiment corrections`. First, on one batch (`kit.gradients`): the sampler holds a policy of k updates
ago; each method's weights are taken (`kit.importance`), and the gradient that they give is compared with the one that
the trainer's policy gives on its own samples. Then training with a sampler that lags behind (`kit.stale`), by TRL's own
arguments.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kit.errors import ArgumentError
from kit.importance import CAP, CORRECTIONS, chosen
from kit.records import Run, free_path
from kit.summary import finite, number, plural

LAST = 5  # steps in "final"


@dataclass(frozen=True)
class CorrectionSettings:
    """`updates` are made first, and the judged batch's sampler is 0, 1, 4, ... of them behind. Training takes
    `steps` steps for each of `trained`, with a sampler that is synced every `every` steps; 0 steps skip it. `judged`
    completions are judged, `completions` are sampled a step, in groups of `group`. `cap` is C, the largest weight."""

    model: str = "tiny"
    corrections: tuple[str, ...] = tuple(CORRECTIONS)
    trained: tuple[str, ...] = tuple(CORRECTIONS)
    updates: int = 16
    judged: int = 256
    steps: int = 12
    every: int = 6
    completions: int = 64
    group: int = 8
    cap: float = CAP
    seed: int = 0

    def __post_init__(self):
        chosen(self.corrections + self.trained)
        for name, least in (("updates", 1), ("steps", 0), ("every", 1)):
            if getattr(self, name) < least:
                raise ArgumentError(f"{name} is {getattr(self, name)}; expected at least {least}.")
        if not self.cap > 0:
            raise ArgumentError(f"cap is {self.cap}; expected a number above 0 (TRL's default is {CAP:g}).")
        if self.judged < self.group or self.judged % self.group:
            raise ArgumentError(f"judged is {self.judged}; expected a multiple of the group of {self.group}.")


def lags(updates: int) -> list[int]:
    """How many updates behind the sampler is: 0, then powers of four, then all.

    >>> lags(16), lags(5), lags(1)
    ([0, 1, 4, 16], [0, 1, 4, 5], [0, 1])
    """
    powers = [4**k for k in range(20) if 4**k < updates]
    return [0, *powers, updates]


def arm_figures(run: Run) -> dict:
    """What is reported of an arm: accuracy, gradient norm, effective sample size, masked share, mismatch."""

    def median(key):
        values = [record[key] for record in run.records if record.get(key) is not None]
        return statistics.median(values) if values else None

    accuracies = [value for value in finite(run, "accuracy") if value is not None]
    return {
        "accuracy_first": accuracies[0] if accuracies else None,
        "accuracy_final": statistics.fmean(accuracies[-LAST:]) if accuracies else None,
        "grad_norm": median("grad_norm"), "sequence_ess": median("mismatch/ess"),
        "masked_share": median("correction/masked_share"), "weight_mean": median("correction/weight_mean"),
        "abs_mean": median("mismatch/abs_mean"), "accuracy": finite(run, "accuracy"), "steps": len(run.records),
    }  # fmt: skip


def run_corrections(settings: CorrectionSettings, dtypes: Sequence[str], out: str | Path, *, view=None) -> dict:
    """Judge the corrections on a batch and in training, dtype after dtype, an engine each.

    Runs are recorded in `out`. `view(runs so far)`, if given, returns a listener for an arm's records.

    Raises:
        kit.errors.ArgumentError: no dtype, unknown corrections; kit.precision.PrecisionError.
    """
    from kit.loading import close_current
    from kit.precision import Precision

    if not dtypes:
        raise ArgumentError("No dtype was given; expected some of float32, float16, bfloat16.")
    for name in dtypes:
        Precision.of(name)
    found = {}
    for name in dtypes:
        found[name] = _Study(settings, name, Path(out), view).run()
    close_current()
    return {
        "model": settings.model,
        "every": settings.every,
        "updates": settings.updates,
        "cap": settings.cap,
        "dtypes": found,
    }


class _Study:
    """One dtype: its engine, its base model, and every arm on it."""

    def __init__(self, settings, dtype, out, view):
        from kit import FastLanguageModel
        from kit.lesson import problems, suited_settings

        self.settings, self.dtype, self.out, self.view = settings, dtype, out, view
        self.arm = replace(
            suited_settings(settings.model, dtype, max(settings.steps, 1)), completions=settings.completions,
            group=settings.group, seed=settings.seed, save_steps=10**6,
        )  # fmt: skip
        self.base, self.tokenizer = FastLanguageModel.from_pretrained(
            settings.model, max_seq_length=self.arm.max_prompt_length + self.arm.max_completion_length, dtype=dtype,
            max_lora_rank=self.arm.rank, max_num_seqs=max(settings.completions, 128),
        )  # fmt: skip
        self.problems = problems(settings.model, "rl", self.arm.problems, settings.seed)

    def run(self) -> dict:
        """{"batch": rows of `kit.gradients.judge_batch`, "training": {correction: `arm_figures`}}."""
        batch, training, runs = self._batch(), {}, []
        for correction in chosen(self.settings.trained) if self.settings.steps else ():
            trainer = self._trainer(correction, self.settings.steps, self.settings.every, self._views(runs))
            trainer.train()
            self.base = trainer.model.unload()
            runs.append(Run.load(trainer.run_dir))
            training[correction.name] = arm_figures(runs[-1]) | {"run": str(runs[-1].path)}
            print(arm_text(f"{self.dtype}, {correction.name}", training[correction.name]), flush=True)
        return {"batch": batch, "training": training}

    def _views(self, runs):
        return [self.view(list(runs))] if self.view else []

    def _batch(self):
        from kit import arithmetic
        from kit.gradients import Judging, judge_batch, snapshot

        keep = lambda record: snapshots.append(snapshot(trainer.model))  # noqa: E731
        trainer = self._trainer(CORRECTIONS["none"], self.settings.updates, 1, [keep, *self._views([])], name="updates")
        snapshots = [snapshot(trainer.model)]
        trainer.train()
        how = Judging(
            chosen(self.settings.corrections), arithmetic.correct_answer, self.settings.group,
            self.arm.max_completion_length, self.settings.seed, self.settings.cap,
        )  # fmt: skip
        judged = self.problems.select(range(self.settings.judged // self.settings.group))
        rows = judge_batch(trainer.model, self.tokenizer, snapshots, lags(self.settings.updates), judged, how)
        self.base = trainer.model.unload()
        return rows

    def _trainer(self, correction, steps, every, listeners, name=None):
        from kit import FastLanguageModel, arithmetic
        from kit.stale import StaleTrainer
        from kit.training import training_arguments

        name = name or correction.name.lower().replace(" ", "-").replace(".", "")
        arguments = training_arguments(replace(self.arm, steps=steps), free_path(self.out / f"{self.dtype}-{name}"))
        arguments.lr_scheduler_type = "constant"  # so that each update moves the policy on, the last ones too
        for key, value in correction.arguments.items():
            setattr(arguments, key, self.settings.cap if key == "vllm_importance_sampling_clip_max" else value)
        policy = FastLanguageModel.get_peft_model(
            self.base, r=self.arm.rank, lora_alpha=self.arm.alpha, random_state=self.arm.seed
        )
        return StaleTrainer(
            model=policy, processing_class=self.tokenizer, reward_funcs=arithmetic.correct_answer, args=arguments,
            train_dataset=self.problems, on_record=[*listeners, _nothing], every=every,
            run_info={"task": "arithmetic", "correction": correction.name},
        )  # fmt: skip


def _nothing(record):
    """A listener, so that the trainer opens no live view of its own."""


# ---- the experiment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit experiment corrections`."""
    parser.add_argument("--model", default="tiny", help="tiny, a folder, or a name on the hub")
    parser.add_argument("--dtypes", default="float16,bfloat16", help="comma-separated")
    parser.add_argument("--corrections", default=",".join(CORRECTIONS), help="comma-separated; default: all")
    for name in ("updates", "judged", "steps", "every", "completions", "group", "seed"):
        default = getattr(CorrectionSettings, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--cap", type=float, default=CAP, help=f"largest weight; default {CAP:g}")


def measure(args: argparse.Namespace) -> dict:
    """`python -m kit experiment corrections`."""
    from kit.live import LiveView

    names = ("model", "updates", "judged", "steps", "every", "completions", "group", "cap", "seed")
    listed = tuple(name.strip() for name in args.corrections.split(",") if name.strip())
    settings = CorrectionSettings(corrections=listed, trained=listed, **{name: getattr(args, name) for name in names})
    dtypes = [name.strip() for name in args.dtypes.split(",") if name.strip()]
    out = args.out or "runs/experiments/corrections"
    return run_corrections(settings, dtypes, out, view=lambda runs: LiveView())


def figure(result: dict):
    """Effective sample size, gradient and reward of each correction."""
    from kit.study_plots import corrections_figure

    return corrections_figure(result)


def text(result: dict) -> str:
    """A table a dtype of the batch with the widest mismatch, then a sentence an arm of the training."""
    parts = []
    for name, found in result["dtypes"].items():
        parts.append(batch_table(name, found["batch"]))
        parts += [arm_text(f"{name}, {correction}", arm) for correction, arm in found["training"].items()]
    return "\n".join(parts)


def batch_table(dtype: str, rows: Sequence[dict]) -> str:
    """The corrections at the largest lag as a table: weights, and the gradient against the trainer's own."""
    largest = max(row["lag"] for row in rows)
    lines = [
        f"{dtype}, sampler {plural(largest, 'update')} behind:",
        f"{'':14}{'ESS':>8}{'masked':>9}{'largest weight':>16}{'cosine':>9}{'length':>9}",
    ]
    for row in (row for row in rows if row["lag"] == largest):
        shown = ["none" if row[key] is None else f"{row[key]:.2f}" for key in ("cosine", "share")]
        lines.append(
            f"{row['correction']:14}{row['ess']:>8.2f}{row['masked_share']:>9.1%}{row['max']:>16.2f}"
            f"{shown[0]:>9}{shown[1]:>9}"
        )
    floor = next((row["floor"] for row in rows if row["floor"] is not None), None)
    noise = "cannot be compared" if floor is None else f"agree to a cosine of {floor:.2f}"
    return "\n".join([*lines, f"Two halves of the trainer's own samples {noise}."])


def arm_text(name: str, arm: dict) -> str:
    """One arm of the training in a sentence."""
    known = {key: "none" if arm[key] is None else number(arm[key]) for key in arm if key not in ("accuracy", "run")}
    masked = "" if arm["masked_share"] is None else f", {arm['masked_share']:.1%} of tokens masked"
    return (
        f"{name}: accuracy {known['accuracy_first']} at first, {known['accuracy_final']} at last; gradient norm "
        f"{known['grad_norm']}, mean |d| {known['abs_mean']}, sequence ESS {known['sequence_ess']}{masked}."
    )
