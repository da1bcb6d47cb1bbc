"""How good the model is at a task, by sampling: through the sampler, batched, at fixed seeds."""

from dataclasses import asdict, dataclass
from math import comb, sqrt

from kit.errors import ArgumentError
from kit.rollout import request_seed


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on a dataset.

    `pass_at_1` is the mean share of right answers, `standard_error` that of the mean over problems; `pass_at_k` the
    unbiased estimate for k samples (Chen et al., "Evaluating Large Language Models Trained on Code", 2021);
    `truncated` the share of completions cut off at the length limit.
    """

    problems: int
    samples: int
    pass_at_1: float
    standard_error: float
    pass_at_k: float
    truncated: float
    per_problem: tuple[float, ...]

    def as_dict(self) -> dict:
        """JSON-able form."""
        return asdict(self)

    def __str__(self):
        many = f", pass@{self.samples} {self.pass_at_k:.3f}" if self.samples > 1 else ""
        return (
            f"pass@1 {self.pass_at_1:.3f} ± {self.standard_error:.3f}{many} "
            f"({self.problems} problems, {self.samples} samples each, {self.truncated:.1%} truncated)"
        )


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k samples, drawn from `samples` of which `right` are right, is right.

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(4, 0, 2)
        (0.25, 1.0, 0.0)
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def evaluate(model, tokenizer, dataset, reward_func, *, samples: int = 1, settings=None, seed: int = 0) -> Evaluation:
    """Sample every problem of a dataset and score it.

    Args:
        model: loaded by `FastLanguageModel`; the sampler gets the adapter it carries, or none.
        dataset: columns `prompt` and whatever the reward function takes.
        reward_func: TRL's signature; a completion is right when its reward is 1.
        samples: completions a problem.
        settings: `kit.sampler.SamplingSettings`; default: temperature 1, as much as fits.
        seed: the same seed, weights and dtype give the same completions.

    Raises:
        kit.errors.ArgumentError: empty dataset, or samples below 1.
    """
    from peft import PeftModel

    if len(dataset) == 0 or samples < 1:
        raise ArgumentError(
            f"Nothing to evaluate: {len(dataset)} problems, {samples} samples each; both must be positive."
        )
    sampler = model.kit.sampler
    if isinstance(model, PeftModel):
        sampler.load_adapter(model)
    else:
        sampler.drop_adapter()
    prompts = [prompt for prompt in dataset["prompt"] for _ in range(samples)]
    ids = tokenizer(prompts).input_ids
    settings = settings or _default_settings(model.kit.max_seq_length, ids)
    completions = sampler.generate(ids, settings, [request_seed(seed, 0, i) for i in range(len(ids))])
    texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
    columns = {name: [v for v in dataset[name] for _ in range(samples)] for name in dataset.column_names}
    columns.pop("prompt")
    rewards = reward_func(
        prompts=prompts, completions=texts, completion_ids=[c.token_ids for c in completions], **columns
    )
    right = [sum(r == 1.0 for r in rewards[i : i + samples]) for i in range(0, len(rewards), samples)]
    truncated = sum(c.finish_reason == "length" for c in completions) / len(completions)
    return _summary(right, samples, truncated)


def _default_settings(max_seq_length, ids):
    from kit.sampler import SamplingSettings

    return SamplingSettings(max_tokens=max_seq_length - max(map(len, ids)))


def _summary(right, samples, truncated):
    shares = [r / samples for r in right]
    mean = sum(shares) / len(shares)
    variance = sum((s - mean) ** 2 for s in shares) / max(len(shares) - 1, 1)
    at_k = sum(pass_at_k(samples, r, samples) for r in right) / len(right)
    return Evaluation(len(right), samples, mean, sqrt(variance / len(right)), at_k, truncated, tuple(shares))
