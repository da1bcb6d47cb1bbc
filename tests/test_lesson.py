"""What the notebooks share: settings, the choice with its plan, the task for other models, and the first cell."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit import arithmetic, install, lesson
from kit.training import TrainSettings

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def sources(path, kind):
    """The texts of a notebook's cells of one kind."""
    import nbformat

    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


# ---- settings


def test_a_setting_is_the_cells_value_unless_the_environment_has_another(monkeypatch):
    monkeypatch.delenv("KIT_STEPS", raising=False)
    assert lesson.setting("STEPS", 40) == 40
    monkeypatch.setenv("KIT_STEPS", "5")
    assert lesson.setting("STEPS", 40) == 5
    monkeypatch.setenv("KIT_STEPS", "many")
    with pytest.raises(ValueError, match="many"):
        lesson.setting("STEPS", 40)


def test_the_bundled_model_gets_the_defaults_and_a_larger_one_a_start():
    assert lesson.suited_settings("tiny", "float16", 7) == TrainSettings(model="tiny", dtype="float16", steps=7)
    large = lesson.suited_settings("Qwen/Qwen3-4B-Base", "bfloat16", seed=3)
    assert large.learning_rate < TrainSettings().learning_rate and large.micro_batch == 8 and large.seed == 3


# ---- the task


def test_only_a_model_that_does_not_know_the_format_gets_examples():
    plain, shown = (lesson.problems(model, "rl", 4) for model in ("tiny", "some/model"))
    assert plain["answer"] == shown["answer"]
    for alone, with_examples in zip(plain["prompt"], shown["prompt"], strict=True):
        assert with_examples.endswith("\n\n" + alone) and with_examples.count("</think>") == 2
        for example in with_examples.removesuffix(alone).strip().split("\n\n"):
            question, answer = example.split("\nA: ")
            a, b = question.removeprefix("Q: ").removesuffix("=?").split("+")
            assert arithmetic.answer_of(answer) == int(a) + int(b)
            assert arithmetic.Problem(int(a), int(b)).split == "pretrain"
    assert lesson.stop_strings("tiny") == [] and lesson.stop_strings("some/model") == ["\n\n"]


# ---- the choice


def test_plan_of_the_bundled_model_fits_and_names_its_dtype():
    text = lesson.plan_text("tiny", "float16")
    assert text.startswith("dtype float16 (asked for)\n") and "fits" in text.splitlines()[-1]


@pytest.mark.parametrize(("model", "dtype"), [("no/such-model", "float16"), ("tiny", "int3")])
def test_a_choice_that_cannot_work_is_answered_in_words(model, dtype):
    assert lesson.plan_text(model, dtype).startswith("This choice cannot work here: ")


@pytest.fixture
def shown(monkeypatch):
    """What a cell displays: a list of [data] that updates replace in place."""
    import IPython.display

    cells = []

    def display(*objects, raw=False, display_id=None):
        for data in objects:
            cells.append(data)
        place = len(cells) - 1
        return SimpleNamespace(update=lambda data, raw: cells.__setitem__(place, data)) if display_id else None

    monkeypatch.setattr(IPython.display, "display", display)
    return cells


def test_choice_untouched_is_what_was_given(shown):
    choice = lesson.choose("tiny", "float16")
    assert (choice.model, choice.dtype) == ("tiny", "float16")
    assert len(shown) == 3 and shown[2]["text/plain"] == lesson.plan_text("tiny", "float16")


def test_a_dropdown_changes_the_choice_and_the_plan_at_once(shown):
    choice = lesson.choose("tiny", "float16")
    shown[1].value = "bfloat16"
    assert choice.dtype == "bfloat16" and shown[2]["text/plain"] == lesson.plan_text("tiny", "bfloat16")
    shown[0].value = "Qwen/Qwen3-4B-Base"
    assert choice.model == "Qwen/Qwen3-4B-Base" and "Qwen3-4B-Base, bfloat16" in shown[2]["text/plain"]


def test_without_ipywidgets_the_choice_still_works(shown, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    choice = lesson.choose("tiny", "float32")
    assert choice.dtype == "float32" and [list(data) for data in shown] == [["text/plain"]]
    assert "pip install ipywidgets" in capsys.readouterr().out


# ---- the first cell


def test_ready_installs_nothing_where_all_is_there(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(install.subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    install.ready()
    assert capsys.readouterr().out.startswith("Ready (nothing was installed): Python ")


@pytest.mark.parametrize(("gpu", "pins"), [(True, "requirements.txt"), (False, "requirements-cpu.txt")])
def test_ready_installs_the_lanes_pins_where_vllm_is_missing(monkeypatch, capsys, gpu, pins):
    monkeypatch.chdir(ROOT)
    calls = []

    def run(command, **options):
        wanted = Path(next(word for word in command if word.endswith(".txt"))).read_text().splitlines()
        calls.append((command[4:], [line.partition("==")[0] for line in wanted if "==" in line]))
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(
        install.shutil, "which", lambda name: "/bin/nvidia-smi" if gpu and name == "nvidia-smi" else None
    )
    monkeypatch.setattr(install, "installed", lambda: {"trl": "1"})
    monkeypatch.setattr(install, "loaded_packages", lambda: {"ipykernel", "numpy"})
    install.ready()
    assert len(calls) == (1 if gpu else 2) and all(command[0] == "-q" for command, _ in calls)
    for _, names in calls:
        assert "trl" in names and {"ipykernel", "numpy"}.isdisjoint(names)
    assert f"-r {pins}" in capsys.readouterr().out


def test_a_failing_pip_says_what_it_said(monkeypatch):
    monkeypatch.chdir(ROOT)
    answer = SimpleNamespace(returncode=1, stdout="looking\nNo matching distribution found for torch\n")
    monkeypatch.setattr(install.subprocess, "run", lambda command, **options: answer)
    monkeypatch.setattr(install, "installed", lambda: {})
    with pytest.raises(install.InstallFailed, match="No matching distribution found for torch"):
        install.ready()


def test_loaded_packages_knows_what_this_process_has_loaded():
    import nbformat

    assert "nbformat" in install.loaded_packages() and nbformat.__version__
    assert "no-such-package" not in install.loaded_packages()


# ---- the notebooks as they are stored


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_opens_with_contents_what_is_seen_time_and_memory(path):
    first, *others = sources(path, "markdown")
    assert "**Contents**" in first and "**What you will see.**" in first
    assert "time to run all" in first and "memory" in first and "H200" in first
    headings = [line.removeprefix("## ") for text in others for line in text.splitlines() if line.startswith("## ")]
    for number, heading in enumerate(headings, start=1):
        title = heading.partition(". ")[2]
        assert heading.startswith(f"{number}. ")
        assert f"[{title}](#{heading.replace(' ', '-')})" in first


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cell_settles_versions_before_anything_is_imported(path):
    cells = sources(path, "code")
    assert cells[0] == sources(NOTEBOOKS[0], "code")[0]
    imported = [
        line.split()[1].partition(".")[0] for line in cells[0].splitlines() if line.startswith(("import", "from"))
    ]
    assert set(imported) - {"kit"} <= sys.stdlib_module_names
    assert cells[0].endswith("install.ready()")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_predicts_before_the_run_and_checks_after_it(path):
    text = "\n".join(sources(path, "markdown"))
    assert "redict" in text.partition("\n## ")[2]
    last_assert = max(i for i, source in enumerate(sources(path, "code")) if "assert " in source)
    assert last_assert >= len(sources(path, "code")) // 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_form_fields_are_literals(path):
    import ast

    for source in sources(path, "code"):
        for line in source.splitlines():
            if "# @param" in line:
                ast.literal_eval(line.partition("=")[2].partition("#")[0].strip())
