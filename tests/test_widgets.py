"""Widgets and their twins; buttons that work while a cell trains, in a real kernel."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from engines import running_kernel

from kit import hardware
from kit.control import RunControl, serve_widgets
from kit.records import Run
from kit.widgets import (
    completion_browser,
    completions_html,
    completions_text,
    control_panel,
    dtype_choices,
    dtype_dropdown,
    groups_of,
    model_choices,
    model_dropdown,
    steps_of,
    telling_group,
)

ROOT = Path(__file__).parents[1]


def row(step: int, prompt: str, completion: str, advantage: float = 0.5, **more) -> dict:
    rewards = {"correct": 1.0, "format": 0.0}
    return {"step": step, "prompt": prompt, "completion": completion, "rewards": rewards, "advantage": advantage} | more


TOKENS = {"tokens": ["4", "<b>", "\n"], "token_mismatch": [0.0, 0.02, 0.01]}
RUN = Run(Path("runs/demo"), {}, [], [
    row(2, "Q: 1+3=?", "4", -0.5),
    row(2, "Q: 1+3=?", "4<b>\n", **TOKENS),
    row(2, "Q: 2+2=?", "5"),
    row(1, "Q: 9+9=?", "18"),
])  # fmt: skip


# ---- choices


def test_dropdowns_have_their_default_untouched():
    assert dtype_dropdown().value == "auto"
    assert dtype_dropdown("bfloat16").value == "bfloat16"
    assert model_dropdown().value == "tiny"
    assert model_dropdown("some/folder").value == "some/folder"
    assert [value for _, value in model_dropdown().options] == [value for _, value in model_choices()]
    with pytest.raises(ValueError, match="'float8' is no dtype; choose auto, float32, float16, bfloat16"):
        dtype_dropdown("float8")


def test_labels_say_what_the_machine_does_with_a_dtype(monkeypatch):
    monkeypatch.setattr(hardware, "detect", lambda: hardware.lookup("T4"))
    assert dtype_choices() == [
        ("auto: float16 here", "auto"),
        ("float32", "float32"),
        ("float16", "float16"),
        ("bfloat16 (not on this GPU)", "bfloat16"),
    ]
    assert dtype_dropdown("bfloat16").label == "bfloat16 (not on this GPU)"


def test_without_ipywidgets_the_error_says_what_to_do_instead():
    code = ("import sys; sys.modules['ipywidgets'] = None\nfrom kit.widgets import *\n"
            "print(completions_text([]) == '')\n"
            "try: model_dropdown()\nexcept ImportError as error: print(error)")  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout
    assert out.startswith("True\nWidgets need ipywidgets: pip install ipywidgets")
    assert 'set dtype = "float16" by hand' in out


def test_importing_the_widgets_loads_none():
    code = "import sys, kit.widgets; print([m for m in ('ipywidgets', 'matplotlib', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"


# ---- completions


def test_completions_are_grouped_by_step_and_prompt():
    assert steps_of(RUN) == [1, 2]
    assert {prompt: len(rows) for prompt, rows in groups_of(RUN, 2).items()} == {"Q: 1+3=?": 2, "Q: 2+2=?": 1}
    chat = row(3, [{"role": "user", "content": "1+1?"}], [{"role": "assistant", "content": "2"}])
    assert list(groups_of(Run(Path("x"), {}, [], [chat]), 3)) == ["user: 1+1?"]


def test_the_telling_group_is_the_last_whose_answers_differ():
    same = [row(3, "Q: 5+5=?", "10", 0.0), row(3, "Q: 5+5=?", "10", 0.0)]
    assert telling_group(RUN) == (2, "Q: 1+3=?")
    assert telling_group(Run(Path("x"), {}, [], [*RUN.completions, *same])) == (2, "Q: 1+3=?")
    assert telling_group(Run(Path("x"), {}, [], same)) == (3, "Q: 5+5=?")
    with pytest.raises(ValueError, match="no recorded completions"):
        telling_group(Run(Path("x"), {}, [], []))


def test_the_text_names_rewards_advantage_and_the_worst_token():
    assert completions_text(groups_of(RUN, 2)["Q: 1+3=?"]) == (
        "1. correct 1, format 0; advantage -0.50\n4\n\n"
        "2. correct 1, format 0; advantage +0.50; largest mismatch 0.02 nats, at '<b>'\n4<b>\n"
    )


def test_the_html_shades_tokens_by_their_mismatch_and_escapes_them():
    html = completions_html(groups_of(RUN, 2)["Q: 1+3=?"])
    assert "<span title='0 nats' style='background:rgba(199,80,0,0.000)'>4</span>" in html
    assert "<span title='0.02 nats' style='background:rgba(199,80,0,0.600)'>&lt;b&gt;</span>" in html
    assert "<span title='0.01 nats' style='background:rgba(199,80,0,0.300)'>\u21b5\n</span>" in html
    assert "0.02 nats</div>" in html  # the legend's end
    assert "<b>\n" not in html


def test_the_browser_shows_the_group_that_is_chosen():
    browser = completion_browser(RUN)
    step, prompt = browser.children[0].children
    page = browser.children[1]
    assert (step.value, prompt.value) == (2, "Q: 1+3=?")
    assert completions_html(groups_of(RUN, 2)["Q: 1+3=?"]) in page.value
    prompt.value = "Q: 2+2=?"
    assert completions_html(groups_of(RUN, 2)["Q: 2+2=?"]) in page.value
    step.value = 1
    assert prompt.options == (("1. Q: 9+9=?", "Q: 9+9=?"),)
    assert completions_html(groups_of(RUN, 1)["Q: 9+9=?"]) in page.value
    assert "no recorded completions" in completion_browser(Run(Path("runs/x"), {}, [], [])).value


# ---- control


def test_a_run_pauses_resumes_and_stops():
    control, states = RunControl(), []
    control.listen(states.append)
    assert control.check() == "run"
    control.pause()
    threading.Timer(0.2, control.resume).start()
    start = time.monotonic()
    assert control.check() == "run"
    assert 0.15 < time.monotonic() - start < 5
    control.pause()
    threading.Timer(0.1, control.stop).start()
    assert control.check() == "stop"
    control.pause()  # too late
    assert control.check() == "stop"
    assert states == ["running", "paused", "running", "paused", "stopping"]


def test_result_runs_here_unless_the_button_has():
    where = []
    assert RunControl().result(lambda: where.append(threading.current_thread()) or 1) == 1
    control = RunControl()
    control.start(lambda: where.append(threading.current_thread()) or time.sleep(0.1) or 2)
    control.start(lambda: 3)  # a second click
    assert control.result(lambda: 4) == 2
    assert where[0] is threading.main_thread()
    assert where[1] is not threading.main_thread()


def test_a_failed_run_is_said_and_the_cell_can_be_run_again():
    for begin in (lambda control: control.start(lambda: 1 // 0), lambda control: None):
        control = RunControl()
        begin(control)
        with pytest.raises(ZeroDivisionError):
            control.result(lambda: 1 // 0)
        assert control.state == "failed" and isinstance(control.error, ZeroDivisionError)
        assert control.result(lambda: 5) == 5
        assert (control.state, control.error) == ("ended", None)


def test_a_run_stopped_before_is_not_stopped_again():
    control = RunControl()

    def train():
        for step in range(1, 100):
            if step == 3:
                control.stop()
            if control.check() == "stop":
                return step

    assert (control.result(train), control.state) == (3, "ended")
    assert (control.result(train), control.state) == (3, "ended")


def test_the_label_follows_a_run_in_a_cell():
    control, seen = RunControl(), []
    label = control_panel(control).children[-1]
    assert label.value == "ready"
    label.observe(lambda change: seen.append(change["new"]), "value")
    control.result(control.check)
    assert seen == ["running", "ended"]
    with pytest.raises(RuntimeError):
        control.result(lambda: exec("raise RuntimeError('no disk')"))
    assert seen[2:] == ["running", "failed: no disk"]


def test_the_panels_buttons_set_the_flags():
    control = RunControl()
    pause, stop, label = control_panel(control).children
    pause.click()
    assert (control.state, pause.description, label.value) == ("paused", "Resume", "paused before the next step")
    pause.click()
    assert (control.state, pause.description) == ("running", "Pause")
    stop.click()
    assert (control.check(), stop.disabled) == ("stop", True)


def test_the_start_button_runs_in_the_background_and_shows_a_failure():
    control = RunControl()
    start, _, _, label = control_panel(control, start=lambda: 1 // 0).children
    start.click()
    with pytest.raises(ZeroDivisionError):
        control.result(lambda: None)
    assert (start.disabled, label.value) == (False, "failed: integer division or modulo by zero")


def test_outside_a_kernel_there_is_nothing_to_serve():
    assert serve_widgets() is False


# ---- in a kernel


@pytest.fixture(scope="module")
def kernel():
    with running_kernel("python3") as client:
        yield client


def printed_until(client, request: str, text: str = "") -> str:
    """What the request printed, until it has printed `text`, or (without text) has ended."""
    out = ""
    while True:
        message = client.get_iopub_msg(timeout=30)
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        out += content["text"] if message["msg_type"] == "stream" else ""
        assert message["msg_type"] != "error", content
        if (text and text in out) or (not text and content.get("execution_state") == "idle"):
            return out


def click(client, comm_id: str) -> None:
    data = {"method": "custom", "content": {"event": "click"}}
    client.shell_channel.send(client.session.msg("comm_msg", {"comm_id": comm_id, "data": data}))


def test_buttons_work_while_a_cell_trains(kernel):
    setup = kernel.execute(
        "import json, time\nfrom kit.widgets import RunControl, control_panel\ncontrol = RunControl()\n"
        "panel = control_panel(control)\npause, stop, label = panel.children\n"
        "print(json.dumps([pause.comm.comm_id, stop.comm.comm_id]))"
    )
    pause, stop = json.loads(printed_until(kernel, setup))
    training = kernel.execute(
        "for step in range(1, 1000):\n    time.sleep(0.02)\n    print('step', step, flush=True)\n"
        "    if control.check() == 'stop':\n        break\nprint('ended')"
    )
    queued = kernel.execute("print('queued cell sees', control.state)")
    printed_until(kernel, training, "step 3\n")
    click(kernel, pause)
    time.sleep(0.5)  # time for 25 steps, if it did not pause
    click(kernel, pause)
    time.sleep(0.3)
    click(kernel, stop)
    rest = printed_until(kernel, training)
    assert "ended" in rest
    steps = [int(line.split()[1]) for line in rest.splitlines() if line.startswith("step")]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert steps[-1] < 40  # 0.3 s of steps, not 0.8 s
    assert printed_until(kernel, queued) == "queued cell sees stopping\n"


def test_a_run_from_the_start_button_leaves_the_kernel_free(kernel):
    setup = kernel.execute(
        "import json, time\nfrom kit.widgets import RunControl, control_panel\ncontrol, seen = RunControl(), []\n"
        "def train():\n    while control.check() == 'run':\n        time.sleep(0.02); seen.append(1)\n"
        "    return 'saved'\n"
        "panel = control_panel(control, start=train)\nstart, pause, stop, label = panel.children\n"
        "print(json.dumps([start.comm.comm_id, stop.comm.comm_id]))"
    )
    start, stop = json.loads(printed_until(kernel, setup))
    click(kernel, start)
    other = kernel.execute("time.sleep(0.3); print(len(seen) > 2)")
    assert printed_until(kernel, other) == "True\n"
    waiting = kernel.execute("print('waiting', flush=True); print(control.result(train), label.value)")
    printed_until(kernel, waiting, "waiting\n")
    click(kernel, stop)  # served while the cell waits
    assert printed_until(kernel, waiting).endswith("saved ended\n")
