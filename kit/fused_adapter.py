"""One adapter on a GPU at the price of one small kernel a layer.

vLLM computes a layer's adapter after its base product: a buffer is cleared, one kernel multiplies by A, another by B.
In a decode step of few tokens these launches are a quarter of the time. Here A is appended to the rows of the base
matrix, so that the base product yields both y = x W^T and the low-rank z = x A^T; one kernel then writes y + z B^T. The
low-rank part is rounded to the activations' dtype, as in the trainer.

Memory: A moves into the base matrix's storage and B into one matrix a layer; vLLM's slots become views of them, and the
base weight stays a contiguous view. Rows whose request names no adapter get y alone, also in captured graphs.
"""

import contextlib
import itertools
from types import MethodType

import torch
from torch.nn import functional

LARGEST_RANK = 128


@contextlib.contextmanager
def fused_adapters(enabled: bool):
    """Engines that are built in this block with `enable_lora` fuse their layers where they can."""
    if not enabled:
        yield
        return
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    original = LoRAModelRunnerMixin.load_lora_model

    def load_lora_model(self, *args, **kwargs):
        model = original(self, *args, **kwargs)
        fuse(model)
        return model

    LoRAModelRunnerMixin.load_lora_model = load_lora_model
    try:
        yield
    finally:
        LoRAModelRunnerMixin.load_lora_model = original


def fuse(engine_model) -> int:
    """Fuse the LoRA layers of vLLM's model that can be; the others stay as they are. Returns how many were fused."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    layers = [m for m in engine_model.modules() if isinstance(m, BaseLinearLayerWithLoRA) and _can_fuse(m)]
    for layer in layers:
        layer.kit_fused = FusedLayer(layer)
        layer._apply_sync = MethodType(lambda self, x, bias=None: self.kit_fused(self.punica_wrapper, x, bias), layer)
        torch.cuda.empty_cache()  # the old matrix fits none of the new ones; without this, both sets stay reserved
    return len(layers)


def _can_fuse(layer) -> bool:
    from vllm import envs
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    a, weight = layer.lora_a_stacked[0], getattr(layer.base_layer, "weight", None)
    rank, slots = a.shape[2], a.shape[0]
    return (
        type(layer.base_layer.quant_method) is UnquantizedLinearMethod
        and not envs.VLLM_BATCH_INVARIANT
        and hasattr(layer, "_apply_sync")
        and weight.is_cuda
        and weight.dtype == a.dtype
        and weight.shape[0] == sum(layer.output_slices)
        and slots == 1
        and 16 <= rank <= LARGEST_RANK
        and rank & (rank - 1) == 0
        and len(layer.output_slices) <= 3
        and _block(layer.output_slices) >= 16
    )


def _block(output_slices) -> int:
    """Columns a program computes: a power of two that divides every part, at most 64."""
    return min(64, *(size & -size for size in output_slices))


class FusedLayer:
    """A LoRA layer's matrices side by side, and its product.

    Args:
        layer: vLLM's layer. Its base weight and its slots become views of what is allocated here.
    """

    def __init__(self, layer):
        base, slots_a, slots_b = layer.base_layer, layer.lora_a_stacked, layer.lora_b_stacked
        self.outputs, self.rank, self.slices = base.weight.shape[0], slots_a[0].shape[2], tuple(layer.output_slices)
        self.weight = torch.cat([base.weight.data, *(a[0, 0] for a in slots_a)])  # (outputs + parts rank, inputs)
        self.b = torch.cat([b[0, 0] for b in slots_b])  # (outputs, rank)
        self.bias = None
        base.weight.data = self.weight[: self.outputs]
        rows_a = self.weight[self.outputs :].split(self.rank)
        layer.lora_a_stacked = tuple(rows[None, None] for rows in rows_a)
        layer.lora_b_stacked = tuple(rows[None, None] for rows in self.b.split(list(self.slices)))

    def __call__(self, wrapper, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x (..., inputs) -> (..., outputs); `wrapper` knows which rows have the adapter."""
        if bias is not None and self.bias is None:
            self.bias = functional.pad(bias, (0, len(self.weight) - self.outputs))
        both = functional.linear(x.reshape(-1, x.shape[-1]), self.weight, None if bias is None else self.bias)
        y = add_low_rank(both, self.b, wrapper._token_lora_indices, self.slices)
        return y.view(*x.shape[:-1], self.outputs)


def add_low_rank(both: torch.Tensor, b: torch.Tensor, indices: torch.Tensor, slices: tuple[int, ...]) -> torch.Tensor:
    """y + z B^T for each part, where `both` is y and the parts' z side by side.

    Args:
        both: (tokens, outputs + parts rank), on a GPU.
        b: (outputs, rank), the parts' B matrices one below the other.
        indices: at least `tokens` integers; a negative one means that this row has no adapter.
        slices: outputs of each part.

    Returns:
        (tokens, outputs), contiguous.
    """
    from kit.low_rank_kernel import expand_kernel

    tokens, (outputs, rank) = len(both), b.shape
    y = both.new_empty(tokens, outputs)
    if not tokens:
        return y
    rows, columns = min(64, max(16, 1 << (tokens - 1).bit_length())), _block(slices)
    ends = [*itertools.accumulate(slices[:-1]), outputs, outputs]
    grid = (outputs // columns, -(-tokens // rows))
    expand_kernel[grid](both, b, indices, y, tokens, outputs, rank, len(slices), ends[0], ends[1], rows, columns)
    return y
