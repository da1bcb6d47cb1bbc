"""The run record: what is on the disk after a kill, a full disk, a resume and a second writer."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kit.records import (
    RECORD_KEYS,
    Run,
    RunBusy,
    RunDiskFull,
    RunExists,
    RunNotFound,
    RunWriter,
    free_path,
    is_locked,
    list_runs,
    plain,
)

ROOT = Path(__file__).parents[1]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, steps: int) -> RunWriter:
    writer = RunWriter.create(path, {"precision": {"name": "float16"}})
    for step in range(1, steps + 1):
        writer.write_completions(step, [{"completion": f"{step}a"}, {"completion": f"{step}b"}])
        writer.write({"step": step, "loss": step / 10})
    return writer


def child(code: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_a_record_is_one_line_with_every_key_in_order(tmp_path):
    with RunWriter.create(tmp_path / "a", {"seed": 3}) as writer:
        writer.write({"extra": 7, "step": 1, "loss": float("nan"), "kl": np.float32(0.5), "grad_norm": float("inf")})
        text = (tmp_path / "a" / "records.jsonl").read_text()  # before close
    assert text.count("\n") == 1
    record = json.loads(text)
    assert list(record) == [*RECORD_KEYS, "extra"]
    assert (record["loss"], record["grad_norm"], record["kl"], record["extra"]) == (None, None, 0.5, 7)
    assert record["reward"] is None


def test_what_json_has_no_form_for_is_named(tmp_path):
    assert plain({"a": [np.bool_(True), Path("x/y"), (1, 2)]}) == {"a": [True, "x/y", [1, 2]]}
    with RunWriter.create(tmp_path / "a", {}) as writer:
        with pytest.raises(TypeError, match=r"record\['loss'\] is a complex"):
            writer.write({"step": 1, "loss": 1j})
        writer.write({"step": 1, "loss": 1.0})
    assert [record["loss"] for record in lines(tmp_path / "a" / "records.jsonl")] == [1.0]


def test_texts_of_any_script_come_back_equal(tmp_path):
    text = "é 数 \u2028 \x85 \ud800 \n Ω"  # separators and a lone surrogate, which a tokenizer may leave
    with RunWriter.create(tmp_path / "a", {}) as writer:
        writer.write_completions(1, [{"prompt": "p", "completion": text}])
    assert Run.load(tmp_path / "a").completions == [{"step": 1, "prompt": "p", "completion": text}]


def test_a_step_is_never_recorded_twice(tmp_path):
    with written(tmp_path / "a", 2) as writer, pytest.raises(ValueError, match="step 2 is already recorded"):
        writer.write({"step": 2})
    assert Run.load(tmp_path / "a").column("step") == [1, 2]


def test_update_merges_and_replaces_whole(tmp_path):
    with RunWriter.create(tmp_path / "a", {"seed": 3}) as writer:
        writer.update(status="finished", summary={"accuracy": 0.5})
        info = json.loads((tmp_path / "a" / "run.json").read_text())
    assert info["seed"] == 3
    assert info["name"] == "a"
    assert (info["status"], info["summary"]) == ("finished", {"accuracy": 0.5})
    assert sorted(os.listdir(tmp_path / "a")) == [".lock", "completions.jsonl", "records.jsonl", "run.json"]


def test_a_reader_never_sees_half_a_run_json(tmp_path):
    with RunWriter.create(tmp_path / "a", {"ballast": "x" * 100_000}) as writer:
        reader = child(
            "import json, sys\nfor _ in range(2000): json.load(open(sys.argv[1]))\nprint('whole')",
            tmp_path / "a" / "run.json",
        )
        while reader.poll() is None:
            writer.update(beat=time.time())
    assert reader.communicate()[0] == "whole\n"


@pytest.mark.parametrize(
    ("error", "status"), [(None, "finished"), (KeyboardInterrupt(), "interrupted"), (ValueError("bad"), "failed")]
)
def test_leaving_the_context_sets_the_status(tmp_path, error, status):
    try:
        with RunWriter.create(tmp_path / "a", {}):
            assert Run.load(tmp_path / "a").status == "running"
            if error is not None:
                raise error
    except (KeyboardInterrupt, ValueError):
        pass
    run = Run.load(tmp_path / "a")
    assert run.status == status
    assert run.info.get("error") == ("ValueError: bad" if status == "failed" else None)


def test_a_killed_writer_leaves_a_readable_run_that_can_be_resumed(tmp_path):
    process = child(
        "import sys\nfrom kit.records import RunWriter\nw = RunWriter.create(sys.argv[1], {})\n"
        "for step in range(1, 10**9):\n"
        "    w.write_completions(step, [{'completion': 'x' * 300}])\n    w.write({'step': step})\n"
        "    if step == 50: print('going', flush=True)\n",
        tmp_path / "a",
    )
    assert process.stdout.readline() == "going\n"
    assert Run.load(tmp_path / "a").status == "running"
    process.send_signal(signal.SIGKILL)
    process.wait()
    run = Run.load(tmp_path / "a")
    assert run.status == "killed"
    steps = run.column("step")
    assert len(steps) >= 50
    assert steps == list(range(1, len(steps) + 1))
    with RunWriter.resume(tmp_path / "a", step=40) as writer:  # the dead process' lock is no obstacle
        writer.write({"step": 41})
    assert Run.load(tmp_path / "a").column("step") == list(range(1, 42))
    assert [row["step"] for row in Run.load(tmp_path / "a").completions] == list(range(1, 41))


def test_resume_keeps_the_lines_up_to_the_checkpoint_byte_for_byte(tmp_path):
    written(tmp_path / "a", 5).close()
    before = (tmp_path / "a" / "records.jsonl").read_bytes()
    with open(tmp_path / "a" / "records.jsonl", "ab") as file:
        file.write(b'{"step": 6, "lo')  # the kill came in the middle of a line
    with RunWriter.resume(tmp_path / "a", step=5) as writer:
        assert (tmp_path / "a" / "records.jsonl").read_bytes() == before
        writer.write({"step": 6})
    with RunWriter.resume(tmp_path / "a", step=3) as writer:
        for step in (4, 5):
            writer.write_completions(step, [{"completion": "again"}])
            writer.write({"step": step, "loss": -1.0})
    run = Run.load(tmp_path / "a")
    assert run.column("loss") == [0.1, 0.2, 0.3, -1.0, -1.0]
    assert [row["completion"] for row in run.completions] == ["1a", "1b", "2a", "2b", "3a", "3b", "again", "again"]
    assert run.info["resumed_from"] == [5, 3]


def test_resume_says_when_the_record_is_shorter_than_the_checkpoint(tmp_path):
    written(tmp_path / "a", 2).close()
    with pytest.warns(UserWarning, match="checkpoint is of step 4, the record ends at step 2"):
        RunWriter.resume(tmp_path / "a", step=4).close()


def test_a_half_written_line_is_left_out_and_said(tmp_path):
    written(tmp_path / "a", 3).close()
    with open(tmp_path / "a" / "records.jsonl", "ab") as file:
        file.write(b'nonsense\n{"step": 4}\n{"step": 5')
    run = Run.load(tmp_path / "a")
    assert run.column("step") == [1, 2, 3, 4]
    assert run.warnings == [
        "records.jsonl: line 4 is not a JSON object with a step; left out",
        "records.jsonl: line 6 is half-written; left out",
    ]


def test_a_second_writer_is_refused_and_told_who_has_it(tmp_path):
    with written(tmp_path / "a", 1) as writer:
        with pytest.raises(RunBusy, match="this very process"):
            RunWriter.resume(tmp_path / "a", step=1)
        other = child(
            "import sys\nfrom kit.records import *\ntry: RunWriter.resume(sys.argv[1], step=1)\n"
            "except RunBusy as error: print(error)",
            tmp_path / "a",
        )
        assert f"process {os.getpid()} on" in other.communicate()[0]
        writer.write({"step": 2})
        assert is_locked(tmp_path / "a")
    assert not is_locked(tmp_path / "a")
    assert Run.load(tmp_path / "a").column("step") == [1, 2]


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    code = (
        "import os, sys, time\nfrom kit.records import RunWriter\nw = RunWriter.create(sys.argv[1], {})\n"
        "if os.fork() == 0:\n    print(os.getpid(), flush=True)\n    time.sleep(60)\nelse:\n    os._exit(1)"
    )
    process = child(code, tmp_path / "a")
    orphan = int(process.stdout.readline())
    process.wait()
    try:
        RunWriter.resume(tmp_path / "a", step=0).close()
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_an_existing_run_is_not_overwritten(tmp_path):
    written(tmp_path / "a", 2).close()
    with pytest.raises(RunExists, match=rf"already holds a run \(2 steps\).*{tmp_path}/a-2"):
        RunWriter.create(tmp_path / "a", {})
    assert free_path(tmp_path / "a") == tmp_path / "a-2"
    assert free_path(tmp_path / "b") == tmp_path / "b"
    RunWriter.create(tmp_path / "a-2", {}).close()
    assert free_path(tmp_path / "a") == tmp_path / "a-3"


def test_an_unknown_run_lists_the_runs_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunNotFound, match=r"Runs in runs: none yet\."):
        Run.load("runs/c")
    for name in ("b", "a"):
        RunWriter.create(f"runs/{name}", {}).close()
    assert list_runs() == [Path("runs/a"), Path("runs/b")]
    with pytest.raises(RunNotFound, match=r"no run at runs/c\. Runs in runs: a, b\."):
        Run.load("runs/c")
    with pytest.raises(RunNotFound, match=r"Did you mean runs/a\?"):
        Run.load("a")
    with pytest.raises(RunNotFound):
        RunWriter.resume("runs/c", step=1)
    assert not Path("runs/c").exists()


def test_a_column_of_no_record_lists_the_keys(tmp_path):
    written(tmp_path / "a", 2).close()
    run = Run.load(tmp_path / "a")
    assert run.column("kl") == [None, None]
    with pytest.raises(KeyError, match=r"no 'gradnorm' in .*grad_norm"):
        run.column("gradnorm")


def test_a_full_disk_takes_the_line_back_and_says_what_is_safe(tmp_path):
    writer = written(tmp_path / "a", 3)
    size = (tmp_path / "a" / "records.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))  # room for 20 bytes of the next line
    try:
        with pytest.raises(RunDiskFull, match=r"records\.jsonl \(step 4\).*Safe: the record up to step 3") as caught:
            writer.write({"step": 4})
        assert (tmp_path / "a" / "records.jsonl").stat().st_size == size
        with pytest.raises(RunDiskFull, match=r"run\.json \(ballast\)"):
            writer.update(ballast="x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == 27  # EFBIG, as a quota or ENOSPC would
    assert "ballast" not in json.loads((tmp_path / "a" / "run.json").read_text())
    assert not list((tmp_path / "a").glob("*.part"))
    writer.write({"step": 4})  # room again
    writer.close()
    assert Run.load(tmp_path / "a").column("step") == [1, 2, 3, 4]


def test_importing_records_is_light():
    code = (
        "import sys, kit.records\n"
        "print([name for name in ('torch', 'numpy', 'matplotlib', 'IPython') if name in sys.modules])"
    )
    assert child(code).communicate()[0] == "[]\n"


def test_a_live_runs_info_equals_the_loaded_one(tmp_path):
    with RunWriter.create(tmp_path / "run", {"hardware": {"features": ("avx512", "amx")}}) as writer:
        writer.update(expected=(0.0, 1e-5))
        live = dict(writer.info)
    loaded = Run.load(tmp_path / "run").info
    assert live["hardware"] == loaded["hardware"] == {"features": ["avx512", "amx"]}
    assert live["expected"] == loaded["expected"] == [0.0, 1e-5]
