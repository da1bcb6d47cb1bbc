"""Notebooks that stay usable: without a front end, with another model, and after something went wrong in a run."""

import os
import resource
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import nbformat
import pytest
from engines import share_of_digits

from kit import lesson
from kit.loading import TINY
from kit.records import Run, RunBusy, RunExists, RunWriter
from kit.rewards import RewardError
from kit.sampler import SamplingSettings

ROOT = Path(__file__).parents[1]
PROMPTS = ["Q: 12+34=?\nA: ", "Q: 56+78=?\nA: ", "Q: 90+12=?\nA: "]


def failing_once(reward):
    """A reward that breaks in its second call."""
    calls = []

    def flaky(completions, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise ConnectionError("the judge is away")
        return reward(completions, **kwargs)

    return flaky


@pytest.mark.engine("float16")
def test_after_an_error_in_the_reward_the_next_run_works(make_trainer):
    policy_of = make_trainer(reward_funcs=failing_once(share_of_digits), name="first")
    with pytest.raises((ConnectionError, RewardError), match="the judge is away"):
        policy_of.train()
    assert (Run.load(policy_of.run_dir).status, len(policy_of.seen)) == ("failed", 1)
    with pytest.raises(RunExists, match="already holds a run"):  # the same cell once more: said, and nothing is lost
        policy_of.train()
    assert len(Run.load(policy_of.run_dir).records) == 1
    again = make_trainer(policy=policy_of.model, name="second", max_steps=2)
    again.train()
    assert Run.load(again.run_dir).status == "finished"
    assert all(record["sync/probe_abs"] < 0.1 for record in again.seen)


@pytest.mark.engine("float16")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_after_an_error_within_generate_the_next_call_gets_its_own_answers(engines, dtype, error, monkeypatch):
    sampler, tokenizer = engines.get(dtype).sampler, engines.tokenizer
    ids, settings, seeds = tokenizer(PROMPTS).input_ids, SamplingSettings(16), [1, 2, 3]
    expected = [c.token_ids for c in sampler.generate(ids, settings, seeds)]
    engine, steps = sampler.llm.llm_engine, []
    step = engine.step

    def breaking():
        steps.append(1)
        if len(steps) == 4:
            raise error("in the middle")
        return step()

    with monkeypatch.context() as patch, pytest.raises(error, match="in the middle"):
        patch.setattr(engine, "step", breaking)
        sampler.generate(ids, settings, seeds)
    assert [c.token_ids for c in sampler.generate(ids, settings, seeds)] == expected
    assert [c.token_ids for c in sampler.generate(ids[:1], settings, seeds[:1])] == expected[:1]


@pytest.mark.engine("float16")
def test_a_full_disk_ends_the_run_with_what_is_safe_and_the_next_run_works(make_trainer):
    trainer = make_trainer(max_steps=3, name="first")
    records, limits = trainer.run_dir / "records.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(record):
        resource.setrlimit(resource.RLIMIT_FSIZE, (records.stat().st_size + 100, limits[1]))

    trainer._listeners.append(fill)
    try:
        with pytest.raises(OSError) as failure:  # the adapter cannot be saved either, which is an error of its own
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = "".join(traceback.format_exception(failure.value))
    assert "RunDiskFull" in told and "Safe: the record up to step 1" in told and "Make room, then resume" in told
    run = Run.load(trainer.run_dir)
    assert run.column("step") == [1] and run.warnings == []
    again = make_trainer(policy=trainer.model, name="second", max_steps=1)
    again.train()
    assert Run.load(again.run_dir).status == "finished"


@pytest.mark.engine("float16")
def test_a_second_notebook_that_writes_the_run_is_refused(make_trainer):
    trainer = make_trainer(max_steps=1)
    with RunWriter.create(trainer.run_dir, {"steps": 7}), pytest.raises(RunBusy, match="this very process"):
        trainer.train()
    run = Run.load(trainer.run_dir)
    assert (run.status, run.info["steps"], run.records, trainer.seen) == ("finished", 7, [], [])


@pytest.mark.notebook
def test_jupyter_execute_runs_a_notebook_without_any_front_end(tmp_path):
    shutil.copy(ROOT / "notebooks" / "03_fp16_vs_bf16.ipynb", tmp_path)
    command = [sys.executable, "-m", "jupyter", "execute", "--inplace", str(tmp_path / "03_fp16_vs_bf16.ipynb")]
    environment = os.environ | {"KIT_STEPS": "2", "KIT_OUT": str(tmp_path / "run")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = nbformat.read(tmp_path / "03_fp16_vs_bf16.ipynb", as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 3  # a chart an arm, and both over each other
    assert all("run-float16: float16, 2 steps" in o["metadata"]["image/png"]["alt"] for o in pictures[:2])
    assert any("The runs differ in dtype only." in output.get("text", "") for output in outputs)
    assert [Run.load(tmp_path / f"run-{dtype}").status for dtype in ("float16", "bfloat16")] == ["finished"] * 2


@pytest.mark.engine
def test_another_model_is_shown_examples_and_its_run_goes_on(tmp_path):
    """The lesson's arm on a model that is not the bundled one: here a copy of it, under a name of its own."""
    shutil.copytree(TINY, tmp_path / "model")
    arm = lesson.suited_settings(
        str(tmp_path / "model"), "float16", 2, completions=16, micro_batch=8, max_completion_length=32, save_steps=1
    )
    seen = []
    run = lesson.train_arm(arm, tmp_path / "run", on_record=seen.append)
    assert (run.status, run.column("step")) == ("finished", [1, 2])
    assert run.info["settings"]["per_device_train_batch_size"] == 8
    prompts = {row["prompt"] for row in run.completions}
    assert all(prompt.count("Q: ") == 3 for prompt in prompts)
    assert all("\n\n" not in row["completion"].rstrip("\n") for row in run.completions)
    with pytest.raises(RunExists, match="run-2"):
        lesson.train_arm(arm, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "checkpoint-2" / "complete").unlink()  # as if it had been killed
    resumed = lesson.go_on(tmp_path / "run", on_record=seen.append)
    assert resumed.column("step") == [1, 2] and resumed.info["resumed_from"] == [1]
    assert [record["step"] for record in seen] == [1, 2, 2]
