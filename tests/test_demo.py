"""`python -m kit demo`: on small notebooks that write a run without an engine, and once on the real one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from kit import demo as kit_demo
from kit.demo import DemoFailed, demo, demo_summary
from kit.errors import ArgumentError
from kit.records import Run, RunExists

ROOT = Path(__file__).parents[1]

# A run of two steps, half a second apart, written as the trainer writes it.
WRITE_RUN = """
import os, time
from kit.records import RunWriter

info = {"steps": 2, "precision": {"name": os.environ["KIT_DTYPE"]}, "sampler": {"name": "none", "version": "1"}}
info["summary"] = {"held_out_before": 0.25, "held_out_before_standard_error": 0.03, "held_out_after": 0.75}
with RunWriter.create(os.environ["KIT_OUT"], info) as writer:
    for step in (1, 2):
        writer.write({"step": step, "accuracy": 0.25 * step, "mismatch/abs_mean": 1e-4, "time/step": 0.5})
        time.sleep(0.5)
print("wrote", os.environ["KIT_STEPS"], os.environ["KIT_MODEL"])
"""


def notebook(path, *cells):
    """A notebook of a title, a heading and code cells."""
    made = [nbformat.v4.new_markdown_cell("# T"), nbformat.v4.new_markdown_cell("## 1. A heading\n\nText.")]
    made += [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    return path


def outputs(path):
    """Everything that the cells of an executed notebook printed."""
    cells = nbformat.read(path, as_version=4).cells
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))


def test_executes_exports_draws_and_reports_each_step(tmp_path, capsys):
    out = tmp_path / "run"
    made = demo(out, steps=2, notebook=notebook(tmp_path / "n.ipynb", WRITE_RUN))
    assert made.column("accuracy") == [0.25, 0.5]
    assert "wrote 2 tiny" in outputs(out / "n.ipynb")
    assert "wrote 2 tiny" in (out / "n.html").read_text()
    assert (out / "figures" / "training.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().err
    assert "1. A heading" in told
    assert "step 1/2  accuracy 0.25" in told and "step 2/2  accuracy 0.5" in told
    seconds = {line.split("step ")[1][0]: line.split(" s ")[0] for line in told.splitlines() if "accuracy" in line}
    assert seconds["1"].strip().isdigit() and seconds["2"].strip().isdigit()


def test_progress_comes_while_it_runs(tmp_path):
    """The first line is there at once, and step 1 is told before the run has ended."""
    path = notebook(tmp_path / "n.ipynb", WRITE_RUN.replace("sleep(0.5)", "sleep(4)"))
    child = _start(tmp_path, path)
    lines = iter(child.stderr.readline, "")
    assert "n.ipynb" in next(lines)
    assert any("step 1/2" in line for line in lines)
    assert child.poll() is None and Run.load(tmp_path / "run").status == "running"
    child.communicate()
    assert child.returncode == 0


def test_summary_gives_the_figures_that_matter(tmp_path):
    made = demo(tmp_path / "run", steps=2, notebook=notebook(tmp_path / "n.ipynb", WRITE_RUN))
    text = demo_summary(made, seconds=61.4)
    assert "2 steps of GRPO in float16, sampled by none 1" in text
    assert "0.25 at step 1 -> 0.375 (mean of the last 2 steps)" in text
    assert "0.25 ± 0.03 -> 0.75" in text
    assert "mean |d| 1e-4 nats" in text
    assert "0.5 s a step, 61 s in all" in text


def test_a_folder_with_a_run_is_left_alone(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "run.json").write_text('{"format": 1}')
    with pytest.raises(RunExists, match="run-2"):
        demo(out, steps=2, notebook=notebook(tmp_path / "n.ipynb", WRITE_RUN))
    assert [path.name for path in out.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("changes", "words"), [({"steps": 0}, "at least 1"), ({"notebook": Path("none.ipynb")}, "none.ipynb")]
)
def test_bad_requests_are_refused_before_anything_is_written(tmp_path, changes, words):
    settings = {"steps": 2, "notebook": notebook(tmp_path / "n.ipynb", WRITE_RUN)} | changes
    with pytest.raises(ArgumentError, match=words):
        demo(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_failing_cell_is_told_plainly_and_the_notebook_up_to_it_is_kept(tmp_path):
    path = notebook(tmp_path / "n.ipynb", "print('before')", "raise ValueError('no such thing')", "print('after')")
    with pytest.raises(DemoFailed, match="ValueError: no such thing") as failure:
        demo(tmp_path / "run", steps=2, notebook=path)
    assert str(tmp_path / "run" / "n.ipynb") in str(failure.value)
    kept = outputs(tmp_path / "run" / "n.ipynb")
    assert "before" in kept and "after" not in kept
    assert "no such thing" in (tmp_path / "run" / "n.html").read_text()
    # there is no run, so the same folder can be used again
    assert demo(tmp_path / "run", steps=2, notebook=notebook(path, WRITE_RUN)).records


def test_a_dead_kernel_is_told_plainly(tmp_path):
    last_words = "import os\nos.write(2, b'the reason')\nos.kill(os.getpid(), 9)"
    path = notebook(tmp_path / "n.ipynb", last_words)
    with pytest.raises(DemoFailed, match="kernel died") as failure:
        demo(tmp_path / "run", steps=2, notebook=path)
    assert "the reason" in str(failure.value)
    assert (tmp_path / "run" / "n.ipynb").exists()


def test_an_interrupt_reaches_the_running_cell_and_keeps_what_there_is(tmp_path):
    path = notebook(tmp_path / "n.ipynb", WRITE_RUN.replace("sleep(0.5)", "sleep(60)"))
    child = _start(tmp_path, path)
    assert any("step 1/2" in line for line in iter(child.stderr.readline, ""))
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=240)
    assert child.returncode == 130, told
    assert "Traceback" not in told
    run = Run.load(tmp_path / "run")
    assert run.status == "interrupted" and len(run.records) == 1
    assert "KeyboardInterrupt" in json.dumps(nbformat.read(tmp_path / "run" / "n.ipynb", as_version=4))


def _start(tmp_path, path):
    """`python -m kit demo` on another notebook, as a process of its own."""
    script = f"import sys; from pathlib import Path; from kit import cli, demo; demo.NOTEBOOK = Path({str(path)!r}); "
    script += "sys.exit(cli.main())"
    command = [sys.executable, "-c", script, "demo", "--out", str(tmp_path / "run"), "--steps", "2"]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.notebook
def test_the_real_demo(tmp_path):
    """Two steps on the bundled model: everything that `make demo` promises is there."""
    out, started = tmp_path / "run", time.monotonic()
    command = [sys.executable, "-m", "kit", "demo", "--out", str(out), "--steps", "2", "--json"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env=os.environ | {"KIT_STEPS": "9"})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["figures"]["steps"] == 2 and told["figures"]["dtype"] == "float16"
    assert told["seconds"] <= time.monotonic() - started
    for name in ("run.json", "records.jsonl", "completions.jsonl", "figures/training.png"):
        assert (out / name).stat().st_size > 0
    page = out / kit_demo.NOTEBOOK.with_suffix(".html").name
    assert "Held-out accuracy after" in page.read_text() and page.with_suffix(".ipynb").exists()
    run = Run.load(out)
    assert run.status == "finished" and run.info["sampler"]["name"] == "vllm"
    assert 0 < run.info["summary"]["held_out_before"] < 1
