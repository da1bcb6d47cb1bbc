"""`python -m kit plan`: does a run fit on a card, and what to change first if it does not.

The arithmetic is `kit.memory`; here are the advice, the check before loading, the figure and the command line.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, replace

from kit.cards import Hardware, from_facts, parse_capability
from kit.errors import ArgumentError
from kit.hardware import detect, recommended_dtype
from kit.memory import GIB, MAX_LORA_RANK, Part, Plan, Settings, kv_bytes, plan_memory, sampler_bytes
from kit.shapes import KNOWN, ModelShape, shape_of

__all__ = [
    "Change", "DoesNotFit", "Part", "Plan", "Settings", "add_arguments", "changes", "check_arguments",
    "largest_micro_batch", "plan_figure", "plan_memory", "run",
]  # fmt: skip


class DoesNotFit(ArgumentError):
    """The model and the settings need more memory than the card has."""


@dataclass(frozen=True)
class Change:
    """One thing to change: what, the plan after it, and the memory it gains [bytes]."""

    text: str
    plan: Plan
    gain: int


def changes(plan: Plan) -> tuple[Change, ...]:
    """What would make the plan smaller, the largest gain first; each is one change to these settings.

    >>> from kit.hardware import lookup
    >>> settings = Settings(shape_of("Qwen3-4B"), lookup("T4"), "float16", shared=False)
    >>> [f"{change.text[:28]} {change.gain / GIB:.1f}" for change in changes(plan_memory(settings))[1:3]]
    ['a smaller model: Qwen3-1.7B 9.5', 'share the base weights betwe 7.5']
    """
    s = plan.settings
    options: list[tuple[str, dict]] = []
    if s.hardware.kind == "cuda" and s.fast_inference and not s.shared:
        options.append(("share the base weights between sampler and trainer", {"shared": True}))
    if s.hardware.kind == "cuda" and not s.load_in_4bit:
        options.append(("load_in_4bit=True (quantises the base weights: another experiment)", {"load_in_4bit": True}))
    if smaller := _smaller(s.model):
        options.append((f"a smaller model: {smaller.name}", {"model": smaller}))
    if not s.checkpointing:
        options.append(("gradient checkpointing", {"checkpointing": True}))
    if s.micro_batch > 1:
        options.append((f"micro-batch 1 instead of {s.micro_batch}", {"micro_batch": 1}))
    if s.length >= 128:
        options.append((f"{s.length // 2} tokens instead of {s.length}", {"length": s.length // 2}))
    if s.gpu_memory_utilization is not None and (least := _least_utilization(s)) < s.gpu_memory_utilization:
        text = f"gpu_memory_utilization {least:.2f} (one completion at a time) instead of {s.gpu_memory_utilization}"
        options.append((text, {"gpu_memory_utilization": least}))
    elif s.completions > 1:
        half = -(-s.completions // 2)
        options.append((f"sample {half} completions at once instead of {s.completions}", {"group": half, "prompts": 1}))
    if s.rank > 8:
        options.append((f"rank {s.rank // 2} instead of {s.rank}", {"rank": s.rank // 2}))
    if not s.eight_bit_optimizer:
        options.append(("8-bit optimizer", {"eight_bit_optimizer": True}))
    if s.cuda_graphs and s.fast_inference:
        options.append(("no CUDA graphs (enforce_eager=True; samples slower)", {"cuda_graphs": False}))
    found = [(text, plan_memory(replace(s, **fields))) for text, fields in options]
    gains = [Change(text, after, plan.total - after.total) for text, after in found if after.total < plan.total]
    return tuple(sorted(gains, key=lambda change: -change.gain))


def largest_micro_batch(plan: Plan) -> int:
    """The largest micro-batch, a power of two up to the completions of a step, that fits; 0 where not even 1 does."""
    best, size = 0, 1
    while size <= plan.settings.completions and plan_memory(replace(plan.settings, micro_batch=size)).fits:
        best, size = size, 2 * size
    return best


def check_arguments(
    model: str | ModelShape,
    max_seq_length: int,
    max_lora_rank: int,
    gpu_memory_utilization: float,
    load_in_4bit: bool,
    hardware: Hardware,
    *,
    dtype: str | None = None,
    fast_inference: bool = True,
    shared: bool = True,
) -> Plan:
    """Refuse arguments of `from_pretrained` that cannot work, before anything loads; returns the plan they make.

    Planned for the leanest run (one completion, micro-batch 1): what does not fit here fits nowhere.

    Raises:
        ArgumentError: a value that is impossible; DoesNotFit: one that needs more memory than there is. Both say which
            value would do. UnsupportedDtype, UnknownModel, as their functions do.
    """
    shape = model if isinstance(model, ModelShape) else shape_of(model)
    on_card = hardware.kind == "cuda" and fast_inference
    if max_lora_rank < 1 or max_lora_rank > MAX_LORA_RANK:
        raise ArgumentError(f"max_lora_rank is a whole number from 1 to {MAX_LORA_RANK}; got {max_lora_rank}")
    if not 0 < gpu_memory_utilization <= 1:
        raise ArgumentError(f"gpu_memory_utilization is a share, above 0 and at most 1; got {gpu_memory_utilization}")
    settings = Settings(
        shape, hardware, dtype or recommended_dtype(hardware)[0],
        rank=max_lora_rank, length=max_seq_length, group=1,
        shared=shared and hardware.kind == "cuda", fast_inference=fast_inference, load_in_4bit=load_in_4bit,
        gpu_memory_utilization=gpu_memory_utilization if on_card and hardware.memory_gib else None,
    )  # fmt: skip
    plan = plan_memory(settings)
    if settings.gpu_memory_utilization is not None:
        _check_utilization(plan)
    elif not plan.fits:
        raise DoesNotFit(f"{plan.table()}\n{_advice(plan)}")
    return plan


def _check_utilization(plan: Plan):
    settings, asked = plan.settings, plan.settings.gpu_memory_utilization
    least, most = _least_utilization(settings), _most_utilization(plan)
    name, card = settings.model.name, settings.hardware
    if least > most or least > 1:
        without = plan_memory(replace(settings, gpu_memory_utilization=None))
        raise DoesNotFit(
            f"{name} does not fit on {card.name} with {card.memory_gib:.1f} GiB at any gpu_memory_utilization.\n"
            f"{without.table()}\n{_advice(without)}"
        )
    if asked < least:
        raise DoesNotFit(
            f"gpu_memory_utilization={asked} of {card.memory_gib:.1f} GiB leaves no room for one completion of "
            f"{settings.length} tokens after the sampler's {sampler_bytes(settings) / GIB:.1f} GiB. "
            f"Give {least:.2f} to {most:.2f}, or a shorter max_seq_length."
        )
    if card.free_gib is not None and asked * card.memory_gib > card.free_gib:
        free = math.floor(100 * card.free_gib / card.memory_gib) / 100
        raise DoesNotFit(
            f"gpu_memory_utilization={asked} asks for {asked * card.memory_gib:.1f} GiB of {card.name}, where "
            f"{card.free_gib:.1f} of {card.memory_gib:.1f} GiB are free: another process holds the rest. End it, or "
            f"give {free:.2f} or less ({least:.2f} is the least that works)."
        )
    if asked > most:
        raise DoesNotFit(
            f"gpu_memory_utilization={asked} leaves {(1 - asked) * card.memory_gib:.1f} of {card.memory_gib:.1f} GiB "
            f"to the trainer, which needs {_trainer_bytes(plan) / GIB:.1f} GiB beside it. Give {most:.2f} or less "
            f"({least:.2f} is the least that works)."
        )


def _trainer_bytes(plan: Plan) -> int:
    """What a run needs beyond vLLM's share [bytes]."""
    return plan.total - plan.part("KV cache").bytes - sampler_bytes(plan.settings)


def _most_utilization(plan: Plan) -> float:
    return math.floor(100 * (1 - _trainer_bytes(plan) / GIB / plan.memory_gib)) / 100


def _least_utilization(settings: Settings) -> float:
    needed = sampler_bytes(settings) + kv_bytes(settings, sequences=1)
    return math.ceil(100 * needed / GIB / settings.hardware.memory_gib) / 100


def _smaller(model: ModelShape) -> ModelShape | None:
    same_kind = [shape for name, shape in KNOWN.items() if name.endswith("-Base") == model.name.endswith("-Base")]
    below = [shape for shape in same_kind if shape.parameters < model.parameters]
    return max(below, key=lambda shape: shape.parameters, default=None)


def _advice(plan: Plan) -> str:
    """The changes as text, the largest gain first; the first few that fit together are named."""
    lines = [
        f"  {change.gain / GIB:>8.2f} GiB  {change.text}{' -> fits' if change.plan.fits else ''}"
        for change in changes(plan)
    ]
    return "\n".join(["change first (gain):", *lines]) if lines else "nothing left to change; use a larger card"


# Okabe and Ito's palette in the order of the parts, so that neighbours differ in lightness as well.
_COLOURS = {
    "base weights": "#0072b2", "base weights, copy": "#56b4e9", "sampler adapter": "#004d40", "KV cache": "#009e73",
    "CUDA graphs": "#b8e0d2", "adapter": "#c75000", "gradients": "#e69f00", "optimizer": "#f5d06f",
    "activations": "#7a5195", "logits chunk": "#cc79a7", "sampler workspace": "#ead1e0", "reserve": "#9aa0a6",
}  # fmt: skip


def plan_figure(plan: Plan):
    """The plan as one bar against the card, a matplotlib Figure; `plan.table()` says the same in words."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    left, widest = 0.0, max(plan.total_gib, plan.memory_gib or 0)
    for part in plan.parts:
        if not part.bytes:
            continue
        label = f"{part.name}  {part.gib:.2f}"
        axes.barh(0, part.gib, left=left, height=0.6, color=_COLOURS[part.name], edgecolor="white", label=label)
        if part.gib > 0.08 * widest:
            axes.text(left + part.gib / 2, 0, f"{part.gib:.1f}", ha="center", va="center", color="white")
        left += part.gib
    if plan.memory_gib is not None:
        axes.axvline(plan.memory_gib, color="#1f2328", linewidth=2)
        align = {"ha": "right", "x": plan.memory_gib - 0.01 * widest}
        axes.text(y=0.42, s=f"{plan.settings.hardware.name}, {plan.memory_gib:g} GiB", va="center", **align)
    axes.set(xlim=(0, 1.03 * widest), ylim=(-0.4, 0.55), xlabel="GiB", yticks=[])
    axes.spines[["left", "top", "right"]].set_visible(False)
    s = plan.settings
    axes.set_title(f"{s.model.name}, {s.dtype}, {s.completions} x {s.length} tokens: {plan.verdict}", loc="left")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure


def add_arguments(parser):
    """The options of `python -m kit plan`."""
    parser.add_argument("--model", default="Qwen3-4B-Base", help="a Qwen3 (0.6B to 8B), tiny, or a local model folder")
    parser.add_argument("--dtype", default="auto", help="float16, bfloat16, float32 or auto")
    parser.add_argument("--gpu", metavar="NAME", help="a card's name, or cpu; default: this machine")
    parser.add_argument("--capability", help="compute capability of a card not in the table")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of the card, as PyTorch reports it")
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapter")
    parser.add_argument("--length", type=int, default=1024, help="prompt and completion together, tokens")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompts", type=int, default=1, help="prompts sampled at once")
    parser.add_argument("--micro-batch", type=int, default=1, help="completions trained on at once")
    parser.add_argument("--utilization", type=float, help="gpu_memory_utilization; default: what the completions need")
    parser.add_argument("--load-in-4bit", action="store_true")
    parser.add_argument("--eight-bit-optimizer", action="store_true")
    parser.add_argument("--no-vllm", action="store_true", help="sample with transformers (fast_inference=False)")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--json", action="store_true", help="print the plans as JSON")


def run(args) -> int:
    """Print the plan with shared and with copied weights; 0 if either fits, 1 if none does."""
    described = args.gpu or args.capability or args.memory
    capability = None if args.capability is None else parse_capability(args.capability)
    hardware = from_facts(args.gpu, capability, args.memory) if described else detect()
    name, reason = recommended_dtype(hardware) if args.dtype == "auto" else (args.dtype, "")
    settings = Settings(
        shape_of(args.model), hardware, name, args.rank, args.length, args.group, args.prompts, args.micro_batch,
        shared=hardware.kind == "cuda", fast_inference=not args.no_vllm, cuda_graphs=not args.eager,
        load_in_4bit=args.load_in_4bit, eight_bit_optimizer=args.eight_bit_optimizer,
        gpu_memory_utilization=args.utilization if hardware.kind == "cuda" else None,
    )  # fmt: skip
    plan = plan_memory(settings)
    plans = {"shared" if settings.shared else "copied": plan}
    if settings.shared and settings.fast_inference:
        plans["copied"] = plan_memory(replace(settings, shared=False))
    if args.json:
        print(json.dumps({weights: as_dict(plan) for weights, plan in plans.items()}, indent=2))
    else:
        _print(plans, f"{name}: {reason}" if reason else "")
    return 0 if any(plan.fits for plan in plans.values()) else 1


def as_dict(plan: Plan) -> dict:
    """The plan as plain values, sizes in bytes and GiB."""
    unknown = math.isinf(plan.spare_gib)
    return {
        "settings": asdict(plan.settings),
        "parts": [asdict(part) for part in plan.parts],
        "total_bytes": plan.total,
        "total_gib": plan.total_gib,
        "memory_gib": plan.memory_gib,
        "spare_gib": None if unknown else plan.spare_gib,
        "fits": plan.fits,
        "sequences_in_flight": plan.sequences_in_flight,
        "sequences_at_most": plan.sequences_at_most,
        "gpu_memory_utilization": plan.gpu_memory_utilization,
        "largest_micro_batch": largest_micro_batch(plan),
        "changes": [{"text": c.text, "gain_gib": c.gain / GIB, "fits": c.plan.fits} for c in changes(plan)],
    }


def _print(plans: dict[str, Plan], reason: str, out=None):
    out = out or sys.stdout
    main = next(iter(plans.values()))
    if reason:
        print(f"dtype {reason}", file=out)
    print(main.table(), file=out)
    for weights, plan in plans.items():
        print(f"with {weights} weights: {plan.total_gib:.2f} GiB, {plan.verdict}", file=out)
    print(
        f"KV cache: {main.sequences_in_flight} completions of {main.settings.length} tokens at once, "
        f"at most {main.sequences_at_most}; largest micro-batch that fits: {largest_micro_batch(main)}",
        file=out,
    )
    if main.fits and main.gpu_memory_utilization is not None:
        print(f"gpu_memory_utilization={main.gpu_memory_utilization} gives the sampler just that", file=out)
    if not main.fits:
        print(_advice(main), file=out)
