"""The notebooks in JupyterLab in a real browser: clicked, watched, stopped and reloaded as a person does it.

Skipped where no Chromium is installed; `.ci/run` installs Debian's. What is waited for is a state of the page, never a
time.
"""

import re
import warnings
from pathlib import Path

import pytest

from kit.browser import HAS_ENDED, BrowserMissing, Lab, NotebookPage, chromium, chromium_path
from kit.records import Run

LOAD, GRPO = "01_load_the_model.ipynb", "02_grpo_with_vllm.ipynb"
FRAMES = 5

# Samples what a cell shows of the run, 25 times a second: how often its picture changed, and whether it ever was gone.
WATCH = """cell => {
    const seen = {pictures: new Set(), samples: 0, blank: 0, heights: new Set(), words: new Set()};
    window.watched = seen;
    const look = () => {
        const image = cell.querySelector('.jp-OutputArea-output img');
        if (!image && seen.pictures.size === 0) return;
        seen.samples += 1;
        const box = image ? image.getBoundingClientRect() : {width: 0, height: 0};
        if (!image || box.width < 200 || box.height < 200) { seen.blank += 1; return; }
        if (image.complete && image.naturalWidth > 0) seen.pictures.add(image.src);
        seen.heights.add(Math.round(box.height));
        const words = [...cell.querySelectorAll('.jp-OutputArea-output pre')].map(pre => pre.textContent);
        seen.words.add((words.join(' ').match(/step [0-9]+/) || [''])[0]);
    };
    seen.timer = setInterval(look, 40);
}"""
SEEN = """() => { const w = window.watched;
    return {pictures: w.pictures.size, samples: w.samples, blank: w.blank, heights: w.heights.size,
            words: w.words.size}; }"""


@pytest.fixture(scope="module")
def browser():
    if chromium_path() is None:
        warnings.warn("No Chromium is installed: the notebooks are NOT tested in a browser. On Debian: apt-get "
                      "install chromium.", stacklevel=1)  # fmt: skip
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab whose kernels make a run that ends only when it is stopped."""
    folder = tmp_path_factory.mktemp("lab")
    with Lab(folder, {"KIT_STEPS": "300", "KIT_OUT": str(folder / "run"), "KIT_HELD_OUT": "32"}) as running:
        yield running


def choices(cell):
    """The dropdowns of a cell, as locators."""
    return cell.locator(".jp-OutputArea select")


def option(dropdown, start: str) -> str:
    """The label of a dropdown's option that starts so."""
    return next(text for text in dropdown.locator("option").all_inner_texts() if text.startswith(start))


def test_without_a_browser_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert chromium_path() is None
    with pytest.raises(BrowserMissing, match="apt-get install chromium"), chromium():
        pass


def test_the_plan_follows_the_dropdowns(browser, lab):
    notebook = NotebookPage(browser, lab, LOAD)
    place = notebook.index_of("choose(")
    notebook.run_through(place)
    cell = notebook.cell(place)
    model, dtype = choices(cell).nth(0), choices(cell).nth(1)
    plan = cell.locator(".jp-OutputArea-output pre", has_text="base weights")
    assert "tiny, float16" in plan.inner_text()
    dtype.select_option(label=option(dtype, "bfloat16"))
    plan.filter(has_text="tiny, bfloat16").wait_for()
    model.select_option(label=option(model, "Qwen3-4B-Base"))
    plan.filter(has_text="Qwen3-4B-Base, bfloat16").wait_for()
    assert "billion x bfloat16" in plan.inner_text()
    assert plan.count() == 1  # replaced, not appended
    notebook.page.close()


@pytest.fixture(scope="module")
def stopped(browser, lab):
    """Notebook 02: run all, watched until the chart has changed often enough, then stopped by its button."""
    notebook = NotebookPage(browser, lab, GRPO)
    place = notebook.index_of("control_panel(")
    panel = notebook.cell(place)
    panel.evaluate(WATCH)
    notebook.run_all()
    notebook.page.wait_for_function(f"() => window.watched.pictures.size >= {FRAMES} || ({HAS_ENDED})()")
    state = panel.locator(".widget-label, .jupyter-widget-label").last.inner_text()
    panel.get_by_role("button", name="Stop and save").click()
    notebook.finished()
    seen = notebook.page.evaluate(SEEN) | {"state": state}
    yield notebook, place, seen
    notebook.page.close()


def test_the_chart_changes_while_it_trains_and_is_never_gone(stopped):
    _, _, seen = stopped
    assert seen["pictures"] >= FRAMES
    assert seen["samples"] > 10 * FRAMES
    assert seen["blank"] == 0
    assert seen["heights"] == 1  # nothing below it jumps
    assert seen["words"] > 2  # the line of words kept pace
    assert seen["state"] == "running"


def test_stop_keeps_the_record_and_the_rest_of_the_notebook_runs_on_it(stopped, lab):
    notebook, place, _ = stopped
    run = Run.load(lab.folder / "run")
    assert run.status == "stopped" and 1 <= len(run.records) < 300
    assert run.column("step") == list(range(1, len(run.records) + 1))
    assert (run.path / "adapter" / "adapter_model.safetensors").exists()
    assert f"{len(run.records)} steps, stopped." in notebook.outputs(place)
    listing = notebook.outputs(notebook.index_of("The last line of records.jsonl"))
    assert re.search(r"^records.jsonl +[\d,]+ bytes$", listing, re.MULTILINE)
    assert re.search(rf"^  step +{len(run.records)}$", listing, re.MULTILINE)
    button = notebook.cell(place).get_by_role("button", name="Stop and save")
    assert button.is_disabled()
    assert notebook.cell(place).get_by_text("ended", exact=True).is_visible()


def test_no_output_is_red_but_errors(stopped):
    notebook, _, _ = stopped
    red = notebook.page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').all_inner_texts()
    assert red == []


def test_after_a_reload_the_output_is_still_there(stopped, lab):
    notebook, place, _ = stopped
    before = notebook.outputs(place)
    steps = len(Run.load(lab.folder / "run").records)
    notebook.command("docmanager:save")
    notebook.reload()
    image = notebook.cell(place).locator(".jp-OutputArea-output img")
    image.wait_for()
    assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") >= 1000
    after = notebook.outputs(place)
    assert f"{steps} steps, stopped." in after and f"{steps} steps, stopped." in before
    assert (lab.notebooks / GRPO).read_text().count('"image/png"') >= 1
    assert Path(lab.folder / "run" / "records.jsonl").read_bytes().count(b"\n") == steps
