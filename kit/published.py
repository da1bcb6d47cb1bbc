"""Values that others published: theirs, not measured here, each with its source. Shown beside ours and labelled so."""

from collections.abc import Sequence
from dataclasses import dataclass

from kit.summary import number


@dataclass(frozen=True)
class Published:
    """One value. `quantity` is "sequence KL" [nats a sequence] or "rms d" [nats]; `model` as its authors name it."""

    quantity: str
    dtype: str
    value: float
    model: str
    by: str
    source: str


_PAPER = ("the paper's offline analysis", "Qi et al. 2025", "arXiv 2510.26788, figure on the offline mismatch")
_FAST_LLM = ("Qwen2.5-0.5B, vLLM against DeepSpeed, float32 heads", "ServiceNow Fast-LLM",
             "github.com/ServiceNow/Fast-LLM/pull/525, cross-engine table, realistic text")  # fmt: skip

PUBLISHED = (
    Published("sequence KL", "bfloat16", 7.64, *_PAPER),
    Published("sequence KL", "float16", 0.32, *_PAPER),
    Published("rms d", "bfloat16", 0.0321, *_FAST_LLM),
    Published("rms d", "float32", 0.0022, *_FAST_LLM),
)


def published(quantity: str) -> list[Published]:
    """All published values of a quantity.

    >>> [value.dtype for value in published("sequence KL")]
    ['bfloat16', 'float16']
    """
    return [value for value in PUBLISHED if value.quantity == quantity]


def published_text(quantities: Sequence[str] = ("sequence KL", "rms d")) -> str:
    """The published values in words, a line a source.

    >>> print(published_text(["sequence KL"]))
    Published by Qi et al. 2025, not measured here: sequence KL 7.64 in bfloat16, 0.32 in float16 (the paper's offline
    analysis; arXiv 2510.26788, figure on the offline mismatch).
    """
    lines = []
    for quantity in quantities:
        by_source = {}
        for value in published(quantity):
            by_source.setdefault((value.by, value.model, value.source), []).append(value)
        for (by, model, source), values in by_source.items():
            told = ", ".join(f"{number(value.value)} in {value.dtype}" for value in values)
            lines.append(f"Published by {by}, not measured here: {quantity} {told} ({model}; {source}).")
    return "\n".join(lines)
