"""Binary number formats: their bits, range and spacing, and exact rounding to any of them, ties to even.

A format has a sign bit, exponent bits and mantissa bits (the fraction, without the leading 1), as in IEEE 754:
subnormal numbers below the smallest normal one, infinities and NaN at the largest exponent. float16 and bfloat16 are
two of them, float8_e5m2 is a third; float8_e4m3fn is not, it has no infinity. Plain numbers need no torch here;
`round_tensor` does the same for tensors and is what `kit.emulation` rounds with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kit.errors import ArgumentError

if TYPE_CHECKING:
    import torch

_CARRIER_EXPONENT, _CARRIER_MANTISSA = 8, 23  # float32 carries every format that is allowed here


@dataclass(frozen=True)
class FloatFormat:
    """A number format: 1 sign bit, `exponent_bits` (2 to 8) and `mantissa_bits` (1 to 23).

    Example:
        >>> FLOAT16.largest, FLOAT16.smallest_normal == 2.0**-14, FLOAT16.round(0.1)
        (65504.0, True, 0.0999755859375)
    """

    exponent_bits: int
    mantissa_bits: int

    def __post_init__(self):
        if not 2 <= self.exponent_bits <= _CARRIER_EXPONENT or not 1 <= self.mantissa_bits <= _CARRIER_MANTISSA:
            raise ArgumentError(
                f"A format of {self.exponent_bits} exponent and {self.mantissa_bits} mantissa bits cannot be had; "
                f"expected 2 to {_CARRIER_EXPONENT} and 1 to {_CARRIER_MANTISSA}, which float32 can carry."
            )

    @property
    def name(self) -> str:
        """float32, float16 or bfloat16 where it is one of those, else for example `e5m2`."""
        known = {form: name for name, form in FORMATS.items()}
        return known.get(self, f"e{self.exponent_bits}m{self.mantissa_bits}")

    @property
    def bits(self) -> int:
        """Bits of one number."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field; also the largest exponent of a finite number."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def largest(self) -> float:
        """Largest finite number."""
        return math.ldexp(2 - 2.0**-self.mantissa_bits, self.bias)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number with all its mantissa bits."""
        return math.ldexp(1.0, self.smallest_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive number; half of it and less rounds to zero."""
        return math.ldexp(1.0, self.smallest_exponent - self.mantissa_bits)

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to a normal number, 2^-(mantissa bits + 1)."""
        return 2.0 ** -(self.mantissa_bits + 1)

    def spacing(self, x: float) -> float:
        """Distance between neighbouring numbers of this format around x; infinite beyond the largest one.

        >>> FLOAT16.spacing(1.0) == 2.0**-10, BFLOAT16.spacing(300.0)
        (True, 2.0)
        """
        if not abs(x) <= self.largest:
            return math.nan if math.isnan(x) else math.inf
        exponent = math.frexp(x)[1] - 1 if x else self.smallest_exponent
        return math.ldexp(1.0, max(exponent, self.smallest_exponent) - self.mantissa_bits)

    def round(self, x: float) -> float:
        """The nearest number of this format, ties to the even one; beyond the largest an infinity. Exact.

        >>> BFLOAT16.round(257.0), BFLOAT16.round(259.0), FLOAT16.round(65519.9), FLOAT16.round(-65520.0)
        (256.0, 260.0, 65504.0, -inf)
        """
        if not math.isfinite(x) or x == 0:
            return x
        if abs(x) >= 2 * self.largest:
            return math.copysign(math.inf, x)
        exponent = max(math.frexp(x)[1] - 1, self.smallest_exponent) - self.mantissa_bits
        # dividing by a power of two is exact here, and Python's round() takes ties to even
        rounded = math.copysign(math.ldexp(round(math.ldexp(abs(x), -exponent)), exponent), x)
        return math.copysign(math.inf, x) if abs(rounded) > self.largest else rounded

    def encode(self, x: float) -> int:
        """The bits of x, rounded to this format, as a whole number: sign, exponent field, mantissa field.

        >>> hex(FLOAT16.encode(1.0)), hex(BFLOAT16.encode(-2.0))
        ('0x3c00', '0xc000')
        """
        sign = int(math.copysign(1.0, x) < 0) << (self.bits - 1)
        top = (2**self.exponent_bits - 1) << self.mantissa_bits
        if math.isnan(x):
            return sign | top | 1 << (self.mantissa_bits - 1)
        size = abs(self.round(x))
        if math.isinf(size):
            return sign | top
        if size < self.smallest_normal:
            return sign | int(size / self.smallest_subnormal)
        fraction, exponent = math.frexp(size)
        mantissa = int(math.ldexp(2 * fraction - 1, self.mantissa_bits))
        return sign | (exponent - 1 + self.bias) << self.mantissa_bits | mantissa

    def decode(self, pattern: int) -> float:
        """The number that these bits stand for.

        >>> FLOAT16.decode(0x3C00), FLOAT16.decode(0x0001) == 2.0**-24, FLOAT16.decode(0xFC00)
        (1.0, True, -inf)
        """
        if not 0 <= pattern < 2**self.bits:
            raise ArgumentError(f"{pattern} is no pattern of {self.bits} bits; expected 0 to {2**self.bits - 1}.")
        sign, field, mantissa = self.fields(pattern)
        if field == 2**self.exponent_bits - 1:
            size = math.nan if mantissa else math.inf
        elif field == 0:
            size = mantissa * self.smallest_subnormal
        else:
            size = math.ldexp(1 + math.ldexp(mantissa, -self.mantissa_bits), field - self.bias)
        return math.copysign(size, -1.0 if sign else 1.0)

    def fields(self, pattern: int) -> tuple[int, int, int]:
        """(sign, exponent field, mantissa field) of a pattern.

        >>> FLOAT16.fields(0xC200)
        (1, 16, 512)
        """
        rest = pattern & (2 ** (self.bits - 1) - 1)
        return pattern >> (self.bits - 1), rest >> self.mantissa_bits, rest & (2**self.mantissa_bits - 1)


FLOAT32, FLOAT16, BFLOAT16 = FloatFormat(8, 23), FloatFormat(5, 10), FloatFormat(8, 7)
FORMATS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}


def format_of(name: str) -> FloatFormat:
    """A format by its name: float32, float16, bfloat16, or `e5m2` for any other.

    >>> format_of("e5m10").name, format_of("bfloat16").bits
    ('float16', 16)
    """
    exponent, _, mantissa = name.removeprefix("e").partition("m")
    if name in FORMATS:
        return FORMATS[name]
    if name.startswith("e") and exponent.isdecimal() and mantissa.isdecimal():
        return FloatFormat(int(exponent), int(mantissa))
    raise ArgumentError(f"Unknown format {name!r}; expected {', '.join(FORMATS)}, or bits such as e5m2.")


def round_tensor(values: torch.Tensor, form: FloatFormat) -> torch.Tensor:
    """Every value rounded to the format, ties to even, as a new float32 tensor of the same shape. Exact.

    Args:
        values: float32 or shorter. float64 is refused: it would be rounded to float32 first, and two roundings in a row
            are not one.
        form: the format.

    Raises:
        kit.errors.ArgumentError: values of another dtype.

    Example:
        >>> import torch
        >>> round_tensor(torch.tensor([0.1, 70000.0]), FLOAT16)
        tensor([0.1000,    inf])
    """
    import torch

    if not values.is_floating_point() or values.dtype.itemsize > 4:
        raise ArgumentError(f"Values of {values.dtype} cannot be rounded exactly here; expected float32 or shorter.")
    x = values.float()
    if form == FLOAT32:
        return x.clone()
    # The bits of float32 sort like its numbers, so rounding a number is rounding its bits as an integer: add half of
    # what is cut off (a little less before an even digit), cut. A carry out of the mantissa raises the exponent.
    cut = _CARRIER_MANTISSA - form.mantissa_bits
    bits = x.view(torch.int32)
    rounded = x
    if cut:
        just_below_half = (1 << cut >> 1) - 1
        rounded = ((bits + just_below_half + (bits >> cut & 1)) >> cut << cut).view(torch.float32)
    if form.exponent_bits < _CARRIER_EXPONENT:
        # Below the smallest normal number the spacing no longer shrinks. From `shift` on float32 has just that spacing,
        # so the addition rounds to it, ties to even, and the subtraction is exact.
        shift = math.ldexp(form.smallest_subnormal, _CARRIER_MANTISSA)
        small = torch.copysign((x.abs() + shift) - shift, x)
        rounded = torch.where(x.abs() < form.smallest_normal, small, rounded)
    rounded = torch.where(rounded.abs() > form.largest, torch.copysign(torch.full_like(x, math.inf), x), rounded)
    return torch.where(x.isfinite(), rounded, x)
