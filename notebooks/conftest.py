"""How pytest runs the notebooks (nbval): few steps, and runs in a folder that is thrown away.

The full settings are one variable away: KIT_STEPS=40 make test TESTS=notebooks
"""

import os
import tempfile
from pathlib import Path

import nbval.kernel

_FOLDER = tempfile.TemporaryDirectory(prefix="kit-notebooks-")

os.environ.setdefault("KIT_STEPS", "5")
os.environ.setdefault("KIT_OUT", str(Path(_FOLDER.name) / "run"))


def _start_as_a_user_does(*arguments, _start=nbval.kernel.start_new_kernel, **options):
    """ipykernel captures output in another way when it is started under pytest, and vLLM's engine then cannot start."""
    under_pytest = os.environ.pop("PYTEST_CURRENT_TEST")
    try:
        return _start(*arguments, **options)
    finally:
        os.environ["PYTEST_CURRENT_TEST"] = under_pytest


nbval.kernel.start_new_kernel = _start_as_a_user_does
