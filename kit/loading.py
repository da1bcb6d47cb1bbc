"""Loading: one dtype in, a trainer model, its tokenizer and a sampler out, all three under one contract.

The call is that of Unsloth's documentation; only the import changes. Not here: training (`kit.trainer`).
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kit import engine, four_bit
from kit.errors import ArgumentError, KitError
from kit.precision import Precision

TINY = Path(__file__).parent / "models" / "tiny"

TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ModelNotFound(KitError, OSError):
    """The model is neither bundled, nor a usable local folder, nor to be had from the hub."""


@dataclass
class Loaded:
    """What the kit knows of a loaded model; `model.kit` holds it.

    `shared_weights` says whether the trainer's base weights are views of the sampler's or a second copy, and why.
    """

    precision: Precision
    path: str
    sampler: "object | None"
    max_seq_length: int
    max_lora_rank: int
    shared_weights: str
    gradient_checkpointing: bool = False


# The sampler of the last load. There is one engine a process: loading again frees it first.
_current: list = []


def close_current() -> float:
    """Close the sampler of the last load, if there is one; returns the memory that came back [GiB]."""
    return sum(_current.pop().close() for _ in range(len(_current)))


class FastLanguageModel:
    """Namespace of the two loading calls, named as in Unsloth."""

    @staticmethod
    def from_pretrained(
        model_name: str = "tiny",
        max_seq_length: int = 2048,
        dtype: "str | torch.dtype | None" = None,
        load_in_4bit: bool = False,
        fast_inference: bool = True,
        max_lora_rank: int = 32,
        gpu_memory_utilization: float = 0.5,
        *,
        max_num_seqs: int = 64,
        random_state: int = 3407,
        start: str = "fast",
        vllm_arguments: dict | None = None,
    ):
        """Load a causal language model for training and, next to it, the sampler that will speak for it.

        Args:
            model_name: "tiny" (bundled), a local folder, or a name on the Hugging Face hub.
            max_seq_length: prompt and completion together [tokens].
            dtype: float16, bfloat16, float32 (names or torch dtypes); None or "auto" lets the hardware decide and says
                why. It fixes every dtype of the run, see `kit.Precision`.
            load_in_4bit: 4-bit base weights; needs a GPU and bitsandbytes.
            fast_inference: sample with vLLM; False samples with transformers, slower and without an engine.
            max_lora_rank: largest adapter rank that `get_peft_model` will accept.
            gpu_memory_utilization: share of the card for the sampler (of the free memory, on a CPU).
            max_num_seqs: completions sampled at once.
            random_state: seed of the engine.
            start: "fast", "compiled" or "eager": see `kit.sampler.VLLMSampler`.
            vllm_arguments: further vLLM engine arguments.

        Returns:
            (model, tokenizer); `model.kit` holds precision and sampler, `model.fast_generate` samples.

        Raises:
            ModelNotFound, kit.precision.PrecisionError, kit.engine.SamplerUnavailable, kit.errors.ArgumentError.
        """
        _check_numbers(max_seq_length, max_lora_rank, gpu_memory_utilization, max_num_seqs)
        engine.check_start(start)
        precision = Precision.of(dtype)
        path = resolve(model_name)
        four_bit.check_four_bit(load_in_4bit, fast_inference)
        tokenizer = _load_tokenizer(path)
        _check_context(path, max_seq_length)
        _check_memory(
            path, precision, max_seq_length, max_lora_rank, gpu_memory_utilization, fast_inference, load_in_4bit
        )
        freed = close_current()  # only now: a call that cannot work leaves the previous model as it is
        if freed:
            print(f"Closed the previous sampler; {freed:.2f} GiB came back.")
        if fast_inference:
            from kit.sampler import VLLMSampler

            sampler = VLLMSampler(
                path,
                precision,
                max_seq_length=max_seq_length,
                max_lora_rank=max_lora_rank,
                gpu_memory_utilization=gpu_memory_utilization,
                max_num_seqs=max_num_seqs,
                start=start,
                seed=random_state,
                engine_arguments=(four_bit.engine_arguments() if load_in_4bit else {}) | (vllm_arguments or {}),
            )
            _current.append(sampler)
        if load_in_4bit:
            model, weights = four_bit.trainer_model(path, precision), "a second copy, in 4 bits like the first"
        elif fast_inference:
            model, weights = _shared_or_copy(path, precision, sampler)
        else:
            model = _load_trainer_model(path, precision)
        if not fast_inference:
            from kit.transformers_sampler import TransformersSampler

            weights = "one copy, the sampler uses the trainer's"
            sampler = TransformersSampler(model, tokenizer, precision, max_seq_length=max_seq_length)
        model.kit = Loaded(precision, path, sampler, max_seq_length, max_lora_rank, weights)
        _add_fast_generate(model, tokenizer)
        return model, tokenizer

    @staticmethod
    def get_peft_model(
        model,
        r: int = 16,
        target_modules: "list[str] | tuple[str, ...]" = TARGET_MODULES,
        lora_alpha: int = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        use_gradient_checkpointing: "bool | str" = False,
        random_state: int = 3407,
        use_rslora: bool = False,
    ):
        """Add a LoRA adapter: float32 parameters on the frozen base, whatever the contract's dtype.

        Args:
            r, lora_alpha, target_modules, bias, use_rslora: as in `peft.LoraConfig`.
            lora_dropout: must be 0: the sampler has no dropout, and the two sides would differ by it.
            use_gradient_checkpointing: recompute activations in the backward pass ("unsloth" means True).
            random_state: seed of the adapter's initial values.

        Returns:
            A `peft.PeftModel`.

        Raises:
            kit.errors.ArgumentError: rank beyond `max_lora_rank`, dropout, or unknown target modules.
        """
        from peft import LoraConfig, get_peft_model

        loaded = _loaded(model)
        _check_adapter(loaded, model, r, target_modules, lora_dropout, bias)
        config = LoraConfig(
            r=r,
            lora_alpha=lora_alpha,
            target_modules=list(target_modules),
            lora_dropout=0.0,
            bias=bias,
            use_rslora=use_rslora,
            task_type="CAUSAL_LM",
        )
        torch.manual_seed(random_state)
        peft_model = get_peft_model(model, config, autocast_adapter_dtype=True)
        peft_model.kit = replace(loaded, gradient_checkpointing=bool(use_gradient_checkpointing))
        return peft_model


def resolve(model_name: str) -> str:
    """Folder of the model's files: bundled, local, or downloaded from the hub.

    Raises:
        ModelNotFound: nothing usable under that name; says what is missing and what to do.
    """
    if model_name == "tiny":
        return str(TINY)
    folder = Path(model_name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return str(folder)
    if model_name.startswith((".", "/", "~")):
        raise ModelNotFound(f"There is no folder {model_name}. Give 'tiny', an existing folder, or a name on the hub.")
    return _download(model_name)


def _check_folder(folder):
    needed = {
        "a config.json": ("config.json",),
        "a tokenizer": ("tokenizer.json", "vocab.json", "tokenizer.model"),
        "weights": ("*.safetensors", "*.bin"),
    }
    for what, patterns in needed.items():
        if not any(path.is_file() for pattern in patterns for path in folder.glob(pattern)):
            raise ModelNotFound(
                f"The model folder {folder} has no {' or '.join(patterns)}. Expected {what} there; save the model "
                f"with model.save_pretrained() and tokenizer.save_pretrained()."
            )


def _download(model_name):
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return snapshot_download(model_name, allow_patterns=patterns)
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise ModelNotFound(
            f"The model {model_name!r} could not be had from the Hugging Face hub{offline}: "
            f"{str(error).splitlines()[0]} Check the name and the connection (and HF_TOKEN for gated models), give a "
            f"local folder, or use model_name='tiny', which needs no network."
        ) from error


def _check_numbers(max_seq_length, max_lora_rank, gpu_memory_utilization, max_num_seqs):
    if max_seq_length < 2:
        raise ArgumentError(
            f"max_seq_length is {max_seq_length}; expected at least 2 tokens (a prompt and a completion)."
        )
    if max_lora_rank < 0 or max_lora_rank > 512:
        raise ArgumentError(f"max_lora_rank is {max_lora_rank}; expected 1 to 512 (0 for an engine without adapters).")
    if not 0 < gpu_memory_utilization <= 1:
        raise ArgumentError(f"gpu_memory_utilization is {gpu_memory_utilization}; expected a share above 0, at most 1.")
    if max_num_seqs < 1:
        raise ArgumentError(f"max_num_seqs is {max_num_seqs}; expected at least 1.")


def _check_context(path, max_seq_length):
    from transformers import AutoConfig

    longest = AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings
    if max_seq_length > longest:
        raise ArgumentError(
            f"max_seq_length is {max_seq_length}, but this model's positions end at {longest}. "
            f"Use max_seq_length={longest} or less."
        )


def _check_memory(path, precision, max_seq_length, max_lora_rank, gpu_memory_utilization, fast_inference, four_bit):
    """Refuse what cannot fit before anything loads; a family that the planner does not know is tried as it is."""
    from kit import hardware
    from kit.plan import check_arguments
    from kit.shapes import UnknownModel

    found = hardware.detect()
    if _current:  # what is free now says nothing: the previous sampler goes first
        found = replace(found, free_gib=None)
    try:
        check_arguments(
            path, max_seq_length, max(1, max_lora_rank), gpu_memory_utilization, four_bit, found,
            dtype=precision.name, fast_inference=fast_inference,
        )  # fmt: skip
    except UnknownModel as unknown:
        print(f"No memory plan: {unknown}")


def _load_tokenizer(path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _shared_or_copy(path, precision, sampler):
    """(trainer model, how its weights are held): views of vLLM's where that is possible, else a second copy."""
    from kit.shared_weights import CannotShare, shared_model

    try:
        return shared_model(path, sampler, precision), "shared with the sampler"
    except CannotShare as reason:
        return _load_trainer_model(path, precision), f"a second copy ({reason})"


def _load_trainer_model(path, precision):
    """The frozen base in the contract's dtype, on the GPU when there is one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=precision.base_weights)
    model.requires_grad_(False)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _loaded(model) -> Loaded:
    try:
        return model.kit
    except AttributeError:
        raise ArgumentError(
            f"This {type(model).__name__} carries no precision contract. Load it with "
            f"kit.FastLanguageModel.from_pretrained(..., dtype=...)."
        ) from None


def _check_adapter(loaded, model, r, target_modules, lora_dropout, bias):
    if not 1 <= r <= loaded.max_lora_rank:
        raise ArgumentError(
            f"The adapter's rank r is {r}; the sampler was built for ranks 1 to {loaded.max_lora_rank}. "
            f"Load the model with max_lora_rank={max(r, 1)} or more, or lower r."
        )
    if lora_dropout:
        raise ArgumentError(
            f"lora_dropout is {lora_dropout}; expected 0. The sampler applies no dropout, so trainer and sampler would "
            f"disagree by it, and no dtype could close that gap."
        )
    if bias != "none":
        raise ArgumentError(f"bias is {bias!r}; expected 'none': vLLM's native adapters carry no bias.")
    layers = engine.linear_layers(model)
    unknown = sorted(set(target_modules) - layers)
    if unknown or not target_modules:
        raise ArgumentError(
            f"target_modules {unknown or list(target_modules)} cannot carry an adapter here; the linear layers of this "
            f"model that can are {', '.join(sorted(layers))}. (The sampler has none on the output layer.)"
        )


def _add_fast_generate(model, tokenizer):
    """`model.fast_generate(texts, settings)`, as in Unsloth: text in, text out, through the sampler."""

    def fast_generate(prompts: "str | list[str]", settings=None, seeds=None) -> list[str]:
        from kit.sampler import SamplingSettings

        prompts = [prompts] if isinstance(prompts, str) else prompts
        settings = settings or SamplingSettings(max_tokens=model.kit.max_seq_length // 2)
        completions = model.kit.sampler.generate(tokenizer(prompts).input_ids, settings, seeds)
        return tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)

    model.fast_generate = fast_generate
