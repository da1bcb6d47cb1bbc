"""Pre-trains the bundled model: a small Qwen3 base model, on the arithmetic corpus, in a few minutes on two CPU cores.

    python -m kit.pretrain --out DIR --seed 0

The architecture is Qwen3's own (q/k norms, grouped-query attention, tied embeddings), so every other part of the kit
treats it like Qwen3-4B-Base. Training is fp32; Muon moves the matrices and AdamW the rest (AdamW alone is far slower
here). The loss first falls to a plateau, where digits are copied but not yet added, and falls again once they are.
The model is saved in bfloat16, like most published checkpoints, and its quality is that of the saved (rounded) weights.
Not a general pre-training loop: no resuming, no GPU, no packing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from kit import arithmetic

LOSS_WINDOW = 10
"""Steps averaged into one point of the loss curve."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights. Learning rates warm up linearly, hold, and fall linearly to 0."""

    seed: int = 0
    steps: int = 2400
    batch_size: int = 16
    muon_lr: float = 0.012
    muon_weight_decay: float = 0.01
    adamw_lr: float = 3e-3
    warmup_steps: int = 50
    decay_share: float = 0.4
    max_grad_norm: float = 1.0
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32

    def lr_factor(self, step: int) -> float:
        """Share of the full learning rate at a step, counted from 0.

        >>> [round(Recipe(steps=100, warmup_steps=10).lr_factor(step), 2) for step in (0, 9, 59, 80, 99)]
        [0.1, 1.0, 1.0, 0.5, 0.03]
        """
        warmup = (step + 1) / self.warmup_steps
        decay = (self.steps - step) / (self.steps * self.decay_share)
        return min(1.0, warmup, decay)


def build_model(recipe: Recipe) -> Qwen3ForCausalLM:
    """An untrained model of the recipe's shape, fp32, initialised from its seed."""
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=arithmetic.VOCAB_SIZE,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=arithmetic.MAX_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).float()


def build_optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the (tied) embedding and the norms."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed_tokens" not in name else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.muon_weight_decay, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def batches(recipe: Recipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (input ids, labels), both `[batch, length]` int64; labels are -100 on the prompt and the padding."""
    rng = random.Random(recipe.seed)
    problems = arithmetic.stream("pretrain", rng)
    ids = arithmetic.build_tokenizer().get_vocab()
    while True:
        pairs = []
        for _ in range(recipe.batch_size):
            problem = next(problems)
            prompt = [ids[c] for c in arithmetic.prompt_text(problem)]
            completion = [ids[c] for c in arithmetic.completion_text(problem, rng)] + [ids["<eos>"]]
            pairs.append((prompt, completion))
        yield _pad(pairs)


def _pad(pairs: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pads: attention is causal, so the padding after a sequence changes nothing before it."""
    length = max(len(prompt) + len(completion) for prompt, completion in pairs)
    input_ids = torch.zeros(len(pairs), length, dtype=torch.long)
    labels = torch.full((len(pairs), length), -100)
    for row, (prompt, completion) in enumerate(pairs):
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor(prompt + completion)
        labels[row, len(prompt) : end] = torch.tensor(completion)
    return input_ids, labels


def train(
    recipe: Recipe, stop_after: int | None = None, report: Callable[[str], None] = print
) -> tuple[Qwen3ForCausalLM, list[dict[str, float]]]:
    """Runs the recipe and returns the model and the loss curve: a point every 50 steps [nats a completion token].

    `stop_after` ends early without changing the schedule, so the curve is the full run's as far as it goes.
    """
    model = build_model(recipe)
    optimizers = build_optimizers(model, recipe)
    full_lr = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    data = batches(recipe)
    losses, curve, began = [], [], time.monotonic()
    for step in range(recipe.steps if stop_after is None else stop_after):
        for optimizer, lr in zip(optimizers, full_lr, strict=True):
            optimizer.param_groups[0]["lr"] = lr * recipe.lr_factor(step)
        losses.append(_train_step(model, optimizers, *next(data), recipe.max_grad_norm))
        if (step + 1) % 50 == 0:
            recent = losses[-LOSS_WINDOW:]
            curve.append({"step": step + 1, "loss": round(sum(recent) / len(recent), 5)})
            report(f"step {step + 1}/{recipe.steps}  loss {curve[-1]['loss']:.4f}  {time.monotonic() - began:.0f} s")
    return model.eval(), curve


def _train_step(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    max_grad_norm: float,
) -> float:
    """One update of both optimizers; returns the mean cross-entropy over completion tokens [nats]."""
    hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    scored = targets != -100
    loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[scored]), targets[scored])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def generate(
    model: Qwen3ForCausalLM, prompts: list[str], samples: int, seed: int, max_new_tokens: int = 96
) -> list[list[str]]:
    """Completions as text, `[prompt][sample]`, by transformers; at temperature 1, or greedy if `samples` is 0.

    A completion that ended by itself keeps its `<eos>`.
    """
    tokenizer = arithmetic.build_tokenizer()
    torch.manual_seed(seed)
    width, completions = max(samples, 1), []
    for start in range(0, len(prompts), 64):
        chunk = prompts[start : start + 64]
        encoded = tokenizer(chunk, return_tensors="pt", padding=True)
        config = GenerationConfig(
            do_sample=samples > 0,
            top_k=0 if samples else None,
            num_return_sequences=width,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            eos_token_id=1,
        )
        output = model.generate(
            input_ids=encoded.input_ids, attention_mask=encoded.attention_mask, generation_config=config
        )
        texts = [text.replace("<pad>", "") for text in tokenizer.batch_decode(output[:, encoded.input_ids.shape[1] :])]
        completions += [texts[i : i + width] for i in range(0, len(texts), width)]
    return completions


def measure(model: Qwen3ForCausalLM, problems: int = 200, seed: int = 0) -> dict[str, float]:
    """Quality at temperature 1 (8 samples a problem) and greedy: on `test` problems, the band on `rl` problems.

    `rl_band` is the share of `rl` problems that 20 to 80 % of the samples get right: those that teach the most.
    `length` counts completion characters, one a token, without the end. Greedy uses the `test` problems too.
    """
    test = arithmetic.make_dataset("test", problems, seed)
    rl = arithmetic.make_dataset("rl", problems, seed)
    sampled = generate(model, test["prompt"], samples=8, seed=seed)
    rates = [_success_rate(texts, answer) for texts, answer in zip(sampled, test["answer"], strict=True)]
    greedy = generate(model, test["prompt"], samples=0, seed=seed)
    greedy_rates = [_success_rate(texts, answer) for texts, answer in zip(greedy, test["answer"], strict=True)]
    rl_sampled = generate(model, rl["prompt"], samples=8, seed=seed)
    rl_rates = [_success_rate(texts, answer) for texts, answer in zip(rl_sampled, rl["answer"], strict=True)]
    texts = [text for group in sampled for text in group]
    figures = {
        "pass_at_1": sum(rates) / len(rates),
        "pass_at_8": sum(rate > 0 for rate in rates) / len(rates),
        "greedy": sum(greedy_rates) / len(greedy_rates),
        "rl_pass_at_1": sum(rl_rates) / len(rl_rates),
        "rl_band": sum(0.2 <= rate <= 0.8 for rate in rl_rates) / len(rl_rates),
        "length": sum(len(text.removesuffix("<eos>")) for text in texts) / len(texts),
        "ended": sum(text.endswith("<eos>") for text in texts) / len(texts),
    }
    return {name: round(figure, 4) for name, figure in figures.items()} | {"problems": problems}


def _success_rate(texts: list[str], answer: str) -> float:
    rewards = arithmetic.correct_answer([text.removesuffix("<eos>") for text in texts], [answer] * len(texts))
    return sum(rewards) / len(rewards)


def save(model: Qwen3ForCausalLM, training: dict[str, object], out: Path) -> None:
    """Writes bfloat16 weights, tokenizer, generation config and `training.json`: all of it, or nothing."""
    unfinished = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
    try:
        # Plain sampling: engines take their defaults from this file, and any filter would bias log-probabilities.
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=1.0, top_p=1.0, top_k=0, pad_token_id=0, eos_token_id=1
        )
        model.to(torch.bfloat16).save_pretrained(unfinished)
        arithmetic.build_tokenizer().save_pretrained(unfinished)
        (unfinished / "training.json").write_text(json.dumps(training, indent=2) + "\n")
        unfinished.replace(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_free(out: Path) -> None:
    """Raises FileExistsError if anything but an empty folder is at `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} already holds files and is left as it is: choose a new folder for --out.")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kit.pretrain", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to create for the model")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected at least 1")
    check_free(options.out)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(seed=options.seed, steps=options.steps)
    began = time.monotonic()
    model, curve = train(recipe)
    seconds = time.monotonic() - began
    print(f"trained {sum(p.numel() for p in model.parameters()):,} parameters; measuring the bfloat16 weights ...")
    quality = measure(model.to(torch.bfloat16).float())
    training = {
        "recipe": asdict(recipe),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "seconds": round(seconds, 1),
        "loss": curve,
        "quality": quality,
    }
    save(model, training, options.out)
    print(f"saved {options.out}: {quality}")


if __name__ == "__main__":
    main()
