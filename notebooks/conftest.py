"""How pytest runs the notebooks (nbval): few steps, and runs in a folder that is thrown away.

The full settings are one variable away: KIT_STEPS=40 make test TESTS=notebooks
"""

import os
import tempfile
from pathlib import Path

_FOLDER = tempfile.TemporaryDirectory(prefix="kit-notebooks-")

os.environ.setdefault("KIT_STEPS", "5")
os.environ.setdefault("KIT_OUT", str(Path(_FOLDER.name) / "run"))
