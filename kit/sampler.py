"""vLLM in this process, sampling from the base model plus a native adapter.

Scope: one engine at a time, token ids in, token ids and logprobs out. The adapter is never merged into the base
weights: it is written to memory-backed storage and loaded once per sync. Not here: when to sync (`kit.trainer`) and the
proof that a sync worked (`kit.probe`).
"""

import gc
import shutil
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from kit import engine
from kit.adapters import adapter_weights, write_adapter
from kit.cpu_half import float16_needs_help, widen_linears
from kit.errors import ArgumentError, KitError
from kit.precision import Precision
from kit.process_memory import return_freed_memory, used_memory_gib

# vLLM 0.31 replaces torch.set_num_threads by a function that does nothing when it builds a CPU engine.
_set_num_threads = torch.set_num_threads

# Parameters below which a model computes on one CPU thread.
SMALL_MODEL = 20e6

ADAPTER_NAME, ADAPTER_ID = "policy", 1


class SamplerClosed(KitError, RuntimeError):
    """A closed sampler was asked to work."""


@dataclass(frozen=True)
class Completion:
    """One sampled completion: its tokens, and the sampler's logprob of each [nats], NaN where it gave none."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


@dataclass(frozen=True)
class SamplingSettings:
    """How to sample. Anything but temperature makes the sampler's distribution another one than the trainer's."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def bias(self) -> str | None:
        """What makes logprobs of sampler and trainer differ although the weights agree; None when nothing does."""
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        used = [f"{name}={getattr(self, name)}" for name, value in off.items() if (getattr(self, name) or 0) != value]
        if not used:
            return None
        return (
            f"{', '.join(used)}: the sampler renormalises over the tokens it keeps, so its logprob of a kept token is "
            f"larger than the trainer's by -log(kept probability mass). The measured mismatch contains that offset."
        )


class VLLMSampler:
    """A vLLM engine in this process, in the contract's dtype.

    Args:
        path: folder of the model (config, weights, tokenizer).
        precision: the contract; weights, adapters and KV cache of the engine follow it.
        max_seq_length: prompt and completion together [tokens].
        max_lora_rank: largest adapter rank that can be loaded; 0 builds an engine without adapters.
        gpu_memory_utilization: share of the card that the engine may take, KV cache included. On a CPU it bounds the
            KV cache by this share of the free memory.
        max_num_seqs: completions sampled at once.
        start: "fast" (CUDA graphs of the decode step, no torch.compile), "compiled" (vLLM's default: starts a minute
            later), or "eager". A CPU engine is always eager.
        engine_arguments: further vLLM engine arguments, as they are.

    Raises:
        kit.engine.SamplerUnavailable: vLLM is missing or installed twice.
    """

    name = "vllm"

    def __init__(
        self,
        path: str | Path,
        precision: Precision,
        *,
        max_seq_length: int,
        max_lora_rank: int = 32,
        gpu_memory_utilization: float = 0.5,
        max_num_seqs: int = 64,
        start: str = "fast",
        seed: int = 0,
        engine_arguments: dict | None = None,
    ):
        vllm = engine.import_vllm()
        self.precision, self.path, self.max_seq_length = precision, str(path), max_seq_length
        self.version, self.max_lora_rank, self.max_num_seqs = vllm.__version__, max_lora_rank, max_num_seqs
        started = time.perf_counter()
        arguments = engine.arguments(
            self.path,
            precision,
            max_seq_length=max_seq_length,
            max_lora_rank=max_lora_rank,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_seqs=max_num_seqs,
            start=start,
            seed=seed,
        )
        self.llm = engine.build(vllm, arguments | (engine_arguments or {}))
        if float16_needs_help(precision.sampler_weights, "cuda" if torch.cuda.is_available() else "cpu"):
            self.llm.apply_model(widen_linears)
        self.start_seconds = time.perf_counter() - started
        self.weights_version = 0  # adapters loaded so far
        self._threads_before = torch.get_num_threads()
        _set_num_threads(_cpu_threads(self.llm))  # of this process: the trainer computes on them too
        self._adapter_dir = tempfile.mkdtemp(prefix="kit-adapter-", dir=_memory_backed())
        self._cleanup = weakref.finalize(self, shutil.rmtree, self._adapter_dir, ignore_errors=True)
        self._adapter_loaded, self._registered_shapes = False, {}

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self.llm is None

    def generate(
        self, prompts: list[list[int]], settings: SamplingSettings, seeds: list[int] | None = None
    ) -> list[Completion]:
        """One completion for each prompt (token ids), sampled from base + adapter.

        Args:
            prompts: token ids of each prompt; repeat a prompt to sample a group from it.
            settings: temperature, length and truncation.
            seeds: one seed a prompt; the same seed, prompt and weights give the same completion in any engine.
        """
        from vllm import SamplingParams

        self._check_prompts(prompts, settings.max_tokens)
        shared = {
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p,
            "stop": list(settings.stop) or None,
            "ignore_eos": settings.ignore_eos,
            "detokenize": bool(settings.stop),  # only stop strings need text
            "logprobs": 0,
            "flat_logprobs": True,  # lists of numbers, not an object a token
        }
        params = [SamplingParams(seed=seed, **shared) for seed in (seeds or [None] * len(prompts))]
        return [_completion(output.outputs[0]) for output in self._run(prompts, params)]

    def score(self, token_ids: list[int]) -> list[float]:
        """The sampler's logprob of each token but the first, given those before it [nats], at temperature 1."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=1.0, seed=0, prompt_logprobs=0, detokenize=False)
        (output,) = self._run([token_ids], [params])
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [entry[token].logprob for token, entry in pairs]

    def next_token_logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """log-probabilities of every next token, shape (vocabulary,), float32 [nats], at temperature 1."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=1.0, seed=0, logprobs=-1, detokenize=False)
        (output,) = self._run([token_ids], [params])
        entries = output.outputs[0].logprobs[0]
        logprobs = torch.full((max(entries) + 1,), -torch.inf)
        logprobs[list(entries)] = torch.tensor([entry.logprob for entry in entries.values()])
        return logprobs

    def _run(self, prompts, params):
        """The engine's outputs; torch's global generator is left as it was, unless requests without seed need it.

        vLLM on a CPU draws from it for seeded requests too. TRL shuffles with it, and a resumed run, which has probed
        once more, must shuffle as the unbroken one.
        """
        texts = [{"prompt_token_ids": token_ids} for token_ids in prompts]
        engine, adapter = self._engine(), self._adapter_request()
        seeded = all(request.seed is not None for request in params)
        with torch.random.fork_rng(devices=[], enabled=seeded):
            try:
                return engine.generate(texts, params, use_tqdm=False, lora_request=adapter)
            except BaseException:  # an interrupt too: what is left would be sampled along with the next call's prompts
                engine.llm_engine.abort_request(list(engine.llm_engine.output_processor.request_states), internal=True)
                raise

    def load_adapter(self, model) -> float:
        """Give the engine the PEFT model's current adapter; returns the seconds it took.

        The first time the adapter is registered from memory-backed files; after that its tensors are written in place.
        The prefix cache is emptied: it holds keys and values of the old weights.
        """
        started = time.perf_counter()
        weights = adapter_weights(model)
        shapes = {name: (low_rank.a.shape, low_rank.b.shape) for name, low_rank in weights.items()}
        if self._adapter_loaded and shapes == self._registered_shapes:
            self._engine().apply_model(lambda engine_model: write_adapter(engine_model, weights))
        else:  # the first one, or one of another rank or other modules, of which parts of the last would remain
            self._register_adapter(model)
            self._registered_shapes = shapes
        self._engine().reset_prefix_cache()
        self.weights_version += 1
        return time.perf_counter() - started

    def _register_adapter(self, model):
        from vllm.lora.request import LoRARequest

        model.save_pretrained(self._adapter_dir, selected_adapters=["default"])
        # load_inplace belongs here, and only here: in a request passed to generate() it reloads the adapter at every
        # scheduler step (42 s instead of 7 for a step of Qwen3-4B on an H200).
        if not self._engine().llm_engine.add_lora(
            LoRARequest(ADAPTER_NAME, ADAPTER_ID, self._adapter_dir, load_inplace=True)
        ):
            raise RuntimeError("vLLM refused the adapter. Its rank or target modules may not fit this engine.")
        self._adapter_loaded = True

    def drop_adapter(self) -> None:
        """Sample from the base model alone until an adapter is loaded again; the prefix cache is emptied."""
        self._engine().reset_prefix_cache()
        self._adapter_loaded = False

    def load_merged(self, model) -> float:
        """Give the engine base weights with the adapter merged in (`kit.merging`); returns the seconds it took."""
        from kit.merging import merged_weights

        started = time.perf_counter()
        weights = ((name, weight) for name, weight in merged_weights(model))
        self._engine().collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._engine().reset_prefix_cache()
        self._adapter_loaded = False
        self.weights_version += 1
        return time.perf_counter() - started

    def realised(self) -> dict[str, set[torch.dtype]]:
        """The dtypes that the engine's tensors really have, by field of the contract."""
        state = self._engine().apply_model(_tensor_dtypes)[0]
        runner = _model_runner(self._engine())
        caches = [t for entry in runner.kv_caches for t in (entry if isinstance(entry, (list, tuple)) else [entry])]
        return {**state, "kv_cache": {t.dtype for t in caches}}

    def close(self) -> float:
        """Shut the engine down; returns the memory that came back [GiB]. Closing twice is harmless."""
        if self.llm is None:
            return 0.0
        from vllm.distributed import cleanup_dist_env_and_memory

        before = used_memory_gib()
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()
        self._cleanup()
        return_freed_memory()
        return max(0.0, before - used_memory_gib())

    def _engine(self):
        if self.llm is None:
            raise SamplerClosed("This sampler was closed. Load the model again with FastLanguageModel.from_pretrained.")
        return self.llm

    def _adapter_request(self):
        if not self._adapter_loaded:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(ADAPTER_NAME, ADAPTER_ID, self._adapter_dir)

    def _check_prompts(self, prompts, max_tokens):
        longest = max(map(len, prompts), default=0)
        if longest + max_tokens > self.max_seq_length:
            raise ArgumentError(
                f"The longest prompt has {longest} tokens and {max_tokens} more may be sampled, but max_seq_length is "
                f"{self.max_seq_length}. Load the model with max_seq_length={longest + max_tokens} or more, or sample "
                f"fewer tokens."
            )


def _cpu_threads(llm) -> int:
    """CPU threads that suit a model. A small one's step is thousands of parallel regions of microseconds each: a second
    thread wins a sixth of the time on an idle machine and costs ten times as much when another process takes its core.
    """
    parameters = llm.apply_model(lambda model: sum(p.numel() for p in model.parameters()))[0]
    return 1 if parameters < SMALL_MODEL else torch.get_num_threads()


def _completion(output) -> Completion:
    flat = output.logprobs
    logprobs = [flat.logprobs[start] if start < end else float("nan") for start, end in _positions(flat)]
    return Completion(list(output.token_ids), logprobs, output.finish_reason)


def _positions(flat):
    """(start, end) of each position's entries; the sampled token's entry comes first."""
    return zip(flat.start_indices, flat.end_indices, strict=True)


def _tensor_dtypes(model) -> dict[str, set[torch.dtype]]:
    """Runs inside the engine: dtypes of base weights and of stacked adapters."""
    adapters, weights = set(), set()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            weights.add(parameter.dtype)
    for module in model.modules():
        for stacked in (*getattr(module, "lora_a_stacked", ()), *getattr(module, "lora_b_stacked", ())):
            adapters.add(stacked.dtype)
    return {"sampler_weights": weights, "sampler_adapters": adapters}


def _model_runner(llm):
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def _memory_backed():
    """/dev/shm where there is room for adapters, else the default temporary folder."""
    shm = Path("/dev/shm")
    return str(shm) if shm.is_dir() and shutil.disk_usage(shm).free > 2**29 else None
