"""The cards: name, compute capability, memory, and how a name that people write finds its card.

Data and text only. What a card can do with a dtype or a vLLM version is in `kit.hardware`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from kit.errors import ArgumentError


class UnknownCard(ArgumentError, LookupError):
    """A card name that is not in the table."""


def check_capability(capability: tuple[int, int]) -> tuple[int, int]:
    """The compute capability itself, or an ArgumentError that says what one looks like.

    >>> check_capability((7, 5))
    (7, 5)
    """
    major, minor = capability
    if not (1 <= major <= 13 and 0 <= minor <= 9):
        raise ArgumentError(f"compute capability {major}.{minor} does not exist; expected 1.0 to 12.1, a T4 has 7.5")
    return capability


def parse_capability(text: str) -> tuple[int, int]:
    """A compute capability from its text.

    >>> parse_capability("8.0")
    (8, 0)
    """
    match = re.fullmatch(r"(\d+)\.(\d)", str(text).strip())
    if match is None:
        raise ArgumentError(f"{text!r} is not a compute capability; expected a number like '7.5' or '9.0'")
    return check_capability((int(match[1]), int(match[2])))


def dotted(capability: tuple[int, int]) -> str:
    """(7, 5) as people write it.

    >>> dotted((7, 5))
    '7.5'
    """
    return f"{capability[0]}.{capability[1]}"


@dataclass(frozen=True)
class Hardware:
    """One device. `kind` is "cuda" or "cpu"; `capability` is (major, minor) on a GPU and None on a CPU.

    `memory_gib` is what PyTorch reports as total (a little less than printed on the box), None where unknown;
    `free_gib` what was free when it was detected. `features` are the CPU flags that matter for dtypes. `problem` holds
    what went wrong while detecting, e.g. a driver that did not answer.
    """

    name: str
    kind: str
    capability: tuple[int, int] | None = None
    memory_gib: float | None = None
    free_gib: float | None = None
    features: tuple[str, ...] = ()
    driver: str | None = None
    problem: str | None = None

    def __post_init__(self):
        if self.kind not in ("cuda", "cpu"):
            raise ArgumentError(f"hardware kind is 'cuda' or 'cpu', not {self.kind!r}")
        if (self.kind == "cuda") != (self.capability is not None):
            raise ArgumentError(f"a GPU has a compute capability, a CPU none; got {self.kind!r} with {self.capability}")
        if self.capability is not None:
            check_capability(self.capability)
        for label, value in (("memory", self.memory_gib), ("free memory", self.free_gib)):
            if value is not None and not (math.isfinite(value) and 0 < value <= 65536):
                raise ArgumentError(f"{label} of {self.name!r} is in GiB and above 0; got {value}")

    @property
    def label(self) -> str:
        """The name, with the compute capability of a GPU."""
        return self.name if self.capability is None else f"{self.name} (compute capability {dotted(self.capability)})"


# Compute capability: developer.nvidia.com/cuda-gpus. Memory in GiB, about what PyTorch reports (the driver's share and
# ECC taken off); where two sizes are sold, the smaller comes first and is what the bare name means.
_GPUS = (
    ("V100 16GB", (7, 0), 15.7),
    ("V100 32GB", (7, 0), 31.7),
    ("T4", (7, 5), 14.7),
    ("RTX 2060", (7, 5), 5.7),
    ("RTX 2070", (7, 5), 7.7),
    ("RTX 2080", (7, 5), 7.7),
    ("RTX 2080 Ti", (7, 5), 10.7),
    ("Quadro RTX 8000", (7, 5), 47.4),
    ("A30", (8, 0), 23.6),
    ("A100 40GB", (8, 0), 39.4),
    ("A100 80GB", (8, 0), 79.2),
    ("A10", (8, 6), 22.0),
    ("A10G", (8, 6), 22.0),
    ("A40", (8, 6), 44.4),
    ("A6000", (8, 6), 47.4),
    ("RTX 3060", (8, 6), 11.6),
    ("RTX 3070", (8, 6), 7.7),
    ("RTX 3080", (8, 6), 9.7),
    ("RTX 3080 Ti", (8, 6), 11.7),
    ("RTX 3090", (8, 6), 23.6),
    ("L4", (8, 9), 22.0),
    ("L40", (8, 9), 44.3),
    ("L40S", (8, 9), 44.3),
    ("RTX 4060", (8, 9), 7.6),
    ("RTX 4060 Ti 8GB", (8, 9), 7.6),
    ("RTX 4060 Ti 16GB", (8, 9), 15.5),
    ("RTX 4070", (8, 9), 11.6),
    ("RTX 4070 Ti", (8, 9), 11.6),
    ("RTX 4070 Ti SUPER", (8, 9), 15.6),
    ("RTX 4080", (8, 9), 15.6),
    ("RTX 4090", (8, 9), 23.6),
    ("H100 80GB", (9, 0), 79.1),
    ("H100 94GB", (9, 0), 93.1),
    ("GH200 96GB", (9, 0), 94.5),
    ("H200", (9, 0), 139.8),
    ("B200", (10, 0), 178.3),
    ("GB200", (10, 0), 184.3),
    ("RTX 5060", (12, 0), 7.5),
    ("RTX 5060 Ti 8GB", (12, 0), 7.5),
    ("RTX 5060 Ti 16GB", (12, 0), 15.4),
    ("RTX 5070", (12, 0), 11.5),
    ("RTX 5070 Ti", (12, 0), 15.4),
    ("RTX 5080", (12, 0), 15.4),
    ("RTX 5090", (12, 0), 31.3),
)
CARDS: tuple[Hardware, ...] = (
    *(Hardware(name, "cuda", capability, memory) for name, capability, memory in _GPUS),
    Hardware("CPU", "cpu"),
    Hardware("CPU avx512_bf16", "cpu", features=("avx512_bf16",)),
    Hardware("CPU avx512_fp16", "cpu", features=("avx512_bf16", "avx512_fp16")),
    Hardware("CPU AMX", "cpu", features=("amx_bf16", "avx512_bf16", "avx512_fp16")),
)

_NOISE = frozenset(("nvidia", "tesla", "geforce", "quadro", "graphics", "gpu", "with", "rtx", ""))
_DISTINCT = frozenset(("ti", "laptop"))  # a word that makes another card of the same number


def lookup(name: str) -> Hardware:
    """The card that a common name means; raises UnknownCard with the list of known ones.

    A size in the name ("40GB") chooses among the sizes sold; without one the smallest is meant.

    >>> lookup("NVIDIA A100-SXM4-40GB").name, lookup("Tesla T4").capability
    ('A100 40GB', (7, 5))
    """
    asked, asked_size = _tokens(name)
    ranked: list[tuple[int, float, Hardware]] = []
    for card in CARDS:
        wanted, size = _tokens(card.name)
        if not wanted <= asked or _DISTINCT & (asked - wanted):
            continue
        offset = abs(asked_size - (size or card.memory_gib or asked_size)) if asked_size else 0.0
        if offset <= 4:  # "A100 24GB" names no card that is sold
            ranked.append((-len(wanted), offset, card))
    if not ranked:
        known = ", ".join(card.name for card in CARDS)
        raise UnknownCard(f"no card called {name!r} is known here; known: {known}. Or give its compute capability.")
    return min(ranked, key=lambda entry: entry[:2])[2]


def from_facts(
    name: str | None, capability: tuple[int, int] | None = None, memory_gib: float | None = None
) -> Hardware:
    """Hardware described by hand; what is given must agree with the table, what is missing is filled in from it.

    A card that the table does not know is accepted when its capability is given.

    >>> from_facts("Tesla T4", (7, 5), 15).memory_gib
    15
    """
    if not name:
        if capability is None:
            raise ArgumentError("describe the hardware by a card's name or by its compute capability")
        return Hardware(f"a GPU of capability {dotted(capability)}", "cuda", capability, memory_gib)
    try:
        card = lookup(name)
    except UnknownCard:
        if capability is None:
            raise
        return Hardware(name, "cuda", capability, memory_gib)
    if capability is not None and capability != card.capability:
        known = "none, it is a CPU" if card.capability is None else dotted(card.capability)
        raise ArgumentError(f"{name!r} has compute capability {known}, not {dotted(capability)}; correct one of them")
    return replace(card, name=name, memory_gib=card.memory_gib if memory_gib is None else memory_gib)


def _tokens(name: str) -> tuple[frozenset[str], int | None]:
    """The words of a name that tell cards apart, and the size in GB that it states."""
    text = re.sub(r"(\d)\s*(ti|super)\b", r"\1 \2", str(name).lower())
    text = re.sub(r"\b(rtx|gtx)(?=\d)", r"\1 ", text)
    text = re.sub(r"\b(\d+)\s*gi?b\b", r"\1gb", text)
    words = frozenset(re.split(r"[^a-z0-9_]+", text)) - _NOISE
    sizes = {word for word in words if re.fullmatch(r"\d+gb", word)}
    return words - sizes, int(min(sizes)[:-2]) if sizes else None
