"""How good the model is at a task, by sampling: through the sampler, batched, at fixed seeds."""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import comb, sqrt

from kit.errors import ArgumentError
from kit.rollout import sample_policy

INTERVAL = statistics.NormalDist().inv_cdf(0.975)  # standard errors to each side of a 95 % interval


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on a dataset.

    `pass_at_1` is the mean share of right answers, `standard_error` that of the mean over problems; `pass_at_k` the
    unbiased estimate for k = `samples`, and `pass_at` the same for k = 1, 2, 4, ... (Chen et al., "Evaluating Large
    Language Models Trained on Code", 2021, eq. 1); `majority` the share of problems whose most frequent answer is right
    (Wang et al., "Self-Consistency Improves Chain of Thought Reasoning", 2022), None where answers cannot be compared;
    `truncated` the share of completions cut off at the length limit; `by_level` pass@1 and the number of problems by
    difficulty; `per_problem` the share of right answers to each problem.
    """

    problems: int
    samples: int
    pass_at_1: float
    standard_error: float
    pass_at_k: float
    truncated: float
    per_problem: tuple[float, ...]
    pass_at: dict[int, float] = field(default_factory=dict)
    majority: float | None = None
    by_level: dict[str, tuple[float, int]] = field(default_factory=dict)

    def as_dict(self) -> dict:
        """JSON-able form."""
        return asdict(self)

    def __str__(self):
        many = f", pass@{self.samples} {self.pass_at_k:.3f}" if self.samples > 1 else ""
        if self.majority is not None and self.samples > 1:
            many += f", majority of {self.samples} {self.majority:.3f}"
        each = "1 sample" if self.samples == 1 else f"{self.samples} samples"
        return (
            f"pass@1 {self.pass_at_1:.3f} ± {self.standard_error:.3f}{many} "
            f"({self.problems} problems, {each} each, {self.truncated:.1%} truncated)"
        )


@dataclass(frozen=True)
class Difference:
    """pass@1 after minus before, paired by problem.

    Each problem is compared with itself, so what makes some harder than others drops out of `standard_error`;
    `interval` holds 95 % of a normal distribution around the mean. `better` and `worse` count problems.
    """

    mean: float
    standard_error: float
    interval: tuple[float, float]
    better: int
    worse: int

    def as_dict(self) -> dict:
        """JSON-able form."""
        return asdict(self)

    def __str__(self):
        low, high = self.interval
        return (
            f"{self.mean:+.3f} (95 % interval {low:+.3f} to {high:+.3f}, paired; {self.better} problems better, "
            f"{self.worse} worse)"
        )


def paired_difference(before: Evaluation, after: Evaluation) -> Difference:
    """What changed between two evaluations of the same problems.

    Raises:
        ArgumentError: different numbers of problems.

    Example:
        >>> one = _summary([0, 1, 1], 1, 0.0)
        >>> print(paired_difference(one, _summary([1, 1, 1], 1, 0.0)))
        +0.333 (95 % interval -0.320 to +0.987, paired; 1 problems better, 0 worse)
    """
    if before.problems != after.problems:
        raise ArgumentError(f"{before.problems} problems before and {after.problems} after cannot be paired.")
    changes = [b - a for a, b in zip(before.per_problem, after.per_problem, strict=True)]
    mean, error = _mean_and_error(changes)
    interval = mean - INTERVAL * error, mean + INTERVAL * error
    return Difference(mean, error, interval, sum(c > 0 for c in changes), sum(c < 0 for c in changes))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k samples, drawn from `samples` of which `right` are right, is right.

    1 - C(samples - right, k) / C(samples, k): Chen et al., "Evaluating Large Language Models Trained on Code", eq. 1.

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(4, 0, 2)
        (0.25, 1.0, 0.0)
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def majority_right(answers: list[str | None], right: list[bool]) -> float:
    """Whether the most frequent answer is right, 1 or 0; between, where several are equally frequent.

    No answer (None) has no vote; without any answer the result is 0.

    Example:
        >>> majority_right(["4", "5", "4"], [True, False, True]), majority_right(["4", "5", None], [True, False, False])
        (1.0, 0.5)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    first = [answers.index(answer) for answer, count in votes.items() if count == most]
    return sum(right[index] for index in first) / len(first)


def evaluate(
    model,
    tokenizer,
    dataset,
    reward_func,
    *,
    samples: int = 1,
    settings=None,
    seed: int = 0,
    answer_of: Callable[[str], object] | None = None,
    level: str | None = None,
) -> Evaluation:
    """Sample every problem of a dataset and score it.

    Args:
        model: loaded by `FastLanguageModel`; the sampler gets the adapter it carries, or none.
        dataset: columns `prompt` and whatever the reward function takes.
        reward_func: TRL's signature; a completion is right when its reward is 1.
        samples: completions a problem.
        settings: `kit.sampler.SamplingSettings`; default: temperature 1, as much as fits.
        seed: the same seed, weights and dtype give the same completions.
        answer_of: the answer in a completion, for the majority vote.
        level: the column by which the result is broken down.

    Raises:
        kit.errors.ArgumentError: empty dataset, samples below 1, or no column `level`.
    """
    if len(dataset) == 0 or samples < 1:
        raise ArgumentError(
            f"Nothing to evaluate: {len(dataset)} problems, {samples} samples each; both must be positive."
        )
    if level is not None and level not in dataset.column_names:
        raise ArgumentError(
            f"There is no column {level!r} to break down by; there are {', '.join(dataset.column_names)}."
        )
    prompts = [prompt for prompt in dataset["prompt"] for _ in range(samples)]
    completions = _sampled(model, tokenizer, prompts, settings, seed)
    texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
    columns = {name: [v for v in dataset[name] for _ in range(samples)] for name in dataset.column_names}
    columns.pop("prompt")
    rewards = reward_func(
        prompts=prompts, completions=texts, completion_ids=[c.token_ids for c in completions], **columns
    )
    marks = [reward == 1.0 for reward in rewards]
    truncated = sum(c.finish_reason == "length" for c in completions) / len(completions)
    return _summary(
        [sum(marks[i : i + samples]) for i in range(0, len(marks), samples)],
        samples,
        truncated,
        majority=None if answer_of is None else _majority([answer_of(text) for text in texts], marks, samples),
        levels=None if level is None else list(dataset[level]),
    )


def _sampled(model, tokenizer, prompts, settings, seed):
    ids = tokenizer(prompts).input_ids
    return sample_policy(model, ids, settings or _default_settings(model.kit.max_seq_length, ids), seed)


def _default_settings(max_seq_length, ids):
    from kit.sampler import SamplingSettings

    return SamplingSettings(max_tokens=max_seq_length - max(map(len, ids)))


def _majority(answers, marks, samples):
    parts = [slice(i, i + samples) for i in range(0, len(marks), samples)]
    return statistics.fmean(majority_right(answers[part], marks[part]) for part in parts)


def _mean_and_error(values):
    """Mean, and its standard error (0 for a single value)."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return mean, sqrt(variance / len(values))


def _summary(right, samples, truncated, *, majority=None, levels=None):
    shares = [r / samples for r in right]
    mean, error = _mean_and_error(shares)
    powers = [2**n for n in range(samples.bit_length()) if 2**n < samples] + [samples]
    at = {k: statistics.fmean(pass_at_k(samples, r, k) for r in right) for k in powers}
    by_level: dict[str, list[float]] = {}
    for name, share in zip(levels or [], shares, strict=levels is not None):
        by_level.setdefault(str(name), []).append(share)
    return Evaluation(
        len(right), samples, mean, error, at[samples], truncated, tuple(shares), at, majority,
        {name: (statistics.fmean(values), len(values)) for name, values in sorted(by_level.items())},
    )  # fmt: skip
