"""`python -m kit compare` and `report`: on runs that are written here, with figures known beforehand."""

import json

import pytest

from kit import cli
from kit.comparison import compare, comparison_table, save_comparison, statements
from kit.errors import ArgumentError
from kit.records import Run, RunNotFound, RunWriter
from kit.report import final_figures, held_out_summary

FP16 = {"abs_mean": 1e-4, "k3": 1e-7}
BF16 = {"abs_mean": 8e-4, "k3": 64e-7}
LEARNS = [0.25, 0.5, 0.5, 0.5, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75, 1.0, 1.0]


def make(root, name, dtype, mismatch, accuracy, *, settings=None, norms=None, **info):
    """A run with these accuracies, a step each, and a mismatch that is the same at every step."""
    described = {"precision": {"name": dtype}, "settings": settings or {"learning_rate": 1e-3}, "model": "tiny"}
    with RunWriter.create(root / name, described | info) as writer:
        for step, value in enumerate(accuracy, start=1):
            writer.write({
                "step": step, "accuracy": value, "kl": 0.01 * step, "mismatch/abs_mean": mismatch["abs_mean"],
                "mismatch/k3": mismatch["k3"], "grad_norm": norms[step - 1] if norms else 0.5, "time/step": 2.0,
                "scaler/scale": 65536.0 if dtype == "float16" else None, "scaler/skipped": int(step == 2),
            })  # fmt: skip
    return Run.load(root / name)


@pytest.fixture
def pair(tmp_path):
    return make(tmp_path, "a", "float16", FP16, LEARNS), make(tmp_path, "b", "bfloat16", BF16, LEARNS)


def test_final_figures_of_a_known_run(tmp_path):
    run = make(tmp_path, "a", "float16", FP16, [0.25, 0.5, 0.5, 0.5, 0.5, 1.0], norms=[1, 2, 3, 4, 5, None],
               summary={"held_out_before": 0.25, "held_out_after": 0.5})  # fmt: skip
    assert final_figures(run) == {
        "dtype": "float16", "steps": 6, "accuracy_first": 0.25, "accuracy_last": 0.6, "held_out_before": 0.25,
        "held_out_after": 0.5, "mismatch_abs_mean_median": 1e-4, "mismatch_k3_median": 1e-7,
        "mismatch_seq_abs_median": None, "grad_norm_median": 3, "kl_last": pytest.approx(0.04), "skipped_updates": 1,
        "loss_scale_last": 65536.0, "seconds_median": 2.0, "tokens_per_s_median": None, "memory_peak_gib": None,
    }  # fmt: skip


def test_final_figures_of_a_run_without_steps(tmp_path):
    figures = final_figures(make(tmp_path, "a", "float16", FP16, []))
    assert figures["steps"] == 0 and figures["accuracy_last"] is None and figures["grad_norm_median"] is None


def test_held_out_figures_reach_the_table(tmp_path):
    from kit.evaluation import Evaluation

    before, after = (Evaluation(4, 1, share, 0.02, share, 0.0, ()) for share in (0.25, 0.75))
    runs = [make(tmp_path, name, "float16", FP16, LEARNS, summary=held_out_summary(before, after)) for name in "ab"]
    row = next(line for line in comparison_table(runs).splitlines() if "held-out accuracy after" in line)
    assert row.split()[-2:] == ["0.75", "0.75"]


def test_table_has_a_column_a_run_and_the_ratio_of_two(pair):
    table = comparison_table(pair)
    rows = {line[:38].strip(): line.split() for line in table.splitlines()}
    assert rows["mismatch k3, median [nats a token]"][-4:] == ["1e-7", "6.4e-6", "64", "x"]
    assert rows["mismatch |d|, median [nats]"][-4:] == ["1e-4", "8e-4", "8", "x"]
    assert rows["loss scale, last"][-2:] == ["65536", "-"]
    assert "The runs differ in dtype only." in table
    assert "tokens a second" not in table  # recorded by neither


def test_three_runs_have_no_ratio(pair, tmp_path):
    third = make(tmp_path, "c", "float32", {"abs_mean": 0.0, "k3": 0.0}, LEARNS)
    assert list(compare([*pair, third])["runs"]) == ["a", "b", "c"]
    assert " x" not in comparison_table([*pair, third])


def test_a_reference_without_mismatch_gives_no_ratio(tmp_path, pair):
    exact = make(tmp_path, "c", "float32", {"abs_mean": 0.0, "k3": 0.0}, LEARNS)
    assert "inf" not in comparison_table([exact, pair[0]])


def test_arms_that_differ_in_more_than_dtype_are_named(tmp_path, pair):
    other = make(tmp_path, "c", "bfloat16", BF16, LEARNS, settings={"learning_rate": 2e-3})
    result = compare([pair[0], other])
    assert not result["fair"] and result["differences"]["settings.learning_rate"] == {"a": 1e-3, "c": 2e-3}
    assert "Warning: the runs differ in more than dtype: learning_rate (a 0.001, c 0.002)" in comparison_table(
        [pair[0], other]
    )


def test_what_cannot_be_compared_is_refused(tmp_path, pair):
    with pytest.raises(ArgumentError, match="at least two different runs"):
        compare(pair[:1])
    with pytest.raises(ArgumentError, match="at least two different runs"):
        compare([pair[0], pair[0]])
    with pytest.raises(ArgumentError, match=r"No step is recorded in .*empty"):
        compare([pair[0], make(tmp_path, "empty", "float16", FP16, [])])


def test_statements_say_when_the_other_format_did_as_well(pair):
    mismatch, learning, stability = statements(*pair)
    assert "|d| of bfloat16 is 8 times float16's, its k3 64 times" in mismatch and "8 and 64" in mismatch
    assert (
        "over the last 10 steps float16 0.750 ± 0.053, bfloat16 0.750 ± 0.053" in learning
        and "one learned as well as the other" in learning
    )
    assert "float16: largest gradient norm 1.0 times its median" in stability and "1 updates skipped" in stability


def test_statements_say_when_one_learned_more(tmp_path, pair):
    poor = make(tmp_path, "c", "bfloat16", BF16, [0.25] * 12, norms=[0.1] * 10 + [9.0, None])
    _, learning, stability = statements(pair[0], poor)
    assert "float16 learned more, by more than the noise" in learning
    assert "bfloat16: largest gradient norm 90.0 times its median, 1 without a finite one" in stability
    assert "bfloat16 learned more" in statements(poor, make(tmp_path, "d", "bfloat16", BF16, LEARNS))[1]


def test_a_verdict_needs_two_steps(tmp_path, pair):
    with pytest.raises(ArgumentError, match="at least 2"):
        statements(pair[0], make(tmp_path, "c", "bfloat16", BF16, [0.5]))


def test_figure_goes_beside_the_first_run_or_where_it_is_told(pair, tmp_path):
    assert save_comparison(pair) == tmp_path / "compare-a-b.png"
    assert (tmp_path / "compare-a-b.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match="no folder"):
        save_comparison(pair, tmp_path / "nowhere" / "x.png")


def test_compare_command(pair, tmp_path, capsys):
    names = [str(run.path) for run in pair]
    assert cli.main(["compare", *names, "--figure", str(tmp_path / "x.png"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fair"] is True and told["runs"]["b"]["mismatch_k3_median"] == 64e-7
    assert told["figure"] == str(tmp_path / "x.png") and (tmp_path / "x.png").exists()
    assert cli.main(["compare", *names]) == 0
    assert "The runs differ in dtype only." in capsys.readouterr().out


def test_compare_command_refuses_without_writing(pair, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    assert cli.main(["compare", str(pair[0].path)]) == 2
    assert "at least two different runs" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_pictures_are_drawn_from_given_runs(pair, tmp_path, monkeypatch, capsys):
    from kit import pictures

    monkeypatch.setattr(pictures, "TARGET", tmp_path / "images" / "training.png")
    monkeypatch.setattr(pictures, "make_arms", lambda steps: pytest.fail("runs were given"))
    assert cli.main(["pictures", *(str(run.path) for run in pair), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == [str(tmp_path / "images" / "training.png")]
    assert (tmp_path / "images" / "training.png").read_bytes().startswith(b"\x89PNG")


def test_report_command(pair, capsys):
    run = pair[0]
    assert cli.main(["report", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["figures"]["accuracy_last"] == pytest.approx(0.85) and told["status"] == "finished"
    assert told["files"] == [str(run.figures_dir / "training.png")]
    assert (run.figures_dir / "training.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["report", str(run.path)]) == 0
    assert "a: float16, 12 steps" in capsys.readouterr().out


def test_report_of_an_unknown_run_names_those_there_are(pair, tmp_path):
    with pytest.raises(RunNotFound, match=r"Runs in .*: a, b\."):
        Run.load(tmp_path / "c")
    assert not (tmp_path / "c").exists()
