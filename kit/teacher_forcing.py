"""The same tokens scored again: by the sampler through vLLM's prompt logprobs, by the trainer through one forward pass.

Two engines never sample the same text, so settings are compared on texts that were sampled once. Everything here
returns logprobs of completion tokens, sequences x longest completion, float32 on the CPU [nats], NaN outside the mask.
Temperature is 1 everywhere; vLLM's prompt logprobs know no other.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kit.cpu_half import trainer_arithmetic
from kit.errors import ArgumentError
from kit.precision import Precision


@dataclass(frozen=True)
class Texts:
    """Prompts and their completions as token ids."""

    prompts: list[list[int]]
    completions: list[list[int]]

    def __post_init__(self):
        if not any(self.completions) or len(self.prompts) != len(self.completions) or not all(self.prompts):
            raise ArgumentError(
                f"{len(self.prompts)} prompts and {sum(map(bool, self.completions))} completions with tokens; expected "
                f"a completion a prompt, no empty prompt, and at least one token to score."
            )

    @property
    def whole(self) -> list[list[int]]:
        """Prompt and completion of each text."""
        return [prompt + completion for prompt, completion in zip(self.prompts, self.completions, strict=True)]

    @property
    def longest(self) -> int:
        """Tokens of the longest text, prompt included."""
        return max(map(len, self.whole))

    @property
    def mask(self) -> torch.Tensor:
        """True on completion tokens, sequences x longest completion."""
        lengths = torch.tensor([len(completion) for completion in self.completions])
        return torch.arange(int(lengths.max()))[None] < lengths[:, None]

    def align(self, rows: Sequence[Sequence[float]]) -> torch.Tensor:
        """Values of each whole text's tokens but the first -> those of its completion, sequences x longest completion.

        A row that already belongs to the completion alone is taken as it is.
        """
        aligned = torch.full(self.mask.shape, torch.nan)
        for index, (row, completion) in enumerate(zip(rows, self.completions, strict=True)):
            if completion:
                aligned[index, : len(completion)] = torch.as_tensor(row, dtype=torch.float32)[-len(completion) :]
        return aligned


def sample_texts(sampler, prompts: list[list[int]], settings, seed: int = 0) -> tuple[Texts, torch.Tensor]:
    """One completion a prompt, and the logprobs that the sampler gave while it sampled.

    Args:
        sampler: `kit.sampler.VLLMSampler`.
        prompts: token ids.
        settings: `kit.sampler.SamplingSettings`.
        seed: of the sampling.
    """
    from kit.rollout import request_seed

    seeds = [request_seed(seed, 0, index) for index in range(len(prompts))]
    completions = sampler.generate(prompts, settings, seeds)
    texts = Texts(prompts, [completion.token_ids for completion in completions])
    return texts, texts.align([completion.logprobs for completion in completions])


# ---- the sampler


def check_sizes(path: str, sequences: int, tokens: int, longest_prompt: int) -> None:
    """Refuse what cannot be measured before anything is loaded.

    Raises:
        kit.errors.ArgumentError: no sequences, no tokens, or more tokens than the model has positions for.
    """
    from kit.length import context_of

    if sequences < 1 or tokens < 1:
        raise ArgumentError(f"{sequences} sequences of {tokens} tokens cannot be measured; expected at least 1 of 1.")
    room = context_of(path) - longest_prompt - 1  # scoring asks the engine for one token more
    if tokens > room:
        raise ArgumentError(
            f"tokens is {tokens}; this model's context leaves room for {room} after a prompt of {longest_prompt}."
        )


def open_sampler(path: str, dtype: str, texts_length: int, sequences: int, **more):
    """A vLLM engine without adapters for texts of this length; the kit's previous one is closed first."""
    from kit import loading
    from kit.sampler import VLLMSampler

    loading.close_current()
    arguments = {"max_lora_rank": 0, "max_seq_length": texts_length + 1, "max_num_seqs": min(sequences, 64)} | more
    sampler = VLLMSampler(path, Precision.of(dtype), **arguments)
    loading._current.append(sampler)
    return sampler


def sampler_scores(sampler, texts: Texts, *, together: bool = True) -> torch.Tensor:
    """The sampler's logprobs of the completions.

    Args:
        sampler: `kit.sampler.VLLMSampler`.
        together: all texts in one call, which the engine batches as it likes; False scores one after the other.
    """
    if together:
        from vllm import SamplingParams

        settings = {"max_tokens": 1, "temperature": 1.0, "seed": 0, "prompt_logprobs": 0, "detokenize": False}
        outputs = sampler._run(texts.whole, [SamplingParams(**settings) for _ in texts.whole])
        rows = [_prompt_logprobs(output, text) for output, text in zip(outputs, texts.whole, strict=True)]
    else:
        rows = [sampler.score(text) for text in texts.whole]
    return texts.align(rows)


def _prompt_logprobs(output, text, known=0):
    """A row of logprobs of the text's tokens but the first; NaN for the first `known`, which came from the cache."""
    pairs = list(zip(text[1:], output.prompt_logprobs[1:], strict=True))
    return [torch.nan] * min(known, len(pairs)) + [entry[token].logprob for token, entry in pairs[known:]]


def sampler_scores_cached(sampler, texts: Texts) -> tuple[torch.Tensor, int]:
    """(logprobs with the start of each text from a warm prefix cache, tokens that came from the cache).

    vLLM keeps whole blocks only, so short texts have none. What it returns for the tokens of a cached block is not
    theirs (vLLM 0.31 leaves that memory unwritten), so those are NaN here.
    """
    from vllm import SamplingParams

    settings = {"max_tokens": 1, "temperature": 1.0, "seed": 0, "detokenize": False}
    sampler.llm.reset_prefix_cache()  # of earlier calls, which would leave next to nothing to score
    half = [text[: len(text) // 2] for text in texts.whole]
    sampler._run(half, [SamplingParams(**settings)] * len(half))
    params = SamplingParams(**settings, prompt_logprobs=0, skip_reading_prefix_cache=False)
    outputs = sampler._run(texts.whole, [params] * len(texts.whole))
    rows, cached = [], 0
    for output, text in zip(outputs, texts.whole, strict=True):
        known = output.num_cached_tokens or 0
        rows.append(_prompt_logprobs(output, text, known))
        cached += known
    return texts.align(rows), cached


def sampler_kernels(sampler) -> dict:
    """What the engine computes with: {"attention": names of its backends, "eager": no captured or compiled code}."""
    names = sampler.llm.apply_model(
        lambda model: {m.get_attn_backend().get_name() for m in model.modules() if hasattr(m, "get_attn_backend")}
    )[0]
    eager = sampler.llm.llm_engine.vllm_config.model_config.enforce_eager
    return {"attention": ", ".join(sorted(names)), "eager": bool(eager)}


@contextlib.contextmanager
def float32_head(sampler) -> Iterator[bool]:
    """Within the block the sampler multiplies by its head in float32; yields False where this vLLM cannot.

    vLLM 0.31 reads the dtype from its logits module at each call (`hf_overrides={"head_dtype": "float32"}` sets it).
    """
    changed = sampler.llm.apply_model(lambda model: _logits_modules(model))[0]
    before = [module.head_dtype for module in changed]
    for module in changed:
        module.head_dtype = torch.float32
    try:
        yield bool(changed)
    finally:
        for module, dtype in zip(changed, before, strict=True):
            module.head_dtype = dtype


def _logits_modules(model):
    return [module for module in model.modules() if hasattr(module, "head_dtype")]


# ---- the trainer


def trainer_scores(
    model, texts: Texts, precision: Precision, *, head_float32: bool = False, batch: int = 16, forward=None
) -> torch.Tensor:
    """The trainer's logprobs of the completions, in the contract's arithmetic.

    Args:
        model: a transformers causal model, or a PEFT model around one.
        precision: its contract; autocast and float16 products follow it.
        head_float32: multiply the last hidden states by the head in float32 instead.
        batch: texts in one forward pass, padded on the right.
        forward: what to call instead of the model, for instance its compiled version.
    """
    rows, forward = [], model if forward is None else forward  # a compiled model has no truth value
    for start in range(0, len(texts.whole), batch):
        rows += _trainer_batch(model, texts.whole[start : start + batch], precision, head_float32, forward)
    return texts.align(rows)


def _trainer_batch(model, batch, precision, head_float32, forward):
    """A row of logprobs a text, of its tokens but the first."""
    lengths = torch.tensor([len(text) for text in batch])
    ids = torch.zeros(len(batch), int(lengths.max()), dtype=torch.long)
    for index, text in enumerate(batch):
        ids[index, : len(text)] = torch.tensor(text)
    inputs = {"input_ids": ids, "attention_mask": torch.arange(ids.shape[1])[None] < lengths[:, None]}
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    with torch.no_grad():
        if head_float32:
            logits = _float32_head_logits(model, inputs, precision)
        else:
            with trainer_arithmetic(precision, model.device.type):
                logits = forward(**inputs, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1)
        chosen = logprobs.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0].cpu()
    return [row[: length - 1] for row, length in zip(chosen, lengths.tolist(), strict=True)]


def _float32_head_logits(model, inputs, precision):
    """Logits whose product with the head is float32, from the hidden states of the contract."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    with trainer_arithmetic(precision, model.device.type):
        hidden = getattr(causal, causal.base_model_prefix)(**inputs, use_cache=False).last_hidden_state
    head = causal.get_output_embeddings()
    bias = None if head.bias is None else head.bias.float()
    return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)
