"""Rewards to combine: format, answer, closeness, length, and functions of one's own, each with a weight.

`answer=1,format=0.2,my_rewards.py:brevity=0.1` names them; each is a column of the record and of the completions.
"""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kit.errors import ArgumentError
from kit.task_answers import number_of
from kit.tasks import Task
from kit.templates import Tags

NAMES = ("answer", "exact", "format", "approximate", "closeness", "length")


@dataclass(frozen=True)
class Rewards:
    """Reward functions in TRL's signature, and the weight of each in the sum."""

    functions: tuple[Callable[..., list[float | None]], ...]
    weights: tuple[float, ...]


def parse(words: str, task: Task, max_completion_length: int) -> Rewards:
    """The rewards that a list `NAME=WEIGHT,...` names; a weight that is left out is 1.

    Raises:
        ArgumentError: an unknown name, a weight that is no finite number, a name twice, a module that does not import.
    """
    functions, weights = [], []
    for word in filter(None, (part.strip() for part in words.split(","))):
        name, equals, weight = word.partition("=")
        functions.append(_function(name.strip(), task, max_completion_length))
        weights.append(_weight(word, weight if equals else "1"))
    if not functions:
        raise ArgumentError(f"No reward is named; expected NAME=WEIGHT,... with names of {', '.join(NAMES)}.")
    names = [function.__name__ for function in functions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError(f"Two rewards are called {', '.join(twice)}: their columns could not be told apart.")
    return Rewards(tuple(functions), tuple(weights))


def _weight(word, text):
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ArgumentError(f"The weight in {word!r} is no finite number.")
    return weight


def _function(name, task, max_completion_length):
    if ":" in name:
        return own_reward(name)
    made = {
        "answer": lambda: task.correct_answer,
        "exact": lambda: fully_correct(task),
        "format": lambda: exact_format(task.tags),
        "approximate": lambda: approximate_format(task.tags),
        "closeness": lambda: closeness(task.tags),
        "length": lambda: length(max_completion_length),
    }
    if name not in made:
        raise ArgumentError(f"There is no reward {name!r}; expected {', '.join(NAMES)}, or FILE.py:FUNCTION.")
    return made[name]()


def fully_correct(task: Task):
    """1 where the task's score is 1, else 0: the share that is right, where the score itself has values between."""

    def accuracy_reward(completions, **columns):
        return [float(score == 1.0) for score in task.correct_answer(completions, **columns)]

    return accuracy_reward


def exact_format(tags: Tags):
    """1 where every tag comes once, in order, with nothing before the first and nothing after the last; else 0.

    >>> exact_format(Tags())(["<think>a</think><answer>4</answer>"], prompts=[""])
    [1.0]
    """

    def exact_format(completions, prompts, **columns):
        return [float(_is_exact(tags, _whole(tags, p, c))) for p, c in zip(prompts, completions, strict=True)]

    return exact_format


def approximate_format(tags: Tags):
    """The share of the tags that come exactly once, wherever: a way towards the exact format. 1 without tags."""

    def approximate_format(completions, prompts, **columns):
        texts = [_whole(tags, p, c) for p, c in zip(prompts, completions, strict=True)]
        count = len(tags.used)
        return [sum(text.count(tag) == 1 for tag in tags.used) / count if count else 1.0 for text in texts]

    return approximate_format


def closeness(tags: Tags):
    """1 for the right number, less the further away: 1 / (1 + |answer - reference| / max(1, |reference|)).

    0 where the answer is no number; None, "does not apply", where the reference is none.
    """

    def closeness(completions, answer, **columns):
        return [_closeness(number_of(wanted), number_of(tags.answer_of(text)))
                for wanted, text in zip(answer, completions, strict=True)]  # fmt: skip

    return closeness


def length(max_completion_length: int):
    """1 for no tokens at all, 0 for a completion as long as allowed, in a straight line between."""

    def length(completion_ids, **columns):
        return [1.0 - min(1.0, len(ids) / max_completion_length) for ids in completion_ids]

    return length


def own_reward(name: str):
    """The function that `FILE.py:NAME` or `package.module:NAME` names.

    Raises:
        ArgumentError: no such file, module or function, or the module fails as it is imported (with its error).
    """
    place, _, function = name.rpartition(":")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ArgumentError:
        raise
    except Exception as error:  # whatever the module does as it is imported
        raise ArgumentError(f"The reward module {place} does not import: {type(error).__name__}: {error}") from error
    found = vars(module).get(function)
    if not callable(found):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ArgumentError(f"{place} has no function {function!r}; it has {', '.join(there) or 'none'}.")
    return found


def _from_file(path):
    if not path.is_file():
        raise ArgumentError(f"There is no reward module {path}; expected FILE.py:FUNCTION.")
    spec = importlib.util.spec_from_file_location(f"kit_reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _whole(tags, prompt, completion):
    """The completion with the opening tag that its prompt ends with."""
    opened = tags.work_start and prompt.rstrip().endswith(tags.work_start)
    return f"{tags.work_start}{completion}" if opened else completion


def _is_exact(tags, text):
    rest = text.strip()
    if any(rest.count(tag) != 1 for tag in tags.used):
        return False
    positions = [rest.index(tag) for tag in tags.used]
    if positions != sorted(positions) or not (tags.answer_of(rest) or "").strip():
        return False
    starts = not tags.used or rest.startswith(tags.used[0])
    return starts and (not tags.answer_end or rest.endswith(tags.answer_end))


def _closeness(wanted, given):
    if wanted is None:
        return None
    if given is None:
        return 0.0
    return float(1 / (1 + abs(given - wanted) / max(1, abs(wanted))))
