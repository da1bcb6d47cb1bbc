"""What a model's configuration says about its size: parameters, adapter parameters, bytes of KV cache a token.

From the configuration alone, without weights, network or torch. Llama, Qwen2 and Qwen3 families; others are refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kit.errors import ArgumentError

BUNDLED = Path(__file__).parent / "models"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class UnknownModel(ArgumentError, LookupError):
    """A model whose configuration is not known here."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model; `max_positions` is the longest sequence [tokens] it was made for."""

    name: str
    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    max_positions: int
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        for label in ("vocabulary", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, label) < 1:
                raise ArgumentError(f"{label} of {self.name} is {getattr(self, label)}; a model has at least 1")

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    def projections(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each linear layer of a decoder layer."""
        return {
            "q_proj": (self.hidden, self.query_size),
            "k_proj": (self.hidden, self.kv_size),
            "v_proj": (self.hidden, self.kv_size),
            "o_proj": (self.query_size, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def linear_parameters(self) -> int:
        """Weights of the decoder layers' linear layers: what 4-bit quantisation shrinks."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.projections().values())

    @property
    def parameters(self) -> int:
        """All parameters; tied embeddings counted once.

        >>> shape_of("Qwen3-4B-Base").parameters
        4022468096
        """
        biased = {"llama": PROJECTIONS[:4], "qwen3": PROJECTIONS[:4], "qwen2": PROJECTIONS[:3]}[self.family]
        biased = biased if self.attention_bias or self.family == "qwen2" else ()
        biased = (*biased, *(PROJECTIONS[4:] if self.mlp_bias else ()))
        shapes = self.projections()
        norms = 2 * self.hidden + (2 * self.head_dim if self.family == "qwen3" else 0)
        other = self.layers * (norms + sum(shapes[name][1] for name in biased))
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return self.linear_parameters + other + self.hidden + embeddings

    def adapter_parameters(self, rank: int, target_modules: tuple[str, ...] = PROJECTIONS) -> int:
        """Parameters of LoRA adapters of `rank` on `target_modules` of every layer.

        >>> shape_of("Qwen3-4B-Base").adapter_parameters(32)
        66060288
        """
        if rank < 1:
            raise ArgumentError(f"an adapter has rank 1 or more; got {rank}")
        shapes = self.projections()
        if unknown := [name for name in target_modules if name not in shapes]:
            raise ArgumentError(f"{unknown} are no linear layers of {self.name}; expected {', '.join(PROJECTIONS)}")
        return self.layers * sum(rank * sum(shapes[name]) for name in target_modules)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Keys and values of one token in every layer [bytes], `itemsize` bytes a number.

        >>> shape_of("Qwen3-4B-Base").kv_bytes_per_token(2)
        147456
        """
        return 2 * self.layers * self.kv_size * itemsize


def _qwen3(name: str, hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, ModelShape]:
    sizes = (151936, hidden, intermediate, layers, heads, 8, 128, tied)
    return {
        name: ModelShape(name, "qwen3", *sizes, max_positions=40960),
        f"{name}-Base": ModelShape(f"{name}-Base", "qwen3", *sizes, max_positions=32768),
    }


# config.json of Qwen/Qwen3-* on the Hugging Face hub.
KNOWN: dict[str, ModelShape] = {
    **_qwen3("Qwen3-0.6B", 1024, 3072, 28, 16, tied=True),
    **_qwen3("Qwen3-1.7B", 2048, 6144, 28, 16, tied=True),
    **_qwen3("Qwen3-4B", 2560, 9728, 36, 32, tied=True),
    **_qwen3("Qwen3-8B", 4096, 12288, 36, 32, tied=False),
}


def shape_of(model: str | Path) -> ModelShape:
    """The shape of a known Qwen3, of "tiny", or of a local folder with a config.json; else UnknownModel.

    >>> shape_of("unsloth/Qwen3-8B-Base").layers
    36
    """
    text = str(model)
    for folder in (Path(text), BUNDLED / text):
        if text and (folder / "config.json").is_file():
            return from_config(_read(folder / "config.json"), name=folder.name)
    known = {name.lower(): shape for name, shape in KNOWN.items()}
    tail = text.rsplit("/", 1)[-1].lower()
    if tail not in known:
        raise UnknownModel(
            f"the size of {text!r} is not known here; known are {', '.join(KNOWN)}, tiny, and any local folder with a "
            "config.json. Download the model first and give its folder."
        )
    return known[tail]


def _read(file: Path) -> dict:
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ArgumentError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ArgumentError(f"{file} holds a {type(config).__name__}, expected a model's configuration")
    return config


def from_config(config: dict, name: str = "model") -> ModelShape:
    """The shape that a transformers configuration (as a dict) describes; an ArgumentError names what is missing.

    >>> config = dict(model_type="llama", vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
    ...               num_attention_heads=2)
    >>> from_config(config).kv_size, from_config(config).tied
    (8, False)
    """
    family = config.get("model_type")
    if family not in ("llama", "qwen2", "qwen3"):
        raise UnknownModel(f"{name} is of the family {family!r}; sizes are known for llama, qwen2 and qwen3")
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [key for key in needed if not isinstance(config.get(key), int)]:
        raise ArgumentError(f"the configuration of {name} lacks {', '.join(missing)}")
    vocabulary, hidden, intermediate, layers, heads = (config[key] for key in needed)
    return ModelShape(
        name,
        family,
        vocabulary,
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=config.get("max_position_embeddings", 32768),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )
