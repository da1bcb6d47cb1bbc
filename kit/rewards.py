"""Reward functions made safe: what they return is checked, and a fault is named before it can reach the gradient."""

import functools
import inspect
from collections.abc import Callable

from kit.errors import ArgumentError

# Reward functions whose mean is the share of right answers; the record's `accuracy` comes from the first one present.
ACCURACY_REWARDS = ("correct_answer", "accuracy_reward")

# Rewards are float32 in TRL; a larger one would become infinite there.
LARGEST_REWARD = 3.4e38


class RewardError(ArgumentError):
    """A reward function raised, or returned something that is not one finite number a completion."""


def checked_reward(function: Callable) -> Callable:
    """The same reward function (TRL's signature, plain or async) with its result checked.

    Raises (when called):
        RewardError: it raised; it returned another number of rewards than there are completions; a reward is NaN,
            infinite or no number. None stays allowed and means "does not apply to this completion".

    Example:
        >>> checked_reward(lambda completions, **kwargs: [1.0])(completions=["a", "b"])
        Traceback (most recent call last):
        kit.rewards.RewardError: Reward function '<lambda>' returned 1 rewards for 2 completions; expected one for each.
    """
    name = getattr(function, "__name__", type(function).__name__)

    def fault(error):
        return RewardError(f"Reward function {name!r} raised {type(error).__name__}: {error}")

    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        @functools.wraps(function)
        async def checked(*args, **kwargs):
            try:
                rewards = await function(*args, **kwargs)
            except Exception as error:
                raise fault(error) from error
            return _check(name, rewards, kwargs["completions"])

    else:

        @functools.wraps(function)
        def checked(*args, **kwargs):
            try:
                rewards = function(*args, **kwargs)
            except Exception as error:
                raise fault(error) from error
            return _check(name, rewards, kwargs["completions"])

    checked.__name__ = name
    return checked


def _check(name, rewards, completions):
    try:
        rewards = list(rewards)
    except TypeError:
        raise RewardError(
            f"Reward function {name!r} returned {type(rewards).__name__}; expected a list with one number for each of "
            f"the {len(completions)} completions."
        ) from None
    if len(rewards) != len(completions):
        raise RewardError(
            f"Reward function {name!r} returned {len(rewards)} rewards for {len(completions)} completions; "
            f"expected one for each."
        )
    for index, reward in enumerate(rewards):
        if reward is None:
            continue
        try:
            finite = bool(abs(reward) <= LARGEST_REWARD)  # false for NaN
        except (TypeError, ValueError, RuntimeError):  # no number; an array or a tensor of several
            finite = False
        if not finite:
            raise RewardError(
                f"Reward function {name!r} returned {reward!r} for completion {index}: "
                f"{str(completions[index])[:80]!r}. Expected a finite number, or None where the reward does not apply."
            )
    return rewards
