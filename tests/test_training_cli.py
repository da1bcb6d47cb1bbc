"""`python -m kit train`: its options, and what it refuses before anything loads. Whole runs are in test_resume.py."""

import json
import signal
from dataclasses import asdict, fields

import pytest
from engines import MODEL, kit_command, wait_for_steps, with_adapter

from kit.cli import main, parse
from kit.errors import ArgumentError
from kit.records import Run, RunWriter
from kit.rewards import RewardError
from kit.task_setup import prepare
from kit.training import TrainSettings, _grpo, training_arguments


def test_every_setting_is_an_option_of_its_type():
    changed = {}
    for field in fields(TrainSettings):
        changed[field.name] = {str: "x", int: 24, float: 0.25}[type(field.default)]
    changed |= {"group": 4, "completions": 24}
    words = [word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    args = parse(["train", *words, "--out", "runs/a"])
    assert {name: getattr(args, name) for name in changed} == changed
    assert TrainSettings(**changed).differences(TrainSettings()) == list(changed)


def test_the_defaults_of_the_command_are_those_of_the_settings():
    args = parse(["train", "--out", "runs/a"])
    assert {field.name: getattr(args, field.name) for field in fields(TrainSettings)} == asdict(TrainSettings())


@pytest.mark.parametrize(
    "bad",
    [
        *({"steps": value} for value in (0, -1)),
        *({"learning_rate": value} for value in (0.0, float("nan"))),
        *({"micro_batch": value} for value in (48, -1)),
        *({name: 0} for name in ("rank", "max_completion_length", "save_steps", "temperature")),
        {"group": 1},
        {"completions": 60},
        {"held_out": -1},
    ],
)
def test_impossible_settings_are_refused_by_name(bad):
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        TrainSettings(**bad)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--steps", "0"], "steps is 0"),
        (["--dtype", "float8"], "Unknown dtype 'float8'"),
        (["--model", "./nowhere"], "no folder ./nowhere"),
        (["--problems", "1000000"], "cannot make a dataset of 1000000 problems"),
        (["--sync", "copied"], "sync is 'copied'"),
        (["--max-completion-length", "4000"], "positions end at 2048"),
        (["--task", "none.jsonl"], "no file none.jsonl"),
        (["--task", "reasoning-gym:chainsum"], "closest: chain_sum"),
        (["--task", "reasoning-gym:chain_sum"], "Every prompt of reasoning-gym:chain_sum is longer"),
        (["--rewards", "none.py:f"], "no reward module none.py"),
        (["--tags", "a,b"], "four separated by commas"),
        (["--stop", "[1]"], "a JSON list of texts"),
        (["--problems", "4"], "a step needs 8 different ones (completions / group). Lower --completions to 32"),
    ],
)
def test_a_bad_request_is_status_2_one_line_and_no_folder(tmp_path, capsys, words, named):
    assert main(["train", "--model", MODEL, *words, "--out", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith("error: ") and named in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["--out", "a", "--resume", "b"]])
def test_either_a_new_run_or_a_resumed_one(capsys, words):
    assert main(["train", *words]) == 2
    assert "either --out runs/NAME" in capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path, capsys):
    with RunWriter.create(tmp_path / "run", {}) as writer:
        writer.write({"step": 1, "loss": 0.5})
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")}
    assert main(["train", "--out", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err
    assert f"already holds a run. Resume it (--resume {tmp_path}/run)" in printed and f"{tmp_path}/run-2" in printed
    assert {path: path.read_bytes() for path in before} == before


def test_an_unknown_model_offline_is_said_in_one_line(tmp_path):
    process = kit_command("train", "--model", "nobody/no-such-model", "--out", tmp_path / "run")
    printed, errors = process.communicate()
    assert process.returncode == 2
    assert printed == ""
    assert "error: The model 'nobody/no-such-model' could not be had" in errors and "HF_HUB_OFFLINE" in errors
    assert "model_name='tiny'" in errors and "Traceback" not in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.engine("float32")
def test_what_a_reward_fails_on_is_named_and_kept(engines, tokenizer, tmp_path):
    """In the second step: what was recorded until then stays."""
    file = tmp_path / "mine.py"
    file.write_text(
        "calls = []\ndef fails(completions, **columns):\n    calls.append(1)\n"
        "    return [1 / (len(calls) == 1 or 'no such text' in text) for text in completions]\n"
    )
    settings = TrainSettings(dtype="float32", steps=3, completions=16, max_completion_length=24,
                             rewards=f"answer,{file}:fails")  # fmt: skip
    with pytest.raises(RewardError, match=r"'fails' raised ZeroDivisionError.*for completion 0.*failed_reward.json"):
        _grpo(with_adapter(engines.model("float32")), tokenizer, settings, prepare(settings),
              training_arguments(settings, tmp_path / "run"), {}, False, [].append, None)  # fmt: skip
    run = Run.load(tmp_path / "run")
    assert run.status == "failed" and run.column("step") == [1]
    kept = json.loads((tmp_path / "run" / "failed_reward.json").read_text())
    assert kept["reward"] == "fails" and kept["index"] == 0
    assert len(kept["prompts"]) == len(kept["completions"]) == 16


@pytest.mark.engine
def test_an_interrupt_keeps_the_record_and_the_adapter(tmp_path):
    out = tmp_path / "run"
    process = kit_command(
        "train", "--model", MODEL, "--dtype", "bfloat16", "--steps", 500, "--completions", 16, "--save-steps", 2,
        "--max-completion-length", 24, "--out", out,
    )  # fmt: skip
    wait_for_steps(process, out, 3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted; the record up to the last whole step is kept." in errors
    assert "Traceback" not in errors
    run = Run.load(out)
    assert run.status == "interrupted"
    assert len(run.records) >= 3 and run.column("step") == list(range(1, len(run.records) + 1))
    assert run.warnings == []
    assert (out / "adapter" / "adapter_model.safetensors").exists()
    assert (out / "checkpoints" / "checkpoint-2" / "complete").exists()
