"""When memory runs out in the middle of a run: what to reduce, in order of what it brings."""

from dataclasses import replace

from kit.errors import KitError
from kit.memory import GIB, Settings, plan_memory


class OutOfMemory(KitError, RuntimeError):
    """Memory ran out; the record and the adapter were kept. The message names what to reduce first."""


def remedies(settings: Settings) -> list[tuple[str, float]]:
    """(what to change, what it saves by the plan [GiB]), the most first; what saves under 1 % of the plan is left out.

    >>> from kit.hardware import lookup
    >>> from kit.shapes import shape_of
    >>> remedies(Settings(shape_of("Qwen3-4B-Base"), lookup("T4"), "float16", micro_batch=8))[0][0]
    'half the length (max_seq_length=512)'
    """
    s, options = settings, []
    if s.micro_batch > 1:
        half = s.micro_batch // 2
        name = f"per_device_train_batch_size={half} with twice the gradient_accumulation_steps (the same batch)"
        options.append((name, {"micro_batch": half}))
    if not s.checkpointing:
        options.append(("use_gradient_checkpointing=True", {"checkpointing": True}))
    if not s.eight_bit_optimizer and s.hardware.kind == "cuda":
        options.append(('optim="adamw_bnb_8bit"', {"eight_bit_optimizer": True}))
    if s.rank > 1:
        options.append((f"r={s.rank // 2} and max_lora_rank={s.rank // 2}", {"rank": s.rank // 2}))
    options.append((f"half the length (max_seq_length={s.length // 2})", {"length": max(1, s.length // 2)}))
    if s.prompts > 1:
        options.append(("half the prompts a step", {"prompts": s.prompts // 2}))
    now = plan_memory(s).total
    saved = [(name, (now - plan_memory(replace(s, **change)).total) / GIB) for name, change in options]
    return sorted((pair for pair in saved if pair[1] > 0.01 * now / GIB), key=lambda pair: -pair[1])


def explained(error: BaseException, trainer) -> OutOfMemory:
    """The error to raise for a `torch.OutOfMemoryError` of this trainer's run."""
    kept = f"The record up to step {trainer.state.global_step} and the adapter are kept in {trainer.run_dir}."
    return OutOfMemory(f"Memory ran out: {str(error).splitlines()[0]}\n{kept}\n{_advice(trainer)}")


def _advice(trainer) -> str:
    try:
        found = remedies(_settings(trainer))
    except KitError as reason:  # a family that the plan does not know
        return f"No plan of this model's memory ({reason}): halve per_device_train_batch_size, or shorten completions."
    lines = [f"  {saved:5.2f} GiB  {name}" for name, saved in found]
    return "\n".join(["Reduce, by what the plan says it saves:", *lines])


def _settings(trainer) -> Settings:
    from kit.hardware import detect
    from kit.shapes import shape_of

    args, loaded = trainer.args, trainer.loaded
    group = args.num_generations
    return Settings(
        shape_of(loaded.path),
        detect(),
        loaded.precision.name,
        rank=trainer.model.peft_config["default"].r,
        length=loaded.max_seq_length,
        group=group,
        prompts=max(1, args.generation_batch_size // group),
        micro_batch=args.per_device_train_batch_size,
        shared=loaded.shared_weights.startswith("shared"),
        fast_inference=trainer.sampler.name == "vllm",
        checkpointing=trainer.model.is_gradient_checkpointing,
        eight_bit_optimizer="8bit" in str(args.optim),
    )
