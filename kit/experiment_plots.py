"""Figures of number formats, emulated precision and attribution: pure functions of results.

What they show, `kit.mantissa.text`, `kit.attribution.text`, `spacing_text` and `gradient_text` say in words. Colours,
lines and the light background are those of `kit.plots`.
"""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from kit.attribution import largest_pairs, share_text
from kit.formats import FORMATS, FloatFormat
from kit.mismatch_plots import dress, new_figure, style_of
from kit.plots import FAINT, INK, PAPER
from kit.summary import number

ADDS, CANCELS = "#c75000", "#0072b2"  # of pairs: above zero, below zero
BAR = "#8a949e"
HALO = {"facecolor": PAPER, "alpha": 0.85, "lw": 0, "pad": 0.8}


# ---- number formats


def spacing_figure(formats: Mapping[str, FloatFormat] = FORMATS) -> Figure:
    """Relative distance between neighbouring numbers over their size, from underflow to overflow, a line a format."""
    figure = new_figure(10, 4.2)
    axes = figure.subplots()
    dress(axes, "How far the next number is away", "size of the number", "distance / size")
    for name, form in formats.items():
        style = style_of(name)
        powers = range(form.smallest_exponent - form.mantissa_bits, form.bias + 1)
        ends = [(2.0**power, 2.0**power * (2 - 2.0**-40)) for power in powers]  # of each stretch of equal spacing
        sizes = [size for pair in ends for size in pair if size <= form.largest]
        axes.plot(sizes, [form.spacing(x) / x for x in sizes], color=style["color"], lw=1.6)
        axes.plot(form.largest, form.spacing(form.largest) / form.largest, marker=style["marker"], color=style["color"])
        where, offset = (form.largest, (9, -3)) if form.largest < 1e30 else (2.0**40, (0, 5))
        axes.annotate(f"{name}: {form.mantissa_bits} mantissa bits", (where, 2.0**-form.mantissa_bits), xytext=offset,
                      textcoords="offset points", color=style["color"], fontsize=10)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(1e-46, 1e40), ylim=(2.0**-26, 4))
    axes.xaxis.set_minor_locator(NullLocator())
    return figure


def spacing_text(formats: Mapping[str, FloatFormat] = FORMATS) -> str:
    """What `spacing_figure` shows: a line a format.

    >>> print(spacing_text({"float16": FORMATS["float16"]}))
    format    bits  exponent  mantissa   relative spacing   smallest normal  smallest above 0   largest
    float16     16         5        10   2^-10 = 9.77e-4            6.1e-5           5.96e-8     65504
    """
    lines = [
        "format    bits  exponent  mantissa   relative spacing   smallest normal  smallest above 0   largest",
    ]
    for name, form in formats.items():
        relative = f"2^-{form.mantissa_bits} = {number(2.0**-form.mantissa_bits)}"
        ends = [number(x) for x in (form.smallest_normal, form.smallest_subnormal, form.largest)]
        lines.append(
            f"{name:9}{form.bits:>5}{form.exponent_bits:>10}{form.mantissa_bits:>10}   {relative:18}"
            f"{ends[0]:>16}{ends[1]:>18}{ends[2]:>10}"
        )
    return "\n".join(lines)


def lost_share(sizes: Sequence[float], scale: float, form: FloatFormat = FORMATS["float16"]) -> tuple[float, float]:
    """Shares of nonzero numbers that become zero, and that overflow, when stored times `scale`.

    >>> lost_share([1e-9, 1.0], 1.0), lost_share([1e-9, 1.0], 65536.0)
    ((0.5, 0.0), (0.0, 0.5))
    """
    nonzero = [abs(x) for x in sizes if x]
    stored = [form.round(x * scale) for x in nonzero]
    count = max(len(nonzero), 1)
    return sum(x == 0 for x in stored) / count, sum(math.isinf(x) for x in stored) / count


def gradient_figure(sizes: Sequence[float], scale: float) -> Figure:
    """Histograms of gradients as they are and multiplied by the loss scale, over what float16 can hold."""
    form = FORMATS["float16"]
    figure = new_figure(10, 3.8)
    axes = figure.subplots()
    dress(axes, "Gradients of one step, and what float16 can hold", "size of a gradient entry", "entries")
    powers = [math.log2(abs(x)) for x in sizes if x]
    edges = list(range(math.floor(min(powers)) - 1, math.ceil(max(powers) + math.log2(scale)) + 2))
    for shift, color, label in ((1.0, BAR, "as it is"), (scale, style_of("float16")["color"], f"times {scale:g}")):
        values = [2 ** (p + math.log2(shift)) for p in powers]
        axes.hist(values, [2.0**edge for edge in edges], color=color, alpha=0.7, label=label)
    zero, largest = form.smallest_subnormal / 2, form.largest
    axes.set(xscale="log", xlim=(2.0 ** edges[0], max(2.0 ** edges[-1], 30 * largest)))
    axes.axvspan(2.0 ** edges[0], zero, color="#b42318", alpha=0.09, lw=0)
    axes.axvspan(largest, axes.get_xlim()[1], color="#b42318", alpha=0.09, lw=0)
    axes.axvspan(zero, form.smallest_normal, color="#b42318", alpha=0.035, lw=0)
    for x, told, side in ((zero, "becomes 0", "right"), (largest, "inf", "left"), (zero, "fewer bits", "left")):
        axes.annotate(told, (x, 0.93), xycoords=("data", "axes fraction"), ha=side, color=FAINT, fontsize=9,
                      xytext=(-4 if side == "right" else 4, 0), textcoords="offset points")  # fmt: skip
    axes.legend(frameon=False, fontsize=9.5, labelcolor=INK, loc="center left")
    return figure


def gradient_text(sizes: Sequence[float], scale: float) -> str:
    """What `gradient_figure` shows."""
    lines = []
    for factor in (1.0, scale):
        zero, over = lost_share(sizes, factor)
        lines.append(f"times {factor:g}: {zero:.1%} of the nonzero gradients become 0 in float16, {over:.1%} overflow")
    return "\n".join(lines)


# ---- emulated precision


def mantissa_figure(result: dict) -> Figure:
    """mean |d| over mantissa bits: emulated on both sides and on one, the fitted line, and the real formats."""
    figure = new_figure(10, 4.8)
    axes = figure.subplots()
    dress(axes, "Mismatch by mantissa bits", "mantissa bits", "mean |trainer - sampler| logprob [nats]")
    bits = [point["bits"] for point in result["points"]]
    for side, style in (("trainer", "--"), ("sampler", ":")):
        values = [point[side]["value"] for point in result["points"]]
        axes.plot(bits, values, color=BAR, ls=style, lw=1.3, label=f"{side} alone, the other float32")
    both = [point["both"] for point in result["points"]]
    axes.errorbar(bits, [v["value"] for v in both], yerr=_whiskers(both), color=INK, marker="o", ms=4.5, lw=1.8,
                  capsize=2, label="both sides emulated", zorder=3)  # fmt: skip
    ends = [min(bits), max(bits)]
    for key, told, style in (("fit", "all points", ":"), ("fit_above_floor", "above float32's floor", "-")):
        if found := result[key]:
            label = f"fit, {told}: a factor of {2 ** -found['slope']:.2f} a bit"
            values = [2 ** (found["at_zero"] + found["slope"] * m) for m in ends]
            axes.plot(ends, values, color="#7a5195", lw=1.1, ls=style, zorder=2, label=label)
    for name, point in result["real"].items():
        style = style_of(name)
        axes.plot(point["bits"], point["both"]["value"], ls="none", marker=style["marker"], ms=11, mew=1.5, mec=PAPER,
                  color=style["color"], zorder=4)  # fmt: skip
        axes.annotate(f"real {name}", (point["bits"], point["both"]["value"]), fontsize=10,
                      xytext=(9, 7) if point["bits"] < 20 else (6, 13), textcoords="offset points", zorder=5,
                      color=style["color"], bbox=HALO, ha="left" if point["bits"] < 20 else "right")  # fmt: skip
    axes.set_yscale("log")
    axes.set_xticks(bits)
    axes.set_xlim(ends[0] - 0.7, ends[1] + 0.7)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.legend(frameon=False, fontsize=9.5, labelcolor=INK, loc="lower left")
    return figure


def _whiskers(estimates):
    """Distances below and above the values, for `errorbar`; none where there is no interval."""
    ends = [(e["value"], e["value"]) if e["low"] is None else (e["low"], e["high"]) for e in estimates]
    below = [e["value"] - low for e, (low, _) in zip(estimates, ends, strict=True)]
    return [below, [high - e["value"] for e, (_, high) in zip(estimates, ends, strict=True)]]


# ---- attribution


def attribution_figure(result: dict) -> Figure:
    """Waterfall of the parts; the largest pairs; single changes at the coarse end; which tokens it comes from."""
    figure = new_figure(11, 9.2)
    (waterfall, pairs), (changes, tokens) = figure.subplots(2, 2, width_ratios=(1.15, 1))
    unit = 10 ** math.floor(math.log10(max(result["total"]["coarse"]["value"], 1e-30)))
    _draw_waterfall(waterfall, result, unit)
    _draw_pairs(pairs, largest_pairs(result, 6), unit)
    _draw_changes(changes, result, unit)
    _draw_tokens(tokens, result)
    return figure


def _unit(unit):
    return f"{number(unit)} nats\u00b2 a token"


def _draw_waterfall(axes: Axes, result: dict, unit: float) -> None:
    """Bars from the coarse total down to float32's; a whisker is the interval of its own bar."""
    coarse, exact = result["total"]["coarse"], result["total"]["exact"]
    names, level = [f"{result['coarse']} everything"], coarse["value"]
    rows = [(0.0, coarse["value"], style_of(result["coarse"])["color"], coarse, "")]
    for part in result["parts"]:
        value = part["part"]
        color = ADDS if value["value"] >= 0 else CANCELS
        rows.append((level - value["value"], value["value"], color, value, share_text(part, result)))
        level -= value["value"]
        names.append(part["name"])
    rows.append((0.0, exact["value"], style_of("float32")["color"], exact, ""))
    names.append("float32 everything")
    dress(axes, "What each thing adds", f"mean d\u00b2 [{_unit(unit)}]", "")
    for place, (left, width, color, estimate, told) in enumerate(rows):
        axes.barh(place, width / unit, left=left / unit, color=color, height=0.62, alpha=0.85)
        if estimate["low"] is not None:
            ends = [(left + estimate[end]) / unit for end in ("low", "high")]
            axes.plot(ends, [place, place], color=INK, lw=1.4, marker="|", ms=7)
        right = max(left + width, left, left + (estimate["high"] or width)) / unit
        told = told or number(width)
        axes.annotate(told, (right, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9.5,
                      color=INK, bbox=HALO)  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(0, color=FAINT, lw=0.8)
    axes.set_xlim(right=axes.get_xlim()[1] * 1.12)


def _draw_pairs(axes: Axes, pairs: Sequence[dict], unit: float) -> None:
    dress(axes, "Pairs of errors: add, or cancel", f"2 mean e\u1d62e\u2c7c [{_unit(unit)}]", "")
    for place, pair in enumerate(pairs):
        color = ADDS if pair["value"] >= 0 else CANCELS
        axes.barh(place, pair["value"] / unit, color=color, height=0.62, alpha=0.85)
        if pair["low"] is not None:
            axes.plot([pair["low"] / unit, pair["high"] / unit], [place, place], color=INK, lw=1.4, marker="|", ms=7)
    axes.set_yticks(range(len(pairs)), ["\n".join(pair["pair"]) for pair in pairs], fontsize=8.5)
    axes.invert_yaxis()
    axes.axvline(0, color=FAINT, lw=0.8)


def _draw_changes(axes: Axes, result: dict, unit: float) -> None:
    """What one change adds to mean d^2 or takes from it; the interval is that of the difference on the same tokens."""
    dress(axes, f"One change at the {result['coarse']} end", f"change of mean d\u00b2 [{_unit(unit)}]", "")
    for place, row in enumerate(result["changes"]):
        estimate = row["change"]
        axes.plot(estimate["value"] / unit, place, marker="o", color=INK, ms=5)
        if estimate["low"] is not None:
            axes.plot([estimate["low"] / unit, estimate["high"] / unit], [place, place], color=INK, lw=1.4)
    axes.axvline(0, color=FAINT, lw=0.8)
    # minus all of it: nothing further can be taken away
    everything, color = -result["total"]["coarse"]["value"] / unit, style_of(result["coarse"])["color"]
    axes.axvline(everything, color=color, lw=1.2, ls="--")
    axes.annotate("all of it", (everything, 0.5), xycoords=("data", "axes fraction"), xytext=(4, 0), color=color,
                  textcoords="offset points", fontsize=9)  # fmt: skip
    axes.set_yticks(range(len(result["changes"])), [_folded(row["name"]) for row in result["changes"]], fontsize=8.5)
    axes.invert_yaxis()


def _folded(name, width=36):
    if len(name) <= width:
        return name
    cut = name.rfind(" ", 0, width)
    return f"{name[:cut]}\n{name[cut + 1 :]}"


def _draw_tokens(axes: Axes, result: dict) -> None:
    """mean |d| of tokens by their probability, and their share of mean d^2 in words."""
    dress(axes, "Which tokens it comes from", "sampler's probability of the token", "mean |d| [nats]")
    axes.annotate("share of d\u00b2, tokens:", (0.01, 0.13), xycoords="axes fraction", color=FAINT, fontsize=8)
    bins = [found for found in result["by_probability"] if found["tokens"]]
    means = [found["abs_mean"] for found in bins]
    color = style_of(result["coarse"])["color"]
    axes.errorbar(range(len(bins)), [m["value"] for m in means], yerr=_whiskers(means), ls="none", marker="o", ms=6,
                  capsize=3, color=color)  # fmt: skip
    for place, found in enumerate(bins):
        axes.annotate(f"{found['share']:.0%}\n{found['tokens']}", (place, 0.03), ha="center",
                      xycoords=("data", "axes fraction"), color=FAINT, fontsize=8)  # fmt: skip
    if means and min(m["value"] for m in means) > 0:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(low / (high / low) ** 0.25, high)
    axes.set_xticks(range(len(bins)), [found["label"].replace(" to ", "\nto ") for found in bins])
    axes.set_xlim(-0.6, len(bins) - 0.4)
