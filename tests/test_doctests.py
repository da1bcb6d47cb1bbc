"""The examples in the docstrings give what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kit"
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if ">>> " in path.read_text())


def test_the_pure_modules_have_examples():
    assert {"mismatch", "distributions", "evaluation", "precision", "rollout", "records", "arithmetic"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    results = doctest.testmod(import_module(f"kit.{name}"), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0
