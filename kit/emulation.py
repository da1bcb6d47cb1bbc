"""Arithmetic in number formats that no hardware has: a float32 model whose numbers are rounded on the way.

What is rounded: the weights (in place, put back afterwards), the inputs of every module without children, and the
output of every module, so products have rounded operands and rounded results. What is not: sums inside a product, which
stay float32 as they do in tensor cores; what a module computes between its children (in transformers the rotated
queries and keys, and the residual sum until its layer ends); gradients. Real 16-bit runs round in other places too, so
an emulated format lies near the real one, not on it.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from kit.errors import ArgumentError
from kit.formats import FLOAT32, FloatFormat, round_tensor


class _Round(torch.autograd.Function):
    """Rounds forward, lets gradients through unchanged: rounding is a staircase, whose slope is zero or infinite."""

    @staticmethod
    def forward(ctx, values, form):
        return round_tensor(values, form)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def rounded(value, form: FloatFormat):
    """A tensor, or the tensors in a tuple, list or dictionary, rounded; integers and anything else as they are."""
    if isinstance(value, torch.Tensor):
        return _Round.apply(value, form) if value.dtype == torch.float32 else value
    if type(value) in (tuple, list):
        return type(value)(rounded(part, form) for part in value)
    if type(value) is dict:
        return {key: rounded(part, form) for key, part in value.items()}
    return value


def add_rounding(model: torch.nn.Module, form: FloatFormat) -> list:
    """Hooks that round inputs and outputs of the model's modules; returns handles whose `remove()` ends it.

    Works on any float32 module tree: a transformers model, or vLLM's inside its engine.
    """
    handles = []
    for module in model.modules():
        if not any(module.children()):
            handles.append(module.register_forward_pre_hook(_round_inputs(form), with_kwargs=True))
        handles.append(module.register_forward_hook(lambda module, inputs, output: rounded(output, form)))
    return handles


def _round_inputs(form):
    return lambda module, args, kwargs: (rounded(args, form), rounded(kwargs, form))


@contextlib.contextmanager
def emulated(
    model: torch.nn.Module, form: FloatFormat, *, weights: bool = True, activations: bool = True
) -> Iterator[torch.nn.Module]:
    """Within the block the model computes in this format: emulated on float32, and float32 again afterwards.

    Args:
        model: in float32, for instance the trainer's. Its outputs stay float32 tensors.
        form: exponent and mantissa bits.
        weights: round the parameters; the originals come back at the end, also after an error.
        activations: round what flows between modules.

    Raises:
        kit.errors.ArgumentError: the model is not in float32, or a weight is beyond the format's range.
    """
    _require_float32(model)
    originals, handles = {}, []
    try:
        if weights and form != FLOAT32:
            for name, parameter in model.named_parameters():
                originals[parameter] = parameter.data
                parameter.data = _round_weight(name, parameter.data, form)
        if activations and form != FLOAT32:
            handles = add_rounding(model, form)
        yield model
    finally:
        for handle in handles:
            handle.remove()
        for parameter, original in originals.items():
            parameter.data = original


def _require_float32(model):
    others = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()} - {"float32"})
    if others:
        raise ArgumentError(
            f"This model holds {', '.join(others)} weights; formats are emulated on float32. Load it with "
            f"dtype='float32'."
        )


def _round_weight(name, weight, form):
    result = round_tensor(weight, form)
    if not result.isfinite().all():
        raise ArgumentError(
            f"{name} holds {weight.abs().max().item():.3g}, beyond {form.name}'s largest number {form.largest:.3g}. "
            f"Use more exponent bits."
        )
    return result


@contextlib.contextmanager
def emulated_sampler(sampler, form: FloatFormat) -> Iterator[None]:
    """Within the block a float32 vLLM sampler rounds its activations to this format.

    Its weights stay as they are: the engine repacks them, so other weights are another checkpoint (`save_rounded`).

    Raises:
        kit.errors.ArgumentError: the sampler is not in float32, or runs captured or compiled code that skips hooks.
    """
    if sampler.precision.name != "float32":
        raise ArgumentError(f"This sampler computes in {sampler.precision.name}; formats are emulated on float32.")
    if not sampler.llm.llm_engine.vllm_config.model_config.enforce_eager:
        raise ArgumentError("This sampler runs captured graphs, which no hook reaches; load it with start='eager'.")
    handles = sampler.llm.apply_model(lambda model: add_rounding(model, form) if form != FLOAT32 else [])[0]
    try:
        sampler.llm.reset_prefix_cache()  # its keys and values were computed in another format
        yield
    finally:
        for handle in handles:
            handle.remove()
        sampler.llm.reset_prefix_cache()


def save_rounded(model: torch.nn.Module, tokenizer, form: FloatFormat, folder: str | Path) -> Path:
    """Write the model with rounded weights as a float32 checkpoint, which any sampler can load; returns the folder."""
    with emulated(model, form, activations=False):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
