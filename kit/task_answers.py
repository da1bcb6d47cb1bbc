"""Is this the same number or expression? Text and plain numbers are compared here, the rest by `math-verify`.

Its parser recurses and computes, so it works in a process of its own (`kit.task_helper`).
"""

import re
from decimal import Decimal, InvalidOperation

from kit.task_helper import Helper

LONGEST = 2000  # characters; no reference is nearly as long, and the parser's time grows with them
_NUMBER = re.compile(r"[-+]?[0-9]{1,300}(\.[0-9]{1,300})?")


def number_of(text: str | None) -> Decimal | None:
    """A plain decimal number, with `$`, `%`, thousands separators and a closing point dropped; None for anything else.

    >>> number_of("$1,024."), number_of("-0.50"), number_of("two"), number_of("1/2")
    (Decimal('1024'), Decimal('-0.50'), None, None)
    """
    if text is None:
        return None
    bare = text.strip().removeprefix("$").removesuffix("$").removesuffix("%").removesuffix(".")
    bare = re.sub(r"(?<=[0-9]),(?=[0-9]{3}\b)", "", bare).strip()
    if not _NUMBER.fullmatch(bare):
        return None
    try:
        return Decimal(bare)
    except InvalidOperation:
        return None


_verifier = Helper("kit.task_answers:verifier")


def same_answer(reference: str, answer: str | None, verifier: Helper = _verifier) -> bool:
    """Whether an answer means what the reference means: the same text, the same number, or equal by `math-verify`.

    >>> same_answer("1024", "1,024"), same_answer("1024", None), same_answer("Monday", "monday")
    (True, False, True)
    """
    if answer is None or len(answer) > LONGEST:
        return False
    if answer.strip().casefold() == reference.strip().casefold():
        return True
    numbers = number_of(reference), number_of(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return verifier.ask(reference, answer) == 1.0


def verifier():
    """verified(reference, answer), with math-verify imported. For `kit.task_helper`."""
    import math_verify  # noqa: F401

    return _verified


def _verified(reference, answer):
    from math_verify import parse, verify

    for wanted in _parsed(parse, reference):
        for given in _parsed(parse, answer):
            if verify(wanted, given, timeout_seconds=None):
                return True
    return False


def _parsed(parse, text):
    """A text as math-verify reads it: as it stands, and as LaTeX, which it only sees between dollar signs."""
    forms = [text] if "$" in text or "\\boxed" in text else [text, f"${text}$"]
    return [found for form in forms if (found := parse(form, parsing_timeout=None))]
