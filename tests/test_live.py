"""The live view: in a real kernel, in a terminal, over a run of another process; and the process that draws."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import nbclient
import nbformat
import pytest

from kit import cli, live
from kit.live import LiveView, RecordTail, follow, progress_line
from kit.painter import Painter, PainterError, paint
from kit.records import Run, RunWriter

ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG\r\n"


def a_run(steps: int = 3) -> Run:
    info = {"name": "demo", "precision": {"name": "float16", "expected_k3": [1e-10, 1e-4]}, "status": "running"}
    records = [{"step": step, "accuracy": 0.5, "mismatch/k3": 1e-8, "time/step": 2.0} for step in range(1, steps + 1)]
    return Run(Path("runs/demo"), info, records, [])


def python(code: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def gone(pid: int) -> bool:
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


# ---- in a notebook


class Watching(nbclient.NotebookClient):
    """Keeps what the kernel published, as a front end sees it."""

    def process_message(self, message, cell, index):
        self.seen.append(message)
        return super().process_message(message, cell, index)


def show_a_run(kernel_name: str = "python3"):
    """A notebook that shows a run of 25 steps, 0.1 s each: its cells, the published messages, what the view counted."""
    cells = [
        "import json, time\nfrom kit.live import LiveView\nview = LiveView()\ninfo = {'name': 'demo', 'precision': "
        "{'name': 'float16'}}",
        "view.begin(info, total=25)\nfor step in range(1, 26):\n    time.sleep(0.1)\n"
        "    view({'step': step, 'accuracy': step / 25, 'kl': 0.001, 'time/step': 0.1})\nview.close(status='finished')",
        "print(json.dumps([view.frames, view.draw_seconds, view.publish_seconds, view.step_seconds, "
        "view.slowest_step_s, view.problem]))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    where = {"metadata": {"path": str(ROOT)}}
    client = Watching(notebook, timeout=120, kernel_name=kernel_name, resources=where)
    client.seen = []
    client.execute()
    return notebook.cells, client.seen, json.loads(notebook.cells[2].outputs[0]["text"])


@pytest.fixture(scope="module")
def executed():
    return show_a_run()


def test_two_outputs_are_updated_in_place(executed):
    _, seen, (frames, *_) = executed
    kinds = Counter(message["msg_type"] for message in seen)
    assert kinds["display_data"] == 2
    assert kinds["clear_output"] == 0
    made, updates = ([m["content"] for m in seen if m["msg_type"] == kind]
                     for kind in ("display_data", "update_display_data"))  # fmt: skip
    figure, words = (content["transient"]["display_id"] for content in made)
    images = [content for content in updates if "image/png" in content["data"]]
    assert {content["transient"]["display_id"] for content in images} == {figure}
    assert {content["transient"]["display_id"] for content in updates} == {figure, words}
    assert len(images) == frames >= 2  # the first and the last at least
    assert len({content["data"]["image/png"] for content in images}) == frames
    assert all(base64.b64decode(content["data"]["image/png"]).startswith(PNG) for content in images)


def test_the_executed_notebook_keeps_the_last_frame_and_its_words(executed):
    (_, cell, _), _, _ = executed
    assert [output["output_type"] for output in cell.outputs] == ["display_data", "display_data"]
    figure, words = cell.outputs
    assert base64.b64decode(figure["data"]["image/png"]).startswith(PNG)
    assert words["data"]["text/plain"].startswith("demo: float16, 25 steps, finished.")
    assert "Accuracy: 0.12 at first, 0.92 at last (means of 5 steps)" in words["data"]["text/plain"]
    assert max(len(line) for line in words["data"]["text/plain"].splitlines()) <= live.WORDS_WIDTH
    assert words["data"]["text/plain"].split() == figure["metadata"]["image/png"]["alt"].split()


def test_words_follow_the_steps(executed):
    _, seen, _ = executed
    told = [m["content"]["data"]["text/plain"] for m in seen if m["msg_type"] == "update_display_data"]
    lines = [text.splitlines()[0] for text in told if text.startswith("step ")]
    assert lines[0].endswith("left")
    steps = [int(line.split("/25")[0].removeprefix("step ")) for line in lines]
    assert steps == sorted(set(steps))
    assert len(steps) >= 2  # how many more is a matter of the machine: updates are throttled by their cost


def test_a_step_is_not_held_up(executed):
    _, _, (_, draw_seconds, publish_seconds, step_seconds, slowest, problem) = executed
    assert problem == ""
    assert draw_seconds > publish_seconds > 0
    assert slowest < 0.1
    assert step_seconds < 0.02 * 25 * 0.1


# ---- throttling


@pytest.mark.parametrize(("cost", "least", "most"), [(1e6, 2, 2), (1e-9, 3, 6)])
def test_calls_stay_within_the_share(cost, least, most):
    updater = live._Updater(lambda last: cost, share=0.02)
    start = time.monotonic()
    while time.monotonic() - start < 1.7:
        updater.notify()
        time.sleep(0.02)
    updater.finish()
    assert least <= updater.calls <= most  # the first and the last always; never more often than twice a second
    assert updater.cost == pytest.approx(updater.calls * cost + updater.seconds)


def test_the_last_call_is_made_even_if_the_end_comes_during_another():
    told = []
    updater = live._Updater(lambda last: told.append(last) or time.sleep(0.2) or 0.0, share=1.0)
    updater.notify()
    time.sleep(0.1)
    updater.finish()
    assert told == [False, True]


def test_news_at_the_end_is_published_without_another_step():
    told = []
    updater = live._Updater(lambda last: told.append(last) or 0.0, share=1.0)
    updater.notify()
    time.sleep(0.2)
    updater.notify()  # too early to be published now
    time.sleep(1.0)
    assert told == [False, False]
    updater.finish()
    assert told == [False, False, True]


# ---- the drawing process


def test_the_drawing_process_draws_the_same_picture():
    painter = Painter()
    try:
        frame = painter.draw([a_run()], dpi=50)
        assert frame.png == paint([a_run()], dpi=50).png
        assert frame.width == 1000
        assert 0 < frame.seconds < 20
        assert os.getpgid(painter._process.pid) != os.getpgrp()  # an interrupted cell does not reach it
        with pytest.raises(PainterError, match=r"unsupported operand|not supported"):
            painter.draw([Run(Path("x"), {}, [{"step": "one", "kl": 1.0}], [])], dpi=50)
        assert painter.draw([a_run()], dpi=50).png == frame.png  # an error is no end
        pid = painter._process.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PainterError, match="stopped"):
            painter.draw([a_run()], dpi=50)
    finally:
        painter.close()
    assert gone(pid)


def test_the_drawing_process_ends_with_a_killed_parent():
    parent = python("from kit.painter import Painter; import time\np = Painter(); p.start()\n"
                    "print(p._process.pid, flush=True); time.sleep(60)")  # fmt: skip
    pid = int(parent.stdout.readline())
    assert os.path.exists(f"/proc/{pid}")
    parent.kill()
    parent.communicate()
    assert gone(pid)


def test_without_the_drawing_process_the_last_frame_is_drawn_here():
    view = LiveView()
    view.info, view.records = a_run().info, a_run().records
    view._painter.start()
    view._painter._process.kill()
    assert view._draw(view.runs, last=False) is None
    assert "the drawing process stopped" in view.problem
    assert base64.b64decode(view._draw(view.runs, last=True).png).startswith(PNG)


# ---- in a terminal


def test_outside_a_notebook_a_step_is_a_line_on_stderr(capsys):
    with LiveView() as view:
        view.begin({"name": "demo"}, total=4)
        view({"step": 1, "reward": 0.25, "grad_norm": 0.5, "time/step": 3.0, "speed/tokens_per_s": 812.3})
        view({"step": 2, "accuracy": 0.75, "scaler/scale": 32768.0, "scaler/skipped": 1, "time/step": 1.0})
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step 1/4  reward 0.25  grad norm 0.5  812 tokens/s  3 s a step  0:09 left",
        "step 2/4  accuracy 0.75  scale 32768  update skipped (overflow)  1 s a step  0:04 left",
    ]
    assert (view.frames, view._painter._process) == (0, None)


def test_on_a_terminal_a_bar_stays_under_the_lines_and_goes_with_the_run():
    code = ("from kit.live import LiveView\nwith LiveView() as view:\n    view.begin({}, total=4)\n"
            "    view({'step': 1})\n    view({'step': 2})\n")  # fmt: skip
    terminal, end = os.openpty()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=end, check=True)
    os.close(end)
    said = os.read(terminal, 10_000).decode()
    os.close(terminal)
    clear = live.CLEAR_LINE
    assert said.replace("\r\n", "\n") == (
        f"{clear}step 1/4\n{'#' * 10}{'.' * 30}  1/4 (25%){clear}step 2/4\n{'#' * 20}{'.' * 20}  2/4 (50%){clear}"
    )


def test_a_line_does_without_what_is_missing():
    assert progress_line([{"step": 5}]) == "step 5"
    assert progress_line([{"step": 5, "kl": None, "time/step": 90.0}], 1000) == "step 5/1000  90 s a step  24.9 h left"


def test_importing_the_view_loads_no_drawing():
    code = "import sys, kit.live; print([m for m in ('matplotlib', 'torch', 'IPython') if m in sys.modules])"
    assert python(code).communicate()[0] == "[]\n"


# ---- a run of another process

WRITER = """
import sys, time
from kit.records import RunWriter
with RunWriter.create(sys.argv[1], {"steps": 6, "precision": {"name": "float16"}}) as writer:
    print("ready", flush=True)
    for step in range(1, 7):
        time.sleep(0.1)
        writer.write({"step": step, "kl": step / 1000})
"""


def test_another_processs_run_is_followed_to_its_end(tmp_path, capsys):
    process = python(WRITER, tmp_path / "a")
    assert process.stdout.readline() == "ready\n"
    run = follow(tmp_path / "a", pause_s=0.05)
    process.communicate()
    assert (run.status, run.column("step")) == ("finished", [1, 2, 3, 4, 5, 6])
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"step {step}/6  KL {step / 1000:g}" for step in range(1, 7)]


def test_watch_prints_records_and_saves_the_figure(tmp_path):
    with RunWriter.create(tmp_path / "a", {}) as writer:
        for step in (1, 2):
            writer.write({"step": step, "kl": 0.5})
    code = ("import argparse, sys\nfrom kit import live\nparser = argparse.ArgumentParser()\n"
            "live.add_arguments(parser)\nsys.exit(live.run(parser.parse_args(sys.argv[1:])))")  # fmt: skip
    out, _ = python(code, tmp_path / "a", "--json").communicate()
    assert [json.loads(line)["step"] for line in out.splitlines()] == [1, 2]
    out, err = python(code, tmp_path / "a", "--figure", tmp_path / "a.png").communicate()
    assert err.splitlines() == ["step 1  KL 0.5", "step 2  KL 0.5"]
    assert out.startswith("a: unknown, 2 steps, finished.")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_watch_of_an_unknown_run_names_those_there_are(tmp_path, capsys):
    RunWriter.create(tmp_path / "a", {}).close()
    assert cli.main(["watch", str(tmp_path / "b")]) == 2
    assert f"error: There is no run at {tmp_path / 'b'}. Runs in {tmp_path}: a." in capsys.readouterr().err


def test_a_tail_waits_for_whole_lines_and_notices_a_resume(tmp_path):
    with RunWriter.create(tmp_path / "a", {}) as writer:
        tail = RecordTail(tmp_path / "a")
        assert tail.poll() == (False, [])
        writer.write({"step": 1})
        writer.write({"step": 2})
        assert [record["step"] for record in tail.poll()[1]] == [1, 2]
        with open(tmp_path / "a" / "records.jsonl", "a") as file:
            file.write('{"step": 3,')
        assert tail.poll() == (False, [])
    with RunWriter.resume(tmp_path / "a", step=1) as writer:
        writer.write({"step": 2, "kl": 0.5})
        restarted, records = tail.poll()
        assert restarted
        assert [(record["step"], record["kl"]) for record in records] == [(1, None), (2, 0.5)]


def test_a_broken_line_does_not_end_the_watch(tmp_path):
    with RunWriter.create(tmp_path / "a", {}) as writer:
        writer.write({"step": 1})
        with open(tmp_path / "a" / "records.jsonl", "ab") as file:
            file.write(b'\x00\x00{"step": 2\n["no record"]\n')  # what a power cut leaves
        writer.write({"step": 3})
        assert [record["step"] for record in RecordTail(tmp_path / "a").poll()[1]] == [1, 3]


def test_a_resumed_run_continues_in_the_view(tmp_path, capsys, monkeypatch):
    first, second = [{"step": 1}, {"step": 2}], [{"step": 1}, {"step": 2, "kl": 0.5}, {"step": 3}]
    RunWriter.create(tmp_path / "a", {}).close()
    monkeypatch.setattr(live, "batches", lambda path, pause_s: iter([(False, first), (True, second)]))
    view = LiveView()
    follow(tmp_path / "a", view)
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "step 1",
        "step 2",
        "step 2",
        "step 3",
    ]
    assert view.records == second
