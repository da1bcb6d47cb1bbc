"""How sure a mean over tokens is: bootstrap intervals that draw whole sequences, whose tokens depend on each other.

The percentile bootstrap of Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13, with the
sequence as the unit that is drawn. All quantities of one call share the draws, so their differences are paired.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kit.errors import ArgumentError
from kit.summary import number, plural

if TYPE_CHECKING:
    import torch

MIN_SEQUENCES = 8
"""Fewer sequences give no interval: their resamples repeat each other too often to say anything about the tails."""
LEVEL, RESAMPLES = 0.95, 2000


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval; `low` and `high` are None where there were too few sequences for one."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self):
        if self.low is None:
            return number(self.value)
        return f"{number(self.value)} ({number(self.low)} to {number(self.high)})"

    def covers(self, value: float) -> bool:
        """Whether the interval holds this value; False without an interval."""
        return self.low is not None and self.low <= value <= self.high


def told(value: dict) -> str:
    """An estimate of a result file, {"value", "low", "high"}, in words.

    >>> told({"value": 0.5, "low": 0.25, "high": 0.75})
    '0.5 (0.25 to 0.75)'
    """
    return str(Estimate(**{key: value[key] for key in ("value", "low", "high")}))


def interval_note(sequences: int) -> str:
    """What the intervals are, or why there are none.

    >>> interval_note(3)
    'No intervals: 3 sequences are too few to draw from, at least 8 are needed.'
    """
    if sequences < MIN_SEQUENCES:
        return (
            f"No intervals: {plural(sequences, 'sequence')} are too few to draw from, at least {MIN_SEQUENCES} are "
            "needed."
        )
    return f"In brackets: 95 % intervals, bootstrap over {sequences} sequences, {RESAMPLES} draws."


def bootstrap(totals_PQ: torch.Tensor, counts_P: torch.Tensor, *, seed: int = 0) -> list[Estimate]:
    """Means a token of several quantities, with their intervals.

    Args:
        totals_PQ: each quantity summed over each sequence's tokens, sequences x quantities.
        counts_P: tokens of each sequence.
        seed: of the draws.

    Raises:
        kit.errors.ArgumentError: no sequence has a token.

    Example:
        >>> import torch
        >>> bootstrap(torch.tensor([[2.0], [4.0]]), torch.tensor([2, 2]))
        [Estimate(value=1.5, low=None, high=None)]
    """
    import torch

    totals, counts = totals_PQ.double(), counts_P.double()
    totals, counts = totals[counts > 0], counts[counts > 0]
    if not len(counts):
        raise ArgumentError("No token was scored by both sides; there is nothing to average.")
    means = (totals.sum(0) / counts.sum()).tolist()
    if len(counts) < MIN_SEQUENCES:
        return [Estimate(mean) for mean in means]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(counts), (RESAMPLES, len(counts)), generator=generator)
    times = torch.zeros(RESAMPLES, len(counts), dtype=torch.double)
    times.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.double))
    resampled = (times @ totals) / (times @ counts)[:, None]
    tail = (1 - LEVEL) / 2
    low, high = resampled.quantile(torch.tensor([tail, 1 - tail], dtype=torch.double), dim=0).tolist()
    return [Estimate(*values) for values in zip(means, low, high, strict=True)]


def token_mean(values_PT: torch.Tensor, mask_PT: torch.Tensor, *, seed: int = 0) -> Estimate:
    """Mean over the masked tokens of sequences x tokens, with its interval."""
    import torch

    return bootstrap(torch.where(mask_PT, values_PT, 0.0).double().sum(-1)[:, None], mask_PT.sum(-1), seed=seed)[0]
