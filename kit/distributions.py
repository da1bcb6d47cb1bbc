"""Sampler against trainer over the whole vocabulary, at a few positions: exact where the sampled metrics estimate."""

from dataclasses import dataclass

import torch

from kit.errors import ArgumentError
from kit.probe import next_token_logprobs


@dataclass(frozen=True)
class DistributionComparison:
    """One position: KL(sampler || trainer) [nats], total variation (0 to 1), share of the top k that both agree on."""

    position: int
    kl: float
    total_variation: float
    top_k_overlap: float


def compare_logprobs(sampler_logprobs_V, trainer_logprobs_V, *, top_k: int = 10) -> tuple[float, float, float]:
    """(KL(sampler || trainer), total variation, top-k overlap) of two next-token distributions, in float64.

    Args:
        sampler_logprobs_V, trainer_logprobs_V: log-probabilities of the whole vocabulary [nats].

    Example:
        >>> half = torch.tensor([0.5, 0.5]).log()
        >>> kl, tv, overlap = compare_logprobs(half, torch.tensor([0.25, 0.75]).log(), top_k=1)
        >>> round(kl, 4), round(tv, 4)
        (0.1438, 0.25)
    """
    p_log, q_log = sampler_logprobs_V.double(), trainer_logprobs_V.double()
    p, q = p_log.exp(), q_log.exp()
    # sum p (q/p - 1 - log q/p) equals sum p log(p/q), without its first-order terms: those cancel only in exact
    # arithmetic, and their float32 rounding (1e-7) is larger than the whole KL in float16
    d = q_log - p_log
    kl = torch.where(p > 0, p * (torch.expm1(d) - d), q).sum().item()
    k = min(top_k, len(p))
    overlap = len(set(p.topk(k).indices.tolist()) & set(q.topk(k).indices.tolist())) / k
    return kl, 0.5 * (p - q).abs().sum().item(), overlap


def compare_distributions(model, token_ids: list[int], positions, *, top_k: int = 10) -> list[DistributionComparison]:
    """Compare the two sides' next-token distributions after `token_ids[:position]`, for each position.

    Args:
        model: loaded by `FastLanguageModel`; the sampler gets the adapter it carries, or none.
        token_ids: one text.
        positions: how many tokens to condition on, each from 1 to len(token_ids).
        top_k: size of the overlap.

    Raises:
        kit.errors.ArgumentError: a position outside the text.
    """
    from peft import PeftModel

    loaded = model.kit
    wrong = [p for p in positions if not 1 <= p <= len(token_ids)]
    if wrong:
        raise ArgumentError(f"Positions {wrong} are outside the text; expected 1 to {len(token_ids)}.")
    if isinstance(model, PeftModel):
        loaded.sampler.load_adapter(model)
    else:
        loaded.sampler.drop_adapter()
    trainer_TV = next_token_logprobs(model, token_ids, loaded.precision).cpu()
    comparisons = []
    for position in positions:
        trainer_V = trainer_TV[position - 1]
        sampler_V = loaded.sampler.next_token_logprobs(token_ids[:position])
        # vLLM pads its vocabulary; the model's own is what both can be compared on
        width = min(len(sampler_V), len(trainer_V))
        comparisons.append(
            DistributionComparison(position, *compare_logprobs(sampler_V[:width], trainer_V[:width], top_k=top_k))
        )
    return comparisons
