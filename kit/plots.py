"""Figures of runs. What they show, `summary_text` says in words (summary.py).

Pure functions of runs: nothing here trains, writes a file or touches pyplot's state, so a figure can be made in any
thread or process. A dtype has one colour, line and marker everywhere. The figure brings its own light background, so
it reads the same in a light and in a dark notebook.
"""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from kit.records import Run
from kit.summary import (
    ACCURACY,
    GRAD_NORM,
    LOSS_SCALE,
    MISMATCH,
    Panel,
    clip_norm,
    differing,
    dtype_of,
    expected_k3,
    finite,
    number,
    panels,
    plural,
    provenance,
    settings_differences,
    skipped_steps,
    smooth,
    smooth_log,
    summary_text,
)  # fmt: skip

__all__ = ["DTYPE_STYLE", "settings_differences", "smooth", "smooth_log", "summary_text", "training_figure"]

# Blue and vermilion of Okabe and Ito (2008), told apart in every common colour blindness; the vermilion a little
# darker, so that numbers in it read well on white. The ruler, float32, is near black.
DTYPE_STYLE = {
    "float16": {"color": "#0072b2", "linestyle": "-", "marker": "o"},
    "bfloat16": {"color": "#c75000", "linestyle": (0, (5, 1.6)), "marker": "s"},
    "float32": {"color": "#333333", "linestyle": (0, (1.2, 1.4)), "marker": "^"},
}
UNKNOWN_STYLE = {"color": "#7a5195", "linestyle": "-.", "marker": "D"}
PAPER, INK, FAINT, GRID = "#ffffff", "#1f2328", "#59636e", "#e4e7eb"


def style_of(runs: Sequence[Run], index: int) -> dict:
    """Colour, line and marker of a run: its dtype's, paler for each further run of the same dtype."""
    dtype = dtype_of(runs[index])
    earlier = sum(dtype_of(run) == dtype for run in runs[:index])
    style = DTYPE_STYLE.get(dtype, UNKNOWN_STYLE)
    white = min(1 - 0.65**earlier, 0.65)
    return style | {"color": tuple(channel + (1 - channel) * white for channel in to_rgb(style["color"]))}


def training_figure(runs: Run | Sequence[Run], *, half_life: float | None = None, dpi: int = 100) -> Figure:
    """Six panels over the steps of one or more runs: points are steps, lines are `smooth` (`smooth_log` on log axes).

    half_life [steps] defaults to a fortieth of the longest run, at least 3. 10 inches wide.
    """
    runs = [runs] if isinstance(runs, Run) else list(runs)
    longest = max((len(run.records) for run in runs), default=0)
    half_life = half_life or max(3.0, longest / 40)
    header = _header_lines(runs)
    legend_rows = -(-len(runs) // _legend_columns(runs))
    rows = legend_rows + len(header)
    height = 5.95 + 0.22 * rows
    figure = Figure(figsize=(10, height), dpi=dpi, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3)
    figure.subplots_adjust(left=0.062, right=0.985, top=1 - (0.72 + 0.22 * rows) / height, bottom=0.82 / height,
                           wspace=0.24, hspace=0.46)  # fmt: skip
    for ax, panel in zip(axes.flat, panels(runs), strict=True):
        _draw_panel(ax, panel, runs, half_life)
    for ax in axes[1]:
        ax.set_xlabel("step", color=FAINT, fontsize=10)
    _draw_header(figure, runs, header, legend_rows)
    footer = f"Points: single steps. Lines: exponentially weighted mean, half-life {number(half_life)} steps"
    figure.text(0.012, 0.018, f"{footer} (of the logarithm on log axes).", color=FAINT, fontsize=9)
    return figure


def _draw_panel(ax: Axes, panel: Panel, runs: Sequence[Run], half_life: float) -> None:
    notes = [panel.unit]
    _dress(ax, panel, max((run.records[-1]["step"] for run in runs if run.records), default=1))
    last = {index: _draw_values(ax, panel, run, style_of(runs, index), half_life) for index, run in enumerate(runs)}
    last = {index: value for index, value in last.items() if value is not None}
    if not last:
        ax.text(0.5, 0.5, "not recorded" if any(run.records for run in runs) else "no steps yet",
                transform=ax.transAxes, ha="center", va="center", color=FAINT, fontsize=10)  # fmt: skip
        ax.set_yticks([])
    else:
        _fit(ax, panel)
        if panel is GRAD_NORM:
            _draw_clip(ax, runs)
        if panel is MISMATCH:
            notes += _draw_expected(ax, runs)
        if panel in (GRAD_NORM, LOSS_SCALE):
            notes += _mark(ax, runs, [skipped_steps(run) for run in runs], 0.955, "x", "x: skipped update")
        if panel.log:
            _tick_log(ax, panel)
            notes += _mark(ax, runs, [_zero_steps(run, panel) for run in runs], 0.03, "v", "\u25bc: zero")
    for place, index in enumerate(reversed(last if len(runs) <= 2 else ())):
        ax.annotate(number(last[index], 2), (1, 1), xytext=(-48 * place, 19), xycoords="axes fraction", ha="right",
                    textcoords="offset points", color=style_of(runs, index)["color"], fontsize=10.5)  # fmt: skip
    ax.annotate("; ".join(notes), (0, 1), xytext=(0, 5), xycoords="axes fraction", textcoords="offset points",
                color=FAINT, fontsize=9)  # fmt: skip


def _draw_values(ax: Axes, panel: Panel, run: Run, style: dict, half_life: float) -> float | None:
    """Draws one run and returns the last value of its line."""
    values = finite(run, panel.key)
    if panel.log:
        values = [value if value is not None and value > 0 else None for value in values]
    points = [(step, value) for step, value in zip(run.column("step"), values, strict=True) if value is not None]
    if not points:
        return None
    steps, values = zip(*points, strict=True)
    line = {"color": style["color"], "lw": 2.2, "ls": style["linestyle"]}
    if panel is LOSS_SCALE:
        ax.plot(steps, values, drawstyle="steps-post", **line)
    else:
        size = 4.5 if len(points) <= 60 else 3 if len(points) <= 400 else 1.5
        ax.plot(steps, values, ls="none", marker=style["marker"], ms=size, mew=0, color=style["color"], alpha=0.32)
        values = (smooth_log if panel.log else smooth)(values, half_life)
        ax.plot(steps, values, **line)
    ax.plot(steps[-1:], values[-1:], ls="none", marker=style["marker"], ms=6, mec=PAPER, mew=0.8, color=style["color"])
    return values[-1]


def _dress(ax: Axes, panel: Panel, last_step: int) -> None:
    ax.set_facecolor(PAPER)
    ax.set_title(panel.title, loc="left", color=INK, fontsize=11.5, fontweight="bold", pad=19, y=1.0)
    ax.grid(True, color=GRID, lw=0.8)
    ax.set_axisbelow(True)
    ax.set_autoscaley_on(False)  # `_fit` does it, also for a single value
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color("#b4bcc4")
    ax.set_xlim(0, max(last_step, 5) * 1.03)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    if panel.log:
        ax.set_yscale("log", base=2 if panel is LOSS_SCALE else 10)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    ax.yaxis.set_minor_locator(NullLocator())  # a fifth of the drawing time, for marks nobody reads
    ax.tick_params(which="both", colors=FAINT, labelcolor=FAINT, labelsize=9.5, length=0)


def _fit(ax: Axes, panel: Panel) -> None:
    """Limits from what is drawn: with zero where zero means something, at least a decade on log axes."""
    values = [value for line in ax.lines for value in line.get_ydata()]
    low, high = min(values), max(values)
    if panel is LOSS_SCALE:
        ax.set_ylim(low / 1.6, high * 2.5)  # room for the marks of skipped updates
    elif panel.log:
        middle, spread = math.sqrt(low * high), max(high / low, 10)
        ax.set_ylim(middle / math.sqrt(spread) / 1.3, middle * math.sqrt(spread) * 1.6)
    elif panel is ACCURACY:
        ax.set_ylim(0, 1.03)
    else:
        low, high = min(low, 0), max(high, 0)
        room = 0.08 * (high - low or 1)
        ax.set_ylim(low - room if low < 0 else 0, high + room)


def _tick_log(ax: Axes, panel: Panel) -> None:
    low, high = ax.get_ylim()
    base = 2 if panel is LOSS_SCALE else 10
    ax.yaxis.set_major_locator(
        LogLocator(base, subs=(1, 2, 5) if base == 10 and high / low < 100 else (1,), numticks=7)
    )


def _draw_clip(ax: Axes, runs: Sequence[Run]) -> None:
    low, high = ax.get_ylim()
    for norm in sorted({clip_norm(run) for run in runs} - {None, 0}):
        if low < norm < high * 30:  # far above every norm, the line would only flatten the curve
            ax.set_ylim(low, max(high, norm * 1.6))
            ax.axhline(norm, color=FAINT, lw=1, ls=(0, (2, 2)))
            ax.annotate(f"clipped above {number(norm)}", (1, norm), xytext=(-2, 3), xycoords=("axes fraction", "data"),
                        textcoords="offset points", ha="right", color=FAINT, fontsize=8.5,
                        bbox={"facecolor": PAPER, "alpha": 0.75, "lw": 0, "pad": 0.5})  # fmt: skip


def _draw_expected(ax: Axes, runs: Sequence[Run]) -> list[str]:
    """A bar a dtype inside the right edge, over the range that is expected of it; a band too if there is only one."""
    bands = {dtype_of(run): expected_k3(run) for run in runs if expected_k3(run)}
    low, high = ax.get_ylim()
    high = max([high, *(min(band[1] * 2, high * 100) for band in bands.values())])
    ax.set_ylim(low, high)
    ax.set_xlim(0, ax.get_xlim()[1] * (1 + 0.03 * len(bands)))
    for place, (dtype, band) in enumerate(reversed(bands.items())):
        color = DTYPE_STYLE.get(dtype, UNKNOWN_STYLE)["color"]
        bottom, top = max(band[0], low), min(band[1], high)
        if bottom < top:
            ax.plot([0.99 - 0.028 * place] * 2, [bottom, top], transform=ax.get_yaxis_transform(), color=color, lw=4,
                    alpha=0.55, solid_capstyle="butt")  # fmt: skip
            if len(bands) == 1:
                ax.axhspan(bottom, top, color=color, alpha=0.07, lw=0)
    return ["bar: expected"] if bands else []


def _zero_steps(run: Run, panel: Panel) -> list[int]:
    pairs = zip(run.column("step"), finite(run, panel.key), strict=True)
    return [step for step, value in pairs if value is not None and value <= 0]


def _mark(
    ax: Axes, runs: Sequence[Run], steps: Sequence[list[int]], height: float, marker: str, note: str
) -> list[str]:
    """Marks steps at a fixed height of the axes; returns the note that explains the mark, if there is any."""
    for index, marked in enumerate(steps):
        if marked:
            ax.plot(marked, [height] * len(marked), transform=ax.get_xaxis_transform(), ls="none", marker=marker, ms=6,
                    mew=1.6, color=style_of(runs, index)["color"], clip_on=False)  # fmt: skip
    return [note] if any(steps) else []


def _header_lines(runs: Sequence[Run]) -> list[str]:
    differences = ", ".join(key.removeprefix("settings.") for key in differing(runs))
    warning = f"Warning: more than dtype differs: {differences}"
    room = 128
    if len(warning) > room:
        warning = warning[: room - 4].rsplit(",", 1)[0] + ", ..."
    return [provenance(runs)] + ([warning] if differences else [])


def _run_label(run: Run) -> str:
    name = run.name if len(run.name) <= 24 else f"{run.name[:10]}\u2026{run.name[-13:]}"  # names differ at their ends
    label = f"{name}, {plural(len(run.records), 'step')}"
    return label if dtype_of(run) in run.name else f"{dtype_of(run)}: {label}"


def _legend_columns(runs: Sequence[Run]) -> int:
    return 3 if max((len(_run_label(run)) for run in runs), default=0) <= 28 else 2


def _draw_header(figure: Figure, runs: Sequence[Run], lines: Sequence[str], first_row: int) -> None:
    handles = [
        Line2D([], [], lw=2.2, ms=5.5, label=_run_label(run), **style_of(runs, index)) for index, run in enumerate(runs)
    ]
    if handles:
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.004, 1.0), ncols=_legend_columns(runs),
                      frameon=False, fontsize=10.5, labelcolor=INK, handlelength=3.2, borderpad=0.5)  # fmt: skip
    height = figure.get_size_inches()[1]
    for row, text in enumerate(lines, start=first_row):
        color = "#b42318" if text.startswith("Warning") else FAINT
        figure.text(0.012, 1 - (0.14 + 0.22 * row) / height, text, color=color, fontsize=9.5, va="top")
