"""Resuming: after kill -9 the next records are those of an unbroken run, and nothing is lost or doubled."""

import json
import signal

import pytest
import torch
from engines import MODEL, adapter_weights, kit_command, wait_for_steps

from kit.cli import main
from kit.records import RECORD_KEYS, Run

SETTINGS = ["--model", MODEL, "--dtype", "float32", "--steps", 8, "--save-steps", 3, "--completions", 16,
            "--max-completion-length", 64, "--learning-rate", 5e-3, "--held-out", 12, "--json"]  # fmt: skip
TIMES = ("time/", "speed/", "memory/", "sync/seconds", "step_time")  # what no two runs share


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(a run that nothing broke, one that was killed after step 5 and resumed from its checkpoint of step 3).

    The first one's standard output and error are beside its folder, in files of those names.
    """
    unbroken, killed = (tmp_path_factory.mktemp("runs") / name for name in ("unbroken", "killed"))
    processes = [kit_command("train", *SETTINGS, "--out", out, OMP_NUM_THREADS="1") for out in (unbroken, killed)]
    wait_for_steps(processes[1], killed, 5)
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()
    assert Run.load(killed).status == "killed"
    resumed = kit_command("train", "--resume", killed, "--json", OMP_NUM_THREADS="1")
    printed, errors = resumed.communicate()
    assert resumed.returncode == 0, errors[-3000:]
    assert json.loads(printed)["info"]["status"] == "finished"
    printed, errors = processes[0].communicate()
    assert processes[0].returncode == 0, errors[-3000:]
    (unbroken.parent / "stdout").write_text(printed)
    (unbroken.parent / "stderr").write_text(errors)
    return unbroken, killed


def compared(record: dict) -> tuple[dict, dict]:
    """What two runs must agree in: (numbers, anything else)."""
    same = {key: value for key, value in record.items() if not key.startswith(TIMES)}
    numbers = {key: value for key, value in same.items() if isinstance(value, (int, float))}
    return numbers, {key: value for key, value in same.items() if key not in numbers}


@pytest.mark.engine
def test_after_kill_9_no_line_is_lost_or_doubled(folders):
    run = Run.load(folders[1])
    assert run.column("step") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["step"] for row in run.completions] == [step for step in range(1, 9) for _ in range(16)]
    assert run.warnings == []
    assert run.info["resumed_from"] == [3]
    assert run.status == "finished"


@pytest.mark.engine
def test_after_kill_9_the_records_are_those_of_an_unbroken_run(folders):
    """Optimizer, schedule, generators, the sampler's seeds and the data's order: all as if nothing had happened."""
    unbroken, resumed = (Run.load(folder) for folder in folders)
    for expected, found in zip(unbroken.records, resumed.records, strict=True):
        (numbers, others), (expected_numbers, expected_others) = compared(found), compared(expected)
        assert numbers == pytest.approx(expected_numbers, rel=1e-6, abs=1e-6)
        assert others == expected_others
    texts = [[(row["prompt"], row["completion"]) for row in run.completions] for run in (unbroken, resumed)]
    assert texts[0] == texts[1]
    assert len({record["loss"] for record in unbroken.records}) == 8  # not the same step again and again
    assert unbroken.records[-1]["kl"] > 1e-4


@pytest.mark.engine
def test_after_kill_9_the_adapter_is_that_of_an_unbroken_run(folders):
    from safetensors.torch import load_file

    unbroken, resumed = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in folders)
    for name, value in unbroken.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-6)


@pytest.mark.engine
def test_in_float32_every_record_proves_its_sync_also_after_the_resume(folders):
    for folder in folders:
        for record in Run.load(folder).records:
            assert record["mismatch/abs_mean"] < 1e-5
            assert record["sync/probe_abs"] < 1e-5


@pytest.mark.engine
def test_a_run_from_the_command_line_is_whole_and_its_result_alone_on_standard_output(folders):
    out = folders[0]
    result, run = json.loads((out.parent / "stdout").read_text()), Run.load(out)
    assert result["records"] == run.records
    nulls = {key for record in run.records for key in RECORD_KEYS if record[key] is None}
    assert nulls == {"scaler/scale", "scaler/skipped"}
    assert run.info["train_settings"]["completions"] == 16
    summary = run.info["summary"]
    assert summary["steps"] == 8
    assert summary["accuracy_first"] == run.records[0]["accuracy"]
    assert summary["accuracy_last5"] == pytest.approx(sum(run.column("accuracy")[-5:]) / 5)
    assert 0 < summary["held_out_before"] < 1 and 0 < summary["held_out_after"] <= 1
    assert sorted(path.name for path in (out / "checkpoints").glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]
    errors = (out.parent / "stderr").read_text()  # progress, in the terminal
    assert "step 1/8" in errors and "step 8/8" in errors


@pytest.mark.engine("float16")
def test_the_loss_scale_is_that_of_the_checkpoint_and_not_the_initial_one(make_trainer):
    """A resume with a fresh scale would overflow its way down again."""
    first = make_trainer(max_steps=2, save_strategy="steps", save_steps=2)
    first.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    first.train()
    assert first.seen[-1]["scaler/scale"] == 2.0**38
    resumed = make_trainer(max_steps=3, save_strategy="steps", save_steps=2)
    assert resumed.accelerator.scaler.get_scale() == 2.0**16  # what it would begin with
    resumed.train(resume_from_checkpoint=True)
    assert (resumed.seen[0]["step"], resumed.seen[0]["scaler/scale"]) == (3, 2.0**37)


@pytest.mark.engine("float32")
def test_a_stopped_run_is_resumed_from_its_last_step(make_trainer, engines, dtype):
    class Stop:
        def check(self):
            return "stop" if len(stopped.seen) == 1 else "run"

    whole = make_trainer(name="whole", max_steps=4)
    whole.train()
    stopped = make_trainer(max_steps=4, save_strategy="steps", save_steps=100)
    stopped.run_control = Stop()
    stopped.train()
    assert Run.load(stopped.run_dir).status == "stopped"
    resumed = make_trainer(max_steps=4, save_strategy="steps", save_steps=100)
    resumed.train(resume_from_checkpoint=True)
    assert [record["step"] for record in resumed.seen] == [3, 4]
    expected = adapter_weights(whole.model)
    for name, value in adapter_weights(resumed.model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.engine("float32")
def test_resuming_a_finished_run_changes_nothing_but_the_note_of_it(make_trainer):
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    first = make_trainer(**saving)
    first.train()
    again = make_trainer(**saving)
    before = (again.run_dir / "records.jsonl").read_bytes()
    again.train(resume_from_checkpoint=True)
    run = Run.load(again.run_dir)
    assert (again.run_dir / "records.jsonl").read_bytes() == before
    assert (run.status, run.info["resumed_from"]) == ("finished", [2])
    assert again.seen == []
    trained = adapter_weights(first.model)
    assert all(torch.equal(value, trained[name]) for name, value in adapter_weights(again.model).items())


def written(folder, **info):
    from kit.records import RunWriter

    with RunWriter.create(folder, info) as writer:
        writer.write({"step": 1, "loss": 0.5})
    return folder


@pytest.mark.parametrize(
    ("prepare", "named"),
    [
        (lambda folder: folder, "There is no run at"),
        (lambda folder: written(folder), "was not started by `python -m kit train`"),
        (lambda folder: written(folder, train_settings={"steps": 3}), "no checkpoint to resume from"),
    ],
)
def test_what_cannot_be_resumed_is_said_before_anything_loads(tmp_path, capsys, prepare, named):
    folder = prepare(tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.glob("*.json*")}
    assert main(["train", "--resume", str(folder)]) == 2
    assert named in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.glob("*.json*")} == before


@pytest.mark.engine("float32")
def test_a_checkpoint_that_a_kill_cut_short_is_not_used(make_trainer):
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_trainer(**saving).train()
    resumed = make_trainer(**saving)
    (resumed.run_dir / "checkpoints" / "checkpoint-4" / "complete").unlink()
    resumed.train(resume_from_checkpoint=True)
    assert [record["step"] for record in resumed.seen] == [3, 4]
    assert Run.load(resumed.run_dir).column("step") == [1, 2, 3, 4]
