"""A sampler by transformers: the same interface as vLLM's, for machines where vLLM cannot run.

Slower (the H200 sampled 265 tokens/s with it and 7,072 with vLLM, 32 sequences), and not the engine whose mismatch this
kit is about: it shares the trainer's kernels. It says so when it is built.
"""

import contextlib
import time

import torch

from kit.cpu_half import trainer_arithmetic
from kit.errors import ArgumentError
from kit.precision import Precision
from kit.probe import next_token_logprobs, trainer_score
from kit.sampler import Completion, SamplerClosed, SamplingSettings


class TransformersSampler:
    """Samples from the trainer's own model, in batches, in the contract's dtype.

    Args:
        model: the trainer's base model; the adapter given to `load_adapter` is used from then on.
        tokenizer: for padding and end tokens.
        precision: the contract.
        max_seq_length: prompt and completion together [tokens].
    """

    name = "transformers"

    def __init__(self, model, tokenizer, precision: Precision, *, max_seq_length: int):
        import transformers

        self._model, self.tokenizer, self.precision, self.max_seq_length = model, tokenizer, precision, max_seq_length
        self._adapter_off = contextlib.nullcontext
        self.version, self.start_seconds, self.weights_version = transformers.__version__, 0.0, 0
        print(
            "Sampling with transformers, not vLLM: expect tens of times less speed, and a mismatch between two uses of "
            "the same kernels rather than between vLLM and PyTorch."
        )

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._model is None

    @property
    def model(self):
        """The model it samples from; raises SamplerClosed after `close`."""
        if self._model is None:
            raise SamplerClosed("This sampler was closed. Load the model again with FastLanguageModel.from_pretrained.")
        return self._model

    def load_adapter(self, model) -> float:
        """Sample from this PEFT model from now on; its adapter is used in place, nothing is copied."""
        started = time.perf_counter()
        self._model, self._adapter_off = model, contextlib.nullcontext
        self.weights_version += 1
        return time.perf_counter() - started

    def drop_adapter(self) -> None:
        """Sample from the base model again."""
        if hasattr(self.model, "disable_adapter"):
            self._adapter_off = self.model.disable_adapter

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], settings: SamplingSettings, seeds: list[int] | None = None
    ) -> list[Completion]:
        """One completion a prompt. The first seed seeds the whole batch: transformers has one generator."""
        device = self.model.device
        self._check_length(prompts, settings)
        batch = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(device)
        random_state = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        training = self.model.training
        self.model.eval()
        with random_state, self._adapter_off(), trainer_arithmetic(self.precision, device.type):
            if seeds:
                torch.manual_seed(seeds[0])
            output = self.model.generate(
                **batch,
                **_generation_arguments(settings, self.tokenizer),
                return_dict_in_generate=True,
                output_logits=True,
            )
        self.model.train(training)
        new = output.sequences[:, batch["input_ids"].shape[1] :]
        logits = torch.stack(output.logits, 1).float() / settings.temperature
        logprobs = torch.log_softmax(logits, -1).gather(-1, new[..., None])[..., 0]
        return [self._cut(ids, values) for ids, values in zip(new.tolist(), logprobs.tolist(), strict=True)]

    def score(self, token_ids: list[int]) -> list[float]:
        """logprob of each token but the first [nats], at temperature 1."""
        with self._adapter_off():
            return trainer_score(self.model, token_ids, self.precision).tolist()

    def next_token_logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """log-probabilities of every next token, shape (vocabulary,), float32 [nats]."""
        with self._adapter_off():
            return next_token_logprobs(self.model, token_ids, self.precision)[-1].cpu()

    def realised(self) -> dict[str, set]:
        """The dtypes of base weights and adapters in use; keys and values have the dtype of the activations."""
        named = [(n, p.dtype) for n, p in self.model.named_parameters() if p.is_floating_point()]
        base = {dtype for name, dtype in named if "lora_" not in name}
        # adapters are float32 here and rounded by autocast at each product, as in the trainer
        return {"sampler_weights": base, "sampler_adapters": {self.precision.sampler_adapters}, "kv_cache": base}

    def close(self) -> float:
        """Let go of the model; the trainer may still hold it, so no memory is promised back."""
        self._model = None
        return 0.0

    def _cut(self, ids, logprobs):
        """Everything up to and with the end token."""
        ends = [i for i, token in enumerate(ids) if token == self.tokenizer.eos_token_id]
        length = ends[0] + 1 if ends else len(ids)
        return Completion(ids[:length], logprobs[:length], "stop" if ends else "length")

    def _check_length(self, prompts, settings):
        longest = max(map(len, prompts))
        if longest + settings.max_tokens > self.max_seq_length:
            raise ArgumentError(
                f"The longest prompt has {longest} tokens and {settings.max_tokens} more may be sampled, but "
                f"max_seq_length is {self.max_seq_length}."
            )


def _generation_arguments(settings, tokenizer):
    arguments = {"max_new_tokens": settings.max_tokens, "do_sample": settings.temperature > 0}
    arguments |= {"eos_token_id": None if settings.ignore_eos else tokenizer.eos_token_id}
    arguments |= {"pad_token_id": tokenizer.pad_token_id}
    if settings.temperature > 0:
        arguments |= {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
        arguments |= {"min_p": settings.min_p or None}
    if settings.stop:
        arguments |= {"stop_strings": list(settings.stop), "tokenizer": tokenizer}
    return arguments
