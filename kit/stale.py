"""A trainer whose sampler lags behind, on purpose: a mismatch wide enough to see what a correction does."""

import torch

from kit.errors import ArgumentError
from kit.trainer import GRPOTrainer


class StaleTrainer(GRPOTrainer):
    """`kit.GRPOTrainer` that gives its adapter to the sampler only every `every` steps.

    In between the sampler draws from a policy of up to `every` - 1 updates ago, and says so: its logprobs are that
    policy's. The proof of sync is made at each real sync. The record gets `correction/masked_share`, the share of the
    tokens to which TRL's correction gave the weight 0, and `correction/weight_mean`.

    Raises:
        kit.errors.ArgumentError: `every` below 1.
    """

    def __init__(self, *args, every: int = 1, **kwargs):
        if every < 1:
            raise ArgumentError(f"every is {every}; expected at least 1 step between two syncs.")
        super().__init__(*args, **kwargs)
        self._every, self._weights = every, (-1, 0.0, 0.0, 0.0)

    def _sync(self):
        if self._synced_step is None or self.state.global_step % self._every == 0:
            super()._sync()

    def _compute_loss(self, model, inputs):
        if "importance_sampling_ratio" in inputs:
            self._note_weights(inputs["importance_sampling_ratio"], inputs["completion_mask"].bool())
        return super()._compute_loss(model, inputs)

    def _note_weights(self, ratio, mask):
        """Sums over the micro-batches of a step; a new step begins again."""
        ratio = torch.as_tensor(ratio).expand(mask.shape)[mask].double()
        now = (float((ratio == 0).sum()), float(ratio.sum()), float(len(ratio)))
        step, *before = self._weights
        if step == self.state.global_step:
            now = tuple(a + b for a, b in zip(now, before, strict=True))
        self._weights = (self.state.global_step, *now)
        zero, total, count = now
        if count:
            self._meter.values["correction/masked_share"] = zero / count
            self._meter.values["correction/weight_mean"] = total / count
