"""Colab without Colab: its IPython 7.34, ipywidgets 7.7.1 and ipykernel 6.17 in an environment of their own, and the
first cell in a Python that has nothing. Skipped where the package index cannot be reached.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

import nbformat
import pytest
from engines import running_kernel
from test_live import (  # noqa: F401  the same tests, on Colab's kernel
    show_a_run,
    test_a_step_is_not_held_up,
    test_the_executed_notebook_keeps_the_last_frame_and_its_words,
    test_two_outputs_are_updated_in_place,
    test_words_follow_the_steps,
)
from test_widgets import (  # noqa: F401
    printed_until,
    test_a_run_from_the_start_button_leaves_the_kernel_free,
    test_buttons_work_while_a_cell_trains,
)

from kit import badges

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# What Colab runs, as last published, with the packages of that age which they import. The rest comes from this
# environment: the kit itself, matplotlib for the drawing process.
COLAB = (
    "ipython==7.34.0", "ipywidgets==7.7.1", "ipykernel==6.17.1", "jupyter_client==7.4.9", "traitlets==5.7.1",
    "ipython_genutils==0.2.0", "backcall==0.2.0", "pickleshare==0.7.5", "decorator==4.4.2", "nest_asyncio==1.6.0",
    "entrypoints==0.4",
)  # fmt: skip


def bare(folder: Path) -> Path:
    """A Python without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def colab(tmp_path_factory):
    """The name of a kernel with Colab's versions."""
    folder = tmp_path_factory.mktemp("colab")
    python = bare(folder / "venv")
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(packages)]
    done = subprocess.run([*command, *COLAB], capture_output=True, text=True)
    if done.returncode:
        warnings.warn("The package index cannot be reached: Colab's versions are NOT tested.", stacklevel=1)
        pytest.skip(f"pip could not install Colab's versions: {done.stderr[-300:]}")
    (packages / "this_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    spec = folder / "kernels" / "colab"
    spec.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Colab", "language": "python"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        patch.setenv("PYTHONPATH", str(ROOT))
        yield "colab"


@pytest.fixture(scope="module")
def executed(colab):
    return show_a_run(colab)


@pytest.fixture(scope="module")
def kernel(colab):
    with running_kernel(colab) as client:
        yield client


def published(client, request: str):
    """(type, content) of what the request published, until it has ended."""
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") == request:
            assert message["msg_type"] != "error", message["content"]
            if message["content"].get("execution_state") == "idle":
                return
            yield message["msg_type"], message["content"]


def test_the_versions_are_colabs(kernel):
    names = ("IPython", "ipywidgets", "ipykernel", "traitlets")
    code = f"import json, {', '.join(names)}\nprint(json.dumps([m.__version__ for m in ({', '.join(names)})]))"
    found = json.loads(printed_until(kernel, kernel.execute(code)))
    assert [f"{name.lower()}=={version}" for name, version in zip(names, found, strict=True)] == [
        *COLAB[:3], COLAB[4],
    ]  # fmt: skip


def test_every_widget_of_the_notebooks_is_made_and_answers(kernel):
    code = """
import json
from pathlib import Path
from kit.records import Run
from kit.widgets import completion_browser, dtype_dropdown, model_dropdown, number_dropdown, run_list
row = {"step": 1, "prompt": "Q", "completion": "4", "rewards": {"right": 1.0}, "advantage": 0.5}
rows = [row, row | {"step": 2, "prompt": "P", "tokens": ["4"], "token_mismatch": [0.5]}]
browser = completion_browser(Run(Path("a"), {}, [], rows))
step, prompt = browser.children[0].children
first = browser.children[1].value
step.value = 1
dtype, model, rank = dtype_dropdown("float16"), model_dropdown(), number_dropdown("rank", (4, 8), 0)
rank.value = 8
runs = run_list(["a", "b"], ["b"])
display(browser, dtype, model, rank, runs)
print(json.dumps([dtype.value, model.value, rank.value, runs.value, "0.5 nats" in first, prompt.value]))
"""
    told = json.loads(printed_until(kernel, kernel.execute(code)).strip().splitlines()[-1])
    assert told == ["float16", "tiny", 8, ["b"], True, "Q"]


def test_the_plan_follows_the_dropdowns(kernel):
    request = kernel.execute("""
import ipywidgets
from kit.lesson import choose
before = set(ipywidgets.Widget.widgets)
choice = choose("tiny", "float16", rank=0)
made = {w.description: w for key, w in ipywidgets.Widget.widgets.items()
        if key not in before and isinstance(w, ipywidgets.Dropdown)}
made["dtype"].value, made["rank"].value = "bfloat16", 8
""")
    messages = list(published(kernel, request))
    plans = [content["data"]["text/plain"] for kind, content in messages if kind == "update_display_data"]
    assert [("tiny, bfloat16, rank 16" in plan, "tiny, bfloat16, rank 8" in plan) for plan in plans] == [
        (True, False),
        (False, True),
    ]
    shown = [content["data"] for kind, content in messages if kind == "display_data"]
    assert sum("application/vnd.jupyter.widget-view+json" in data for data in shown) == 3


# ---- the first cell, in a Python that has nothing


@pytest.fixture
def repository(tmp_path):
    """A git repository with the kit as it is now."""
    folder = tmp_path / "origin"
    shutil.copytree(ROOT / "kit", folder / "kit", ignore=shutil.ignore_patterns("__pycache__", "models"))
    for name in ("requirements.txt", "requirements-cpu.txt"):
        shutil.copy(ROOT / name, folder)
    git = ["git", "-C", str(folder), "-c", "user.name=kit", "-c", "user.email=kit@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "The kit"]):
        subprocess.run([*git, *command], check=True)
    return folder


PIP = """
import json, sys
from pathlib import Path
pins = next(Path(word).read_text() for word in sys.argv if word.endswith(".txt"))
with open({log!r}, "a") as log:
    log.write(json.dumps([sys.argv[1:], pins]) + "\\n")
"""


def test_the_first_cell_fetches_the_kit_and_settles_the_pins_before_anything_is_imported(tmp_path, repository):
    source = next(c.source for c in nbformat.read(NOTEBOOKS[0], 4).cells if c.cell_type == "code")
    source = re.sub(r'REPOSITORY = ".*?"', f"REPOSITORY = {str(repository)!r}", source)
    source += "\nprint(sorted({'torch', 'vllm', 'trl', 'transformers', 'numpy', 'ipywidgets'} & set(sys.modules)))"
    stand_in, log = tmp_path / "stand-in" / "pip", tmp_path / "log"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    (stand_in / "__main__.py").write_text(PIP.format(log=str(log)))
    empty = tmp_path / "content"
    empty.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(stand_in.parent)}
    done = subprocess.run([str(bare(tmp_path / "venv")), "-c", source], cwd=empty, env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Installing the pinned packages for a") and lines[-1] == "[]"
    assert any(line.startswith("Ready (installed just now)") for line in lines)
    assert "Jupyter, no HF_TOKEN; only gated models need one." in lines
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    pins = next(name for name in ("requirements-cpu.txt", "requirements.txt") if name in done.stdout)
    assert all(arguments[:2] == ["install", "-q"] for arguments, _ in calls)
    assert {text.strip() for _, text in calls} == {(ROOT / pins).read_text().strip()}


# ---- the notebooks as they are stored


def versions(text: str) -> set[tuple[str, str]]:
    """Every name==version in a text."""
    return {(name.lower().replace("_", "-"), version) for name, version in re.findall(r"([\w.-]+)==(\d[\w.]*)", text)}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_version_in_a_notebook_is_a_pinned_one(path):
    pinned = {
        pin for name in ("requirements.txt", "requirements-cpu.txt") for pin in versions((ROOT / name).read_text())
    }
    sources = "\n".join(cell.source for cell in nbformat.read(path, 4).cells)
    assert versions(sources) <= pinned
    assert "pip install" not in sources  # the first cell's `install.ready` does it, from the requirements


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_repositorys_address_comes_from_one_place(path):
    notebook = json.loads(path.read_text())
    written = badges.addressed(notebook, path.name, badges.repository())
    assert written["cells"][1:] == notebook["cells"][1:], "run python -m kit.badges"
    title = "".join(notebook["cells"][0]["source"])
    if badges.MARK.search(title) or path.name[:2] in ("01", "02", "03"):
        assert written == notebook, "run python -m kit.badges"


def test_another_address_is_written_everywhere_and_nothing_else_changes():
    path = next(path for path in NOTEBOOKS if path.name.startswith("01"))
    before = json.loads(path.read_text())
    moved = badges.addressed(before, path.name, "https://github.com/me/fork")
    text = "".join(moved["cells"][0]["source"])
    assert f"https://colab.research.google.com/github/me/fork/blob/main/notebooks/{path.name}" in text
    assert f"kernels/welcome?src=https://github.com/me/fork/blob/main/notebooks/{path.name}" in text
    assert badges.repository() not in json.dumps(moved)
    assert badges.addressed(moved, path.name, badges.repository()) == before
    assert all((ROOT / "notebooks" / target).exists() for target in re.findall(r"\]\((images/[^)]+)\)", text))


def test_a_notebook_without_a_title_is_refused():
    with pytest.raises(ValueError, match="does not begin with a title"):
        badges.addressed({"cells": [{"cell_type": "code", "source": ["1"]}]}, "a.ipynb", "https://github.com/a/b")
