"""float16 matrix products on CPUs that have no float16 arithmetic.

There torch 2.13 falls back to loops that are 6 to 25 times slower than float32. The same product is computed here in
float32 from the float16 operands and rounded to float16 once: what a GPU's tensor cores do (exact products, float32
accumulation, one rounding). Everything else of the contract stays as it is.
"""

import contextlib

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from kit.precision import Precision

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}


class Float16Products(TorchDispatchMode):
    """While active, float16 matrix products on the CPU are computed in float32 and rounded once.

    Example:
        >>> a, b = torch.randn(8, 32).half(), torch.randn(32, 8).half()
        >>> with Float16Products():
        ...     product = a @ b
        >>> torch.equal(product, (a.float() @ b.float()).half())
        True
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in PRODUCTS or args[-1].dtype != torch.float16 or args[-1].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        widened = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
        return func(*widened, **(kwargs or {})).half()


def has_float16_arithmetic() -> bool:
    """True where oneDNN has float16 kernels for this CPU (AVX512-FP16 or AMX-FP16)."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()


def float16_needs_help(dtype: torch.dtype, device_type: str) -> bool:
    """True for float16 on a CPU without float16 arithmetic."""
    return device_type == "cpu" and dtype == torch.float16 and not has_float16_arithmetic()


def widen_linears(engine_model) -> None:
    """Let the linear layers of vLLM's CPU model compute as `Float16Products` does. Runs inside the engine."""
    for module in engine_model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = _widened_linear


def _widened_linear(x, weight, bias=None):
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).half()


def float16_products(precision: Precision, device_type: str):
    """`Float16Products` where the contract asks for float16 and the CPU has none; elsewhere a context of nothing."""
    if float16_needs_help(precision.autocast, device_type):
        return Float16Products()
    return contextlib.nullcontext()


@contextlib.contextmanager
def trainer_arithmetic(precision: Precision, device_type: str):
    """Autocast and products as the trainer's loss has them, for a forward pass outside the trainer."""
    dtype = precision.autocast
    autocast = torch.autocast(device_type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    with float16_products(precision, device_type), autocast:
        yield
