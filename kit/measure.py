"""Offline mismatch: sample with the sampler, score the same tokens with the trainer, compare. No training.

`python -m kit mismatch` does it for several dtypes in turn, each from the same checkpoint.
"""

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass

import torch

from kit.mismatch import KEYS, mismatch_metrics


@dataclass(frozen=True)
class Measurement:
    """Logprobs of the same tokens by both sides, sequences x tokens [nats], with the mask of real tokens."""

    trainer_logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor
    mask: torch.Tensor

    @property
    def tokens(self) -> int:
        """How many tokens were compared."""
        return int(self.mask.sum())

    def metrics(self) -> dict:
        """All `mismatch/*` keys."""
        return mismatch_metrics(self.trainer_logprobs, self.sampler_logprobs, self.mask)


def measure_mismatch(model, tokenizer, prompts: list[str], settings, *, seed: int = 0, batch: int = 32) -> Measurement:
    """Sample one completion a prompt and score it on both sides, at the sampling temperature.

    Args:
        model: loaded by `FastLanguageModel`; the sampler gets the adapter it carries, or none.
        prompts: texts; repeat one to sample it more than once.
        settings: `kit.sampler.SamplingSettings`.
        seed: of the sampling.
        batch: sequences in one trainer forward pass.
    """
    from kit.rollout import sample_policy

    prompt_ids = tokenizer(prompts).input_ids
    completions = sample_policy(model, prompt_ids, settings, seed)
    width = max(len(c.token_ids) for c in completions)
    shape = (len(prompts), width)
    trainer, sampled, mask = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for index, completion in enumerate(completions):
        length = len(completion.token_ids)
        sampled[index, :length], mask[index, :length] = torch.tensor(completion.logprobs), True
    for start in range(0, len(prompts), batch):
        rows = slice(start, start + batch)
        texts = [p + c.token_ids for p, c in zip(prompt_ids[rows], completions[rows], strict=True)]
        scores = _score_batch(model, texts, settings.temperature, tokenizer.pad_token_id)
        for index, (prompt, text) in enumerate(zip(prompt_ids[rows], texts, strict=True), start):
            trainer[index, : len(text) - len(prompt)] = scores[index - start, len(prompt) - 1 : len(text) - 1]
    return Measurement(trainer, sampled, mask)


def _score_batch(model, texts, temperature, pad_token_id):
    """Logprob of each token but the first, texts x (longest - 1), right-padded; float32 on the CPU."""
    from kit.cpu_half import trainer_arithmetic

    lengths = [len(t) for t in texts]
    ids = torch.full((len(texts), max(lengths)), pad_token_id)
    for index, text in enumerate(texts):
        ids[index, : len(text)] = torch.tensor(text)
    attention = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
    device = model.device
    with torch.no_grad(), trainer_arithmetic(model.kit.precision, device.type):
        logits = model(input_ids=ids.to(device), attention_mask=attention.to(device), use_cache=False).logits
    logprobs = torch.log_softmax(logits[:, :-1].float() / temperature, -1)
    return logprobs.gather(-1, ids[:, 1:, None].to(device))[..., 0].cpu()


def mismatch_by_dtype(model_name: str, dtypes: list[str], *, sequences: int, tokens: int, seed: int = 0) -> dict:
    """Measure the mismatch of one model in several dtypes, one engine after the other.

    Returns:
        {"model", "sequences", "hardware", "versions", "dtypes": {name: {"tokens", every `mismatch/*` key}}}.
    """
    from kit import arithmetic, provenance
    from kit.loading import FastLanguageModel, close_current
    from kit.sampler import SamplingSettings

    prompts = arithmetic.make_dataset("test", min(sequences, 256), seed)["prompt"]
    prompts = [prompts[i % len(prompts)] for i in range(sequences)]
    found = {}
    for name in dtypes:
        model, tokenizer = FastLanguageModel.from_pretrained(model_name, max_seq_length=tokens + 64, dtype=name)
        measured = measure_mismatch(model, tokenizer, prompts, SamplingSettings(max_tokens=tokens), seed=seed)
        found[name] = {"tokens": measured.tokens} | measured.metrics()
        del model
    close_current()
    origin = {"hardware": provenance.machine(), "versions": provenance.versions()}
    return {"model": model_name, "sequences": sequences, "seed": seed, **origin, "dtypes": found}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit mismatch`."""
    parser.add_argument("--model", default="tiny", help="tiny, a folder, or a name on the hub")
    parser.add_argument("--dtypes", default="float32,float16,bfloat16", help="comma-separated")
    parser.add_argument("--sequences", type=int, default=256, help="completions to sample in each dtype")
    parser.add_argument("--tokens", type=int, default=96, help="longest completion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")


def run(args: argparse.Namespace) -> int:
    """`python -m kit mismatch`: measure, print, return the exit status."""
    dtypes = [name.strip() for name in args.dtypes.split(",") if name.strip()]
    with contextlib.redirect_stdout(sys.stderr):  # notes on the way; standard output has the result alone
        result = mismatch_by_dtype(args.model, dtypes, sequences=args.sequences, tokens=args.tokens, seed=args.seed)
    print(json.dumps(result, indent=2) if args.json else mismatch_table(result))
    return 0


def mismatch_table(result: dict) -> str:
    """The result of `mismatch_by_dtype` as a text table: a row a metric, a column a dtype."""
    names = list(result["dtypes"])
    lines = [f"{'':24}" + "".join(f"{name:>14}" for name in names)]
    for key in ("tokens", *KEYS):
        values = [result["dtypes"][name][key] for name in names]
        lines.append(f"{key:24}" + "".join(f"{'none' if v is None else format(v, '.4g'):>14}" for v in values))
    return "\n".join(lines)
