"""Figures of the offline mismatch: its density, its growth with length, and report cards beside each other.

Pure functions of results. What they show, `kit.length.text` and `kit.report_cards.card_text` say in words. Colours,
lines and the light background are those of `kit.plots`.
"""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from kit.growth import BINS, LOWEST_PROBABILITY, expected_abs
from kit.plots import DTYPE_STYLE, FAINT, GRID, INK, PAPER, UNKNOWN_STYLE
from kit.published import PUBLISHED, Published, published
from kit.report_cards import title
from kit.summary import number

CARD_MARKERS = "osD^vP*X"  # of the cards, in their order


def new_figure(width: float, height: float) -> Figure:
    """An empty figure on the kit's light background, with a canvas, apart from pyplot's state [inches]."""
    figure = Figure(figsize=(width, height), dpi=100, facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, heading: str, across: str, up: str) -> None:
    """Title, labels and grid of one chart, as in all figures of the kit."""
    axes.set_facecolor(PAPER)
    axes.set_title(heading, loc="left", color=INK, fontsize=11.5, fontweight="bold")
    axes.set_xlabel(across, color=FAINT)
    axes.set_ylabel(up, color=FAINT)
    axes.tick_params(which="both", colors=FAINT)
    axes.grid(True, color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def style_of(dtype: str) -> dict:
    """Colour, line and marker of a dtype."""
    return DTYPE_STYLE.get(dtype, UNKNOWN_STYLE)


# ---- density and length


def length_figure(result: dict) -> Figure:
    """Density of the tokens (where the result has it) above what adds up over a completion."""
    if not _with_density(result):
        return growth_figure(result)
    figure = new_figure(10, 9.6)
    top, bottom = figure.subfigures(2, 1, height_ratios=(5.8, 3.8))
    _draw_densities(top, result)
    _draw_lengths(bottom, result)
    return figure


def density_figure(result: dict) -> Figure:
    """A column a dtype: both sides' probability of each token, and under it their log-ratio, magnified."""
    figure = new_figure(10, 5.8)
    _draw_densities(figure, result)
    return figure


def growth_figure(result: dict) -> Figure:
    """Log-ratio and KL of a completion by its length, with the theory of independent tokens dotted."""
    figure = new_figure(10, 4.2)
    _draw_lengths(figure, result)
    return figure


def _with_density(result):
    return {name: found for name, found in result["dtypes"].items() if "density" in found}


def _draw_densities(figure, result):
    dtypes = _with_density(result)
    cells = figure.subplots(2, len(dtypes), squeeze=False)
    for place, (name, found) in enumerate(dtypes.items()):
        _draw_probabilities(cells[0, place], name, found)
        _draw_differences(cells[1, place], name, found)
    for axes in cells[:, 1:].flat:
        axes.set_ylabel("")


def _draw_lengths(figure, result):
    growth, kl = figure.subplots(1, 2)
    lengths = [row["length"] for found in result["dtypes"].values() for row in found["by_length"]]
    for name, found in result["dtypes"].items():
        _draw_growth(growth, name, found)
        _draw_kl(kl, style_of(name), found["by_length"])
    dress(growth, "A completion's log-ratio, by length", "first n tokens", "mean |log-ratio| [nats]")
    dress(kl, "KL of a completion, by length", "first n tokens", "sequence KL [nats]")
    for axes in (growth, kl):
        _powers_of_two(axes, lengths)
    _draw_published(kl, published("sequence KL"))
    handles = [Line2D([], [], color=FAINT, ls="-", marker="o", ms=4), Line2D([], [], color=FAINT, ls=":", lw=1.5)]
    growth.legend(handles, ["measured", "theory: independent tokens"], frameon=False, fontsize=9, labelcolor=FAINT)


def _shades(name):
    return LinearSegmentedColormap.from_list(name, [(0, "#e4e7eb"), (1, style_of(name)["color"])])


def _draw_grid(axes, name, counts, extent):
    most = max(max(row) for row in counts)
    turned = [[counts[x][y] or math.nan for x in range(BINS)] for y in range(BINS)]
    axes.imshow(turned, origin="lower", extent=extent, aspect="auto", cmap=_shades(name),
                norm=LogNorm(0.7, max(most, 2)), interpolation="nearest", zorder=2)  # fmt: skip


def _draw_probabilities(axes, name, found):
    """Both probabilities of each token: a line where the two sides agree."""
    dress(axes, name, "probability by the sampler", "by the trainer")
    _draw_grid(axes, name, found["density"]["probability"], (0, 1, 0, 1))
    axes.plot([0, 1], [0, 1], color=INK, lw=0.6, zorder=3)
    gap = number(found["mismatch/prob_abs_max"], 2)
    axes.annotate(f"largest gap {gap}", (0.03, 0.93), xycoords="axes fraction", color=FAINT, fontsize=9)


def _draw_differences(axes, name, found):
    """d of each token over the sampler's probability: the same, magnified to one scale for all dtypes."""
    scale = found["density"]["scale"]
    dress(axes, "", "probability by the sampler", "d [nats]")
    _draw_grid(axes, name, found["density"]["d"], (math.log10(LOWEST_PROBABILITY), 0, -scale, scale))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(10.0**value)))
    axes.set_xticks([-4, -3, -2, -1, 0])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.set_yticks([-scale, 0, scale])
    axes.annotate(f"rms d {number(found['rms'], 2)}", (0.03, 0.9), xycoords="axes fraction", color=FAINT, fontsize=9,
                  bbox={"facecolor": PAPER, "alpha": 0.8, "lw": 0, "pad": 0.5}, zorder=4)  # fmt: skip


def _draw_growth(axes, name, found):
    rows, kl, style = found["by_length"], found["mismatch/k3"], style_of(name)
    points = [(row["length"], row["abs"], row["abs_standard_error"] or 0) for row in rows if row["abs"] > 0]
    if not points:
        return
    lengths, values, errors = zip(*points, strict=True)
    axes.errorbar(lengths, values, yerr=errors, color=style["color"], ls=style["linestyle"], marker=style["marker"],
                  ms=5, lw=1.8, capsize=2)  # fmt: skip
    axes.plot(lengths, [expected_abs(kl, n) for n in lengths], color=style["color"], ls=":", lw=1.5)
    power = found["growth"]["slope"]
    told = name if power is None else f"{name}, n^{power:.2f}"
    axes.annotate(told, (lengths[-1], values[-1]), xytext=(4, 9), textcoords="offset points", color=style["color"],
                  fontsize=9.5, ha="right")  # fmt: skip


def _draw_kl(axes, style, rows, **line):
    points = [(row["length"], row["kl"]) for row in rows if row["kl"] > 0]
    if points:
        shown = {"color": style["color"], "ls": style["linestyle"], "marker": style["marker"], "ms": 5, "lw": 1.8}
        axes.plot(*zip(*points, strict=True), **(shown | line))


def _powers_of_two(axes, lengths):
    if not lengths:
        return
    axes.set(xscale="log", yscale="log")
    shortest, longest = min(lengths), max(lengths)
    ticks = [2**k for k in range(20) if shortest <= 2**k <= longest] or [shortest]
    axes.set_xticks(ticks[-1::-2][::-1], [str(n) for n in ticks[-1::-2][::-1]])
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_published(axes, values: Sequence[Published]):
    """Others' values as thin lines: they are of other models and lengths, and are labelled as theirs."""
    for value in values:
        color = style_of(value.dtype)["color"]
        axes.axhline(value.value, color=color, lw=1, ls=(0, (1, 3)), zorder=1)
        told = f"{value.by}: {number(value.value)} ({value.dtype})"
        axes.annotate(told, (0.01, value.value), color=color, xycoords=("axes fraction", "data"),
                      xytext=(0, 2), textcoords="offset points", fontsize=8)  # fmt: skip


# ---- report cards


def cards_figure(
    cards: Sequence[dict], names: Sequence[str] | None = None, others: Sequence[Published] = PUBLISHED
) -> Figure:
    """Left: size of d by dtype, a marker a card, hollow diamonds for what others published. Right: KL by length.

    names: what the legend calls the cards; default: machine and model.
    """
    figure = new_figure(10, 4.2 + 0.22 * (len(cards) + 1))
    size, kl = figure.subplots(1, 2)
    dtypes = [name for name in DTYPE_STYLE if any(name in card["dtypes"] for card in cards)]
    dtypes = sorted(dtypes, key=("float32", "float16", "bfloat16").index)
    for place, card in enumerate(cards):
        marker = CARD_MARKERS[place % len(CARD_MARKERS)]
        for name, found in card["dtypes"].items():
            style = style_of(name) | {"marker": marker}
            across = dtypes.index(name) + 0.16 * (place - (len(cards) - 1) / 2)
            size.plot(across, max(found["rms"], 1e-9), ls="none", color=style["color"], marker=marker, ms=8)
            _draw_kl(kl, style, found["by_length"], lw=1.4)
    dress(size, "How far apart sampler and trainer are", "", "rms of d [nats]")
    dress(kl, "KL of a completion, by length", "first n tokens", "sequence KL [nats]")
    for value in others:
        if value.quantity == "rms d" and value.dtype in dtypes:
            size.plot(dtypes.index(value.dtype) + 0.38, value.value, ls="none", marker="d", ms=9, mfc=PAPER,
                      mec=style_of(value.dtype)["color"])  # fmt: skip
    _powers_of_two(
        kl, [row["length"] for card in cards for found in card["dtypes"].values() for row in found["by_length"]]
    )
    _draw_published(kl, [value for value in others if value.quantity == "sequence KL"])
    size.set_yscale("log")
    size.set_xticks(range(len(dtypes)), dtypes)
    size.set_xlim(-0.5, max(len(dtypes), 1) - 0.35)
    handles = [
        Line2D([], [], color=INK, ls="none", marker=CARD_MARKERS[i % len(CARD_MARKERS)], ms=7)
        for i in range(len(cards))
    ]
    handles.append(Line2D([], [], ls="none", marker="d", ms=8, mfc=PAPER, mec=INK))
    labels = [*(names or map(title, cards)), "published by others, other models: see the text"]
    figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize=9, labelcolor=INK)
    return figure
