"""Procedural tasks of `reasoning-gym`: questions without end, offline, scored by the family itself.

`reasoning-gym:FAMILY` or `reasoning-gym:FAMILY:option=value,option=value`; the options are those of the family.
"""

import ast
import difflib
import importlib.util
import sys
import types
from dataclasses import fields

from kit.errors import ArgumentError
from kit.task_helper import Helper

PREFIX = "reasoning-gym:"


def gym():
    """The module `reasoning_gym`.

    It imports every family at once, and one of them (zebra_puzzles) needs pycosat, C source without wheels: the CPU
    lane leaves it out, and an empty module lets the other families load.
    """
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = types.ModuleType("pycosat")
    import reasoning_gym

    return reasoning_gym


def parse(name: str) -> tuple[str, dict]:
    """Family and options of a task's name.

    >>> parse("reasoning-gym:chain_sum:max_terms=2,allow_negation=True")
    ('chain_sum', {'max_terms': 2, 'allow_negation': True})
    """
    family, _, words = name.removeprefix(PREFIX).partition(":")
    options = {}
    for word in filter(None, words.split(",")):
        key, equals, value = word.partition("=")
        if not equals:
            raise ArgumentError(f"The option {word!r} of task {name!r} has no value; expected option=value.")
        try:
            options[key.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key.strip()] = value
    return family, options


def make(name: str, size: int, seed: int):
    """A family's data set: `dataset[i]` is an entry, `dataset.score_answer(answer, entry)` its score from 0 to 1.

    Raises:
        ArgumentError: no such family (with those of a similar name), options that the family does not have or refuses.
    """
    module, (family, options) = gym(), parse(name)
    from reasoning_gym.factory import DATASETS

    if family not in DATASETS:
        close = difflib.get_close_matches(family, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)[:5]
        raise ArgumentError(
            f"reasoning-gym has no family {family!r}; of its {len(DATASETS)} these are closest: {', '.join(close)}."
        )
    known = [field.name for field in fields(DATASETS[family][1]) if field.name not in ("seed", "size")]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ArgumentError(f"{family} has no option {', '.join(unknown)}; it has {', '.join(known)}.")
    try:
        dataset = module.create_dataset(family, seed=seed, size=size, **options)
        dataset[0]
    except Exception as error:  # families check their options with assertions and fail in their own ways
        needs = " It needs pycosat: pip install pycosat (with a C compiler)." if family == "zebra_puzzles" else ""
        raise ArgumentError(f"{family} cannot be made: {type(error).__name__}: {error}.{needs}") from error
    return dataset


def rows(dataset) -> list[dict]:
    """Every entry as a row: `question`, `answer`, `level` (what makes it hard, in words) and its `index`."""
    found = []
    for index in range(len(dataset)):
        entry = dataset[index]
        found.append({"question": entry["question"], "answer": str(entry["answer"]), "level": _level(entry["metadata"]),
                      "index": index})  # fmt: skip
    return found


def _level(metadata):
    """The values of what the family varies: `num_terms 2, num_digits 3`."""
    varied = [key for key in metadata.get("difficulty", {}) if isinstance(metadata.get(key), (int, str))]
    return ", ".join(f"{key} {metadata[key]}" for key in varied)


def scorer(name: str, size: int, seed: int):
    """score(answers, index): the family's own score of each answer, 0 for none and for one that breaks the family.

    Some families compute what they are given, so that is done in a process of its own (`kit.task_helper`).
    """
    helper = Helper("kit.task_gym:judge", name, size, seed)

    def score(answers: list[str | None], index: list[int], **columns) -> list[float]:
        pairs = zip(answers, index, strict=True)
        return [0.0 if answer is None else helper.ask(answer, row) or 0.0 for answer, row in pairs]

    return score


def judge(name: str, size: int, seed: int):
    """scored(answer, index) of a family. For `kit.task_helper`."""
    dataset = make(name, size, seed)
    return lambda answer, index: dataset.score_answer(answer, dataset[index])
