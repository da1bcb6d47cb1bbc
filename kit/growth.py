"""How a mismatch adds up over a completion: pure functions of measured logprobs, and the theory beside them.

S_n is the sum of d = trainer logprob - sampler logprob over the first n tokens of a completion. The sampler draws the
tokens, so E[exp d] = 1 for each of them, and for small d (second order) d has mean -kl and variance 2 kl, kl being
KL(sampler || trainer) a token (Schulman, "Approximating KL divergence", 2020). If tokens err independently, S_n is
normal with mean -n kl and variance 2 n kl: a walk of sqrt(2 n kl) and a drift of n kl, equal at n = 2 / kl. One number
measured a token, kl, so predicts every length; what is measured beyond that is dependence between tokens.
"""

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kit.errors import ArgumentError

if TYPE_CHECKING:
    from kit.measure import Measurement

BINS = 40
LOWEST_PROBABILITY = 1e-4  # left edge of the density; rarer tokens count in its first column
FEWEST_SEQUENCES = 8  # for an interval of the slope
RESAMPLES = 400


# ---- theory


def walk(kl: float, length: int) -> float:
    """Standard deviation of S_n if tokens err independently: sqrt(2 n kl) [nats].

    >>> walk(0.005, 100)
    1.0
    """
    return math.sqrt(2 * length * kl)


def drift(kl: float, length: int) -> float:
    """-E[S_n] = n kl, the KL of a sequence [nats].

    >>> drift(0.005, 200)
    1.0
    """
    return length * kl


def crossover(kl: float) -> float | None:
    """The length from which drift exceeds walk, 2 / kl [tokens]; None where there is no mismatch.

    >>> crossover(0.002)
    1000.0
    """
    return 2 / kl if kl > 0 else None


def expected_abs(kl: float, length: int) -> float:
    """E|S_n| of a normal S_n with mean -n kl and variance 2 n kl [nats] (the folded normal's mean).

    >>> round(expected_abs(0.0005, 1) / walk(0.0005, 1), 3), round(expected_abs(0.5, 1000) / drift(0.5, 1000), 3)
    (0.798, 1.0)
    """
    spread, mean = walk(kl, length), drift(kl, length)
    if spread == 0:
        return 0.0
    return spread * math.sqrt(2 / math.pi) * math.exp(-((mean / spread) ** 2) / 2) + mean * math.erf(
        mean / spread / math.sqrt(2)
    )


def slope(lengths: Sequence[float], values: Sequence[float]) -> float | None:
    """Exponent of a power law, by least squares on both logarithms: 0.5 is a walk, 1 a drift. None below two points.

    >>> round(slope([16, 64, 256], [1, 2, 4]), 6), slope([16], [1])
    (0.5, None)
    """
    points = [(math.log(n), math.log(v)) for n, v in zip(lengths, values, strict=True) if v > 0]
    if len(points) < 2:
        return None
    middle = sum(x for x, _ in points) / len(points)
    height = sum(y for _, y in points) / len(points)
    below = sum((x - middle) ** 2 for x, _ in points)
    return sum((x - middle) * (y - height) for x, y in points) / below if below else None


def lengths_up_to(longest: int, shortest: int = 16) -> list[int]:
    """Powers of two from `shortest` on, and the longest.

    >>> lengths_up_to(100), lengths_up_to(8)
    ([16, 32, 64, 100], [8])
    """
    if longest < 1:
        raise ArgumentError(f"The longest length is {longest}; expected at least 1 token.")
    powers = [shortest * 2**k for k in range(32) if shortest * 2**k < longest]
    return [*powers, longest]


# ---- measured


def by_length(measured: "Measurement", lengths: Sequence[int]) -> list[dict]:
    """A row a length, over the completions that are at least that long.

    Keys: `length` [tokens], `sequences`, and in nats a sequence `abs` = mean |S_n| with `abs_standard_error`,
    `mean` = mean S_n, `rms`, and `kl` = mean of sum (exp d - d - 1), the sequence's KL by its tokens' k3.
    """
    sums, k3 = _running(measured)
    counts = measured.mask.sum(-1)
    rows = []
    for length in lengths:
        enough = counts >= length
        s = sums[enough, length - 1]
        if len(s):
            error = s.abs().std().item() / math.sqrt(len(s)) if len(s) > 1 else None
            rows.append({
                "length": length, "sequences": len(s), "abs": s.abs().mean().item(), "abs_standard_error": error,
                "mean": s.mean().item(), "rms": s.square().mean().sqrt().item(),
                "kl": k3[enough, length - 1].mean().item(),
            })  # fmt: skip
    return rows


def growth(measured: "Measurement", lengths: Sequence[int], seed: int = 0) -> dict:
    """{"slope", "low", "high"}: exponent of mean |S_n|, with the 95 % interval of a bootstrap over whole sequences.

    The interval is None below `FEWEST_SEQUENCES` sequences: a resampled handful says nothing.
    """
    sums, _ = _running(measured)
    whole = measured.mask.sum(-1) >= max(lengths)
    table = sums[whole][:, [n - 1 for n in lengths]].abs().tolist()
    if not table:
        return {"slope": None, "low": None, "high": None}
    draw = random.Random(seed)
    found = slope(lengths, _column_means(table))
    low = high = None
    if len(table) >= FEWEST_SEQUENCES and found is not None:
        again = [slope(lengths, _column_means(draw.choices(table, k=len(table)))) for _ in range(RESAMPLES)]
        again = sorted(value for value in again if value is not None)
        low, high = again[int(0.025 * len(again))], again[int(0.975 * len(again))]
    return {"slope": found, "low": low, "high": high}


def density(measured: "Measurement", scale: float) -> dict:
    """Counts of tokens by the sampler's probability and by d, and by both sides' probability.

    `d` is a grid of `BINS` x `BINS`, rows log10 of the sampler's probability from `LOWEST_PROBABILITY` to 1, columns d
    from -scale to scale [nats]; `probability` is the same over both probabilities from 0 to 1. What lies beyond an edge
    counts in the last cell before it.
    """
    import torch

    sampler, d = _kept(measured)
    if not len(d):
        raise ArgumentError("No token was scored by both sides; there is no density to draw.")
    across = 1 - sampler / math.log(LOWEST_PROBABILITY)
    up = (d / scale + 1) / 2

    def grid(x, y):
        cell = [(BINS * values).long().clamp(0, BINS - 1) for values in (x, y)]
        return torch.bincount(cell[0] * BINS + cell[1], minlength=BINS * BINS).reshape(BINS, BINS).tolist()

    return {"scale": scale, "d": grid(across, up), "probability": grid(sampler.exp(), (sampler + d).exp())}


def _column_means(table):
    return [sum(column) / len(table) for column in zip(*table, strict=True)]


def _running(measured):
    """(S_n, running sum of k3), sequences x tokens in double; tokens that are not finite on both sides add 0."""
    import torch

    from kit.mismatch import MAX_LOG_RATIO

    finite = measured.mask & measured.trainer_logprobs.isfinite() & measured.sampler_logprobs.isfinite()
    d = torch.where(finite, measured.trainer_logprobs - measured.sampler_logprobs, 0.0).double()
    return d.cumsum(-1), (torch.expm1(d.clamp(max=MAX_LOG_RATIO)) - d).cumsum(-1)


def _kept(measured):
    """(sampler logprobs, d) of the tokens that both sides scored."""
    finite = measured.mask & measured.trainer_logprobs.isfinite() & measured.sampler_logprobs.isfinite()
    sampler = measured.sampler_logprobs[finite].double()
    return sampler, measured.trainer_logprobs[finite].double() - sampler


def summary(measured: "Measurement", seed: int = 0) -> dict:
    """All of a measurement's figures as plain values: `mismatch/*`, `rms` of d, `by_length`, `growth`, `crossover`."""
    metrics = measured.metrics()
    if metrics["mismatch/k3"] is None:
        raise ArgumentError("No token was scored by both sides; nothing can be said of the mismatch.")
    lengths = lengths_up_to(int(measured.mask.sum(-1).max()))
    _, d = _kept(measured)
    return {
        "tokens": measured.tokens, **metrics, "rms": d.square().mean().sqrt().item(),
        "by_length": by_length(measured, lengths), "growth": growth(measured, lengths, seed),
        "crossover": crossover(metrics["mismatch/k3"]),
    }  # fmt: skip
