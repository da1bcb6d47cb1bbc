"""Checkpoints that are whole or not there."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kit.checkpoints import (
    MARKER,
    NoCheckpoint,
    find,
    last_complete,
    mark_complete,
    save_adapter,
    save_adapter_in_the_end,
    step_of,
)
from kit.errors import KitError


def checkpoint(run_dir: Path, step: int, *, whole: bool = True) -> Path:
    folder = run_dir / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(b"state")
    if whole:
        mark_complete(folder)
    return folder


def test_the_last_whole_checkpoint_is_the_highest_step_not_the_last_name(tmp_path):
    for step in (5, 10, 100, 20):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 110, whole=False)
    assert last_complete(tmp_path) == tmp_path / "checkpoints" / "checkpoint-100"
    assert step_of(last_complete(tmp_path)) == 100


def test_a_new_run_resumes_from_nothing(tmp_path):
    checkpoint(tmp_path, 5)
    assert find(tmp_path, None) is find(tmp_path, False) is None


def test_resuming_finds_the_last_whole_checkpoint_and_removes_half_written_ones(tmp_path):
    whole, half = checkpoint(tmp_path, 5), checkpoint(tmp_path, 10, whole=False)
    assert find(tmp_path, True) == str(whole)
    assert whole.exists() and not half.exists()


def test_a_named_checkpoint_is_taken_if_it_is_whole(tmp_path):
    first, half = checkpoint(tmp_path, 5), checkpoint(tmp_path, 15, whole=False)
    checkpoint(tmp_path, 10)
    assert find(tmp_path, first) == str(first)
    with pytest.raises(NoCheckpoint, match=r"checkpoint-15 is no whole checkpoint.*checkpoint-10, checkpoint-5"):
        find(tmp_path, half)


def test_without_a_whole_checkpoint_nothing_is_removed_and_the_error_says_what_to_do(tmp_path):
    half = checkpoint(tmp_path, 10, whole=False)
    with pytest.raises(NoCheckpoint, match="save_steps") as error:
        find(tmp_path, True)
    assert half.exists()
    assert isinstance(error.value, KitError)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False, dtype=torch.float16)

    def forward(self, x):
        return self.layer(x)


def adapted_net():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(Net(), LoraConfig(r=2, target_modules=["layer"]))


def test_the_saved_adapter_is_the_float32_one_in_memory(tmp_path):
    model = adapted_net()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(1 / 3)  # not representable in 16 bits
    save_adapter(model, tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == 2
    assert all(torch.equal(value, torch.full_like(value, 1 / 3)) for value in saved.values())
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_kill_before_the_exchange_leaves_the_old_adapter(tmp_path):
    """What a killed process leaves, a half-written new folder, is neither used nor in the way."""
    model = adapted_net()
    save_adapter(model, tmp_path / "adapter")
    before = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter.new").mkdir()
    (tmp_path / "adapter.new" / "adapter_model.safetensors").write_bytes(b"half")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == before
    save_adapter(model, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_the_marker_is_what_makes_a_checkpoint_whole(tmp_path):
    folder = checkpoint(tmp_path, 5, whole=False)
    assert last_complete(tmp_path) is None
    mark_complete(folder)
    assert last_complete(tmp_path) == folder
    assert (folder / MARKER).exists()


def test_an_adapter_that_cannot_be_saved_does_not_hide_why_the_run_ended(tmp_path):
    class Model:
        def save_pretrained(self, folder, **kwargs):
            raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="the first error") as caught:
        try:
            raise ValueError("the first error")
        finally:
            save_adapter_in_the_end(Model(), tmp_path / "adapter")
    assert "No space left" in caught.value.__notes__[0]
    with pytest.raises(OSError, match="No space left"):
        save_adapter_in_the_end(Model(), tmp_path / "adapter")
