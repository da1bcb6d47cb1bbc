"""Evaluation: the estimators in closed form, and what the sampler's completions are turned into."""

import statistics
from fractions import Fraction
from itertools import combinations

import pytest
from engines import move_adapter, with_adapter
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import ArgumentError
from kit.evaluation import _summary, evaluate, majority_right, paired_difference, pass_at_k
from kit.records import Run
from kit.sampler import SamplingSettings


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples, data):
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    draws = list(combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(float(Fraction(sum(map(any, draws)), len(draws))))


def test_shares_means_and_errors():
    """Four problems, two samples each, of which 2, 1, 0 and 1 were right."""
    found = _summary([2, 1, 0, 1], samples=2, truncated=0.25)
    assert found.per_problem == (1.0, 0.5, 0.0, 0.5)
    assert found.pass_at_1 == 0.5
    assert found.pass_at_k == 0.75  # three of four have a right one among both samples
    assert found.standard_error == pytest.approx((1 / 6 / 4) ** 0.5)  # sample variance of the shares: 1/6
    assert found.as_dict()["truncated"] == 0.25
    assert str(found) == "pass@1 0.500 ± 0.204, pass@2 0.750 (4 problems, 2 samples each, 25.0% truncated)"
    assert "(2 problems, 1 sample each," in str(_summary([1, 0], samples=1, truncated=0.0))


def test_pass_at_every_power_of_two_and_at_the_number_of_samples():
    found = _summary([6, 0, 3], samples=6, truncated=0.0)
    assert list(found.pass_at) == [1, 2, 4, 6]
    assert found.pass_at[1] == found.pass_at_1 == 0.5
    assert found.pass_at[2] == pytest.approx((1 + 0 + (1 - 3 / 15)) / 3)
    assert found.pass_at[6] == found.pass_at_k == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("answers", "right", "share"),
    [
        (["4", "4", "5"], [True, True, False], 1.0),
        (["5", "4", "5"], [False, True, False], 0.0),
        (["4", "5"], [True, False], 0.5),
        ([None, None, "4"], [False, False, True], 1.0),
        ([None], [False], 0.0),
    ],
)
def test_the_majority_is_of_those_that_answered(answers, right, share):
    assert majority_right(answers, right) == share


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=30))
def test_paired_differences_are_those_of_each_problem(pairs):
    before, after = (_summary([pair[side] for pair in pairs], 4, 0.0) for side in (0, 1))
    found = paired_difference(before, after)
    changes = [(b - a) / 4 for a, b in pairs]
    assert found.mean == pytest.approx(after.pass_at_1 - before.pass_at_1)
    assert found.standard_error == pytest.approx(statistics.stdev(changes) / len(pairs) ** 0.5)
    low, high = found.interval
    assert low <= found.mean <= high and high - low == pytest.approx(2 * 1.959964 * found.standard_error)
    assert (found.better, found.worse) == (sum(c > 0 for c in changes), sum(c < 0 for c in changes))


def test_a_gain_on_every_problem_alike_has_no_error_where_the_unpaired_one_is_large():
    before, after = _summary([0, 1, 2, 3], 4, 0.0), _summary([1, 2, 3, 4], 4, 0.0)
    found = paired_difference(before, after)
    assert (found.mean, found.standard_error, found.interval) == (0.25, 0.0, (0.25, 0.25))
    assert before.standard_error > 0.1
    with pytest.raises(ArgumentError, match="4 problems before and 1 after"):
        paired_difference(before, _summary([1], 1, 0.0))


def test_results_by_level_add_up():
    found = _summary([2, 1, 0], 2, 0.0, levels=["easy", "hard", "hard"])
    assert found.by_level == {"easy": (1.0, 1), "hard": (0.25, 2)}


@pytest.mark.engine("float32")
def test_the_reward_function_gets_texts_and_columns_in_order(model, tokenizer, problems):
    seen = {}

    def reward(prompts, completions, completion_ids, answer, digits):
        seen.update(prompts=prompts, texts=completions, ids=completion_ids, answer=answer, digits=digits)
        return [float(index % 3 == 0) for index in range(len(completions))]

    few = problems.select(range(4))
    found = evaluate(model, tokenizer, few, reward, samples=2, settings=SamplingSettings(24))
    assert seen["prompts"] == [p for p in few["prompt"] for _ in range(2)]
    assert seen["answer"] == [a for a in few["answer"] for _ in range(2)]
    assert seen["digits"] == [d for d in few["digits"] for _ in range(2)]
    assert seen["texts"] == tokenizer.batch_decode(seen["ids"], skip_special_tokens=True)
    assert found.per_problem == (0.5, 0.5, 0.0, 0.5)  # completions 0, 3 and 6 were right
    assert (found.problems, found.samples) == (4, 2)


@pytest.mark.engine("float32")
def test_the_same_seed_gives_the_same_result_and_the_limit_shows_as_truncation(model, tokenizer, problems):
    from kit.arithmetic import correct_answer

    few = problems.select(range(16))
    one, again, other = (evaluate(model, tokenizer, few, correct_answer, seed=seed) for seed in (3, 3, 4))
    assert one == again
    assert one.per_problem != other.per_problem
    assert 0.1 < one.pass_at_1 < 0.9  # the bundled model is right on part of its problems
    assert one.truncated < 0.2
    cut = evaluate(model, tokenizer, few, correct_answer, settings=SamplingSettings(3))
    assert (cut.truncated, cut.pass_at_1) == (1.0, 0.0)


@pytest.mark.engine("float32")
def test_the_adapter_that_the_model_carries_is_evaluated(model, tokenizer, problems):
    from kit.arithmetic import correct_answer

    few = problems.select(range(16))
    base = evaluate(model, tokenizer, few, correct_answer)
    policy = with_adapter(model)
    fresh = evaluate(policy, tokenizer, few, correct_answer)
    move_adapter(policy, 3.0)
    spoilt = evaluate(policy, tokenizer, few, correct_answer)
    assert fresh == base
    assert spoilt.pass_at_1 == 0.0


@pytest.mark.engine("float32")
@pytest.mark.parametrize(("rows", "samples"), [(0, 1), (4, 0), (4, -1)])
def test_nothing_to_evaluate_is_an_error(model, tokenizer, problems, rows, samples):
    with pytest.raises(ArgumentError, match=f"{rows} problems, {samples} samples"):
        evaluate(model, tokenizer, problems.select(range(rows)), None, samples=samples)


# ---- the command


def settings(**changes):
    from kit.training import TrainSettings

    return TrainSettings(**{"dtype": "float32", "max_completion_length": 96, "seed": 5} | changes)


@pytest.mark.engine("float32")
def test_a_run_is_evaluated_before_and_after_at_the_same_seeds_and_paired(engines, model, tokenizer, tmp_path):
    from kit import RunWriter
    from kit.task_evaluate import evaluated

    policy = with_adapter(engines.model("float32"))
    move_adapter(policy, 3.0)
    with RunWriter.create(tmp_path / "run", {}) as writer:
        policy.save_pretrained(writer.adapter_dir)
    said = []
    found = evaluated(settings(), run=Run.load(tmp_path / "run"), problems=12, samples=4, temperatures=(0.5, 1.0),
                      loaded=(model, tokenizer), say=said.append)  # fmt: skip
    kinds = [(row["weights"], row["temperature"]) for row in found["results"]]
    assert kinds == [("base", 0.5), ("base", 1.0), ("trained", 0.5), ("trained", 1.0)]
    cool, base, _, spoilt = found["results"]
    assert 0.2 < base["pass_at_1"] < 0.9 and spoilt["pass_at_1"] == 0.0
    assert base["pass_at_1"] <= base["pass_at"][2] <= base["pass_at"][4] == base["pass_at_k"]
    assert cool["pass_at_1"] >= base["pass_at_1"] and cool["majority"] >= base["pass_at_1"]
    assert set(base["by_level"]) == {"2", "3"}
    change = found["differences"][1]
    assert change["mean"] == -base["pass_at_1"] and change["interval"][1] < 0 and change["better"] == 0
    assert len(said) == 6 and "trained - base" in said[-1]
    assert not model.kit.sampler.is_closed


@pytest.mark.engine("float32")
def test_stop_strings_and_truncated_sampling_reach_the_sampler(model, tokenizer):
    from kit.task_evaluate import evaluated

    narrow = settings(top_k=1, stop="</think>")
    one, two = (evaluated(narrow, problems=6, samples=2, loaded=(model, tokenizer))["results"][0] for _ in range(2))
    assert one == two and one["pass_at_1"] == 0.0  # stopped before the answer
    assert one["truncated"] == 0.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--samples", "0"], "256 problems, 0 samples each"),
        (["--run", "nowhere"], "no run at nowhere"),
        (["--run", "nowhere", "--model", "tiny"], "either --run"),
        (["--task", "none.jsonl"], "no file none.jsonl"),
        (["--tags", "a,b"], "four separated by commas"),
    ],
)
def test_a_bad_request_is_one_line(capsys, words, said):
    from kit.cli import main

    assert main(["evaluate", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err.splitlines()[-1] and printed.out == ""
