"""The dtype contract: one frozen value from which trainer and sampler are both built.

Scope: which dtype every number in a run has, and what size of mismatch that dtype explains. Nothing here loads a model.
The realised dtypes are read back by `kit.audit`.
"""

from dataclasses import asdict, dataclass, field

import torch

from kit.errors import ArgumentError

NAMES = ("float32", "float16", "bfloat16")

# Half the spacing of numbers near 1: 2^-(mantissa bits + 1), for 23, 10 and 7 mantissa bits.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

# Where mean |trainer logprob - sampler logprob| [nats] and k3 [nats a token] lie when nothing is wrong: from the
# bundled model on a CPU (low end; both fall with the policy's entropy) to SmolLM2-135M and random Qwen3-4B weights on
# an H200 (high end). float32 is a ruler on a CPU only: on a GPU TF32 inside the attention kernels alone makes 2e-3.
EXPECTED_ABS_MEAN = {"float32": (0.0, 1e-5), "float16": (1e-6, 1e-2), "bfloat16": (1e-5, 8e-2)}
EXPECTED_K3 = {"float32": (0.0, 1e-9), "float16": (1e-12, 1e-4), "bfloat16": (1e-10, 5e-3)}


class PrecisionError(ArgumentError):
    """A dtype that is unknown, that this hardware lacks, or that contradicts the contract."""


@dataclass(frozen=True)
class Precision:
    """Every dtype of a run, fixed by its name: "float16", "bfloat16" or "float32".

    Build it with `Precision.of`. Trainable parameters are float32 in all three: full 16-bit parameters with Adam go
    NaN within steps, and only the frozen base and the arithmetic need the short format.

    Example:
        >>> Precision.of("float16").loss_scaling, Precision.of("bfloat16").loss_scaling
        (True, False)
    """

    name: str
    reason: str = field(default="asked for", compare=False)

    def __post_init__(self):
        if self.name not in NAMES:
            raise PrecisionError(f"Unknown dtype {self.name!r}. Known: {', '.join(NAMES)}, auto.")

    @classmethod
    def of(cls, dtype: "str | torch.dtype | Precision | None" = "auto") -> "Precision":
        """The contract for a dtype given as a name, a torch.dtype, "auto" or None (the same as "auto").

        "auto" picks float16 wherever the hardware has it and says why in `reason`.

        Raises:
            PrecisionError: unknown dtype, or one that this hardware does not have.
        """
        from kit import hardware

        if isinstance(dtype, Precision):
            return dtype
        if dtype is None or dtype == "auto":
            name, reason = hardware.recommended_dtype(hardware.detect())
            return cls(name, f"auto: {reason}")
        name = str(dtype).removeprefix("torch.")
        name = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}.get(
            name, name
        )
        precision = cls(name)
        hardware.check_dtype(hardware.detect(), name)
        return precision

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of this name."""
        return getattr(torch, self.name)

    @property
    def base_weights(self) -> torch.dtype:
        """Frozen base weights of the trainer."""
        return self.dtype

    @property
    def adapters(self) -> torch.dtype:
        """Trainable parameters: float32 always; the optimizer adds updates far below 16-bit spacing."""
        return torch.float32

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of the trainer's matrix products; None (off) for float32."""
        return None if self.name == "float32" else self.dtype

    @property
    def loss_scaling(self) -> bool:
        """float16 only: its smallest normal number is 6e-5, and policy gradients are smaller."""
        return self.name == "float16"

    @property
    def sampler_weights(self) -> torch.dtype:
        """Base weights inside the sampler."""
        return self.dtype

    @property
    def sampler_adapters(self) -> torch.dtype:
        """Adapters inside the sampler: rounded as the trainer's autocast rounds them before each product."""
        return self.dtype

    @property
    def kv_cache(self) -> torch.dtype:
        """Keys and values that the sampler keeps."""
        return self.dtype

    @property
    def logits(self) -> torch.dtype:
        """The head's product, on both sides; log-softmax of it is taken in float32 on both."""
        return self.dtype

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of one rounding, 2^-(mantissa bits + 1)."""
        return UNIT_ROUNDOFF[self.name]

    @property
    def mixed_precision(self) -> str:
        """accelerate's word for the autocast dtype: "no", "fp16" or "bf16"."""
        return {"float32": "no", "float16": "fp16", "bfloat16": "bf16"}[self.name]

    def contract(self) -> dict[str, torch.dtype | bool | None]:
        """Field name -> required value, in the order in which `kit.audit` shows them."""
        fields = ("base_weights", "adapters", "autocast", "loss_scaling", "logits")
        sampler = ("sampler_weights", "sampler_adapters", "kv_cache")
        return {name: getattr(self, name) for name in fields + sampler}

    def describe(self) -> dict:
        """The contract as JSON: dtype names as strings, the reason, and the mismatch to expect."""
        words = {k: v if isinstance(v, bool) else str(v).removeprefix("torch.") for k, v in self.contract().items()}
        expected = {"expected_abs_mean": EXPECTED_ABS_MEAN[self.name], "expected_k3": EXPECTED_K3[self.name]}
        return {**asdict(self), **words, **expected}

    def __str__(self):
        return f"{self.name} ({self.reason})"


def check_arguments(precision: Precision, args) -> None:
    """Refuse training arguments (`trl.GRPOConfig`) that contradict the contract.

    Raises:
        PrecisionError: `bf16`/`fp16` flags, a `model_init_kwargs` dtype or a full-16-bit evaluation that would make the
            trainer compute in another dtype than the one the sampler was built in.
    """
    wanted = {"bf16": precision.name == "bfloat16", "fp16": precision.name == "float16"}
    for flag, value in wanted.items():
        given = getattr(args, flag)
        if given and not value:
            hint = (
                "trl.GRPOConfig sets bf16=True when neither flag is given; kit.GRPOConfig leaves both to the contract. "
            )
            raise PrecisionError(
                f"{flag}=True contradicts dtype {precision.name}: autocast would run in another dtype than the "
                f"sampler's {precision.sampler_weights}, and the two sides would disagree by construction. "
                f"{hint if flag == 'bf16' else ''}Remove {flag}, or load the model with dtype={flag!r}."
            )
    for flag in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, flag):
            raise PrecisionError(f"{flag}=True recasts the whole model, adapters included; the contract forbids it.")
    if args.cast_lm_head_to_fp32 and precision.logits != torch.float32:
        raise PrecisionError(
            f"cast_lm_head_to_fp32=True contradicts dtype {precision.name}: the trainer's logits would be float32, the "
            f"sampler's {precision.name}. Remove it, or load the model with dtype='float32'."
        )
    asked = (args.model_init_kwargs or {}).get("dtype") or (args.model_init_kwargs or {}).get("torch_dtype")
    if asked not in (None, "auto") and str(asked).removeprefix("torch.") != precision.name:
        raise PrecisionError(
            f"model_init_kwargs dtype {asked} contradicts dtype {precision.name}. Give the dtype once, in "
            f"FastLanguageModel.from_pretrained(dtype=...)."
        )
