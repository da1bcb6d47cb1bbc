"""What is measured between two optimizer steps: collected per micro-batch, reduced once."""

import time

import torch

from kit.mismatch import kl_k3, mismatch_metrics

# Completions of a step for which every token's mismatch is written down (the first groups of the batch).
TOKEN_ROWS = 8


class StepMeter:
    """Collects one step's logprobs and times; `finish` reduces them to record keys.

    Logprobs stay on their device until `finish`, so a micro-batch costs no synchronisation.
    """

    def __init__(self):
        self.values: dict = {}
        self.rollout_seconds = 0.0
        self.sampled_tokens, self.sampling_seconds = 0, 0.0
        self.token_mismatch: dict[int, list[float]] = {}
        self._started: float | None = None
        self._trainer, self._sampler, self._mask, self._rows, self._kl = [], [], [], [], []

    def start(self) -> None:
        """The step begins with its first micro-batch."""
        if self._started is None:
            self._started = time.perf_counter()

    def add_rollout(self, tokens: int, sampling_seconds: float, rollout_seconds: float) -> None:
        """One rollout: tokens sampled, seconds in the sampler, seconds with sync and probe."""
        self.sampled_tokens += tokens
        self.sampling_seconds += sampling_seconds
        self.rollout_seconds += rollout_seconds

    def add_batch(self, trainer_PT, sampler_PT, mask_PT, rows_P) -> None:
        """Logprobs of one micro-batch [nats], completions x tokens, and each completion's row in the step's batch."""
        self._trainer.append(trainer_PT.detach())
        self._sampler.append(sampler_PT)
        self._mask.append(mask_PT)
        self._rows.append(rows_P)

    @property
    def has_kl(self) -> bool:
        """True once the KL of this step has been sampled."""
        return bool(self._kl)

    def add_kl(self, policy_PT, base_PT, mask_PT) -> None:
        """Logprobs of policy and base model on the completions (or on the first of them)."""
        rows = len(base_PT)
        self._kl.append((policy_PT[:rows].detach(), base_PT, mask_PT[:rows]))

    def finish(self) -> dict:
        """Record keys of the step: mismatch, kl, times, speed."""
        total = time.perf_counter() - self._started
        metrics = mismatch_metrics(*(_flat_rows(parts) for parts in (self._trainer, self._sampler, self._mask)))
        self._keep_token_mismatch()
        return {
            **metrics,
            "kl": kl_k3(*(_flat_rows(parts) for parts in zip(*self._kl, strict=True))),
            "time/step": total,
            "time/rollout": self.rollout_seconds,
            "time/train": total - self.rollout_seconds,
            "speed/tokens_per_s": self.sampled_tokens / self.sampling_seconds if self.sampling_seconds else None,
            **self.values,
        }

    def _keep_token_mismatch(self):
        """|d| of each token of the step's first completions, for the completion browser."""
        for trainer, sampler, mask, rows in zip(self._trainer, self._sampler, self._mask, self._rows, strict=True):
            wanted = (rows < TOKEN_ROWS).nonzero()[:, 0].tolist()
            difference = (trainer - sampler).abs().float().cpu()
            for index in wanted:
                self.token_mismatch[int(rows[index])] = difference[index, mask[index].bool().cpu()].tolist()


def _flat_rows(parts):
    """Micro-batches of unequal length as one tensor, padded with zeros on the right (masked out there)."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])
