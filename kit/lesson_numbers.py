"""Numbers of a real model for notebook 0: gradients of a policy loss, the largest activation, weights that do not move.

Everything is computed in float32; what a shorter format would make of it is `kit.formats`' part.
"""

import random

import torch

from kit import arithmetic
from kit.formats import FloatFormat, round_tensor


def policy_gradients(model, tokenizer, *, problems: int = 16, seed: int = 0, entries: int = 40_000) -> list[float]:
    """Gradient entries of a GRPO loss at its first update, drawn from all linear layers.

    Completions are drawn from the task's styles, some right and some wrong; their advantages are rewards minus the
    mean, over the standard deviation. At the first update the importance ratio is 1, so the loss is the mean over
    tokens of -advantage x logprob (Shao et al., "DeepSeekMath", 2024, equation 3 without its KL term).

    Args:
        model: a float32 causal model of the bundled task.
        tokenizer: its tokenizer.
        problems: completions in the batch.
        seed: of problems, completions and the drawn entries.
        entries: how many gradient entries to return.
    """
    rng = random.Random(seed)
    source = arithmetic.stream("rl", rng)
    chosen = [next(source) for _ in range(problems)]
    prompts = tokenizer([arithmetic.prompt_text(problem) for problem in chosen]).input_ids
    texts = [arithmetic.completion_text(problem, rng) for problem in chosen]
    rewards = torch.tensor(arithmetic.correct_answer(texts, [str(problem.answer) for problem in chosen]))
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    completions = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts).input_ids]
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    with torch.enable_grad():
        for weight in weights:
            weight.requires_grad_(True)
        loss = _token_mean_loss(model, prompts, completions, advantages)
        gradients = torch.autograd.grad(loss, weights)
        for weight in weights:
            weight.requires_grad_(False)
    everything = torch.cat([gradient.flatten() for gradient in gradients])
    generator = torch.Generator().manual_seed(seed)
    return everything[torch.randperm(len(everything), generator=generator)[:entries]].tolist()


def _token_mean_loss(model, prompts, completions, advantages):
    total, tokens = 0.0, 0
    for prompt, completion, advantage in zip(prompts, completions, advantages, strict=True):
        ids = torch.tensor([prompt + completion])
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1], -1)
        total -= advantage * logprobs.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :].sum()
        tokens += len(completion)
    return total / tokens


def largest_activation(model, token_ids: list[int]) -> tuple[str, float]:
    """(name, size) of the linear layer's output that is largest on a text."""
    found = {}

    def note(name):
        return lambda module, inputs, output: found.update({name: output.abs().max().item()})

    hooks = [
        module.register_forward_hook(note(name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([token_ids]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return max(found.items(), key=lambda item: item[1])


def unmoved_share(weight: torch.Tensor, relative: float, form: FloatFormat) -> float:
    """Share of weights that stay where they are in this format when each grows by this share of itself.

    >>> unmoved_share(torch.tensor([1.0, 1.5]), 1e-3, FloatFormat(8, 7))
    1.0
    """
    before = round_tensor(weight, form)
    after = round_tensor(before + relative * before, form)
    return (after == before).double().mean().item()
