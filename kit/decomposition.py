"""Where a mean square difference comes from: an exact split into parts and pairs, with intervals.

Let d be trainer logprob - sampler logprob of a token [nats]; d_0 with everything coarse, d_K with everything exact,
and e_i what making one thing coarse adds to it, so that d_0 = d_K + sum of e_i on every token. As means over tokens,

    mean d_0^2 - mean d_K^2 = sum_i part_i,            part_i  = mean e_i (d_0 + d_K)
                            = sum_i alone_i + sum_i<j pair_ij,
    alone_i = mean e_i^2 + 2 mean e_i d_K,             pair_ij = 2 mean e_i e_j
    part_i  = alone_i + half of its pairs.

part_i is the Shapley value of a game in which the e_i add up ("A value for n-person games", 1953): the mean over all
orders in which the things could be changed. A pair above zero means that two errors go the same way and add; below
zero, that they cancel. mean d^2 is twice k3 to leading order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from kit.errors import ArgumentError
from kit.intervals import Estimate, bootstrap


@dataclass(frozen=True)
class Part:
    """One thing's share: `part` as above, `alone` when only it is coarse, `first` what changing it first takes away."""

    name: str
    part: Estimate
    alone: Estimate
    first: Estimate


@dataclass(frozen=True)
class Decomposition:
    """All of it, in nats^2 a token; `dropped` counts tokens that some side could not score."""

    coarse: Estimate
    exact: Estimate
    difference: Estimate
    parts: list[Part]
    pairs: dict[tuple[str, str], Estimate]
    sequences: int
    tokens: int
    dropped: int

    @property
    def remainder(self) -> float:
        """difference - sum of the parts: zero but for float64 rounding."""
        return self.difference.value - sum(part.part.value for part in self.parts)


def decompose(coarse_PT, exact_PT, added: Mapping[str, torch.Tensor], mask_PT, *, seed: int = 0) -> Decomposition:
    """Split mean d_0^2 - mean d_K^2 among the things that were changed.

    Args:
        coarse_PT, exact_PT: d_0 and d_K, sequences x tokens [nats].
        added: name -> e_i, of the same shape.
        mask_PT: true on completion tokens.

    Raises:
        kit.errors.ArgumentError: the e_i do not add up to d_0 - d_K, so that a part is missing or counted twice.

    Example:
        >>> zero, one = torch.zeros(1, 2), torch.ones(1, 2)
        >>> found = decompose(2 * one, zero, {"a": one, "b": one}, one.bool())
        >>> found.difference.value, [part.part.value for part in found.parts], found.pairs["a", "b"].value
        (4.0, [2.0, 2.0], 2.0)
    """
    names, mask = list(added), mask_PT.bool()
    finite = torch.stack([coarse_PT, exact_PT, *added.values()]).isfinite().all(0)
    kept = mask & finite
    d_0, d_K, *e = (torch.where(kept, x, 0.0).double() for x in (coarse_PT, exact_PT, *added.values()))
    _check_sum(d_0, d_K, e)
    pairs = list(combinations(range(len(e)), 2))
    quantities = [d_0**2, d_K**2, d_0**2 - d_K**2]
    for x in e:
        quantities += [x * (d_0 + d_K), x**2 + 2 * x * d_K, 2 * x * d_0 - x**2]
    quantities += [2 * e[i] * e[j] for i, j in pairs]
    estimates = bootstrap(torch.stack([q.sum(-1) for q in quantities], 1), kept.sum(-1), seed=seed)
    of_parts, of_pairs = estimates[3 : 3 + 3 * len(e)], estimates[3 + 3 * len(e) :]
    parts = [Part(name, *of_parts[3 * i : 3 * i + 3]) for i, name in enumerate(names)]
    named = {(names[i], names[j]): estimate for (i, j), estimate in zip(pairs, of_pairs, strict=True)}
    counts = int((kept.sum(-1) > 0).sum()), int(kept.sum()), int((mask & ~finite).sum())
    return Decomposition(*estimates[:3], parts, named, *counts)


def _check_sum(d_0, d_K, e):
    off = (d_0 - d_K - sum(e, torch.zeros_like(d_0))).abs().max().item() if d_0.numel() else 0.0
    if off > 1e-5 * max(1.0, d_0.abs().max().item()):
        raise ArgumentError(
            f"The changes do not add up to the whole: off by {off:.3g} nats on some token. Each must be measured on "
            f"the same tokens, from one chain of settings."
        )


@dataclass(frozen=True)
class Bin:
    """Tokens that have something in common: their number, mean |d| [nats], and share of the total of d^2."""

    label: str
    tokens: int
    abs_mean: Estimate | None
    share: float


def by_bins(d_PT, mask_PT, values_PT, edges: Sequence[float], labels: Sequence[str]) -> list[Bin]:
    """How |d| depends on a token's position, probability or anything else: a `Bin` for each edges[i] <= x < edges[i+1].

    Args:
        d_PT: differences, sequences x tokens [nats].
        mask_PT: true on completion tokens.
        values_PT: what the tokens are sorted by, same shape.
        edges: one more than labels.
    """
    kept = mask_PT.bool() & d_PT.isfinite()
    square = torch.where(kept, d_PT, 0.0).double() ** 2
    bins = []
    for label, low, high in zip(labels, edges[:-1], edges[1:], strict=True):
        inside = kept & (values_PT >= low) & (values_PT < high)
        tokens = int(inside.sum())
        mean = None
        if tokens:
            absolute = torch.where(inside, d_PT.abs(), 0.0).double()
            mean = bootstrap(absolute.sum(-1)[:, None], inside.sum(-1))[0]
        share = (square[inside].sum() / square.sum()).item() if square.sum() > 0 else 0.0
        bins.append(Bin(label, tokens, mean, share))
    return bins
