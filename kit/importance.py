"""Corrections of the mismatch by importance weights: what each multiplies a token's loss by. Pure functions.

With d = trainer logprob - sampler logprob of a sampled token and S its sum over the completion, exp d and exp S are the
weights that would make an average over the sampler's draws one over the trainer's. They are unbiased and of high
variance, so every method in use bounds them:

    token TIS     min(exp d, C)                    truncated importance sampling, Yao et al. 2025
    token MIS     exp d where it is at most C, else 0       masked importance sampling, Liu et al. 2025
    sequence TIS  min(exp S, C) for all tokens of a completion
    sequence MIS  exp S where it is at most C, else 0       TRL's default, with C = 3
    GSPO          exp(S / n), the geometric mean; 0 where clipping to 1 - e .. 1 + e ends the gradient
                  Zheng et al. 2025 (arXiv 2507.18071), equations 5 and 7
    Dr. GRPO      no weight; advantages without division by the group's deviation, and a constant in place of the
                  completion's length     Liu et al. 2025 (arXiv 2503.20783)
"""

from dataclasses import dataclass, field

from kit.errors import ArgumentError

CAP = 3.0
GSPO_RANGE = 0.2
LOSSES = ("grpo", "dapo", "dr_grpo")


@dataclass(frozen=True)
class Correction:
    """A method: its weight rule here, and the arguments of `trl.GRPOConfig` (1.16) that make TRL do the same.

    `rule` is one of `weights`' rules; `loss` TRL's loss type.
    """

    name: str
    rule: str
    loss: str = "dapo"
    arguments: dict = field(default_factory=dict)


def _by_trl(name, mode):
    return Correction(name, mode, arguments={
        "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": CAP,
    })  # fmt: skip


CORRECTIONS = {
    correction.name: correction
    for correction in (
        Correction("none", "none"),
        _by_trl("token TIS", "token_truncate"),
        _by_trl("token MIS", "token_mask"),
        _by_trl("sequence TIS", "sequence_truncate"),
        _by_trl("sequence MIS", "sequence_mask"),
        Correction("GSPO", "gspo", "grpo", {"importance_sampling_level": "sequence", "loss_type": "grpo"}),
        Correction("Dr. GRPO", "none", "dr_grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    )
}


def chosen(names) -> list[Correction]:
    """The corrections of these names, in this order.

    Raises:
        kit.errors.ArgumentError: a name that is not known.

    >>> [correction.rule for correction in chosen(["none", "token TIS"])]
    ['none', 'token_truncate']
    """
    unknown = [name for name in names if name not in CORRECTIONS]
    if unknown or not names:
        raise ArgumentError(
            f"Unknown correction {', '.join(map(repr, unknown)) or '(none given)'}. Known: {', '.join(CORRECTIONS)}."
        )
    return [CORRECTIONS[name] for name in names]


def weights(difference_PT, mask_PT, rule: str, *, advantages_P=None, cap: float = CAP, gspo_range: float = GSPO_RANGE):
    """The factor on each token's loss, completions x tokens; 0 outside the mask.

    Args:
        difference_PT: d = trainer - sampler logprob [nats]; what is not finite counts as 0 (a weight of 1), as in TRL.
        mask_PT: true on completion tokens.
        rule: "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask" or "gspo".
        advantages_P: of the completions; "gspo" needs their signs, since it clips only what would move further away.
        cap: C, the largest weight.
        gspo_range: e, how far GSPO's ratio may lie from 1.

    Raises:
        kit.errors.ArgumentError: unknown rule, or a cap that is not above 0.

    >>> import torch
    >>> d, mask = torch.tensor([[0.0, 2.0]]), torch.ones(1, 2)
    >>> weights(d, mask, "token_truncate").tolist(), weights(d, mask, "sequence_mask").tolist()
    ([[1.0, 3.0]], [[0.0, 0.0]])
    """
    import torch

    if not cap > 0:
        raise ArgumentError(f"cap is {cap}; expected a number above 0.")
    mask = mask_PT.bool()
    d = torch.where(mask, torch.nan_to_num(difference_PT, nan=0.0, posinf=0.0, neginf=0.0), 0.0)
    if rule == "none":
        ratio = torch.ones_like(d)
    elif rule == "gspo":
        if advantages_P is None:
            raise ArgumentError("The rule 'gspo' needs advantages_P: which way it clips depends on their signs.")
        ratio = (d.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()
        better = advantages_P[:, None] > 0
        ended = torch.where(better, ratio > 1 + gspo_range, ratio < 1 - gspo_range)
        ratio = torch.where(ended, 0.0, ratio)
    elif rule in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        ratio = (d if rule.startswith("token") else d.sum(-1, keepdim=True)).exp()
        ratio = ratio.clamp(max=cap) if rule.endswith("truncate") else torch.where(ratio > cap, 0.0, ratio)
    else:
        raise ArgumentError(
            f"Unknown rule {rule!r}; expected one of {', '.join(c.rule for c in CORRECTIONS.values())}."
        )
    return torch.where(mask, ratio, 0.0)


def weight_figures(weights_PT, mask_PT) -> dict[str, float]:
    """What weights do to a batch: `ess` (0 to 1) and `masked_share` over tokens, `mean` and `max` of the weights.

    ess = (sum w)^2 / (n sum w^2) is the share of the tokens that the weighted average effectively uses (Kish 1965); 0
    if every token is masked.
    """
    mask = mask_PT.bool()
    kept = weights_PT[mask].double()
    if not len(kept):
        raise ArgumentError("There are no tokens to weigh.")
    square = (kept**2).sum()
    ess = float(kept.sum() ** 2 / (len(kept) * square)) if square else 0.0
    return {
        "ess": ess, "masked_share": float((kept == 0).double().mean()), "mean": float(kept.mean()),
        "max": float(kept.max()),
    }  # fmt: skip


def advantages(rewards_P, group: int, *, divide: bool = True):
    """Rewards minus their group's mean, over the group's deviation unless `divide` is false (Dr. GRPO); as TRL's.

    Raises:
        kit.errors.ArgumentError: the rewards are not whole groups of at least two.

    >>> import torch
    >>> advantages(torch.tensor([0.0, 1.0]), 2, divide=False).tolist()
    [-0.5, 0.5]
    """
    if group < 2 or len(rewards_P) % group or not len(rewards_P):
        raise ArgumentError(f"{len(rewards_P)} rewards are not whole groups of {group} (at least 2).")
    groups = rewards_P.float().reshape(-1, group)
    centred = groups - groups.mean(-1, keepdim=True)
    if divide:
        centred = centred / (groups.std(-1, keepdim=True) + 1e-4)
    return centred.flatten()


def token_share(mask_PT, loss: str, longest: int):
    """What a token's loss is multiplied by so that the sum over the batch is TRL's loss of this type.

    "grpo" averages over each completion and then over completions, "dapo" over all tokens, "dr_grpo" divides by
    completions x `longest`.
    """
    mask = mask_PT.float()
    if loss == "grpo":
        return mask / mask.sum(-1, keepdim=True).clamp(min=1) / len(mask)
    if loss == "dapo":
        return mask / mask.sum().clamp(min=1)
    if loss == "dr_grpo":
        return mask / (len(mask) * longest)
    raise ArgumentError(f"Unknown loss {loss!r}; expected one of {', '.join(LOSSES)}.")
