"""The sanity test: which problems are kept, when an arm has reached the mark, and real arms on a small set."""

import json
import statistics
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import sanity
from kit.cli import main
from kit.errors import ArgumentError
from kit.records import Run
from kit.sanity import SanitySettings, arm_figures, check_set, first_reached, percentile, perfectible, run_sanity


def a_run(**columns) -> Run:
    """A run whose records have these columns."""
    length = len(next(iter(columns.values())))
    records = [{"step": i + 1} | {key: values[i] for key, values in columns.items()} for i in range(length)]
    return SimpleNamespace(
        records=records, info={}, path="runs/x", column=lambda key: [record.get(key) for record in records]
    )


# ---- pure


@given(st.lists(st.floats(0, 1), max_size=30))
def test_kept_problems_are_those_in_the_band(shares):
    kept = perfectible(shares)
    assert all(0.2 <= shares[i] <= 0.8 for i in kept)
    assert all(not 0.2 <= share <= 0.8 for i, share in enumerate(shares) if i not in kept)


def test_the_band_holds_its_edges_at_40_samples():
    assert perfectible([7 / 40, 8 / 40, 32 / 40, 33 / 40]) == [1, 2]


@given(accuracies=st.lists(st.floats(0, 1), max_size=30), window=st.integers(1, 6), target=st.floats(0.1, 0.99))
def test_reached_is_the_first_window_above_the_target(accuracies, window, target):
    means = [statistics.fmean(accuracies[i - window : i]) for i in range(window, len(accuracies) + 1)]
    above = [step for step, mean in enumerate(means, window) if mean > target]
    assert first_reached(accuracies, target, window) == (above[0] if above else None)


def test_a_step_without_accuracy_is_not_reached():
    assert first_reached([1.0, None, 1.0], 0.9, 2) is None and first_reached([], 0.9, 1) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_percentiles_are_values_in_order(values):
    assert percentile(values, 1.0) == max(values)
    assert percentile(values, 0.5) <= percentile(values, 0.99)
    assert sum(value <= percentile(values, 0.5) for value in values) >= len(values) / 2
    assert percentile([], 0.99) is None


def test_the_figures_of_an_arm():
    run = a_run(
        accuracy=[0.5, 0.9, 1.0, 1.0], grad_norm=[1.0, 2.0, None, 4.0], time=[1.0] * 4,
        **{"mismatch/abs_mean": [4e-4, 2e-4, 1e-4, 1e-4], "scaler/skipped": [0, 1, 0, 0], "time/step": [2.0, 1, 1, 1]},
    )  # fmt: skip
    found = arm_figures(run, 0.95, 2)
    assert (found["steps"], found["reached"], found["skipped"], found["seconds"]) == (4, 4, 1, 5.0)
    assert found["accuracy_first"] == 0.5 and found["accuracy_final"] == 1.0 and found["accuracy_best"] == 1.0
    assert found["grad_norm_median"] == 2.0 and found["grad_norm_p99"] == 4.0
    assert found["mismatch_start"] == pytest.approx(3e-4) and found["mismatch_end"] == pytest.approx(1e-4)
    assert found["curves"]["grad_norm"] == [1.0, 2.0, None, 4.0]


def test_an_arm_without_steps_has_nothing_to_say_and_says_it():
    found = arm_figures(a_run(accuracy=[]), 0.95, 5)
    assert found["reached"] is None and found["accuracy_final"] is None and found["grad_norm_median"] is None
    assert "not above 95%" in sanity.arm_text("float16", found, 0.95)


@pytest.mark.parametrize(
    "bad", [{"candidates": 0}, {"samples": 1}, {"steps": 0}, {"window": 0}, {"target": 1.0}, {"target": float("nan")}]
)
def test_impossible_settings_are_refused_by_name(bad):
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        SanitySettings(**bad)


def test_a_set_without_perfectible_problems_is_refused_with_what_was_found():
    about = {"candidates": 10, "samples": 40, "low": 0.2, "high": 0.8, "kept": 0, "never_right": 7, "always_right": 3}
    with pytest.raises(ArgumentError, match=r"Of 10 problems 0 .*7 never, 3 always.*needs 8"):
        check_set(about, 8)
    check_set(about | {"kept": 8}, 8)


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--samples", "1"], "samples is 1"), (["--dtypes", ""], "No dtype"), (["--dtypes", "int8"], "Unknown dtype")],
)
def test_a_bad_request_is_one_line(words, named, tmp_path, capsys):
    assert main(["experiment", "sanity", *words, "--out", str(tmp_path / "out")]) == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


# ---- real arms


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Two short arms, as JSON."""
    settings = SanitySettings(candidates=16, samples=6, steps=3, completions=32)
    return json.loads(json.dumps(run_sanity(settings, ["float32", "bfloat16"], tmp_path_factory.mktemp("sanity"))))


@pytest.mark.engine
def test_both_arms_train_on_the_same_kept_problems(result):
    about = result["set"]
    assert 4 <= about["kept"] <= 16 and about["sampled_in"] == "float32"
    assert about["kept"] + about["never_right"] + about["always_right"] <= 16
    assert list(result["arms"]) == ["float32", "bfloat16"]
    prompts = []
    for arm in result["arms"].values():
        run = Run.load(arm["run"])
        assert len(run.records) == arm["steps"] == 3
        prompts.append({row["prompt"] for row in run.completions})
    assert prompts[0] == prompts[1] and len(prompts[0]) <= about["kept"]


@pytest.mark.engine
def test_each_arm_reports_what_it_must(result):
    for arm in result["arms"].values():
        assert 0 <= arm["accuracy_final"] <= 1 and arm["grad_norm_p99"] >= arm["grad_norm_median"] > 0
        assert len(arm["curves"]["mismatch"]) == 3 and arm["skipped"] == 0
    assert result["arms"]["float32"]["mismatch_start"] < result["arms"]["bfloat16"]["mismatch_start"] / 50
    words = sanity.text(result)
    assert words.count("gradient norm median") == 2 and f"{result['set']['kept']} of 16" in words
    figure = sanity.figure(result)
    figure.canvas.draw()
    assert len(figure.axes) == 3


@pytest.mark.engine
def test_an_arm_stops_once_the_mark_is_passed(tmp_path):
    settings = SanitySettings(
        candidates=16, samples=4, steps=6, target=0.05, window=2, completions=16, group=8
    )  # a mark that it passes at once
    found = run_sanity(settings, ["float32"], tmp_path)
    arm = found["arms"]["float32"]
    assert arm["reached"] == 2 and 2 <= arm["steps"] <= 3
    assert Run.load(arm["run"]).status == "stopped"
