"""`python -m kit evaluate`: a model's accuracy at a task; of a run, before and after it, paired by problem."""

import argparse
import contextlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from kit.errors import ArgumentError
from kit.evaluation import Evaluation, evaluate, paired_difference
from kit.records import Run
from kit.task_setup import Prepared, prepare, stop_strings
from kit.tasks import Task
from kit.training import TrainSettings, settings_of

TASK_SETTINGS = ("task", "question", "answer", "level", "tags", "template")


def evaluated(
    settings: TrainSettings,
    *,
    run: Run | None = None,
    problems: int = 256,
    samples: int = 1,
    temperatures: tuple[float, ...] = (1.0,),
    loaded: tuple | None = None,
    say=print,
) -> dict:
    """Evaluate a model at its settings' task, and the run's adapter too if there is one: one engine, the same problems,
    the same seeds.

    Args:
        settings: model, dtype, task, lengths, seed, and how to sample (top_p, top_k, min_p, stop).
        run: whose adapter is evaluated after the base model.
        problems: held-out problems; fewer where the task has fewer.
        samples: completions a problem.
        temperatures: each is evaluated.
        loaded: (base model, tokenizer) that are loaded already, and stay so; default: they are loaded here.
        say: is told each result as it comes.

    Returns:
        {"results": [{"weights", "temperature", every field of `Evaluation`}], "differences", "notes"}.
    """
    prepared = prepare(settings, held_out=problems)
    if len(prepared.task.held_out) == 0:
        raise ArgumentError(f"{settings.task} has no held-out problem to evaluate with.")
    for note in prepared.notes:
        say(note)
    model, tokenizer = loaded or _load(settings, run)
    results, differences = [], []
    try:
        found: dict[tuple[str, float], Evaluation] = {}
        for weights, policy in _policies(model, run):
            for temperature in temperatures:
                one = _one(policy, tokenizer, prepared, settings, samples, temperature)
                say(f"{weights}, temperature {temperature:g}: {one}")
                found[weights, temperature] = one
                results.append({"weights": weights, "temperature": temperature} | one.as_dict())
        for temperature in temperatures if run else ():
            change = paired_difference(found["base", temperature], found["trained", temperature])
            say(f"trained - base, temperature {temperature:g}: {change}")
            differences.append({"temperature": temperature} | change.as_dict())
    finally:
        if loaded is None:
            model.kit.sampler.close()
    return {"results": results, "differences": differences, "notes": list(prepared.notes)}


def _load(settings, run):
    from kit.loading import FastLanguageModel

    rank = 0
    if run is not None:
        config = run.adapter_dir / "adapter_config.json"
        if not config.exists():
            raise ArgumentError(f"{run.path} has no adapter to evaluate: it stopped before it saved one.")
        rank = json.loads(config.read_text())["r"]
    return FastLanguageModel.from_pretrained(
        model_name=settings.model,
        max_seq_length=settings.max_prompt_length + settings.max_completion_length,
        dtype=settings.dtype,
        max_lora_rank=rank,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_num_seqs=settings.completions,
    )


def _policies(model, run):
    """(name, model) of the base, then of the run's policy; the adapter is put on in between."""
    yield "base", model
    if run is not None:
        from peft import PeftModel

        policy = PeftModel.from_pretrained(model, run.adapter_dir)
        policy.kit = replace(model.kit)
        yield "trained", policy


def _one(policy, tokenizer, prepared: Prepared, settings, samples, temperature):
    from kit.sampler import SamplingSettings

    sampling = SamplingSettings(
        settings.max_completion_length,
        temperature=temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop=tuple(stop_strings(settings.stop)),
    )
    return evaluate_task(policy, tokenizer, prepared.task, sampling, samples=samples, seed=settings.seed)


def evaluate_task(model, tokenizer, task: Task, settings, *, samples: int = 1, seed: int = 0) -> Evaluation:
    """`kit.evaluate` on a task's held-out problems, with the majority vote, and by difficulty where the task has it."""
    level = next((name for name in ("level", "digits") if name in task.held_out.column_names), None)
    return evaluate(model, tokenizer, task.held_out, task.correct_answer, samples=samples, settings=settings,
                    seed=seed, answer_of=task.tags.answer_of, level=level)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit evaluate`."""
    parser.add_argument("--run", metavar="RUN", help="a run: its base and its trained model, and the difference")
    parser.add_argument("--model", help="without --run: tiny (default), a folder, or a name on the hub")
    parser.add_argument("--dtype", help="default: the run's, else float16")
    parser.add_argument("--task", help="default: the run's, else arithmetic")
    for name in TASK_SETTINGS[1:]:
        parser.add_argument(f"--{name}", help=f"as in `python -m kit train --{name}`")
    parser.add_argument("--problems", type=int, default=256, help="held-out problems (default 256)")
    parser.add_argument("--samples", type=int, default=1, help="completions a problem; 8 gives pass@1 to pass@8")
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0], help="one or more (default 1.0)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--stop", help="a stop string, or a JSON list of them; default: the run's, else none")
    parser.add_argument("--max-prompt-length", type=int, help="default: the run's, else 32")
    parser.add_argument("--max-completion-length", type=int, help="default: the run's, else 96")
    parser.add_argument("--seed", type=int, help="of problems and sampling; default: the run's, else 0")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """`python -m kit evaluate`: evaluate, print, return the exit status."""
    if args.problems < 1 or args.samples < 1:
        raise ArgumentError(f"{args.problems} problems, {args.samples} samples each; both must be positive.")
    if args.run and args.model:
        raise ArgumentError("Give either --run, which names its model, or --model.")
    trained = Run.load(Path(args.run)) if args.run else None
    settings = _settings(args, trained)
    with contextlib.redirect_stdout(sys.stderr):  # progress; standard output has the result alone
        found = evaluated(settings, run=trained, problems=args.problems, samples=args.samples,
                          temperatures=tuple(args.temperature), say=lambda text: print(text, flush=True))  # fmt: skip
    result = _origin(settings, trained) | found
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


def _settings(args, trained):
    """The run's settings or the defaults, changed where an option is given."""
    settings = settings_of(trained.path) if trained else TrainSettings(model=args.model or "tiny")
    names = (*TASK_SETTINGS, "dtype", "stop", "max_prompt_length", "max_completion_length", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(settings, **given, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p, rewards="answer")


def _origin(settings, trained):
    from kit import provenance

    shown = {name: value for name, value in asdict(settings).items() if value != ""}
    origin = {"model": settings.model, "dtype": settings.dtype, "task": settings.task, "settings": shown}
    origin |= {"run": trained.name} if trained else {}
    return origin | {"hardware": provenance.machine(), "versions": provenance.versions()}


def table(result: dict) -> str:
    """What `run` prints without --json: a line a result, its levels, and the differences."""
    lines = [f"{result['model']} in {result['dtype']}, {result['task']}"]
    for row in result["results"]:
        values = dict(row)
        weights, temperature = values.pop("weights"), values.pop("temperature")
        lines.append(f"{weights}, temperature {temperature:g}: {Evaluation(**values)}")
        lines += [f"    {name or 'no level'}: {share:.3f} ({count} problems)"
                  for name, (share, count) in row["by_level"].items() if len(row["by_level"]) > 1]  # fmt: skip
    for row in result["differences"]:
        low, high = row["interval"]
        lines.append(f"trained - base, temperature {row['temperature']:g}: {row['mean']:+.3f} "
                     f"(95 % interval {low:+.3f} to {high:+.3f}, paired)")  # fmt: skip
    return "\n".join(lines)
