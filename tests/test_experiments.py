"""`python -m kit experiment`: the table, what all experiments share, and the line of mismatch over mantissa bits."""

import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from engines import kit_command
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from kit import cli, mantissa
from kit.errors import ArgumentError
from kit.experiments import EXPERIMENTS, save
from kit.mantissa import fit

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_a_module_with_four_functions(name):
    module, words = EXPERIMENTS[name]
    for function in ("add_arguments", "measure", "text", "figure"):
        assert callable(getattr(import_module(module), function))
    assert len(words) > 20


def test_help_answers_without_anything_heavy():
    script = (
        "import sys; from kit.cli import main\n"
        "try: main(['experiment', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'trl', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in EXPERIMENTS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mantissa", "--bits", "4,x"], "whole numbers such as"),
        (["mantissa", "--bits", "7"], "at least two different numbers"),
        (["mantissa", "--bits", "0,7"], "expected 2 to 8 and 1 to 23"),
        (["mantissa", "--tokens", "3000"], "leaves room for"),
        (["mantissa", "--sequences", "0"], "at least 1"),
        (["attribution", "--dtype", "float32"], "expected bfloat16 or float16"),
        (["attribution", "--dtype", "float8"], "Unknown dtype"),
    ],
)
def test_a_bad_request_is_one_line_and_nothing_is_written(arguments, said, capsys, tmp_path):
    assert cli.main(["experiment", *arguments, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and said in lines[0] and printed.out == ""
    assert not (tmp_path / "out").exists()


def test_a_result_is_replaced_and_a_folder_that_cannot_be_is_named(tmp_path):
    figure = Figure()
    for value in (1, 2):
        files = save({"value": value}, figure, tmp_path / "deep" / "r\u00e9sultat")
    assert json.loads(Path(files["result"]).read_text()) == {"value": 2}
    assert Path(files["figure"]).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot be written"):
        save({}, figure, tmp_path / "file")
    assert cli.main(["experiment", "mantissa", "--out", str(tmp_path / "file")]) == 2  # at once, not after measuring


# ---- the line


@given(st.floats(-3, 3), st.floats(-20, 20), st.lists(st.integers(1, 23), min_size=2, unique=True))
def test_a_line_is_found_again(slope, height, bits):
    found = fit(bits, [2.0 ** (height + slope * m) for m in bits])
    assert found["slope"] == pytest.approx(slope, abs=1e-6) and found["at_zero"] == pytest.approx(height, abs=1e-5)
    assert found["error"] is None if len(bits) == 2 else found["error"] < 1e-5


def test_the_error_of_a_slope_is_that_of_least_squares():
    found = fit([1, 2, 3, 4], [2.0, 1.0, 2.0, 1.0])  # log2: 1, 0, 1, 0
    assert found["slope"] == pytest.approx(-0.2) and found["at_zero"] == pytest.approx(1.0)
    assert found["error"] == pytest.approx(math.sqrt(0.8 / 2 / 5))
    assert fit([1, 2, 3], [4.0, 2.0, 0.0])["slope"] == -1  # a zero has no logarithm
    with pytest.raises(ArgumentError, match="two different numbers"):
        fit([1, 2], [1.0, 0.0])


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """(standard output, standard error, folder) of a small `kit experiment mantissa --json`."""
    out = tmp_path_factory.mktemp("experiment") / "mantissa"
    process = kit_command(
        "experiment", "mantissa", "--bits", "4,6,8,10,13,16,20,23", "--sequences", "24", "--tokens", "48",
        "--out", out, "--json",
    )  # fmt: skip
    output, errors = process.communicate()
    assert process.returncode == 0, errors[-2000:]
    return output, errors, out


@pytest.mark.engine
def test_json_alone_is_printed_and_the_files_hold_the_same(command):
    output, errors, out = command
    result = json.loads(output)
    stored = json.loads((out / "result.json").read_text())
    assert stored == {key: value for key, value in result.items() if key not in ("result", "figure")}
    assert result["figure"] == str(out / "figure.png") and (out / "figure.png").stat().st_size > 10_000
    assert result["settings"]["sequences"] == 24 and result["hardware"]["kind"] == "cpu" and result["versions"]["torch"]
    assert "mantissa bits: mean |d|" in errors  # progress


@pytest.mark.engine
def test_the_mismatch_halves_with_each_bit(command):
    result = json.loads(command[0])
    assert abs(result["fit"]["slope"] + 1) < 0.15
    assert [point["bits"] for point in result["points"]] == [4, 6, 8, 10, 13, 16, 20, 23]
    for point in result["points"]:
        assert point["both"]["low"] <= point["both"]["value"] <= point["both"]["high"]


@pytest.mark.engine
def test_the_real_formats_lie_near_the_line(command):
    result = json.loads(command[0])
    line = result["fit_above_floor"]
    for name in ("bfloat16", "float16"):
        point = result["real"][name]
        expected = 2 ** (line["at_zero"] + line["slope"] * point["bits"])
        assert 1 / 4 < point["both"]["value"] / expected < 4, name
    # 23 emulated bits are float32 itself
    assert result["points"][-1]["both"] == result["real"]["float32"]["both"]


@pytest.mark.engine
def test_figure_and_words_tell_the_line_and_the_real_points(command):
    result = json.loads(command[0])
    figure, told = mantissa.figure(result), mantissa.text(result)
    figure.canvas.draw()
    (axes,) = figure.axes
    shown = [text.get_text() for text in [*axes.texts, *axes.get_legend().get_texts()]]
    for key in ("fit", "fit_above_floor"):
        factor = f"{2 ** -result[key]['slope']:.2f}"
        assert any(f"{factor} a bit" in line for line in shown) and f"A factor of {factor} a bit" in told
    for name in ("bfloat16", "float16", "float32"):
        assert f"real {name}" in shown and f"real {name}" in told
    assert axes.get_yscale() == "log"
