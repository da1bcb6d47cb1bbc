"""Reward functions: what passes, and how each fault is named before it reaches a gradient."""

import asyncio
import functools
import math

import numpy as np
import pytest
import torch

from kit.errors import KitError
from kit.rewards import RewardError, checked_reward

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
