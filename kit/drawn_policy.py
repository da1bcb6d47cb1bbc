"""A policy to measure without training one: the base model plus a LoRA adapter whose numbers are drawn.

After training, weights are no longer exact in a 16-bit format, and merging an adapter rounds. A checkpoint as it is
published is often stored in bfloat16, where rounding its weights would change nothing and show nothing.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

from kit.engine import linear_layers
from kit.loading import TARGET_MODULES
from kit.precision import Precision

RANK, ALPHA = 8, 16


@dataclass(frozen=True)
class PolicyFolders:
    """The merged policy as checkpoints: weights in float32, the same rounded to the coarse dtype, and where they are
    from."""

    base: str
    exact: str
    coarse: str


def draw_adapter(model, spread: float, seed: int):
    """The model with a float32 LoRA adapter on every linear layer; the same seed gives the same numbers.

    Args:
        model: a transformers causal model of any dtype.
        spread: standard deviation of the entries of B (training moves them from 0 by some hundredths).
        seed: of the draws.

    Returns:
        A `peft.PeftModel`.
    """
    from peft import LoraConfig, get_peft_model

    linear = linear_layers(model)
    targets = sorted(linear & set(TARGET_MODULES)) or sorted(linear)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    policy = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                scale = spread if "lora_B" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return policy.eval()


def write_policy(path: str, folder: str | Path, precision: Precision, *, spread: float, seed: int) -> PolicyFolders:
    """Merge a drawn adapter into the base in float32, and write it twice: as it is, and rounded to the coarse dtype.

    Args:
        path: folder of the base model.
        folder: where to write; needs room for the model in float32 and once more in the coarse dtype.
        precision: the coarse contract.
        spread, seed: as in `draw_adapter`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    folders = PolicyFolders(path, str(Path(folder) / "exact"), str(Path(folder) / "coarse"))
    with _without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        merged = draw_adapter(model, spread, seed).merge_and_unload()
        for target, dtype in ((folders.exact, torch.float32), (folders.coarse, precision.base_weights)):
            merged.to(dtype).save_pretrained(target)
            tokenizer.save_pretrained(target)
    return folders


def load_trainer(path: str, precision: Precision):
    """A frozen transformers model in the contract's dtype, on the GPU when there is one."""
    from transformers import AutoModelForCausalLM

    with _without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=precision.base_weights)
    model.requires_grad_(False)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


@contextlib.contextmanager
def _without_progress_bars():
    """transformers' bars held back: a measurement loads half a dozen models, and says itself where it is."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def native_policy(folders: PolicyFolders, precision: Precision, *, spread: float, seed: int):
    """The same policy with its adapter unmerged on the coarse base, as a trainer holds it."""
    policy = draw_adapter(load_trainer(folders.base, precision), spread, seed)
    return policy.to("cuda" if torch.cuda.is_available() else "cpu")
