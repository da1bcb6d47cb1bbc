"""The table of claims: judged by rules over results, rendered, and equal to the one in notebooks/README.md."""

import copy
import json
from pathlib import Path

import pytest

from kit import claims
from kit.claims import AGREES, BEGIN, CLAIMS, DOES_NOT, END, UNASKED, judge, markdown, write_into
from kit.cli import main
from kit.errors import ArgumentError
from kit.report_cards import shipped_cards

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "notebooks" / "results"
README = ROOT / "notebooks" / "README.md"


@pytest.fixture
def found():
    """The committed results, to be changed."""
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in claims.NEEDED}
    return copy.deepcopy(results | {"cards": shipped_cards()})


def verdict(rows, words):
    (row,) = [row for row in rows if words in row["claim"]]
    return row["verdict"]


def test_the_readme_has_the_table_of_the_committed_results(found):
    text = README.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == markdown(judge(found))


def test_every_claim_is_judged_once_with_a_measure(found):
    rows = judge(found)
    assert [row["claim"] for row in rows] == [claim.says for claim in CLAIMS]
    assert {row["verdict"] for row in rows} <= {AGREES, DOES_NOT, UNASKED}
    assert all(row["measure"] for row in rows)


def test_a_verdict_follows_the_figures(found):
    for name, reached in (("float16", None), ("bfloat16", 12)):
        found["sanity"]["arms"][name]["reached"] = reached
    rows = judge(found)
    assert verdict(rows, "learns a perfectible set") == DOES_NOT
    assert verdict(rows, "becomes unstable") == DOES_NOT
    found["sanity"]["arms"]["bfloat16"]["reached"] = None
    assert verdict(judge(found), "becomes unstable") == AGREES
    found["length"]["dtypes"]["bfloat16"]["rms"] = found["length"]["dtypes"]["float16"]["rms"]
    assert verdict(judge(found), "three further bits") == DOES_NOT


def test_what_was_not_run_cannot_be_asked(found):
    del found["sanity"]["arms"]["bfloat16"]
    found["corrections"]["dtypes"] = {name: d | {"training": {}} for name, d in found["corrections"]["dtypes"].items()}
    rows = judge(found)
    assert verdict(rows, "becomes unstable") == UNASKED and verdict(rows, "beats every correction") == UNASKED


def test_a_bar_in_a_cell_does_not_end_it():
    line = markdown([{"claim": "|d|", "measure": "a", "verdict": AGREES}]).splitlines()[-1]
    assert line.replace("\\|", "").count("|") == 4


def test_only_what_is_between_the_markers_is_replaced(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    row = {"claim": "c", "measure": "m", "verdict": AGREES}
    write_into(path, [row])
    assert path.read_text() == f"before\n{BEGIN}\n{markdown([row])}\n{END}\nafter\n"
    path.write_text("no markers")
    with pytest.raises(ArgumentError, match="has not the two lines"):
        write_into(path, [row])
    with pytest.raises(ArgumentError, match="has not the two lines"):
        write_into(tmp_path / "nowhere.md", [row])


def test_the_command_reads_the_results_and_says_which_is_missing(tmp_path, capsys):
    assert main(["experiment", "claims", "--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "python -m kit experiment length" in capsys.readouterr().err
    assert main(["experiment", "claims", "--results", str(RESULTS), "--out", str(tmp_path / "out"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["claims"]
    assert len(rows) == len(CLAIMS) and (tmp_path / "out" / "figure.png").stat().st_size > 10_000
    assert all(row["claim"] in claims.text({"claims": rows}) for row in rows)
