"""A whole run from one frozen value: load, evaluate, train, evaluate, record. `python -m kit train` calls it.

The notebooks do the same in separate cells; nothing here is needed to follow them.
"""

import argparse
import contextlib
import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kit.errors import ArgumentError
from kit.records import Run, RunNotFound, plain

FAILED_REWARD = "failed_reward.json"  # what a reward function was given when it failed


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a run; the defaults suit the bundled model on two CPU cores.

    `completions` a step are sampled in groups of `group` (so `completions / group` prompts), and trained on in
    micro-batches of `micro_batch` (0: all at once). `problems` training problems are drawn with `seed`.
    `held_out` problems, which are not trained on, are evaluated before and after; 0 skips that.

    `task` is a name of `kit.tasks`; `question`, `answer`, `solution` and `level` are columns of a file or hub data set.
    `rewards` is a list as `kit.task_rewards` reads it, `tags` and `template` say what prompts look like
    (`kit.task_setup`, `kit.templates`), `warm_up` counts steps of supervised fine-tuning on worked solutions before
    GRPO, with `warm_up_learning_rate`. `stop`, `top_p`, `top_k` and `min_p` change how completions are sampled; all but
    `stop` bias the measured ratio, and the run says so. `reward_limit` is the time for one reward of one step [s].
    """

    model: str = "tiny"
    dtype: str = "float16"
    steps: int = 40
    learning_rate: float = 2e-3
    rank: int = 16
    alpha: int = 32
    group: int = 8
    completions: int = 64
    micro_batch: int = 0
    problems: int = 512
    max_prompt_length: int = 32
    max_completion_length: int = 96
    temperature: float = 1.0
    beta: float = 0.0
    loss_type: str = "dapo"
    sync: str = "native"
    save_steps: int = 10
    held_out: int = 0
    gpu_memory_utilization: float = 0.5
    seed: int = 0
    task: str = "arithmetic"
    question: str = ""
    answer: str = ""
    solution: str = ""
    level: str = ""
    rewards: str = ""
    tags: str = ""
    template: str = "auto"
    warm_up: int = 0
    warm_up_learning_rate: float = 1e-3
    stop: str = ""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    reward_limit: float = 300.0

    def __post_init__(self):
        for name in ("steps", "learning_rate", "rank", "alpha", "completions", "problems", "max_prompt_length",
                     "max_completion_length", "temperature", "save_steps", "warm_up_learning_rate", "top_p",
                     "reward_limit"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}; expected a number above 0.")
        if self.group < 2 or self.completions % self.group:
            raise ArgumentError(
                f"completions is {self.completions} and group {self.group}; expected a group of at least 2, and a "
                f"multiple of it as completions."
            )
        if self.micro_batch < 0 or self.completions % (self.micro_batch or 1):
            raise ArgumentError(
                f"micro_batch is {self.micro_batch}; expected a divisor of the {self.completions} completions, or 0."
            )
        for name in ("held_out", "warm_up", "top_k", "min_p"):
            if not getattr(self, name) >= 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}; expected 0, or a number above it.")

    def differences(self, other: "TrainSettings") -> list[str]:
        """Names of the settings in which two runs differ."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


def load(settings: TrainSettings):
    """(PEFT model, tokenizer) for these settings."""
    from kit.loading import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=settings.model,
        max_seq_length=settings.max_prompt_length + settings.max_completion_length,
        dtype=settings.dtype,
        max_lora_rank=settings.rank,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_num_seqs=settings.completions,
    )
    model = FastLanguageModel.get_peft_model(
        model, r=settings.rank, lora_alpha=settings.alpha, random_state=settings.seed
    )
    return model, tokenizer


def training_arguments(settings: TrainSettings, out: str | Path):
    """The `kit.GRPOConfig` of these settings."""
    from kit.config import GRPOConfig
    from kit.task_setup import stop_strings

    micro_batch = settings.micro_batch or settings.completions
    stop = stop_strings(settings.stop)
    return GRPOConfig(
        output_dir=str(out),
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="linear",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=settings.completions // micro_batch,
        num_generations=settings.group,
        max_completion_length=settings.max_completion_length,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p or None,
        generation_kwargs={"stop": stop} if stop else None,
        beta=settings.beta,
        loss_type=settings.loss_type,
        sync=settings.sync,
        save_steps=settings.save_steps,
        seed=settings.seed,
    )


def train(settings: TrainSettings, out: str | Path, *, resume: bool = False, on_record=None, run_control=None) -> Run:
    """Train on the settings' task and return the finished run's record.

    Raises:
        kit.records.RunExists: `out` holds a run and `resume` is false; nothing is loaded then.
        kit.errors.ArgumentError: what `kit.task_setup.prepare` says of data and rewards; nothing is loaded then either.
        whatever loading and training raise; the record keeps every finished step.
    """
    _check_request(settings, out, resume)
    from kit.task_setup import check_size, prepare

    prepared = prepare(settings)
    check_size(prepared, settings)
    for note in prepared.notes:
        print(note)
    arguments = training_arguments(settings, out)
    arguments.reward_weights = list(prepared.rewards.weights)
    model, tokenizer = load(settings)
    if prepared.chat_template:
        tokenizer.chat_template = prepared.chat_template
    try:
        info = {"train_settings": asdict(settings), "task": settings.task, "task_notes": list(prepared.notes)}
        info |= {"chat_template": prepared.chat_template} if prepared.chat_template else {}
        before = None if resume else _held_out(model, tokenizer, settings, prepared.task)
        if settings.warm_up and not resume:
            info["warm_up"] = _warm_up(model, tokenizer, settings, prepared.task)
        run_dir = _grpo(model, tokenizer, settings, prepared, arguments, info, resume, on_record, run_control)
        _summarise(run_dir, before, _held_out(model, tokenizer, settings, prepared.task))
    finally:
        model.kit.sampler.close()
    return Run.load(out)


def _warm_up(model, tokenizer, settings, task):
    from kit.warmup import warm_up

    warmed = warm_up(model, tokenizer, task, steps=settings.warm_up, learning_rate=settings.warm_up_learning_rate,
                     batch=min(16, settings.completions), seed=settings.seed)  # fmt: skip
    print(f"Warm-up: {warmed}")
    return warmed.as_dict()


def _grpo(model, tokenizer, settings, prepared, arguments, info, resume, on_record, run_control):
    """Train; returns the run's folder. What a reward function failed on is kept there."""
    from kit.rewards import RewardError, checked_reward
    from kit.trainer import GRPOTrainer

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[checked_reward(function, settings.reward_limit) for function in prepared.rewards.functions],
        args=arguments,
        train_dataset=prepared.task.train,
        on_record=on_record,
        run_info=info,
        run_control=run_control,
    )
    try:
        trainer.train(resume_from_checkpoint=resume)
    except RewardError as error:
        kept = trainer.run_dir / FAILED_REWARD
        kept.write_text(json.dumps(plain({"error": str(error)} | error.sample), indent=2))
        error.args = (f"{error} What it was given is in {kept}.",)
        raise
    return trainer.run_dir


def _check_request(settings, out, resume):
    """Refuse what is known to be wrong before TRL and vLLM are imported: folder, checkpoint, dtype, model."""
    from kit import checkpoints
    from kit.loading import resolve
    from kit.precision import Precision
    from kit.records import RunExists, free_path

    if resume:
        checkpoints.find(Path(out), resume)
    elif free_path(out) != Path(out):
        raise RunExists(
            f"{out} already holds a run. Resume it (--resume {out}), or take a free name: {free_path(out)}."
        )
    Precision.of(settings.dtype)
    resolve(settings.model)


def settings_of(run_dir: str | Path) -> TrainSettings:
    """The settings that a run was started with, for resuming it.

    Raises:
        RunNotFound: no run there, or one that was not started by `train`.
    """
    info = Run.load(run_dir).info
    if "train_settings" not in info:
        raise RunNotFound(f"{run_dir} was not started by `python -m kit train`; resume it where it was started.")
    return TrainSettings(**info["train_settings"])


def _held_out(model, tokenizer, settings, task):
    if not settings.held_out:
        return None
    from kit.evaluation import evaluate
    from kit.sampler import SamplingSettings
    from kit.task_setup import stop_strings

    sampling = None
    if settings.stop:
        stop = tuple(stop_strings(settings.stop))
        sampling = SamplingSettings(settings.max_completion_length, settings.temperature, stop=stop)
    return evaluate(model, tokenizer, task.held_out, task.correct_answer, settings=sampling, seed=settings.seed)


def _summarise(run_dir, before, after):
    from kit.evaluation import paired_difference
    from kit.records import annotate

    run = Run.load(run_dir)
    first, last = run.records[0], run.records[-5:]
    accuracies = [r["accuracy"] for r in last if r["accuracy"] is not None]
    summary = {
        "steps": run.records[-1]["step"],
        "accuracy_first": first["accuracy"],
        "accuracy_last5": sum(accuracies) / len(accuracies) if accuracies else None,
        "held_out_before": before and before.pass_at_1,
        "held_out_after": after and after.pass_at_1,
        "held_out_standard_error": after and after.standard_error,
    }
    if before and after:
        summary["held_out_difference"] = paired_difference(before, after).as_dict()
    annotate(run_dir, summary=summary)


def rewards_text(run: Run) -> str:
    """The mean of each reward's column at the first and the last step, a line each."""
    first, last = run.records[0], run.records[-1]
    names = [key for key in run.keys if key.startswith("rewards/") and key.endswith("/mean")]
    ends = {key: ["none" if row.get(key) is None else f"{row[key]:.3f}" for row in (first, last)] for key in names}
    lines = [f"  {key.split('/')[1]:22}{' -> '.join(values)}" for key, values in ends.items()]
    return "\n".join([f"rewards, step {first['step']} -> step {last['step']}", *lines])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit train`: one for each setting."""
    for field in fields(TrainSettings):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default, help=f"default {field.default}")
    parser.add_argument("--out", help="folder of the run, for example runs/NAME; must not hold one")
    parser.add_argument("--resume", metavar="RUN", help="go on with this run from its last checkpoint, as it was set")
    parser.add_argument("--json", action="store_true", help="print records and summary as JSON at the end")


def run(args: argparse.Namespace) -> int:
    """`python -m kit train`: train, report, return the exit status."""
    if bool(args.out) == bool(args.resume):
        print("error: give either --out runs/NAME for a new run, or --resume runs/NAME.", file=sys.stderr)
        return 2
    out = args.resume or args.out
    if args.resume:
        settings = settings_of(out)
    else:
        settings = TrainSettings(**{f.name: getattr(args, f.name) for f in fields(TrainSettings)})
    with contextlib.redirect_stdout(sys.stderr):  # notes on the way; standard output has the result alone
        finished = train(settings, out, resume=bool(args.resume))
    if args.json:
        print(json.dumps({"run": str(out), "info": finished.info, "records": finished.records}, indent=1))
    else:
        from kit.summary import summary_text

        print(summary_text([finished]), rewards_text(finished), sep="\n")
    return 0
