"""Figures of training experiments: the sanity test, corrections, and the claims they bear on.

Pure functions of results. What they show, the `text` function of the same experiment says in words.
"""

import math
from collections.abc import Sequence
from textwrap import fill

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from kit.mismatch_plots import dress, new_figure, style_of
from kit.plots import FAINT, INK, PAPER
from kit.summary import smooth

# ---- the sanity test


def sanity_figure(result: dict) -> Figure:
    """Accuracy with the mark to pass, gradient norm and mismatch of each arm: steps, and means of the last few."""
    figure = new_figure(10, 3.8)
    panels = figure.subplots(1, 3)
    for (axes, key), heading in zip(
        zip(panels, ("accuracy", "grad_norm", "mismatch"), strict=True),
        ("Training accuracy", "Gradient norm", "Mismatch: mean |d| [nats]"),
        strict=True,
    ):
        dress(axes, heading, "step", "")
        for name, arm in result["arms"].items():
            line = _trailing(arm["curves"][key], result["window"], log=key != "accuracy")
            _draw_curve(axes, name, arm["curves"][key], line, log=key != "accuracy")
    _draw_target(panels[0], result)
    handles = [Line2D([], [], color=style_of(n)["color"], ls=style_of(n)["linestyle"], lw=2) for n in result["arms"]]
    figure.legend(handles, list(result["arms"]), loc="outside lower center", ncols=3, frameon=False, labelcolor=INK)
    return figure


def _draw_target(axes, result):
    """The mark to pass, and where the mean of the last steps passed it."""
    axes.set_ylim(0, 1.03)
    axes.axhline(result["target"], color=FAINT, lw=1, ls=(0, (2, 2)))
    axes.annotate(f"{result['target']:.0%}", (0, result["target"]), xycoords=("axes fraction", "data"), xytext=(4, 2),
                  textcoords="offset points", color=FAINT, fontsize=9)  # fmt: skip
    for name, arm in result["arms"].items():
        if arm["reached"]:
            axes.plot(arm["reached"], result["target"], ls="none", marker="*", ms=14, mec=PAPER,
                      color=style_of(name)["color"], zorder=4)  # fmt: skip


def _trailing(values, window, *, log):
    """Mean of up to `window` values that end at each one, of their logarithms on a log axis."""
    known = [value if value is not None and (value > 0 or not log) else None for value in values]
    logs = [math.log(value) if log and value is not None else value for value in known]
    means = []
    for place in range(len(logs)):
        last = [value for value in logs[max(place + 1 - window, 0) : place + 1] if value is not None]
        means.append(sum(last) / len(last) if last else None)
    return [math.exp(value) if log and value is not None else value for value in means]


def _draw_curve(axes, name, values, line, *, log):
    style = style_of(name)
    points = [(step, value) for step, value in enumerate(values, 1) if value is not None and (value > 0 or not log)]
    line = [(step, value) for step, value in enumerate(line, 1) if value is not None]
    if not points:
        return
    axes.plot(
        *zip(*points, strict=True), ls="none", marker=style["marker"], ms=3, mew=0, color=style["color"], alpha=0.3
    )
    axes.plot(*zip(*line, strict=True), color=style["color"], ls=style["linestyle"], lw=2)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())


# ---- corrections

CORRECTION_STYLE = {
    "none": {"color": "#333333", "marker": "o"},
    "token TIS": {"color": "#0072b2", "marker": "s"},
    "token MIS": {"color": "#56a3d9", "marker": "D"},
    "sequence TIS": {"color": "#c75000", "marker": "^"},
    "sequence MIS": {"color": "#e08a4f", "marker": "v"},
    "GSPO": {"color": "#00805a", "marker": "P"},
    "Dr. GRPO": {"color": "#7a5195", "marker": "X"},
}


def corrections_figure(result: dict) -> Figure:
    """A row a dtype: length of the gradient and sample size over the sampler's lag, and accuracy in training."""
    trained = any(found["training"] for found in result["dtypes"].values())
    figure = new_figure(10, 3.5 * len(result["dtypes"]) + 0.4)
    cells = figure.subplots(len(result["dtypes"]), 3 if trained else 2, squeeze=False)
    for line, (name, found) in zip(cells, result["dtypes"].items(), strict=True):
        _draw_batch(line, name, found["batch"])
        if trained:
            dress(line[2], "Accuracy in training", f"step, sampler synced every {result['every']}", "")
            for correction, arm in found["training"].items():
                values = [
                    (step, value) for step, value in enumerate(smooth(arm["accuracy"], 3.0), 1) if value is not None
                ]
                if values:
                    line[2].plot(*zip(*values, strict=True), lw=1.8, color=CORRECTION_STYLE[correction]["color"])
    names = dict.fromkeys(row["correction"] for found in result["dtypes"].values() for row in found["batch"])
    handles = [Line2D([], [], lw=1.8, ms=6, **CORRECTION_STYLE[name]) for name in names]
    figure.legend(handles, list(names), loc="outside lower center", ncols=len(names), frameon=False, labelcolor=INK,
                  fontsize=9)  # fmt: skip
    return figure


def _draw_batch(line, dtype, rows):
    """Length of the gradient and sample size over the lag; the cosines are in the words."""
    lags = sorted({row["lag"] for row in rows})
    dress(line[0], f"{dtype}: gradient's length", "updates the sampler is behind", "multiple of the right one")
    dress(line[1], "Sample size left", "updates the sampler is behind", "share of tokens")
    for correction in dict.fromkeys(row["correction"] for row in rows):
        mine = [row for row in rows if row["correction"] == correction]
        for axes, key in ((line[0], "share"), (line[1], "ess")):
            points = [(lags.index(row["lag"]), row[key]) for row in mine if row[key]]
            if points:
                axes.plot(*zip(*points, strict=True), lw=1.6, ms=6, **CORRECTION_STYLE[correction])
    line[0].set_yscale("log")
    line[0].set_yticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
    line[0].yaxis.set_minor_locator(NullLocator())
    line[0].axhline(1, color=FAINT, lw=1, ls=":")
    for axes in line[:2]:
        axes.set_xticks(range(len(lags)), map(str, lags))
    line[1].set_ylim(0, 1.03)


# ---- claims

VERDICT_COLOR = {"agrees": "#00805a", "does not": "#c75000", "cannot be asked here": FAINT}


def claims_figure(rows: Sequence[dict]) -> Figure:
    """The claims as lines of text, each with its verdict in colour before it."""
    figure = new_figure(10, 0.68 * len(rows) + 0.4)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(len(rows), 0))
    for place, row in enumerate(rows):
        axes.text(0, place + 0.4, row["verdict"], color=VERDICT_COLOR[row["verdict"]], fontweight="bold", fontsize=10)
        axes.text(0.22, place + 0.4, row["claim"], color=INK, fontsize=10)
        axes.text(0.22, place + 0.5, fill(row["measure"], 130), color=FAINT, fontsize=7.5, va="top")
    return figure
