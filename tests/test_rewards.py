"""Reward functions: what passes, and how each fault is named before it reaches a gradient."""

import asyncio
import contextlib
import functools
import math
import re
import signal

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import ArgumentError, KitError
from kit.rewards import RewardError, checked_reward
from kit.task_answers import number_of, same_answer
from kit.task_helper import Helper
from kit.task_rewards import parse
from kit.tasks import Task
from kit.templates import Tags

TEXTS = ["one", "two"]


def returning(value):
    def my_reward(completions, **kwargs):
        return value

    return checked_reward(my_reward)


@pytest.mark.parametrize(
    "rewards",
    [[0.0, 1.0], (1, 0), [True, False], [None, 0.5], [-3e38, 3e38], np.array([0.25, 0.5]), torch.tensor([0.25, 0.5])],
)
def test_finite_numbers_and_none_pass_unchanged(rewards):
    assert returning(rewards)(prompts=TEXTS, completions=TEXTS) == list(rewards)


def test_it_gets_every_argument_and_keeps_its_name():
    @checked_reward
    def length(prompts, completions, answer, **kwargs):
        return [len(p) + len(c) + float(a) for p, c, a in zip(prompts, completions, answer, strict=True)]

    assert length(prompts=["a", "b"], completions=TEXTS, answer=["1", "2"], trainer_state=None) == [5.0, 6.0]
    assert length.__name__ == "length"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300, "0.5", [0.5], torch.tensor([1.0, 2.0])])
def test_a_reward_that_is_no_finite_float32_is_named_with_its_completion(bad):
    with pytest.raises(RewardError, match=r"'my_reward' returned .* for completion 1: 'two'"):
        returning([0.5, bad])(completions=TEXTS)


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, 2.0, 3.0]])
def test_another_number_of_rewards_is_named(rewards):
    with pytest.raises(RewardError, match=f"'my_reward' returned {len(rewards)} rewards for 2 completions"):
        returning(rewards)(completions=TEXTS)


@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (1.0, "float")])
def test_a_result_that_is_no_list_is_named(value, kind):
    with pytest.raises(RewardError, match=f"'my_reward' returned {kind}; expected a list"):
        returning(value)(completions=TEXTS)


def test_what_it_raises_is_named_and_kept_as_the_cause():
    @checked_reward
    def fragile(completions, **kwargs):
        return [float(text) for text in completions]

    with pytest.raises(RewardError, match="'fragile' raised ValueError: could not convert") as error:
        fragile(completions=TEXTS)
    assert isinstance(error.value.__cause__, ValueError)
    assert isinstance(error.value, KitError)


def test_an_interrupt_inside_it_stays_an_interrupt():
    @checked_reward
    def slow(completions, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slow(completions=TEXTS)


class Judge:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]


async def judge(completions, scale=1.0, **kwargs):
    return [scale * len(text) for text in completions]


@pytest.mark.parametrize("function", [judge, Judge(), functools.partial(judge, scale=1.0)])
def test_async_reward_functions_stay_async(function):
    """TRL runs them in its event loop, and looks at the function to know."""
    from trl.trainer.utils import is_async_callable

    checked = checked_reward(function)
    assert is_async_callable(checked)
    assert asyncio.run(checked(completions=TEXTS)) == [3.0, 3.0]


def test_an_async_fault_is_named():
    async def broken(completions, **kwargs):
        return [math.nan] * len(completions)

    with pytest.raises(RewardError, match="'broken' returned nan for completion 0"):
        asyncio.run(checked_reward(broken)(completions=TEXTS))


# ---- slow ones, and what is kept of a fault


def test_a_function_that_hangs_is_stopped_and_named_with_its_sample():
    def hangs(completions, **kwargs):
        while True:
            with contextlib.suppress(Exception):  # its own safety net does not hold the limit up
                sum(range(1000))

    with pytest.raises(RewardError, match=r"'hangs' took longer than 0.2 s for 2 completions") as error:
        checked_reward(hangs, limit_s=0.2)(prompts=["a", "b"], completions=TEXTS)
    assert error.value.sample == {"reward": "hangs", "index": None, "prompts": ["a", "b"], "completions": TEXTS}
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_regular_expression_without_end_is_stopped_too():
    def backtracks(completions, **kwargs):
        return [float(bool(re.match(r"(a+)+$", "a" * 60 + "b"))) for _ in completions]

    with pytest.raises(RewardError, match="'backtracks' took longer"):
        checked_reward(backtracks, limit_s=0.3)(completions=TEXTS)


def test_the_completion_that_a_function_fails_on_is_named():
    def brittle(completions, prompts, **kwargs):
        return [1 / len(text) for text in completions]

    with pytest.raises(RewardError, match=r"'brittle' raised ZeroDivisionError.*, for completion 1: ''") as error:
        checked_reward(brittle)(prompts=["p", "q"], completions=["one", ""])
    assert error.value.sample["index"] == 1 and error.value.sample["completions"] == ["one", ""]


def test_a_function_that_is_checked_is_not_checked_twice():
    once = checked_reward(constant, limit_s=1.0)
    assert checked_reward(once) is once


def constant(completions, **kwargs):
    return [1.0] * len(completions)


# ---- answers


@pytest.mark.parametrize(
    ("reference", "answer", "same"),
    [
        ("1024", "1,024", True),
        ("1024", "$1024.00$", True),
        ("72", "72 dollars", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"\frac{1}{2}", "1/2", True),
        ("x+1", "1+x", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("(1,2)", "(1, 2)", True),
        ("Monday", " monday ", True),
        ("Monday", "Tuesday", False),
        ("3", "4", False),
        ("x+1", "x+2", False),
        ("3", "", False),
        ("3", None, False),
        ("7", "\u0667", False),  # a digit to Python, an answer to nobody here
    ],
)
def test_answers_that_mean_the_same(reference, answer, same):
    assert same_answer(reference, answer) is same


@pytest.mark.parametrize(
    "bad",
    [
        "{" * 10_000 + "}" * 10_000,
        r"\frac{" * 10_000,
        "10^{10^{10^{10}}}",
        "9**9**9**9",
        "9" * 100_000,
        "+".join(["x"] * 20_000),
        "\x00\ud800",
        r"\sum_{n=1}^{10^{12}} \sin(n!)",
    ],
    ids=["braces", "fractions", "tower", "power", "digits", "terms", "surrogate", "sum"],
)
def test_an_answer_that_could_take_the_parser_down_is_not_right_and_the_next_one_is(bad):
    helper = Helper("kit.task_answers:verifier", limit_s=1.0)
    try:
        assert helper.ask("7", bad) in (0.0, None)
        assert helper.ask(r"\frac{1}{2}", "0.5") == 1.0
        assert same_answer("7", bad, helper) is False
    finally:
        helper.close()


def test_a_helper_that_dies_is_replaced_and_what_was_given_up_is_counted():
    helper = Helper("kit.task_answers:verifier")
    try:
        assert helper.ask("1/2", "0.5") == 1.0 and helper.lost == 0
        first = helper._started()
        first.kill()
        first.wait()
        assert helper.ask("1/2", "0.5") == 1.0
        helper.limit_s = 0.0
        assert helper.ask("1/2", "0.5") is None and helper.lost == 1
    finally:
        helper.close()


@given(st.text(max_size=40))
def test_any_text_is_a_number_or_none(text):
    number = number_of(text)
    assert number is None or number.is_finite()


# ---- rewards to combine


def same_text(answers, answer, **columns):
    return [float(given == wanted) for given, wanted in zip(answers, answer, strict=True)]


TASK = Task("sums", Dataset.from_dict({"question": ["2+2"], "answer": ["4"]}), None, same_text, Tags())
RIGHT = "two and two</think> <answer>4</answer>"
OPEN, CLOSED = "Q: 2+2\nA: <think>", "Q: 2+2\nA: "


def columns_of(words, completions, prompts, answer="4", ids=None):
    found = parse(words, TASK, 10)
    count = len(completions)
    given = {"prompts": prompts, "completions": completions, "answer": [answer] * count, "completion_ids": ids}
    return {f.__name__: f(**given) for f in found.functions}, found.weights


def test_names_weights_and_columns():
    texts = [RIGHT, "<think>" + RIGHT, "4", RIGHT + " bye", RIGHT.replace("4", "5"), "</think><answer></answer>"]
    columns, weights = columns_of("answer=1, format=0.5 ,approximate=0.25", texts, [OPEN] * 6)
    assert weights == (1.0, 0.5, 0.25)
    assert columns == {
        "correct_answer": [1.0, 1.0, 0.0, 1.0, 0.0, 0.0],
        "exact_format": [1.0, 0.0, 0.0, 0.0, 1.0, 0.0],
        "approximate_format": [1.0, 0.75, 0.25, 1.0, 1.0, 1.0],
    }
    closed, _ = columns_of("format", [RIGHT, "<think>" + RIGHT], [CLOSED] * 2)
    assert closed == {"exact_format": [0.0, 1.0]}


def test_closeness_is_one_at_the_reference_and_falls():
    texts = [f"<answer>{value}</answer>" for value in ("4", "8", "-4", "four")]
    columns, _ = columns_of("closeness", texts, [CLOSED] * 4)
    assert columns["closeness"] == [1.0, 0.5, pytest.approx(1 / 3), 0.0]
    columns, _ = columns_of("closeness", texts, [CLOSED] * 4, answer="a word")
    assert columns["closeness"] == [None] * 4


def test_length_is_linear():
    columns, _ = columns_of("length", ["a", "b", "c"], [OPEN] * 3, ids=[[], [1] * 5, [1] * 10])
    assert columns["length"] == [1.0, 0.5, 0.0]


def test_a_function_of_ones_own_is_a_column_under_its_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def brevity(completions, **columns):\n    return [1 / (1 + len(c)) for c in completions]\n")
    columns, weights = columns_of(f"answer,{file}:brevity=0.1", ["abc"], [OPEN])
    assert columns["brevity"] == [0.25] and weights == (1.0, 0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "No reward is named"),
        ("anwser", "no reward 'anwser'; expected answer, exact"),
        ("answer=much", "weight in 'answer=much' is no finite number"),
        ("answer=nan", "no finite number"),
        ("answer,answer=2", "Two rewards are called correct_answer"),
        ("none.py:f", "no reward module none.py"),
        ("no_such_module:f", "no_such_module does not import: ModuleNotFoundError"),
        ("{0}/broken.py:f", r"broken.py does not import: NameError: name 'undefined'"),
        ("{0}/syntax.py:f", "syntax.py does not import: SyntaxError"),
        ("{0}/other.py:f", r"other.py has no function 'f'; it has g"),
    ],
)
def test_rewards_that_cannot_be_had_are_named(tmp_path, words, said):
    (tmp_path / "broken.py").write_text("undefined\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "other.py").write_text("def g(completions, **columns):\n    return []\n")
    with pytest.raises(ArgumentError, match=said):
        parse(words.format(tmp_path), TASK, 10)
