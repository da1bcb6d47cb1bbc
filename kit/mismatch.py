"""How far apart sampler and trainer are: pure functions of their logprobs.

With d = trainer logprob - sampler logprob of each sampled token [nats], before any clamp, in float32:
k1 = mean(-d) and k3 = mean(exp(d) - d - 1) both estimate KL(sampler || trainer) a token (Schulman, "Approximating KL
divergence", 2020: k3 is unbiased, never negative, and of lower variance). seq_kl = mean over sequences of sum(-d).
ess = (sum w)^2 / (n sum w^2) with w = exp(sum d), the share of sequences that an importance-weighted average would
effectively use. A token whose logprob is not finite on either side is counted and left out.
"""

import math

import torch

KEYS = (
    "mismatch/abs_mean", "mismatch/abs_p99", "mismatch/abs_max", "mismatch/k1", "mismatch/k3", "mismatch/prob_abs_max",
    "mismatch/seq_kl", "mismatch/seq_abs", "mismatch/ess", "mismatch/ratio_max", "mismatch/nonfinite",
)  # fmt: skip

# exp() of a larger log-ratio is not representable in float32; k3 and ratio_max saturate here and stay finite.
MAX_LOG_RATIO = 80.0


def mismatch_metrics(trainer_logprobs_PT, sampler_logprobs_PT, mask_PT) -> dict[str, float | None]:
    """All `mismatch/*` keys of a record.

    Args:
        trainer_logprobs_PT: logprobs of the sampled tokens by the trainer, sequences x tokens [nats].
        sampler_logprobs_PT: the same by the sampler, NaN where it gave none.
        mask_PT: true on completion tokens. Padding may hold anything.

    Returns:
        Key -> value; None for every mean when no token is left. `mismatch/ratio_max` is the largest sequence ratio
        exp(sum d); together with k3 it saturates at exp(80), which `mismatch/saturated` counts (tokens + sequences).

    Raises:
        ValueError: the three shapes differ.

    Example:
        >>> m = mismatch_metrics(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2))
        >>> m["mismatch/abs_mean"], m["mismatch/k1"], round(m["mismatch/k3"], 4)
        (0.25, -0.25, 0.0744)
    """
    trainer, sampler = torch.as_tensor(trainer_logprobs_PT).float(), torch.as_tensor(sampler_logprobs_PT).float()
    mask = torch.as_tensor(mask_PT).bool()
    if not trainer.shape == sampler.shape == mask.shape:
        raise ValueError(
            f"Trainer logprobs {tuple(trainer.shape)}, sampler logprobs {tuple(sampler.shape)} and mask "
            f"{tuple(mask.shape)} must have one shape, sequences x tokens."
        )
    finite = torch.isfinite(trainer) & torch.isfinite(sampler)
    kept = mask & finite
    nonfinite = int((mask & ~finite).sum())
    if not kept.any():
        return {**dict.fromkeys(KEYS), "mismatch/nonfinite": nonfinite, "mismatch/saturated": 0}
    difference = torch.where(kept, trainer - sampler, 0.0)
    d = difference[kept]
    sequence = difference.double().sum(-1)[kept.any(-1)]
    values = (*_token_metrics(d), _largest_probability_gap(trainer, sampler, kept), *_sequence_metrics(sequence))
    saturated = int((d.abs() > MAX_LOG_RATIO).sum() + (sequence.abs() > MAX_LOG_RATIO).sum())
    return {**dict(zip(KEYS, (*values, nonfinite), strict=True)), "mismatch/saturated": saturated}


def _token_metrics(d):
    """abs_mean, abs_p99, abs_max, k1, k3 of the kept tokens' differences, shape (tokens,)."""
    absolute = d.abs()
    p99 = absolute.kthvalue(math.ceil(0.99 * absolute.numel())).values
    # expm1 keeps the digits that exp(d) - 1 - d loses for the small d of float32 and float16
    k3 = torch.expm1(d.double().clamp(max=MAX_LOG_RATIO)) - d.double()
    return absolute.mean().item(), p99.item(), absolute.max().item(), -d.mean().item(), k3.mean().item()


def _largest_probability_gap(trainer, sampler, kept):
    """max |p_trainer - p_sampler| over the kept tokens."""
    return (trainer[kept].exp() - sampler[kept].exp()).abs().max().item()


def _sequence_metrics(sequence):
    """seq_kl, seq_abs, ess, ratio_max of the sequences' summed differences, shape (sequences,)."""
    weight = (sequence - sequence.max()).exp()
    ess = weight.sum() ** 2 / (len(weight) * (weight**2).sum())
    ratio_max = math.exp(min(sequence.max().item(), MAX_LOG_RATIO))
    return -sequence.mean().item(), sequence.abs().mean().item(), ess.item(), ratio_max


def kl_k3(policy_logprobs_PT, reference_logprobs_PT, mask_PT) -> float | None:
    """KL(policy || reference) by the k3 estimator on tokens sampled from the policy [nats a token].

    k3 = mean(exp(r) - r - 1) with r = reference - policy logprob. Tokens that are not finite are left out; None when
    none is left.

    Example:
        >>> kl_k3(torch.tensor([[-1.0]]), torch.tensor([[-1.0]]), torch.ones(1, 1))
        0.0
    """
    kept = mask_PT.bool() & torch.isfinite(policy_logprobs_PT) & torch.isfinite(reference_logprobs_PT)
    if not kept.any():
        return None
    r = (reference_logprobs_PT.float() - policy_logprobs_PT.float())[kept].double()
    return (torch.expm1(r.clamp(max=MAX_LOG_RATIO)) - r).mean().item()
