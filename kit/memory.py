"""Memory before anything loads: what a model, a dtype and a run's settings need on a card, part by part.

Exact where it can be (weights, adapters, gradients, optimizer, KV cache: counts times bytes), estimated where it cannot
(activations, workspaces, CUDA graphs, reserve: the constants below, each with where it comes from). Sampling and
training take turns, so of their transient memory only the larger counts. What fits and what to change is `kit.plan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kit.errors import ArgumentError
from kit.hardware import Hardware, check_dtype
from kit.shapes import ModelShape

GIB = 2**30
SMALL_GIB = 2.0  # a smaller plan is shown in MiB
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
ADAPTER_ITEMSIZE = 4  # the contract: adapters, their gradients and Adam's moments are float32
MAX_LORA_RANK = 512  # vLLM's largest (vllm.config.lora.MaxLoRARanks)
BLOCK = {"cuda": 16, "cpu": 128}  # vLLM hands out KV cache in blocks of this many tokens

# TRL 1.16 never holds the logits of all tokens: trl.kernels.chunked_logprob works on tiles of this size.
TOKEN_CHUNK, VOCABULARY_CHUNK = 4096, 32768

# Live bytes a token, counted tensor by tensor on transformers 5.17 + PEFT 0.21 (Qwen3, LoRA on all seven projections,
# autocast) over ten widths and fitted, by the bytes of a base weight; tests/test_plan.py counts again. Per unit of
# (hidden, intermediate, query heads, key heads): what a layer saves for its backward pass, and what it holds at its
# worst, recomputed or not. Besides the layers, `_KEPT` x hidden is held from the forward to the backward pass.
_SAVED = {2: (20.9, 7.9, 12.6, 6.7), 4: (21.7, 15.8, 16.9, 9.4)}
_WORST = {2: (27.0, 14.0, 12.6, 6.7), 4: (16.0, 23.7, 18.5, 10.1)}
_KEPT = {2: 6.0, 4: 8.0}

# NF4 with double quantisation: half a byte a weight, and 1/64 + 4/(64 x 256) for the block scales (arXiv 2305.14314).
_FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
_EIGHT_BIT_STATE = 2 * (1 + 4 / 256)  # two moments of one byte, one float32 scale for 256 (arXiv 2110.02861)

# vLLM while sampling: tokens a scheduler step, and float32 rows of logits held at once (logits, a copy, probabilities).
BATCHED_TOKENS, _LOGIT_COPIES = 4096, 3
# CUDA graphs: vLLM's own estimate for Qwen3-8B is 0.52 GiB for 86 graphs, for 16 graphs 0.36 GiB (LMCache issue 3430,
# gpustack/runner PR 251). An estimate, the least certain of the parts.
_GRAPHS_FIXED, _GRAPH = 0.3 * GIB, 2.5 * 2**20
# CUDA context and loaded libraries (on a CPU: torch, vLLM and TRL in one Python process), and the allocator's gaps as a
# share of what is allocated and freed each step. Estimates.
_CONTEXT = {"cuda": 0.5 * GIB, "cpu": 1.0 * GIB}
_GAPS = 0.1


@dataclass(frozen=True)
class Settings:
    """What is planned for. `length` is prompt and completion together [tokens]; `group` x `prompts` completions are
    sampled at once; `micro_batch` of them are trained on at once. `shared`: the trainer's base weights are views of the
    sampler's (GPU only). `gpu_memory_utilization`: vLLM's share of the card; None plans a KV cache for all completions.
    """

    model: ModelShape
    hardware: Hardware
    dtype: str
    rank: int = 32
    length: int = 1024
    group: int = 8
    prompts: int = 1
    micro_batch: int = 1
    shared: bool = True
    fast_inference: bool = True
    cuda_graphs: bool = True
    checkpointing: bool = True
    load_in_4bit: bool = False
    eight_bit_optimizer: bool = False
    gpu_memory_utilization: float | None = None

    def __post_init__(self):
        check_dtype(self.hardware, self.dtype)
        for name in ("rank", "length", "group", "prompts", "micro_batch"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ArgumentError(f"{name} is a whole number from 1; got {getattr(self, name)!r}")
        if self.rank > MAX_LORA_RANK:
            raise ArgumentError(f"rank {self.rank} is above {MAX_LORA_RANK}, the largest that vLLM loads")
        if self.length > self.model.max_positions:
            raise ArgumentError(
                f"{self.length} tokens are more than {self.model.name} was made for; at most {self.model.max_positions}"
            )
        utilization = self.gpu_memory_utilization
        if utilization is not None and not 0 < utilization <= 1:
            raise ArgumentError(f"gpu_memory_utilization is a share of the card, above 0, at most 1; got {utilization}")
        if utilization is not None and self.hardware.memory_gib is None:
            raise ArgumentError(f"a share of {self.hardware.name} cannot be planned: its memory is unknown")
        if self.hardware.kind == "cpu" and self.load_in_4bit:
            raise ArgumentError("4-bit weights need a GPU: bitsandbytes and vLLM have no kernels for them on a CPU")
        if self.hardware.kind == "cpu" and self.shared:
            raise ArgumentError("on a CPU vLLM repacks the weights, so they cannot be shared; plan with shared=False")

    @property
    def completions(self) -> int:
        """Completions sampled at once."""
        return self.group * self.prompts


@dataclass(frozen=True)
class Part:
    """One part of the memory: `name`, `bytes`, where they come from, and whose they are."""

    name: str
    bytes: int
    note: str
    owner: str  # "sampler", "trainer" or "both"

    @property
    def gib(self) -> float:
        """The part in GiB."""
        return self.bytes / GIB


@dataclass(frozen=True)
class Plan:
    """Memory by part. The parts add up to `total` exactly [bytes]."""

    settings: Settings
    parts: tuple[Part, ...]

    @property
    def total(self) -> int:
        """All parts together [bytes]."""
        return sum(part.bytes for part in self.parts)

    @property
    def total_gib(self) -> float:
        """All parts together [GiB]."""
        return self.total / GIB

    @property
    def memory_gib(self) -> float | None:
        """What the card has [GiB]; None where unknown."""
        return self.settings.hardware.memory_gib

    @property
    def spare_gib(self) -> float:
        """What is left of the card [GiB]; negative: what is missing. Infinite where the card's memory is unknown."""
        return math.inf if self.memory_gib is None else self.memory_gib - self.total_gib

    @property
    def fits(self) -> bool:
        """Whether the parts fit on the card, with a KV cache for at least one completion."""
        return self.spare_gib >= 0 and self.sequences_in_flight >= 1

    def table(self) -> str:
        """The plan as text: a line a part, the sum, and the card [GiB], each rounded so that the lines add up.

        Below SMALL_GIB in all, parts and sum are in MiB: a bundled model's adapter would read as 0.000 GiB.
        """
        s, lines, exact, shown = self.settings, [], 0.0, 0.0
        unit, size, places = ("MiB", 2**20, 1) if self.total_gib < SMALL_GIB else ("GiB", GIB, 3)
        for part in self.parts:
            exact += part.bytes / size
            amount = round(exact, places) - shown
            shown = round(exact, places)
            lines.append(f"  {part.name:<20}{amount:>9.{places}f}  {part.note}")
        head = f"{s.model.name}, {s.dtype}, rank {s.rank}, {s.completions} completions of {s.length} tokens [{unit}]"
        lines.append(f"  {'sum':<20}{shown:>9.{places}f}  {unit}")
        if self.memory_gib is not None:
            lines.append(f"  {s.hardware.name:<20}{self.memory_gib:>9.3f}  GiB, {self.verdict}")
        return "\n".join([head, *lines])

    @property
    def verdict(self) -> str:
        """Whether it fits, and by how much, in words."""
        if self.spare_gib < 0:
            return f"does not fit: {-self.spare_gib:.2f} GiB missing"
        if self.sequences_in_flight < 1:
            return "does not fit: the KV cache holds not even one completion"
        return "fits" if math.isinf(self.spare_gib) else f"fits: {self.spare_gib:.2f} GiB left"

    def part(self, name: str) -> Part:
        """The part of that name."""
        return next(part for part in self.parts if part.name == name)

    @property
    def sequences_in_flight(self) -> int:
        """Completions of full length that the KV cache of the plan holds at once."""
        return self.part("KV cache").bytes // kv_bytes(self.settings, sequences=1)

    @property
    def sequences_at_most(self) -> int:
        """Completions of full length at once if what is left of the card went to the KV cache too."""
        if math.isinf(self.spare_gib):
            return self.sequences_in_flight
        room = self.part("KV cache").bytes + self.spare_gib * GIB
        return max(0, int(room // kv_bytes(self.settings, sequences=1)))

    @property
    def gpu_memory_utilization(self) -> float | None:
        """The share of the card to give vLLM for this plan, rounded up to a hundredth; None without vLLM on a card."""
        settings = self.settings
        if self.memory_gib is None or settings.hardware.kind == "cpu" or not settings.fast_inference:
            return None
        needed = sampler_bytes(settings) + self.part("KV cache").bytes
        return math.ceil(100 * needed / GIB / self.memory_gib) / 100


def plan_memory(settings: Settings) -> Plan:
    """The memory plan of these settings.

    >>> from dataclasses import replace
    >>> from kit.hardware import lookup
    >>> from kit.shapes import shape_of
    >>> plan = plan_memory(Settings(shape_of("Qwen3-4B-Base"), lookup("T4"), "float16"))
    >>> plan.fits, plan_memory(replace(plan.settings, shared=False)).fits
    (True, False)
    """
    s, model, size = settings, settings.model, ITEMSIZE[settings.dtype]
    base = base_bytes(model, s.dtype, s.load_in_4bit)
    adapter = model.adapter_parameters(s.rank)
    twice = s.fast_inference and not s.shared
    training = activation_bytes(s) + logits_bytes(s)
    sampling = sampling_bytes(s)
    state = _EIGHT_BIT_STATE if s.eight_bit_optimizer else 2 * ADAPTER_ITEMSIZE
    kind = "4-bit" if s.load_in_4bit else s.dtype
    count = f"{_count(model.parameters)} x {kind}"
    layers = "checkpointed" if s.checkpointing else "all layers kept"
    once = "the trainer's own" if twice else "none: held once"
    tokens = s.micro_batch * s.length
    parts = (
        Part("base weights", base, count, "sampler" if twice else "both"),
        Part("base weights, copy", base if twice else 0, once, "trainer"),
        Part("sampler adapter", adapter_slot_bytes(s), f"rank {s.rank}, {s.dtype}", "sampler"),
        Part("KV cache", _planned_kv_bytes(s), f"{model.kv_bytes_per_token(size)} bytes a token", "sampler"),
        Part("CUDA graphs", graph_bytes(s), f"{captured_graphs(s)} graphs, estimated", "sampler"),
        Part("adapter", adapter * ADAPTER_ITEMSIZE, f"{_count(adapter)} x float32", "trainer"),
        Part("gradients", adapter * ADAPTER_ITEMSIZE, "float32", "trainer"),
        Part("optimizer", int(adapter * state), "Adam, 8 bit" if s.eight_bit_optimizer else "Adam, float32", "trainer"),
        Part("activations", activation_bytes(s), f"{s.micro_batch} x {s.length} tokens, {layers}", "trainer"),
        Part("logits chunk", logits_bytes(s), f"{_logit_rows(s)} of {tokens} tokens at a time", "trainer"),
        Part("sampler workspace", max(0, sampling - training), "what sampling needs beyond training's", "sampler"),
        Part("reserve", reserve_bytes(s), "context, libraries, the allocator's gaps", "both"),
    )
    return Plan(s, parts)


def _count(parameters):
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e8 else f"{parameters / 1e6:.2f} million"


def base_bytes(model: ModelShape, dtype: str, load_in_4bit: bool = False) -> int:
    """Base weights once [bytes]; in 4 bit the linear layers shrink, embeddings and norms keep the dtype."""
    size = ITEMSIZE[dtype]
    if not load_in_4bit:
        return model.parameters * size
    return int(model.linear_parameters * _FOUR_BIT) + (model.parameters - model.linear_parameters) * size


def adapter_slot_bytes(settings: Settings) -> int:
    """The buffers that vLLM stacks one adapter into [bytes]: seven projections, whichever of them are trained."""
    if not settings.fast_inference:
        return 0
    return settings.model.adapter_parameters(settings.rank) * ITEMSIZE[settings.dtype]


def kv_tokens(length: int, sequences: int, kind: str) -> int:
    """KV cache for `sequences` of `length` at once [tokens]: whole blocks and one scheduled ahead, for each."""
    return sequences * (-(-length // BLOCK[kind]) + 1) * BLOCK[kind]


def kv_bytes(settings: Settings, sequences: int) -> int:
    """KV cache of `sequences` completions of full length [bytes]."""
    tokens = kv_tokens(settings.length, sequences, settings.hardware.kind)
    return tokens * settings.model.kv_bytes_per_token(ITEMSIZE[settings.dtype])


def _planned_kv_bytes(settings: Settings) -> int:
    if settings.gpu_memory_utilization is None or not settings.fast_inference or settings.hardware.kind == "cpu":
        return kv_bytes(settings, settings.completions)
    share = settings.gpu_memory_utilization * settings.hardware.memory_gib * GIB
    return max(0, int(share - sampler_bytes(settings)))


def sampler_bytes(settings: Settings) -> int:
    """What vLLM takes out of its share before the KV cache gets the rest [bytes]."""
    base = base_bytes(settings.model, settings.dtype, settings.load_in_4bit)
    fixed = adapter_slot_bytes(settings) + graph_bytes(settings) + int(_CONTEXT[settings.hardware.kind])
    return base + fixed + sampling_bytes(settings)


def sampling_bytes(settings: Settings) -> int:
    """Transient memory of sampling [bytes]: one layer over a scheduler step, and the logits of every completion."""
    model, size = settings.model, ITEMSIZE[settings.dtype]
    tokens = max(BATCHED_TOKENS, settings.length) if settings.fast_inference else settings.completions
    layer = tokens * size * (3 * model.intermediate + 4 * model.hidden + 2 * model.query_size)
    return layer + settings.completions * model.vocabulary * 4 * _LOGIT_COPIES


def activation_bytes(settings: Settings) -> int:
    """What the backward pass needs of the forward pass, at its worst, besides the logits chunk [bytes].

    With checkpointing one hidden state a layer is kept, and a layer is recomputed at a time. The chunk is gone by then,
    so of that layer only what is larger than the chunk counts.
    """
    model, size = settings.model, ITEMSIZE[settings.dtype]
    tokens = settings.micro_batch * settings.length
    worst = _per_token(_WORST[size], model) * tokens
    saved = (size * model.hidden if settings.checkpointing else _per_token(_SAVED[size], model)) * tokens
    kept = _KEPT[size] * model.hidden * tokens + model.layers * saved
    at_once = worst if settings.checkpointing else worst - saved
    return int(kept + max(0, at_once - logits_bytes(settings)))


def _per_token(weights: tuple[float, ...], model: ModelShape) -> float:
    widths = (model.hidden, model.intermediate, model.query_size, model.kv_size)
    return sum(weight * width for weight, width in zip(weights, widths, strict=True))


def _logit_rows(settings: Settings) -> int:
    return min(settings.micro_batch * settings.length, TOKEN_CHUNK)


def logits_bytes(settings: Settings) -> int:
    """The head's tile of logits, and the gradient of the hidden states that it is folded into [bytes].

    TRL allocates the tile at its full width however small the vocabulary is. On a CPU it folds tiles in torch, with
    seven float32 copies and a mask, instead of in one Triton kernel.
    """
    model, size, tokens = settings.model, ITEMSIZE[settings.dtype], settings.micro_batch * settings.length
    rows, columns = _logit_rows(settings), min(settings.model.vocabulary, VOCABULARY_CHUNK)
    needed = rows * VOCABULARY_CHUNK * size + tokens * model.hidden * (4 + 2 * size)
    if settings.hardware.kind == "cuda":
        return needed
    return needed + max(29 * rows * columns, 4 * columns * (rows + model.hidden))


def captured_graphs(settings: Settings) -> int:
    """CUDA graphs that vLLM captures for these completions at once (sizes 1, 2, 4, then 8 apart, to 512)."""
    if settings.hardware.kind == "cpu" or not (settings.fast_inference and settings.cuda_graphs):
        return 0
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    mixed = sum(size <= min(2 * settings.completions, 512) for size in sizes)
    return mixed + sum(size <= settings.completions for size in sizes)


def graph_bytes(settings: Settings) -> int:
    """Memory of the captured CUDA graphs [bytes], an estimate."""
    graphs = captured_graphs(settings)
    return int(_GRAPHS_FIXED + graphs * _GRAPH) if graphs else 0


def reserve_bytes(settings: Settings) -> int:
    """What no part accounts for [bytes]: context and libraries, and the gaps that transient memory leaves."""
    transient = max(activation_bytes(settings) + logits_bytes(settings), sampling_bytes(settings))
    return int(_CONTEXT[settings.hardware.kind] + _GAPS * transient)
