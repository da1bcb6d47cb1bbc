"""The gradient that a correction gives, against the one it should give: same tokens, same weights, one batch.

The reference is the policy gradient on the trainer policy's own samples. A sampler that lags behind gives another one;
a correction by importance weights should turn it back, as far as its variance allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kit.importance import CAP
from kit.summary import plural

GRADIENT_SCALE = 1024.0  # of the loss, for float16's sake; divided out again in float32
ROWS = 32  # completions in one forward pass


def compare(gradient, reference) -> dict[str, float | None]:
    """`cosine` of the angle between two flat gradients, and the first's length as a `share` of the second's.

    >>> import torch
    >>> compare(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    {'cosine': 1.0, 'share': 2.0}
    """
    lengths = [float(g.double().norm()) for g in (gradient, reference)]
    if not all(lengths):
        return {"cosine": None, "share": None if not lengths[1] else 0.0}
    cosine = float(gradient.double() @ reference.double()) / (lengths[0] * lengths[1])
    return {"cosine": cosine, "share": lengths[0] / lengths[1]}


@dataclass(frozen=True)
class Batch:
    """Completions of the sampler: token ids with their prompts, the sampler's logprobs and the mask, completions x
    tokens, rewards a completion."""

    texts: list[list[int]]
    prompt_lengths: list[int]
    sampler_logprobs: object
    mask: object
    rewards: object


def draw(policy, tokenizer, problems, reward, sampling, group: int, seed: int) -> Batch:
    """Sample `group` completions of each problem from the sampler as it is."""
    import torch

    from kit.rollout import request_seed

    prompts = [prompt for prompt in problems["prompt"] for _ in range(group)]
    ids = tokenizer(prompts).input_ids
    completions = policy.kit.sampler.generate(ids, sampling, [request_seed(seed, 0, i) for i in range(len(ids))])
    width = max(len(c.token_ids) for c in completions)
    logprobs, mask = torch.zeros(len(ids), width), torch.zeros(len(ids), width, dtype=torch.bool)
    for row, completion in enumerate(completions):
        logprobs[row, : len(completion.token_ids)] = torch.tensor(completion.logprobs)
        mask[row, : len(completion.token_ids)] = True
    texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
    answers = [answer for answer in problems["answer"] for _ in range(group)]
    rewards = torch.tensor(reward(completions=texts, answer=answers))
    whole = [prompt + c.token_ids for prompt, c in zip(ids, completions, strict=True)]
    return Batch(whole, [len(prompt) for prompt in ids], logprobs, mask, rewards)


def gradients(policy, batch: Batch, corrections, group: int, longest: int, cap: float = CAP) -> tuple[dict, object]:
    """({name: flat gradient of the loss}, d) of each correction on one batch, by the trainer's arithmetic.

    d is completions x tokens [nats]. Gradients are those of minus the weighted sum of advantage x logprob, at the
    policy's weights: what the first update on this batch would follow.
    """
    import torch

    from kit.cpu_half import float16_products
    from kit.importance import advantages, token_share, weights

    parameters = [p for p in policy.parameters() if p.requires_grad]
    worth = {c.name: advantages(batch.rewards, group, divide=c.loss != "dr_grpo") for c in corrections}
    shares = {c.name: token_share(batch.mask, c.loss, longest) for c in corrections}
    sums = {c.name: torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64) for c in corrections}
    differences = torch.zeros_like(batch.sampler_logprobs)
    for start in range(0, len(batch.texts), ROWS):
        rows = slice(start, start + ROWS)
        logprobs = _logprobs(policy, batch, rows)
        d = (logprobs.detach().cpu() - batch.sampler_logprobs[rows]) * batch.mask[rows]
        differences[rows] = d
        for place, c in enumerate(corrections):
            factor = weights(d, batch.mask[rows], c.rule, advantages_P=worth[c.name][rows], cap=cap)
            factor = factor * worth[c.name][rows, None] * shares[c.name][rows]
            loss = -(factor.to(logprobs.device) * logprobs).sum() * GRADIENT_SCALE
            with float16_products(policy.kit.precision, policy.device.type):  # the backward pass has products too
                found = torch.autograd.grad(loss, parameters, retain_graph=place < len(corrections) - 1)
            sums[c.name] += torch.cat([g.flatten() for g in found]).double().cpu() / GRADIENT_SCALE
    return sums, differences


def _logprobs(policy, batch, rows):
    """The trainer's logprobs of the completion tokens of some rows, with their graph; 0 beyond a completion's end."""
    import torch

    from kit.cpu_half import trainer_arithmetic

    texts, starts = batch.texts[rows], batch.prompt_lengths[rows]
    longest, width = max(map(len, texts)), batch.mask.shape[1]
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    attention = torch.arange(longest)[None] < torch.tensor([len(text) for text in texts])[:, None]
    device = policy.device
    with trainer_arithmetic(policy.kit.precision, device.type):
        logits = policy(input_ids=ids.to(device), attention_mask=attention.to(device), use_cache=False).logits
    every = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None].to(device))[..., 0]
    place = (torch.tensor(starts)[:, None] - 1 + torch.arange(width)[None]).clamp(max=longest - 2).to(device)
    return every.gather(1, place) * batch.mask[rows].to(device)


def judge_batch(
    policy, tokenizer, snapshots: Sequence[dict], lags: Sequence[int], problems, how: "Judging"
) -> list[dict]:
    """A row a lag and correction: weights and gradient on completions of a sampler that is so many updates behind.

    The trainer holds the last snapshot throughout; the sampler an earlier one. Reference is the gradient on the
    trainer's own samples; `floor` is the cosine between the gradients of its two halves: more agreement than the noise
    of sampling leaves cannot be asked of any correction.
    """
    from kit.sampler import SamplingSettings

    sampling = SamplingSettings(max_tokens=how.longest)
    asked = (tokenizer, problems, how.reward, sampling, how.group)
    last, rows = len(snapshots) - 1, []
    restore(policy, snapshots[last])
    policy.kit.sampler.load_adapter(policy)
    own = [draw(policy, *asked, seed=how.seed + 1 + half) for half in (0, 1)]
    halves = [gradients(policy, batch, how.corrections, how.group, how.longest, how.cap)[0] for batch in own]
    for lag in lags:
        restore(policy, snapshots[last - lag])
        policy.kit.sampler.load_adapter(policy)
        batch = draw(policy, *asked, seed=how.seed + 100)
        restore(policy, snapshots[last])
        found, d = gradients(policy, batch, how.corrections, how.group, how.longest, how.cap)
        for c in how.corrections:
            reference = (halves[0][c.name] + halves[1][c.name]) / 2
            about = _row(c, batch, d, how.group, how.cap) | compare(found[c.name], reference)
            about["floor"] = compare(halves[0][c.name], halves[1][c.name])["cosine"]
            rows.append({"lag": lag, "correction": c.name} | about)
        behind = plural(lag, "update")
        print(f"sampler {behind} behind: {plural(len(how.corrections), 'correction')} judged", flush=True)
    return rows


@dataclass(frozen=True)
class Judging:
    """What a batch is judged by: `kit.importance.Correction`s, reward, group, longest completion, seed, cap."""

    corrections: list
    reward: object
    group: int
    longest: int
    seed: int = 0
    cap: float = CAP


def _row(correction, batch, d, group, cap):
    from kit.importance import advantages, weight_figures, weights
    from kit.mismatch import mismatch_metrics

    worth = advantages(batch.rewards, group)
    factor = weights(d, batch.mask, correction.rule, advantages_P=worth, cap=cap)
    metrics = mismatch_metrics(d + batch.sampler_logprobs, batch.sampler_logprobs, batch.mask)
    shown = {"abs_mean": metrics["mismatch/abs_mean"], "seq_abs": metrics["mismatch/seq_abs"]}
    return weight_figures(factor, batch.mask) | shown | {"reward": float(batch.rewards.mean())}


def snapshot(policy) -> dict:
    """Copies of the policy's trainable parameters, by name."""
    return {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}


def restore(policy, snapshot: dict) -> None:
    """Give the policy the parameters of an earlier `snapshot`."""
    import torch

    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name in snapshot:
                parameter.copy_(snapshot[name])
