"""Reward functions made safe: what they return is checked, and a fault is named before it can reach the gradient."""

import contextlib
import functools
import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from kit.errors import ArgumentError

# Reward functions whose mean is the share of right answers; the record's `accuracy` comes from the first one present.
ACCURACY_REWARDS = ("accuracy_reward", "correct_answer")

# Rewards are float32 in TRL; a larger one would become infinite there.
LARGEST_REWARD = 3.4e38

LIMIT_S = 300.0  # for the rewards of one batch; a function that takes longer hangs
SLOW_S = 10.0  # from here on it is named, once


class RewardError(ArgumentError):
    """A reward function raised, took too long, or returned something that is not one finite number a completion.

    `sample` holds what it was given: `reward`, `completions`, `prompts`, and `index`, the completion at fault (None
    where that is not known).
    """

    def __init__(self, message: str, sample: dict | None = None):
        super().__init__(message)
        self.sample = sample or {}


def checked_reward(function: Callable, limit_s: float = LIMIT_S) -> Callable:
    """The same reward function (TRL's signature, plain or async) with its result checked and its time limited.

    The limit holds for a plain function in the main thread, where a signal can interrupt it.

    Raises (when called):
        RewardError: it raised; it took longer than `limit_s` [s]; it returned another number of rewards than there are
            completions; a reward is NaN, infinite or no number. None stays allowed and means "does not apply to this
            completion".

    Example:
        >>> checked_reward(lambda completions, **kwargs: [1.0])(completions=["a", "b"])
        Traceback (most recent call last):
        kit.rewards.RewardError: Reward function '<lambda>' returned 1 rewards for 2 completions; expected one for each.
    """
    if getattr(function, "kit_checked", False):
        return function
    name = getattr(function, "__name__", type(function).__name__)
    clock = _Clock(name)

    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        @functools.wraps(function)
        async def checked(*args, **kwargs):
            try:
                with clock.running(len(kwargs["completions"])):
                    rewards = await function(*args, **kwargs)
            except Exception as error:
                raise _raised(name, error, kwargs) from error
            return _check(name, rewards, kwargs)

    else:

        @functools.wraps(function)
        def checked(*args, **kwargs):
            try:
                with clock.running(len(kwargs["completions"])), _time_limit(limit_s):
                    rewards = function(*args, **kwargs)
            except _OutOfTime:
                raise RewardError(
                    f"Reward function {name!r} took longer than {limit_s:g} s for {len(kwargs['completions'])} "
                    f"completions and was stopped. Give it a limit of its own, or raise --reward-limit.",
                    _sample(name, kwargs),
                ) from None
            except Exception as error:
                raise _raised(name, error, kwargs, _culprit(function, args, kwargs, error)) from error
            return _check(name, rewards, kwargs)

    checked.__name__, checked.kit_checked = name, True
    return checked


class _OutOfTime(BaseException):
    """Not an Exception: a reward function's own `except Exception` must not swallow it."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _OutOfTime in the block after that many seconds; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        raise _OutOfTime

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


class _Clock:
    """Says once that a reward function is slow."""

    def __init__(self, name):
        self._name, self._said = name, False

    @contextlib.contextmanager
    def running(self, completions):
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if seconds > SLOW_S and not self._said:
            self._said = True
            print(f"Note: reward function {self._name!r} took {seconds:.0f} s for {completions} completions; every "
                  f"step waits for it.", file=sys.stderr)  # fmt: skip


def _culprit(function, args, kwargs, error):
    """The first completion with which alone the function raises the same kind of error; None if none does."""
    count = len(kwargs["completions"])
    with contextlib.suppress(_OutOfTime), _time_limit(SLOW_S):
        for index in range(count):
            alone = {k: [v[index]] if isinstance(v, list) and len(v) == count else v for k, v in kwargs.items()}
            try:
                function(*args, **alone)
            except type(error):
                return index
            except Exception:
                return None
    return None


def _sample(name, kwargs, index=None):
    return {"reward": name, "index": index} | {key: kwargs.get(key) for key in ("prompts", "completions")}


def _raised(name, error, kwargs, index=None):
    text = "" if index is None else f", for completion {index}: {str(kwargs['completions'][index])[:80]!r}"
    return RewardError(
        f"Reward function {name!r} raised {type(error).__name__}: {error}{text}", _sample(name, kwargs, index)
    )


def _check(name, rewards, kwargs):
    completions = kwargs["completions"]
    try:
        rewards = list(rewards)
    except TypeError:
        raise RewardError(
            f"Reward function {name!r} returned {type(rewards).__name__}; expected a list with one number for each of "
            f"the {len(completions)} completions.",
            _sample(name, kwargs),
        ) from None
    if len(rewards) != len(completions):
        raise RewardError(
            f"Reward function {name!r} returned {len(rewards)} rewards for {len(completions)} completions; "
            f"expected one for each.",
            _sample(name, kwargs),
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
                f"{str(completions[index])[:80]!r}. Expected a finite number, or None where the reward does not apply.",
                _sample(name, kwargs, index),
            )
    return rewards
