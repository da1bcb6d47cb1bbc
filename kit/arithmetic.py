"""The bundled model's task: addition with visible work, and text that is honestly noisy about it.

A problem reads `Q: 24+67=?` and its completion `<think>steps: 4+7+0=1c 2+6+1=9</think> 91`: one digit a step from
the right, each step naming both digits, the carry that comes in, the digit that goes out, and `c` if a carry leaves.
The corpus mixes three styles: a careful one, a quick one that slips and forgets carries, and plain guesses. A model
trained on it answers part of the problems right, which is what reinforcement learning needs to begin with.

Everything is deterministic from a seed, and the splits are disjoint by a hash of the problem. Pure Python: transformers
and datasets are imported only by the functions that return their objects.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kit.errors import ArgumentError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

DIGITS = (2, 3)
"""Digits of each addend; both addends of a problem have the same number."""

SPLIT_PERCENT = {"pretrain": 75, "rl": 20, "test": 5}
"""Percent of all problems in each split: the corpus, the problems GRPO trains on, and those held out from both."""

CHARACTERS = "0123456789+-*/=?!:;.,()[]<>_'\"%\n QAabcdefghijklmnopqrstuvwxyz"
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
VOCAB_SIZE = 64
MAX_LENGTH = 2048
"""Longest sequence of the bundled model, prompt included [tokens]."""

_FINAL_ANSWER = re.compile(r"\s*(-?[0-9]{1,18})\s*\.?\s*")


@dataclass(frozen=True)
class Problem:
    """The sum `a + b` of two numbers of equally many digits."""

    a: int
    b: int

    @property
    def answer(self) -> int:
        return self.a + self.b

    @property
    def digits(self) -> int:
        return len(str(self.a))

    @property
    def split(self) -> str:
        """Name of the split that holds this problem; `a + b` and `b + a` are always together."""
        return _split_of(self.a, self.b)


@dataclass(frozen=True)
class Style:
    """A way of writing completions: how often it is used, and how wrong it goes.

    `share` is its part of the corpus, `slip` the chance that a digit is written wrong, `drop_carry` the chance that
    a carry is forgotten in the next step. `label` opens the work, `separator` stands between its steps.
    """

    label: str
    separator: str
    share: float
    slip: float
    drop_carry: float


CAREFUL = Style(label="steps: ", separator=" ", share=0.38, slip=0.0, drop_carry=0.0)
QUICK = Style(label="quick: ", separator=",", share=0.37, slip=0.15, drop_carry=0.35)
GUESS_SHARE = 0.25
"""The rest of the corpus shows no work; such a guess is right in one case of ten."""
GUESS_RIGHT = 0.10


def _split_of(a: int, b: int) -> str:
    low, high = sorted((a, b))
    percentile = zlib.crc32(f"{low}+{high}".encode()) % 100
    for split, percent in SPLIT_PERCENT.items():
        if percentile < percent:
            return split
        percentile -= percent
    raise AssertionError("SPLIT_PERCENT does not add up to 100")


def _check_split(split: str) -> None:
    if split not in SPLIT_PERCENT:
        raise ArgumentError(f"unknown split {split!r}: expected one of {', '.join(map(repr, SPLIT_PERCENT))}")


def stream(split: str, rng: random.Random) -> Iterator[Problem]:
    """Problems of a split without end, repeats allowed; every number of digits in `DIGITS` is equally likely.

    Raises ValueError for an unknown split.
    """
    _check_split(split)
    while True:
        digits = rng.choice(DIGITS)
        low, high = 10 ** (digits - 1), 10**digits
        problem = Problem(rng.randrange(low, high), rng.randrange(low, high))
        if problem.split == split:
            yield problem


def prompt_text(problem: Problem) -> str:
    """The question, up to where the completion begins.

    >>> prompt_text(Problem(24, 67))
    'Q: 24+67=?\\nA: '
    """
    return f"Q: {problem.a}+{problem.b}=?\nA: "


def completion_text(problem: Problem, rng: random.Random, style: Style | None = None) -> str:
    """A completion in the given style, or in one drawn by its share of the corpus (then guesses occur too).

    The answer is what the shown work leads to, so a slip in the work is a slip in the answer. No end-of-text token.

    >>> completion_text(Problem(24, 67), random.Random(0), CAREFUL)
    '<think>steps: 4+7+0=1c 2+6+1=9</think> 91'
    """
    if style is None:
        draw = rng.random()
        if draw < GUESS_SHARE:
            guess = _guess(problem, rng)
            return f"<think>i guess it is {guess}</think> {guess}"
        style = CAREFUL if draw < GUESS_SHARE + CAREFUL.share else QUICK
    steps, result = _work(problem, rng, style)
    return f"<think>{style.label}{style.separator.join(steps)}</think> {result}"


def _work(problem: Problem, rng: random.Random, style: Style) -> tuple[list[str], int]:
    """Column addition from the right, with the style's slips: the steps as text, and the number they spell."""
    steps, written, carry = [], [], 0
    for x, y in zip(reversed(str(problem.a)), reversed(str(problem.b)), strict=True):
        total = int(x) + int(y) + carry
        digit, carry_out = total % 10, total // 10
        if rng.random() < style.slip:
            digit = (digit + rng.choice((1, 9, 2, 8))) % 10
        steps.append(f"{x}+{y}+{carry}={digit}{'c' if carry_out else ''}")
        written.append(digit)
        carry = carry_out if rng.random() >= style.drop_carry else 0
    if carry:
        steps.append("1")
        written.append(1)
    return steps, int("".join(map(str, reversed(written))))


def _guess(problem: Problem, rng: random.Random) -> int:
    """A number near the answer, of which one digit is off; right with probability `GUESS_RIGHT`."""
    if rng.random() < GUESS_RIGHT:
        return problem.answer
    place = 10 ** rng.randrange(problem.digits)
    return problem.answer + rng.choice((-1, 1)) * rng.choice((1, 2)) * place


def answer_of(text: str) -> int | None:
    """The number that follows the last `</think>`, or None if anything but that number stands there.

    Raises TypeError for text that is not a string (chat messages, for instance).

    >>> answer_of("<think>steps: 4+7+0=1c 2+6+1=9</think> 91"), answer_of("<think>91"), answer_of("</think> 91 or 92")
    (91, None, None)
    """
    if not isinstance(text, str):
        raise TypeError(
            f"a completion of type {type(text).__name__} cannot be read: expected plain text. "
            "Give the trainer string prompts (as make_dataset does), not chat messages."
        )
    _, marker, final = text.rpartition("</think>")
    match = _FINAL_ANSWER.fullmatch(final)
    return int(match.group(1)) if marker and match else None


def correct_answer(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    """Reward of TRL's signature: 1.0 where a completion's answer is exactly the expected one, else 0.0.

    Its mean is the accuracy. `kwargs` are the columns that TRL also passes; none is used.

    >>> correct_answer(["<think>i guess it is 91</think> 91", "91"], ["91", "91"])
    [1.0, 0.0]
    """
    return [float(answer_of(text) == int(expected)) for text, expected in zip(completions, answer, strict=True)]


@cache
def _pool(split: str, digits: int) -> tuple[tuple[int, int], ...]:
    """Every problem of a split with that many digits, in order."""
    numbers = range(10 ** (digits - 1), 10**digits)
    return tuple((a, b) for a in numbers for b in numbers if _split_of(a, b) == split)


def make_dataset(split: str, size: int, seed: int) -> Dataset:
    """`size` different problems of a split: columns `prompt` (str), `answer` (str) and `digits` (int).

    Numbers of digits are equally likely until one is used up (`rl` has some 1,600 two-digit problems).
    Raises ValueError for an unknown split, and for a size below 1 or above the number of problems in the split.
    """
    from datasets import Dataset

    _check_split(split)
    pools = [_pool(split, digits) for digits in DIGITS]
    available = sum(map(len, pools))
    if not 1 <= size <= available:
        raise ArgumentError(
            f"cannot make a dataset of {size} problems: split {split!r} holds {available} different ones. "
            f"Ask for a size between 1 and {available}."
        )
    rng = random.Random(seed)
    queues = [rng.sample(pool, min(size, len(pool))) for pool in pools]
    problems = [Problem(*rng.choice([queue for queue in queues if queue]).pop()) for _ in range(size)]
    return Dataset.from_dict(
        {
            "prompt": [prompt_text(problem) for problem in problems],
            "answer": [str(problem.answer) for problem in problems],
            "digits": [problem.digits for problem in problems],
        }
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: 64 ids, left padding, `<eos>` ends a completion, `<unk>` is any other character."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    assert len(vocabulary) == VOCAB_SIZE, len(vocabulary)
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )
