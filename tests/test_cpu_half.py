"""float16 products on CPUs without float16 arithmetic: exact products, one rounding, nothing else touched."""

import contextlib

import pytest
import torch

from kit import cpu_half
from kit.cpu_half import Float16Products, float16_products, has_float16_arithmetic, trainer_arithmetic
from kit.precision import Precision


def halves(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape).half() for shape in shapes]


def rounded_once(function, *parts):
    """The function in float64, rounded to float16 at the end: exact products and sums, one rounding."""
    return function(*(part.double() for part in parts)).half()


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(16, 64), (64, 8)]),
        (torch.bmm, [(3, 16, 64), (3, 64, 8)]),
        (torch.addmm, [(8,), (16, 64), (64, 8)]),
        (torch.baddbmm, [(3, 16, 8), (3, 16, 64), (3, 64, 8)]),
        (torch.nn.functional.linear, [(2, 16, 64), (8, 64), (8,)]),
        (torch.matmul, [(2, 3, 16, 64), (2, 3, 64, 8)]),
    ],
)
def test_a_product_is_rounded_once(function, shapes):
    parts = halves(*shapes)
    with Float16Products():
        found = function(*parts)
    assert found.dtype == torch.float16
    exact = rounded_once(function, *parts)
    # float32 accumulation may fall on the other side of a tie, by one last place, in few elements
    torch.testing.assert_close(found, exact, rtol=2**-10, atol=2**-12)
    assert (found != exact).float().mean() < 0.01


def test_the_backward_pass_is_computed_the_same_way():
    x, weight = halves((16, 64), (8, 64))
    weight.requires_grad_()
    with Float16Products():
        torch.nn.functional.linear(x, weight).sum().backward()
    expected = rounded_once(lambda a: torch.ones(8, 16, dtype=a.dtype) @ a, x)
    torch.testing.assert_close(weight.grad, expected, rtol=2**-10, atol=2**-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_left_alone(dtype):
    a, b = (part.to(dtype) for part in halves((16, 64), (64, 8)))
    with Float16Products():
        assert torch.equal(a @ b, torch.mm(a, b))
        assert (a @ b).dtype == dtype


def test_infinity_and_nan_come_through():
    a, b = torch.full((2, 4), 60000.0).half(), torch.full((4, 2), 60000.0).half()
    with Float16Products():
        assert (a @ b).isinf().all()  # overflow of float16, not saved by float32
        assert ((a * torch.nan) @ b).isnan().all()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_only_float16_needs_it(name):
    assert isinstance(float16_products(Precision(name), "cpu"), contextlib.nullcontext)


@pytest.mark.parametrize("has", [True, False])
def test_it_is_used_where_the_cpu_lacks_the_arithmetic(monkeypatch, has):
    monkeypatch.setattr(cpu_half, "has_float16_arithmetic", lambda: has)
    chosen = float16_products(Precision("float16"), "cpu")
    assert isinstance(chosen, contextlib.nullcontext if has else Float16Products)
    assert isinstance(float16_products(Precision("float16"), "cuda"), contextlib.nullcontext)


def test_what_this_cpu_has_is_what_its_flags_say():
    from kit.hardware import detect

    hardware = detect()
    if hardware.kind == "cpu" and hardware.features:
        assert has_float16_arithmetic() == bool({"avx512_fp16", "amx_fp16"} & set(hardware.features))


@pytest.mark.parametrize(("name", "dtype"), [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")])
def test_arithmetic_outside_the_trainer_is_the_contracts(name, dtype):
    layer, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    with trainer_arithmetic(Precision(name), "cpu"):
        assert layer(x).dtype == getattr(torch, dtype)


@pytest.mark.engine("float16")
def test_the_engines_linear_layers_round_once_too(model):
    """On this CPU's float16 kernels the result would be another one, and later."""
    if has_float16_arithmetic():
        pytest.skip("this CPU has float16 arithmetic")
    x, weight, bias = halves((16, 64), (8, 64), (8,))
    (linears,) = model.kit.sampler.llm.apply_model(
        lambda inner: [m.cpu_linear for m in inner.modules() if hasattr(m, "cpu_linear")]
    )
    assert len(linears) > 8
    exact = rounded_once(torch.nn.functional.linear, x, weight, bias)
    for linear in linears:
        torch.testing.assert_close(linear(x, weight, bias), exact, rtol=2**-10, atol=2**-16)
