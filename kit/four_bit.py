"""4-bit base weights (NF4 with double quantisation, QLoRA) on both sides, computed in the contract's dtype.

Trainer and sampler quantise the same checkpoint with bitsandbytes, so they hold the same codes. Their arithmetic would
still differ: vLLM 0.25 computes its 4-bit layers in bfloat16 whatever the engine's dtype. Here its layers dequantise to
and multiply in the dtype of their input, as the trainer's do; the probe proves it at each sync, as for other weights.

Source: Dettmers et al., QLoRA, arXiv 2305.14314, sections 2 and 3.
"""

import importlib.util

import torch

from kit.engine import import_vllm
from kit.errors import ArgumentError
from kit.precision import Precision, PrecisionError


def check_four_bit(wanted: bool, fast_inference: bool = True) -> None:
    """Refuse 4-bit weights where they cannot be.

    Raises:
        PrecisionError: no CUDA GPU, or a vLLM without bitsandbytes layers.
        ArgumentError: bitsandbytes is not installed.
    """
    if not wanted:
        return
    if not torch.cuda.is_available():
        raise PrecisionError(
            "load_in_4bit=True needs a CUDA GPU: vLLM has no 4-bit layers for a CPU. Load with load_in_4bit=False."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ArgumentError("load_in_4bit=True needs bitsandbytes. Run `pip install bitsandbytes==0.50.2`.")
    if not fast_inference:
        return
    import_vllm()
    if importlib.util.find_spec("vllm.model_executor.layers.quantization.bitsandbytes") is None:
        raise PrecisionError(
            "load_in_4bit=True: this vLLM has no bitsandbytes layers. Use the pinned one (requirements.txt), load with "
            "load_in_4bit=False, or sample with transformers (fast_inference=False)."
        )


def engine_arguments() -> dict:
    """What vLLM is told, and its layers' arithmetic put right for every engine that is built from now on."""
    from vllm.model_executor.layers.quantization.bitsandbytes import BitsAndBytesLinearMethod

    BitsAndBytesLinearMethod._apply_4bit_weight = _product
    return {"quantization": "bitsandbytes"}


def _product(method, layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T with W dequantised to x's dtype; a packed projection's parts have quantisation states of their own."""
    from bitsandbytes import matmul_4bit

    weight, offsets = layer.weight, layer.weight.bnb_shard_offsets
    parts = []
    for index, state in layer.weight.bnb_quant_state.items():
        state.dtype = x.dtype
        parts.append(matmul_4bit(x, weight[offsets[index] : offsets[index + 1]].t(), state))
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return y if bias is None else y + bias


def trainer_model(path: str, precision: Precision):
    """The frozen base in 4 bits, on the GPU."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precision.base_weights,
    )
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=precision.base_weights, quantization_config=config, device_map={"": 0}
    )
    model.requires_grad_(False)
    return model
