"""A first look at d = trainer logprob - sampler logprob, token by token: a table, a figure, and the same in words.

Pure functions of logprobs that were measured (`kit.measure`); the metrics of a run are in `kit.mismatch`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kit.summary import number

if TYPE_CHECKING:
    from kit.measure import Measurement


def token_table(
    tokens: Sequence[str], sampler_logprobs: Sequence[float], trainer_logprobs: Sequence[float], most: int = 12
) -> str:
    """The `most` tokens that the sampler was least sure of, in their order: place, text, both logprobs and d [nats].

    >>> print(token_table(["4", "2", "7"], [-0.5, -0.001, -0.25], [-0.5, -0.001, -0.251], most=2))
    place  token        sampler      trainer          d
        1  '4'        -0.500000    -0.500000          0
        3  '7'        -0.250000    -0.251000     -0.001
    """
    rows = list(zip(range(1, len(tokens) + 1), tokens, sampler_logprobs, trainer_logprobs, strict=True))
    lines = [f"place  {'token':8}{'sampler':>12} {'trainer':>12} {'d':>10}"]
    for place, token, sampler, trainer in sorted(sorted(rows, key=lambda row: row[2])[:most]):
        lines.append(f"{place:>5}  {token!r:8}{sampler:>12.6f} {trainer:>12.6f} {number(trainer - sampler):>10}")
    return "\n".join(lines)


def difference_text(measurements: Mapping[str, "Measurement"]) -> str:
    """What `difference_figure` shows, a line a dtype: {dtype name: `kit.measure.Measurement`} -> text."""
    lines = []
    for name, measured in measurements.items():
        _, d = _points(measured)
        absolute = d.abs()
        lines.append(
            f"{name:>8}: mean |d| {number(absolute.mean().item())} nats, largest {number(absolute.max().item())}, "
            f"exactly equal in {(absolute == 0).double().mean().item():.0%} of {len(d)} tokens"
        )
    return "\n".join(lines)


def difference_figure(measurements: Mapping[str, "Measurement"]):
    """Left: both logprobs of each token. Right: |d| over the token's surprise. {dtype name: Measurement} -> Figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from kit.plots import DTYPE_STYLE, FAINT, PAPER, UNKNOWN_STYLE

    figure = Figure(figsize=(10, 4.2), dpi=100, facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    both, size = figure.subplots(1, 2)
    floor = min(_smallest(measured) for measured in measurements.values()) / 3
    for name, measured in measurements.items():
        style = DTYPE_STYLE.get(name, UNKNOWN_STYLE)
        sampler, d = _points(measured)
        dots = {"ls": "none", "marker": style["marker"], "color": style["color"], "mew": 0}
        both.plot(sampler, sampler + d, ms=4, alpha=0.35, **dots)
        size.plot((-sampler).clamp(min=1e-6), d.abs().clamp(min=floor), ms=3, alpha=0.25, **dots)
        mean = d.abs().mean().item()
        size.axhline(max(mean, floor), color=style["color"], ls=style["linestyle"], lw=1.8)
        size.annotate(f"{name}: mean {number(mean, 2)}", (0.01, max(mean, floor)), xycoords=("axes fraction", "data"),
                      xytext=(0, 3), textcoords="offset points", color=style["color"], fontsize=9.5,
                      bbox={"facecolor": PAPER, "alpha": 0.8, "lw": 0, "pad": 0.5})  # fmt: skip
    both.axline((0, 0), slope=1, color=FAINT, lw=0.8)
    size.set(xscale="log", yscale="log")
    size.axhline(floor, color=FAINT, lw=0.6, ls=":")
    size.set_ylim(floor / 4, max(size.get_ylim()[1], 1e3 * floor))
    size.annotate("exactly equal", (0.01, floor), xycoords=("axes fraction", "data"), xytext=(0, -11),
                  textcoords="offset points", color=FAINT, fontsize=9)  # fmt: skip
    _label(both, "Logprob of each token, by both", "sampler [nats]", "trainer [nats]")
    _label(size, "How far apart they are", "surprise of the token: -logprob [nats]", "|trainer - sampler| [nats]")
    return figure


def _label(axes, title, across, up):
    from kit.plots import FAINT, INK

    axes.set_title(title, loc="left", color=INK, fontsize=11.5, fontweight="bold")
    axes.set_xlabel(across, color=FAINT)
    axes.set_ylabel(up, color=FAINT)
    axes.tick_params(colors=FAINT)
    axes.spines[["top", "right"]].set_visible(False)


def _points(measured):
    """(sampler logprobs, d) of the tokens that both sides scored, two vectors of float32."""
    kept = measured.mask & measured.sampler_logprobs.isfinite() & measured.trainer_logprobs.isfinite()
    sampler = measured.sampler_logprobs[kept]
    return sampler, measured.trainer_logprobs[kept] - sampler


def _smallest(measured):
    absolute = _points(measured)[1].abs()
    return absolute[absolute > 0].min().item() if (absolute > 0).any() else 1e-9
