"""A number as the bits of a format: as text, as HTML, and as a widget in which bits can be flipped.

The widget is a thin shell over the functions above it; `bits_text` is its twin for a terminal or a screen reader.
"""

import html
import math
from collections.abc import Callable

from kit.errors import ArgumentError
from kit.formats import FORMATS, FloatFormat, format_of
from kit.summary import number

# Sign, exponent, mantissa: each dark enough to be read on white, told apart by place and by label too.
COLOURS = {"sign": "#59636e", "exponent": "#0072b2", "mantissa": "#c75000"}


def bit_groups(pattern: int, form: FloatFormat) -> dict[str, str]:
    """{"sign", "exponent", "mantissa"}: each part of a pattern as ones and zeros.

    >>> bit_groups(0x3C01, format_of("float16"))
    {'sign': '0', 'exponent': '01111', 'mantissa': '0000000001'}
    """
    sign, exponent, mantissa = form.fields(pattern)
    return {
        "sign": str(sign),
        "exponent": f"{exponent:0{form.exponent_bits}b}",
        "mantissa": f"{mantissa:0{form.mantissa_bits}b}",
    }


def kind_of(pattern: int, form: FloatFormat) -> str:
    """zero, subnormal, normal, infinity or NaN."""
    _, exponent, mantissa = form.fields(pattern)
    if exponent == 2**form.exponent_bits - 1:
        return "NaN" if mantissa else "infinity"
    if exponent == 0:
        return "subnormal" if mantissa else "zero"
    return "normal"


def meaning(pattern: int, form: FloatFormat) -> str:
    """The value of a pattern as a product of its parts.

    >>> meaning(0x3C01, format_of("float16")), meaning(0x0001, format_of("float16"))
    ('+ 2^0 x (1 + 1/1024)', '+ 2^-14 x (0 + 1/1024)')
    """
    sign, exponent, mantissa = form.fields(pattern)
    if exponent == 2**form.exponent_bits - 1:
        return "not a number" if mantissa else f"{'-' if sign else '+'} beyond every number"
    power, leading = (exponent - form.bias, 1) if exponent else (form.smallest_exponent, 0)
    return f"{'-' if sign else '+'} 2^{power} x ({leading} + {mantissa}/{2**form.mantissa_bits})"


def flip(pattern: int, place: int, form: FloatFormat) -> int:
    """The pattern with one bit changed; place 0 is the leftmost, the sign.

    >>> hex(flip(0x3C00, 0, format_of("float16")))
    '0xbc00'
    """
    if not 0 <= place < form.bits:
        raise ArgumentError(f"There is no bit {place} in {form.name}; expected 0 (the sign) to {form.bits - 1}.")
    return pattern ^ 1 << (form.bits - 1 - place)


def facts(x: float, form: FloatFormat) -> dict[str, str]:
    """What became of x in the format, in words: stored value, error, what it is, its neighbours' distance."""
    pattern = form.encode(x)
    stored = form.decode(pattern)
    found = {"stored": _exact(stored), "which is": f"{kind_of(pattern, form)}: {meaning(pattern, form)}"}
    if math.isfinite(x) and math.isfinite(stored):
        error = stored - x
        relative = f" ({number(abs(error / x))} of it)" if x and error else ""
        found["rounding error"] = f"{number(error)}{relative}" if error else "none, it is exact"
        found["next number"] = f"{number(form.spacing(stored))} away"
    elif math.isfinite(x):
        found["rounding error"] = f"overflow: the largest number is {number(form.largest)}"
    return found


def _error(x, stored):
    if stored == x or math.isnan(x):
        return "exact"
    return f"off by {number(stored - x)}" if math.isfinite(stored) else "overflow"


def _exact(value):
    """A short decimal that reads back as the same number."""
    return repr(value) if math.isfinite(value) else str(value)


def bits_text(x: float, formats: list[str] | tuple[str, ...] = tuple(FORMATS)) -> str:
    """The bits of x in some formats, with the value that they hold.

    >>> print(bits_text(0.1, ["bfloat16"]))
    bfloat16  0 01111011 1001101                        stored 0.10009765625, off by 9.77e-5
    """
    lines = []
    for name in formats:
        form = format_of(name)
        pattern = form.encode(x)
        stored = form.decode(pattern)
        bits = " ".join(bit_groups(pattern, form).values())
        lines.append(f"{form.name:9} {bits:41} stored {_exact(stored)}, {_error(x, stored)}")
    return "\n".join(lines)


def bits_html(x: float, form: FloatFormat) -> str:
    """The bits in colour with their meaning, on a page of its own colours: readable in light and dark notebooks."""
    boxes = []
    for part, bits in bit_groups(form.encode(x), form).items():
        style = f"color:#fff;background:{COLOURS[part]};padding:1px 6px;margin-right:3px;border-radius:3px"
        boxes.append(f"<span style='{style}' title='{part}'>{bits}</span>")
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in facts(x, form).items())
    legend = ", ".join(f"<span style='color:{colour}'>{part}</span>" for part, colour in COLOURS.items())
    page = "background:#fff;color:#1f2328;padding:8px 12px;border-radius:4px;line-height:1.7"
    return (
        f"<div style='{page}'><div style='font-family:monospace;font-size:15px'>{''.join(boxes)}</div>"
        f"<div style='font-size:12px'>{legend}</div><table style='color:#1f2328;background:#fff'>{rows}</table></div>"
    )


def bit_view(x: float = 0.1, dtype: str = "float16") -> object:
    """A widget: type a number, choose a format, flip bits. Without ipywidgets use `bits_text`.

    Raises:
        ImportError: ipywidgets is missing; says what to call instead.
    """
    try:
        import ipywidgets as widgets
    except ImportError as error:
        raise ImportError("The bit view needs ipywidgets; print kit.bit_view.bits_text(0.1) instead.") from error

    entry = widgets.FloatText(value=x, description="number", continuous_update=False)
    formats = widgets.Dropdown(options=list(FORMATS), value=dtype, description="format")
    row, page = widgets.HBox(layout={"flex_flow": "row wrap"}), widgets.HTML()
    shown = {"x": x}

    def show(value: float) -> None:
        shown["x"] = value
        if math.isfinite(value):
            entry.value = value
        form = format_of(formats.value)
        page.value = bits_html(value, form)
        row.children = _buttons(widgets, form.encode(value), form, show)

    entry.observe(lambda change: show(change["new"]), "value")
    formats.observe(lambda change: show(shown["x"]), "value")
    show(x)
    return widgets.VBox([widgets.HBox([entry, formats]), row, page])


def _buttons(widgets: object, pattern: int, form: FloatFormat, show: Callable[[float], None]) -> tuple:
    """A button a bit, which shows the number with that bit flipped."""
    parts = ["sign"] + ["exponent"] * form.exponent_bits + ["mantissa"] * form.mantissa_bits
    buttons = []
    for place, (part, bit) in enumerate(zip(parts, f"{pattern:0{form.bits}b}", strict=True)):
        label = f"{part}, bit {place}: {bit}, press to flip"
        button = widgets.Button(description=bit, tooltip=label, layout={"width": "2em", "padding": "0"})
        button.style.button_color, button.style.text_color = COLOURS[part], "#ffffff"
        button.on_click(lambda _, place=place: show(form.decode(flip(pattern, place, form))))
        buttons.append(button)
    return tuple(buttons)
