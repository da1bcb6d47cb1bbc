"""Sync the way TRL does it: the adapter added to 16-bit base weights. Off by default; here so that it can be measured.

Each merge rounds the sum to the base's dtype, and each unmerge subtracts from the rounded sum: the trainer's own base
weights drift. Native adapters (the default) never touch them.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kit.errors import ArgumentError


def merged_weights(model) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight) of the base model with the adapter merged into it, as TRL 1.16 hands them to vLLM.

    The adapter is merged in place while the iterator runs and taken out again at its end, with the rounding of both.
    """
    if getattr(model, "is_loaded_in_4bit", False):
        raise ArgumentError("4-bit base weights cannot be merged and pushed: the sum would be quantised again.")
    model.merge_adapter()
    try:
        for name, parameter in model.named_parameters():
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if model.prefix not in name:
                yield name, parameter.data
    finally:
        model.unmerge_adapter()


@dataclass(frozen=True)
class MergeDrift:
    """How far base weights moved after `merges` merge-and-unmerge rounds.

    `moved` is the share of the targeted weights that no longer equal the original; `relative` the mean absolute change
    over the mean absolute weight; `logprob_abs` the mean |change| of the model's logprobs of the probe text [nats].
    """

    merges: int
    moved: float
    relative: float
    logprob_abs: float


def merge_drift(model, token_ids: list[int], merges: int = 20) -> list[MergeDrift]:
    """Merge and unmerge the adapter again and again on a copy of the model, and measure the base after each round.

    Args:
        model: PEFT model loaded by the kit; it is not changed.
        token_ids: the probe text.
        merges: rounds.

    Returns:
        One `MergeDrift` a round. All zero in exact arithmetic.
    """
    from kit.probe import trainer_score

    precision = model.kit.precision
    work = _copy_without_sampler(model)
    originals = {n: p.detach().clone() for n, p in work.named_parameters() if ".base_layer." in n}
    with work.disable_adapter():
        reference = trainer_score(work, token_ids, precision)
    size = sum(p.float().abs().sum() for p in originals.values())
    count = sum(p.numel() for p in originals.values())
    rounds = []
    for number in range(1, merges + 1):
        for _ in merged_weights(work):
            pass
        now = dict(work.named_parameters())
        moved = sum((now[n] != p).sum().item() for n, p in originals.items()) / count
        change = sum((now[n].float() - p.float()).abs().sum() for n, p in originals.items())
        with work.disable_adapter():
            logprobs = trainer_score(work, token_ids, precision)
        rounds.append(MergeDrift(number, moved, (change / size).item(), (logprobs - reference).abs().mean().item()))
    return rounds


def _copy_without_sampler(model):
    """A deep copy; the sampler, which cannot be copied, is left out of it."""
    memo = {id(model.kit.sampler): None}
    return copy.deepcopy(model, memo)
