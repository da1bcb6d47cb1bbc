"""TRL's `report_to`: trackers get every key of the record, with the record's values.

TensorBoard's writer is fetched for the test alone, Weights & Biases is tried where it is installed (offline): neither
is a dependency of the kit.
"""

import importlib.util
import io
import json
import logging
import struct
import subprocess
import sys
import warnings

import pytest
from engines import share_of_digits

from kit.arithmetic import correct_answer
from kit.quiet import keep_quiet
from kit.records import RECORD_KEYS

WRITER = ("tensorboardX==2.6.4", "protobuf==6.33.2")
REWARDS = [share_of_digits, correct_answer]  # the first one varies, the second one gives the accuracy


@pytest.fixture
def tensorboard(tmp_path, monkeypatch):
    """The folder of TensorBoard's events; its writer can be imported during the test."""
    if not any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))):
        folder = tmp_path / "packages"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *WRITER]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            warnings.warn("The package index cannot be reached: trackers are NOT tested.", stacklevel=1)
            pytest.skip(f"pip could not install {WRITER}: {done.stderr[-300:]}")
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    return tmp_path / "events"


def scalars(folder) -> dict[tuple[int, str], float]:
    """{(step, tag): value} of TensorBoard's event files: records of a length, its checksum, an event, its checksum."""
    try:
        events = importlib.import_module("tensorboardX.proto.event_pb2")
    except ImportError:
        events = importlib.import_module("tensorboard.compat.proto.event_pb2")
    found = {}
    for path in folder.glob("events*"):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event, data = events.Event.FromString(data[12 : 12 + length]), data[16 + length :]
            found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    return found


@pytest.mark.engine("float16")
def test_tensorboard_gets_every_key_of_every_record(make_trainer, tensorboard):
    trainer = make_trainer(reward_funcs=REWARDS, max_steps=2, report_to="tensorboard")
    trainer.train()
    found = scalars(tensorboard)
    assert [record["step"] for record in trainer.seen] == [1, 2]
    for record in trainer.seen:
        for key in set(RECORD_KEYS) - {"step"}:  # the step is the axis
            assert record[key] is not None, key
            assert found[record["step"], f"train/{key}"] == pytest.approx(record[key], rel=1e-6, abs=1e-30), key


@pytest.mark.engine("float32")
def test_what_a_dtype_has_not_is_left_out_without_a_word(make_trainer, tensorboard):
    keep_quiet()
    trainer, said = make_trainer(max_steps=1, report_to="tensorboard"), io.StringIO()
    logger, handler = logging.getLogger("transformers.integrations.integration_utils"), logging.StreamHandler(said)
    logger.addHandler(handler)
    try:
        trainer.train()
    finally:
        logger.removeHandler(handler)
    (record,) = trainer.seen
    assert record["scaler/scale"] is None and (1, "train/scaler/scale") not in scalars(tensorboard)
    assert (1, "train/mismatch/k3") in scalars(tensorboard)
    assert "attempting to log" not in said.getvalue()


@pytest.mark.engine("float16")
def test_weights_and_biases_offline_gets_every_key(make_trainer, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed; it is no dependency")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    trainer = make_trainer(reward_funcs=REWARDS, max_steps=1, report_to="wandb")
    trainer.train()
    importlib.import_module("wandb").finish()
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.rglob("wandb-summary.json"))
    for key in set(RECORD_KEYS) - {"step"}:
        assert summary[f"train/{key}"] == pytest.approx(trainer.seen[0][key], rel=1e-6), key
