"""Number formats: exact against torch's casts and Python's own, bit for bit, and the views of a number's bits."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit import arithmetic, bit_view
from kit.drawn_policy import load_trainer
from kit.errors import ArgumentError
from kit.experiment_plots import gradient_figure, gradient_text, lost_share, spacing_figure, spacing_text
from kit.formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS, FloatFormat, format_of, round_tensor
from kit.lesson_numbers import largest_activation, policy_gradients, unmoved_share
from kit.loading import resolve
from kit.precision import Precision

E5M2 = FloatFormat(5, 2)
CASTS = {
    "float16": (FLOAT16, torch.float16),
    "bfloat16": (BFLOAT16, torch.bfloat16),
    "e5m2": (E5M2, torch.float8_e5m2),
}
each_cast = pytest.mark.parametrize(("form", "dtype"), CASTS.values(), ids=CASTS)
formats = st.builds(FloatFormat, st.integers(2, 8), st.integers(1, 23))
float32s = st.floats(width=32)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Bit for bit, the sign of zero included; any NaN equals any NaN."""
    one, two = one.float(), two.float()
    equal = (one == two) & (one.signbit() == two.signbit())
    return bool((equal | (one.isnan() & two.isnan())).all())


def some_float32(count: int = 2_000_000) -> torch.Tensor:
    """Random bit patterns: every exponent, subnormals, infinities and NaN alike."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).int().view(torch.float32)


def every_number(form: FloatFormat) -> torch.Tensor:
    """Every finite number of a format of up to 16 bits."""
    numbers = torch.tensor([form.decode(pattern) for pattern in range(2**form.bits)])
    return numbers[numbers.isfinite()]


@each_cast
def test_rounding_equals_torchs_cast_on_random_bits(form, dtype):
    values = some_float32()
    assert same(round_tensor(values, form), values.to(dtype))


@each_cast
def test_ties_and_their_neighbours_equal_torchs_cast(form, dtype):
    """Halfway between any two neighbours of the format, and the float32 numbers just below and above."""
    numbers = every_number(form).sort().values
    ties = ((numbers[:-1].double() + numbers[1:].double()) / 2).float()
    for values in (numbers, ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)):
        assert same(round_tensor(values, form), values.to(dtype))


@each_cast
def test_what_overflows_equals_torchs_cast(form, dtype):
    edge = torch.tensor(form.largest + form.spacing(form.largest) / 2)  # the tie between the largest and infinity
    values = torch.stack([edge, torch.nextafter(edge, edge * 0), torch.nextafter(edge, edge * 2)])
    values = torch.cat([values, -values, torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])])
    assert same(round_tensor(values, form), values.to(dtype))


@given(float32s, formats)
def test_a_tensor_is_rounded_as_a_number_is(x, form):
    assert same(round_tensor(torch.tensor([x]), form), torch.tensor([form.round(x)]))


@given(st.floats(), formats)
def test_rounding_finds_a_nearest_number_and_stays_there(x, form):
    y = form.round(x)
    assert form.round(y) == y or math.isnan(y)
    if math.isfinite(y) and math.isfinite(x):
        assert abs(x - y) <= form.spacing(y) / 2
        assert math.copysign(1, x) == math.copysign(1, y)


@given(st.floats(), st.floats(), formats)
def test_rounding_keeps_the_order(x, y, form):
    if x <= y:
        assert form.round(x) <= form.round(y)


@given(st.floats(), formats)
def test_encoding_and_decoding_are_inverse(x, form):
    y = form.decode(form.encode(x))
    assert y == form.round(x) or (math.isnan(x) and math.isnan(y))
    assert math.isnan(x) or math.copysign(1, y) == math.copysign(1, x)


def test_float64_is_rounded_once():
    """Rounded to float32 first this lands on a tie, and then on the even number, which is the wrong side."""
    x = 1 + 2.0**-11 + 2.0**-40
    assert FLOAT16.round(x) == 1 + 2.0**-10 == float(np.float16(x))
    assert FLOAT16.round(float(np.float32(x))) == 1.0
    with pytest.raises(ArgumentError, match="float32 or shorter"):
        round_tensor(torch.tensor([x], dtype=torch.float64), FLOAT16)


def test_every_pattern_of_float16_is_the_number_python_reads():
    for pattern in range(2**16):
        (expected,) = struct.unpack("<e", struct.pack("<H", pattern))
        value = FLOAT16.decode(pattern)
        assert value == expected or (math.isnan(value) and math.isnan(expected))
        assert math.isnan(value) or FLOAT16.encode(value) == pattern


@pytest.mark.parametrize("name", FORMATS)
def test_range_and_spacing_are_torchs(name):
    form, info = FORMATS[name], torch.finfo(getattr(torch, name))
    assert (form.bits, form.largest, form.smallest_normal) == (info.bits, info.max, info.smallest_normal)
    assert form.spacing(1.0) == info.eps == 2 * form.unit_roundoff
    assert form.smallest_subnormal == info.smallest_normal * info.eps
    assert form.round(form.smallest_subnormal / 2) == 0.0
    assert form.spacing(math.inf) == form.spacing(2.0**200) == math.inf and math.isnan(form.spacing(math.nan))
    assert form.spacing(0.0) == form.smallest_subnormal


@pytest.mark.parametrize("shape", [(0,), (), (2, 0, 3), (4, 5)])
def test_shapes_stay_and_the_input_is_left_alone(shape):
    values = torch.full(shape, 1.001)
    assert round_tensor(values, BFLOAT16).shape == torch.Size(shape)
    assert (values == torch.full(shape, 1.001)).all()
    unrounded = round_tensor(values, FLOAT32)
    assert same(unrounded, values) and (not values.numel() or unrounded.data_ptr() != values.data_ptr())


@pytest.mark.parametrize("bits", [(1, 5), (9, 5), (5, 0), (5, 24)])
def test_formats_that_float32_cannot_carry_are_refused(bits):
    with pytest.raises(ArgumentError, match="expected 2 to 8 and 1 to 23"):
        FloatFormat(*bits)


def test_formats_by_name():
    assert format_of("e5m10") == FLOAT16 and FLOAT16.name == "float16"
    assert format_of("e4m3").name == "e4m3"
    for wrong in ("", "float8", "e5", "em", "e5m2x", "\u00e9"):
        with pytest.raises(ArgumentError, match="Unknown format"):
            format_of(wrong)
    with pytest.raises(ArgumentError, match="cannot be rounded"):
        round_tensor(torch.tensor([1]), FLOAT16)


# ---- views of bits


@given(float32s, st.sampled_from(list(FORMATS.values())), st.data())
def test_flipping_a_bit_twice_changes_nothing(x, form, data):
    place = data.draw(st.integers(0, form.bits - 1))
    pattern = form.encode(x)
    flipped = bit_view.flip(pattern, place, form)
    assert flipped != pattern and bit_view.flip(flipped, place, form) == pattern
    assert "".join(bit_view.bit_groups(pattern, form).values()) == f"{pattern:0{form.bits}b}"


@pytest.mark.parametrize(
    ("x", "kind"),
    [(0.0, "zero"), (-0.0, "zero"), (1e-7, "subnormal"), (1.0, "normal"), (1e9, "infinity"), (math.nan, "NaN")],
)
def test_kinds_of_numbers_in_float16(x, kind):
    assert bit_view.kind_of(FLOAT16.encode(x), FLOAT16) == kind
    assert bit_view.bits_text(x).count("\n") == 2
    assert kind in bit_view.bits_html(x, FLOAT16)


def test_the_text_tells_error_and_overflow():
    exact, float16, bfloat16 = bit_view.bits_text(70000.0).splitlines()
    assert exact.endswith("exact") and float16.endswith("stored inf, overflow") and bfloat16.endswith("off by 144")
    assert bit_view.facts(3e-8, FLOAT16)["rounding error"] == "2.96e-8 (0.987 of it)"
    with pytest.raises(ArgumentError, match="expected 0"):
        bit_view.flip(0, 16, FLOAT16)


def test_the_widget_shows_what_the_functions_say():
    view = bit_view.bit_view(0.1, "bfloat16")
    top, row, page = view.children
    entry, formats = top.children
    assert page.value == bit_view.bits_html(0.1, BFLOAT16) and len(row.children) == 16
    row.children[0].click()
    assert entry.value == -BFLOAT16.round(0.1) and page.value == bit_view.bits_html(entry.value, BFLOAT16)
    formats.value = "float32"
    assert len(row.children) == 32
    entry.value = 2.0
    assert [button.description for button in row.children[:3]] == ["0", "1", "0"]
    row.children[1].click()  # 2.0 without its exponent bit
    assert entry.value == 0.0 and "zero" in page.value


# ---- figures


def test_the_spacing_figure_and_its_words_have_every_format():
    figure = spacing_figure()
    figure.canvas.draw()
    drawn = [text.get_text() for text in figure.axes[0].texts]
    for name in FORMATS:
        assert any(text.startswith(name) for text in drawn) and f"\n{name}" in spacing_text()
    line = figure.axes[0].lines[0].get_ydata()
    assert max(line) <= 1 and min(line) >= 2.0**-24


def test_the_loss_scale_saves_what_underflows():
    sizes = [1e-9, -3e-8, 1e-5, 0.0, 2.0]
    assert lost_share(sizes, 1.0) == (0.25, 0.0)
    assert lost_share(sizes, 65536.0) == (0.0, 0.25)
    assert lost_share([], 1.0) == (0.0, 0.0)
    assert gradient_text(sizes, 65536.0).splitlines()[0].startswith("times 1: 25.0%")
    figure = gradient_figure(sizes, 65536.0)
    figure.canvas.draw()
    heights = sum(patch.get_height() for patch in figure.axes[0].patches if patch.get_height() in range(9))
    assert heights >= 8  # four numbers, twice


# ---- numbers of a real model, for notebook 0


@pytest.fixture(scope="module")
def tiny():
    return load_trainer(resolve("tiny"), Precision("float32"))


def test_the_gradients_are_those_of_a_policy_loss(tiny):
    tokenizer = arithmetic.build_tokenizer()
    sizes = policy_gradients(tiny, tokenizer, problems=8, entries=5000)
    assert len(sizes) == 5000 and sizes == policy_gradients(tiny, tokenizer, problems=8, entries=5000)
    assert all(map(math.isfinite, sizes)) and 1e-9 < max(map(abs, sizes)) < 1
    assert not any(p.requires_grad for p in tiny.parameters())
    assert lost_share(sizes, 1.0)[0] > lost_share(sizes, 2.0**16)[0]


def test_the_largest_activation_is_found_and_no_hook_stays(tiny):
    ids = arithmetic.build_tokenizer()("Q: 24+67=?\nA: ").input_ids
    name, size = largest_activation(tiny, ids)
    outputs = []
    handle = tiny.get_submodule(name).register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad():
        tiny(input_ids=torch.tensor([ids]))
    handle.remove()
    assert outputs[0].abs().max().item() == pytest.approx(size)
    assert not any(m._forward_hooks for m in tiny.modules())


def test_small_updates_are_lost_in_short_formats():
    weight = torch.linspace(1, 1.99, 100)
    assert unmoved_share(weight, 1e-3, FLOAT16) == 0.0
    assert unmoved_share(weight, 1e-3, BFLOAT16) == 1.0
    assert unmoved_share(weight, 2.0**-20, FLOAT32) == 0.0
