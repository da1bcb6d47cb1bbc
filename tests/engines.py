"""Real parts for the engine tests: one vLLM engine for each dtype in turn, shared; a fresh trainer model for each test.

A process holds one engine at a time, so conftest.py orders the tests by the dtype that `@pytest.mark.engine` names.
"""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
MODEL = "tiny"
DTYPES = ("float32", "float16", "bfloat16")
MAX_SEQ_LENGTH, MAX_NUM_SEQS = 160, 32

each_dtype = pytest.mark.parametrize("dtype", [pytest.param(d, marks=pytest.mark.engine(d)) for d in DTYPES])


class Engines:
    """The engine of the last dtype that was asked for; it is built again when another load has closed it."""

    def __init__(self):
        self.loaded = self.tokenizer = None

    def get(self, dtype: str):
        """What `model.kit` of a model loaded in this dtype holds; its sampler may have an earlier test's adapter."""
        from kit import FastLanguageModel

        if self.loaded is None or self.loaded.precision.name != dtype or self.loaded.sampler.is_closed:
            self.loaded = None
            model, self.tokenizer = FastLanguageModel.from_pretrained(
                MODEL, max_seq_length=MAX_SEQ_LENGTH, dtype=dtype, max_lora_rank=16, max_num_seqs=MAX_NUM_SEQS
            )
            self.loaded = model.kit
        return self.loaded

    def model(self, dtype: str):
        """A base model as `from_pretrained` returns it, beside the shared engine."""
        from transformers import AutoModelForCausalLM

        loaded = self.get(dtype)
        model = AutoModelForCausalLM.from_pretrained(loaded.path, dtype=loaded.precision.base_weights)
        model.requires_grad_(False)
        model.kit = replace(loaded)
        return model


def with_adapter(model, *, spread: float = 0.0, seed: int = 0, **arguments):
    """The model with an adapter whose B matrices are drawn with this standard deviation (0: a new adapter's zeros)."""
    from kit import FastLanguageModel

    policy = FastLanguageModel.get_peft_model(model, **({"r": 8, "lora_alpha": 16} | arguments))
    move_adapter(policy, spread, seed)
    return policy


def move_adapter(policy, spread: float, seed: int = 0) -> None:
    """Add noise to the adapter's B matrices, as a large update would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter += spread * torch.randn(parameter.shape, generator=generator).to(parameter)


def adapter_weights(policy) -> dict[str, torch.Tensor]:
    """Copies of all trainable parameters."""
    return {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}


def share_of_digits(completions, **kwargs) -> list[float]:
    """A reward that differs between completions whatever the model has learnt: the share of digits in the text."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def constant_reward(completions, **kwargs) -> list[float]:
    """A reward without information."""
    return [1.0] * len(completions)


@contextlib.contextmanager
def planted(owner, name, replacement):
    """A fault, planted on purpose: within the block the method `owner.name` is `replacement(the real one)`."""
    setattr(owner, name, replacement(getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)


@contextlib.contextmanager
def running_kernel(name: str):
    """A Jupyter kernel of this name in the project's folder; gives its client, and is shut down at the end."""
    from jupyter_client import KernelManager

    manager = KernelManager(kernel_name=name)
    manager.start_kernel(cwd=str(ROOT))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def kit_command(*arguments, **environment) -> subprocess.Popen:
    """A `python -m kit` process, running; its output is read by `communicate`."""
    return subprocess.Popen(
        [sys.executable, "-m", "kit", *map(str, arguments)],
        cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for_steps(process, run_dir: Path, steps: int, limit: float = 180.0) -> None:
    """Return when the run's record has that many lines; fail when its process ends before."""
    records, end = run_dir / "records.jsonl", time.monotonic() + limit
    while not records.exists() or records.read_bytes().count(b"\n") < steps:
        assert process.poll() is None, process.communicate()[1][-2000:]
        assert time.monotonic() < end, f"no step {steps} within {limit} s"
        time.sleep(0.05)
