"""Evaluation: the estimators in closed form, and what the sampler's completions are turned into."""

from fractions import Fraction
from itertools import combinations

import pytest
from engines import move_adapter, with_adapter
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import ArgumentError
from kit.evaluation import evaluate, pass_at_k
from kit.sampler import SamplingSettings


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples, data):
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    draws = list(combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(float(Fraction(sum(map(any, draws)), len(draws))))


def test_shares_means_and_errors():
    """Four problems, two samples each, of which 2, 1, 0 and 1 were right."""
    from kit.evaluation import _summary

    found = _summary([2, 1, 0, 1], samples=2, truncated=0.25)
    assert found.per_problem == (1.0, 0.5, 0.0, 0.5)
    assert found.pass_at_1 == 0.5
    assert found.pass_at_k == 0.75  # three of four have a right one among both samples
    assert found.standard_error == pytest.approx((1 / 6 / 4) ** 0.5)  # sample variance of the shares: 1/6
    assert found.as_dict()["truncated"] == 0.25
    assert "pass@1 0.500 ± 0.204, pass@2 0.750" in str(found)


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
