"""Where a notebook runs: Colab, Kaggle or anywhere else. The hub's token, and a place for runs that stays.

Standard library only, and nothing is asked of a host that is not there. A token is never printed.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from kit.errors import ArgumentError

TOKEN = "HF_TOKEN"
DRIVE = Path("/content/drive")


def host() -> str:
    """ "Colab", "Kaggle" or "Jupyter"; the last stands for everything else."""
    if "google.colab" in sys.modules or _there("google.colab"):
        return "Colab"
    return "Kaggle" if _there("kaggle_secrets") else "Jupyter"


def _there(module):
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # no parent package; a module without a spec
        return module in sys.modules


def hub_token() -> str:
    """Sees to it that HF_TOKEN is set where the host has one, and says in words where it comes from, or that none is.

    The environment comes first, then Colab's and Kaggle's secrets. None is fine: only gated models need one.
    """
    if os.environ.get(TOKEN):
        return f"{TOKEN} from the environment"
    for name, ask in (("Colab", _ask_colab), ("Kaggle", _ask_kaggle)):
        if host() == name:
            try:
                found = ask()
            except Exception as error:  # no such secret, no access to it, no network: each host has its own classes
                return f"no {TOKEN} from {name}'s secrets ({type(error).__name__}); only gated models need one"
            if found:
                os.environ[TOKEN] = found
                return f"{TOKEN} from {name}'s secrets"
    return f"no {TOKEN}; only gated models need one"


def _ask_colab():
    return import_module("google.colab.userdata").get(TOKEN)


def _ask_kaggle():
    return import_module("kaggle_secrets").UserSecretsClient().get_secret(TOKEN)


def place(out: str | Path, drive: bool = False) -> Path:
    """Where a run goes: `out` as it is, or with `drive` that path on Google Drive, which outlives Colab's machine.

    Everything of the run is then written there, checkpoints too; Colab asks for permission when it is mounted.

    Raises:
        ArgumentError: `drive` outside Colab.
    """
    if not drive:
        return Path(out)
    if host() != "Colab":
        raise ArgumentError(f"There is no Google Drive outside Colab. Leave it off: {out} stays on this disk.")
    import_module("google.colab.drive").mount(str(DRIVE))
    return DRIVE / "MyDrive" / Path(out)
