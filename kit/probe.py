"""Proof of sync: after each adapter load, both sides score one short text, and must agree as far as the dtype allows.

A stale adapter, a wrong scaling, an adapter applied twice or a prefix cache of old weights moves the sampler's logprobs
by orders of magnitude more than rounding does; this is where it shows.
"""

from dataclasses import dataclass

import torch

from kit.cpu_half import trainer_arithmetic
from kit.errors import KitError
from kit.precision import Precision

# float32 on a CPU agrees to 2e-7; nothing smaller than this is worth stopping a run for.
FLOOR = 1e-5
# How much further than before training the two sides may drift apart. Rounding changes with the policy's entropy by a
# factor of a few; a wrong weight changes it by hundreds.
MARGIN = 10.0


class SyncError(KitError, RuntimeError):
    """The sampler does not hold the trainer's weights."""


@dataclass(frozen=True)
class SyncProbe:
    """What agreement to expect.

    `baseline` is mean |trainer - sampler logprob| [nats] of the base model, adapters off on both sides.
    """

    precision: Precision
    baseline: float

    @property
    def limit(self) -> float:
        """Largest mean |d| that rounding explains [nats]."""
        return max(MARGIN * self.baseline, self.precision.unit_roundoff, FLOOR)

    def check(self, measured: float, step: int) -> float:
        """Return `measured`, or stop the run.

        Raises:
            SyncError: beyond `limit`, or not finite.
        """
        if measured <= self.limit:
            return measured
        raise SyncError(
            f"After the sync of step {step} sampler and trainer disagree by {measured:.3g} nats a token on the probe "
            f"text; with the same weights {self.precision.name} explains at most {self.limit:.3g} (base model: "
            f"{self.baseline:.3g}). The sampler does not hold the trainer's weights: a stale or doubled adapter, "
            f"another scaling (lora_alpha / r), or changed base weights. The record up to here is kept. Load the "
            f"model again and resume from the last checkpoint; if it happens again, please report it."
        )


def trainer_score(model, token_ids: list[int], precision: Precision) -> torch.Tensor:
    """The trainer's logprob of each token but the first, shape (tokens - 1,), float32 [nats], at temperature 1."""
    following = torch.tensor(token_ids[1:], device=model.device)[:, None]
    return next_token_logprobs(model, token_ids, precision)[:-1].gather(-1, following)[:, 0].cpu()


def next_token_logprobs(model, token_ids: list[int], precision: Precision) -> torch.Tensor:
    """The trainer's log-probabilities after each token, shape (tokens, vocabulary), float32 [nats]."""
    ids = torch.tensor([token_ids], device=model.device)
    with torch.no_grad(), trainer_arithmetic(precision, model.device.type):
        return torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)


def disagreement(model, sampler, token_ids: list[int], precision: Precision) -> float:
    """mean |trainer - sampler logprob| over the text [nats]; infinite when the sampler's is not finite.

    Raises:
        SyncError: the trainer's own logprobs are not finite; its weights are gone.
    """
    trainer = trainer_score(model, token_ids, precision)
    if not trainer.isfinite().all():
        raise SyncError(
            "The trainer's own logprobs are not finite: its weights have diverged (or its activations overflow in "
            f"{precision.name}). The record up to here is kept. Lower the learning rate, and resume from the last "
            "checkpoint."
        )
    difference = trainer - torch.tensor(sampler.score(token_ids))
    return difference.abs().mean().item() if difference.isfinite().all() else float("inf")
