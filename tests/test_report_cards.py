"""Report cards: what the schema admits and refuses, the shipped ones, and one that is made here."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.cli import main
from kit.mismatch_plots import cards_figure
from kit.published import PUBLISHED, published, published_text
from kit.report_cards import (
    FOLDER,
    CardError,
    card_text,
    check_card,
    ratio_text,
    read_card,
    schema,
    shipped_cards,
    title,
    usable_dtypes,
    write_card,
)

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path for path in FOLDER.glob("*.json") if path.name != "schema.json")


@pytest.fixture
def card():
    """A copy of a shipped card, to be spoilt."""
    return copy.deepcopy(shipped_cards()[0])


def put(card, field, value):
    """Set a field by its dotted name; `DELETE` removes it."""
    *parents, last = [int(part) if part.isdigit() else part for part in field.split(".")]
    for part in parents:
        card = card[part]
    if value is DELETE:
        del card[last]
    else:
        card[last] = value


DELETE = object()


# ---- the shipped ones


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_card_is_valid_measured_in_several_dtypes_and_where_the_theory_has_them(path):
    card = read_card(path)
    assert len(card["dtypes"]) >= 2 and card["versions"]["trl"]
    fp16, bf16 = card["dtypes"]["float16"], card["dtypes"]["bfloat16"]
    assert 4 < bf16["abs_mean"] / fp16["abs_mean"] < 16
    for found in card["dtypes"].values():
        assert found["nonfinite"] == 0
        assert found["tokens"] == card["settings"]["sequences"] * card["settings"]["tokens"]
        assert found["by_length"][-1]["length"] == card["settings"]["tokens"]
        assert found["abs_mean"] <= found["rms"] <= found["abs_max"]


def test_a_card_of_a_cpu_ships():
    assert any(card["hardware"]["kind"] == "cpu" and card["model"]["name"] == "tiny" for card in shipped_cards())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_card_says_nothing_of_its_owner(path):
    text = path.read_text()
    assert not any(word in text for word in ("/home", "/root", "/tmp", "/work", "Users", "@", "hostname"))


# ---- the schema


def test_the_schema_is_itself_valid():
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("format", "kit-report-card-0", "format"),
        ("format", DELETE, "'format' is a required property"),
        ("made", "yesterday", "made"),
        ("hardware.kind", "tpu", "hardware.kind"),
        ("hardware.capability", [9], "hardware.capability"),
        ("hardware.memory_gib", 0, "hardware.memory_gib"),
        ("hardware.serial", "1234", "serial"),
        ("owner", "somebody", "owner"),
        ("versions.torch", "somewhere/else", "versions.torch"),
        ("model.parameters", 0, "model.parameters"),
        ("settings.sequences", 1, "settings.sequences"),
        ("settings.temperature", 0.7, "settings.temperature"),
        ("dtypes", {}, "dtypes"),
        ("dtypes.float8", {}, "float8"),
        ("dtypes.float16.k3", -1, "dtypes.float16.k3"),
        ("dtypes.float16.abs_mean", "small", "dtypes.float16.abs_mean"),
        ("dtypes.float16.abs_mean", None, "dtypes.float16.abs_mean"),
        ("dtypes.float16.tokens", 0, "dtypes.float16.tokens"),
        ("dtypes.float16.by_length", [], "dtypes.float16.by_length"),
        ("dtypes.float16.by_length.0.length", 1.5, "dtypes.float16.by_length.0.length"),
        ("dtypes.float16.by_length.0.sequences", DELETE, "dtypes.float16.by_length.0"),
        ("dtypes.float16.growth.slope", "steep", "dtypes.float16.growth.slope"),
        ("dtypes.float16.kernels.host", "name", "dtypes.float16.kernels"),
    ],
)
def test_a_broken_field_is_named(card, field, value, named):
    put(card, field, value)
    with pytest.raises(CardError) as raised:
        check_card(card)
    assert named in str(raised.value) and "python -m kit report --out" in str(raised.value)


@pytest.mark.parametrize(
    "path", ["/home/ada/model", "~/model", "./model", "C:\\Users\\Ada", "ada@example.org", "a\nb", ""]
)
def test_a_folder_or_an_address_is_not_a_name(card, path):
    for field in ("model.name", "hardware.name"):
        spoilt = copy.deepcopy(card)
        put(spoilt, field, path)
        with pytest.raises(CardError, match=field.replace(".", r"\.")):
            check_card(spoilt)


@pytest.mark.parametrize("name", ["CPU Intel(R) Xeon(R) CPU @ 2.20GHz", "NVIDIA H100 80GB HBM3", "Qwen/Qwen3-4B"])
def test_names_that_hardware_and_models_have_are_admitted(card, name):
    put(card, "hardware.name", name)
    put(card, "model.name", name)
    check_card(card)


@pytest.mark.parametrize("value", [None, [], "card", 3, {}])
def test_what_is_no_card_at_all_is_said(value):
    with pytest.raises(CardError):
        check_card(value)


# ---- files


def test_a_card_written_is_the_card_read(card, tmp_path):
    put(card, "model.name", "Qwen/Qwen3-4B-Base äö")
    path = write_card(card, tmp_path / "new folder" / "card.json")
    assert read_card(path) == card


def test_a_broken_card_is_not_written(card, tmp_path):
    put(card, "dtypes.float16.k3", float("-inf"))
    with pytest.raises(CardError):
        write_card(card, tmp_path / "card.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "cannot be read"),
        ("", "is not JSON"),
        ('{"format": ', "is not JSON"),
        ('{"format": NaN}', "NaN is not a number"),
        ("[]", "is not valid"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_is_no_card_is_one_line(tmp_path, capsys, text, named):
    path = tmp_path / "card.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["report", str(path)]) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == "" and len(printed.err.splitlines()) == 1 and named in printed.err and path.name in printed.err
    )


@pytest.mark.parametrize("words", [[], ["runs/a", "--out", "card.json"]])
def test_either_a_run_or_a_card(words, capsys):
    assert main(["report", *words]) == 2
    assert "either a run's folder" in capsys.readouterr().err


def test_a_card_is_shown_in_words_and_as_json(capsys):
    assert main(["report", str(SHIPPED[0])]) == 0
    words = capsys.readouterr().out
    assert main(["report", str(SHIPPED[0]), "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert words.strip() == card_text(card).strip() and title(card) in words
    assert all(name in words for name in card["dtypes"])


# ---- words and figure


@given(factor=st.floats(0.1, 100))
def test_the_ratio_is_that_of_the_figures(factor):
    card = shipped_cards()[0]
    dtypes = {"float16": card["dtypes"]["float16"]}
    dtypes["bfloat16"] = dtypes["float16"] | {"abs_mean": factor * dtypes["float16"]["abs_mean"]}
    told = ratio_text({"dtypes": dtypes})
    assert float(told.partition("mean |d| ")[2].split()[0]) == pytest.approx(factor, rel=0.06)
    assert ratio_text({"dtypes": {"float32": {}}}) == ""


@pytest.mark.parametrize("count", [0, 1, 9])
def test_the_figure_takes_any_number_of_cards(count):
    figure = cards_figure((shipped_cards() * 9)[:count])
    figure.canvas.draw()
    assert len(figure.axes) == 2


def test_a_card_of_one_dtype_without_mismatch_is_drawn(card):
    only = card | {"dtypes": {"float32": card["dtypes"]["float32"] | {"rms": 0.0}}}
    for row in only["dtypes"]["float32"]["by_length"]:
        row["kl"] = 0.0
    check_card(only)
    cards_figure([only]).canvas.draw()


def test_values_of_others_carry_their_source_and_are_labelled():
    assert {value.dtype for value in published("sequence KL")} == {"float16", "bfloat16"}
    assert all(value.source and value.by and value.value > 0 for value in PUBLISHED)
    lines = published_text().splitlines()
    assert all(line.startswith("Published by ") and "not measured here" in line for line in lines)
    assert "2510.26788" in published_text() and "7.64" in published_text() and published("nothing") == []


def test_a_card_without_bfloat16_on_a_gpu_that_has_none():
    from kit.hardware import lookup

    assert usable_dtypes(lookup("T4")) == ["float32", "float16"]
    assert usable_dtypes(lookup("H200")) == usable_dtypes(lookup("CPU")) == ["float32", "float16", "bfloat16"]


# ---- made here


@pytest.mark.engine
def test_a_card_of_this_machine_is_made_checked_and_nobodys(tmp_path):
    path = tmp_path / "card.json"
    command = [sys.executable, "-m", "kit", "report", "--out", path, "--dtypes", "float32", "--sequences", "8"]
    done = subprocess.run([*map(str, command), "--tokens", "64", "--json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    card = read_card(path)
    assert json.loads(done.stdout) == card
    found = card["dtypes"]["float32"]
    assert found["tokens"] == 8 * 64 and found["kernels"]["sampler_attention"] and found["abs_mean"] < 1e-3
    assert card["model"] | {"parameters": 0} == {
        "name": "tiny", "parameters": 0, "layers": 4, "hidden_size": 128, "vocabulary": 64
    }  # fmt: skip
    assert str(tmp_path) not in path.read_text() and str(Path.home()) not in path.read_text()


def test_sizes_that_cannot_be_are_refused_before_anything_loads(tmp_path, capsys):
    out = tmp_path / "card.json"
    for words in (["--tokens", "9999"], ["--sequences", "0"], ["--dtypes", "int4"], ["--model", "./nowhere"]):
        assert main(["report", "--out", str(out), *words]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert not out.exists()
