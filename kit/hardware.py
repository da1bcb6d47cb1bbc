"""What a device can do: the dtypes it has, the one to use and why, and the device of this machine.

The rules are pure; only `detect` looks at the machine. The cards are in `kit.cards`, what vLLM does on them in
`kit.attention`; their names can be had from here too. Non-goals: AMD and Intel GPUs, speed, several GPUs.
"""

from __future__ import annotations

import functools
import platform
import subprocess
from dataclasses import replace
from pathlib import Path

from kit.attention import ATTENTION, CASCADE_SOURCES, attention_backend, cascade_attention_fault, engine_arguments
from kit.cards import CARDS, Hardware, UnknownCard, check_capability, dotted, from_facts, lookup, parse_capability
from kit.errors import ArgumentError
from kit.findings import Finding, parse_version

__all__ = [
    "ATTENTION", "CARDS", "CASCADE_SOURCES", "DTYPES", "Finding", "Hardware", "UnknownCard", "UnsupportedDtype",
    "ask_driver", "attention_backend", "cascade_attention_fault", "check_capability", "check_dtype", "detect", "dotted",
    "dtypes_of", "engine_arguments", "from_facts", "lookup", "parse_capability", "parse_version", "recommended_dtype",
]  # fmt: skip

DTYPES = ("float32", "float16", "bfloat16")

# CPU flags (as /proc/cpuinfo spells them, x86 first, then Arm) that make a 16-bit dtype native rather than emulated.
_CPU_FLAGS = {
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
}
# Lowest compute capability that computes a dtype: CUDA C++ Programming Guide, arithmetic instructions.
_LOWEST_CAPABILITY = {"float16": (5, 3), "bfloat16": (8, 0)}


class UnsupportedDtype(ArgumentError):
    """A dtype was asked for that this hardware does not have."""


def dtypes_of(hardware: Hardware) -> tuple[str, ...]:
    """The dtypes that a device computes in hardware.

    >>> dtypes_of(lookup("T4")), dtypes_of(lookup("L4"))
    (('float32', 'float16'), ('float32', 'float16', 'bfloat16'))
    """
    if hardware.kind == "cpu":
        native = [name for name, flags in _CPU_FLAGS.items() if any(flag in hardware.features for flag in flags)]
    else:
        native = [name for name, lowest in _LOWEST_CAPABILITY.items() if hardware.capability >= lowest]
    return tuple(name for name in DTYPES if name == "float32" or name in native)


def check_dtype(hardware: Hardware, dtype: str) -> str:
    """Why `dtype` can be used on `hardware`; raises UnsupportedDtype, with a way out, where it cannot.

    A CPU emulates what it lacks (values rounded, arithmetic in float32): allowed, and said. A GPU does not.

    >>> check_dtype(lookup("T4"), "float16")
    'float16 is computed in hardware on T4 (compute capability 7.5)'
    """
    if dtype not in DTYPES:
        raise UnsupportedDtype(f"{dtype!r} is not a dtype of this kit; choose one of {', '.join(DTYPES)}")
    native = dtypes_of(hardware)
    if dtype in native:
        return f"{dtype} is computed in hardware on {hardware.label}"
    if hardware.kind == "cpu":
        flags = " or ".join(_CPU_FLAGS[dtype][:2])
        return (
            f"{dtype} is emulated on {hardware.label}, which has no {flags}: values are rounded to {dtype}, arithmetic "
            "runs in float32; right, but slower"
        )
    raise UnsupportedDtype(
        f"{dtype} does not exist in hardware on {hardware.label}: it needs compute capability "
        f"{dotted(_LOWEST_CAPABILITY[dtype])}. vLLM refuses it there and PyTorch would emulate it, slowly, so the two "
        f"sides would differ; the kit does not change it silently. Use dtype={native[-1]} instead. To see what {dtype} "
        f"rounding does without such a GPU, emulate it on the CPU: model 'tiny', dtype {dtype}."
    )


def recommended_dtype(hardware: Hardware) -> tuple[str, str]:
    """The dtype that "auto" means on `hardware`, and why: float16 wherever the hardware computes it.

    The factor 8 is three bits of significand, measured on a CPU and on an H200; arXiv 2510.26788 for training.

    >>> recommended_dtype(lookup("H100"))[0], recommended_dtype(lookup("CPU"))[0]
    ('float16', 'float32')
    """
    native = dtypes_of(hardware)
    if "float16" not in native:
        return "float32", (
            f"{hardware.label} computes no float16 in hardware; in float32 sampler and trainer agree, and it is as fast"
        )
    if "bfloat16" not in native:
        return "float16", f"{hardware.label} computes float16 in hardware and has no bfloat16"
    return "float16", (
        f"{hardware.label} computes both 16-bit dtypes; float16 rounds 8 times finer than bfloat16 (11 significant "
        "bits against 8), so sampler and trainer disagree about 8 times less"
    )


def detect(timeout: float = 5.0) -> Hardware:
    """The device that a run would use: the first GPU that PyTorch sees, else this CPU.

    A GPU whose driver does not answer within `timeout` seconds, or that PyTorch cannot use, gives this CPU with
    `problem` set to the reason: nothing hangs, nothing raises.
    """
    driver, problem = _driver(timeout)
    if driver is None:  # with a problem, not even torch is asked: CUDA could hang in this process for good
        return replace(_this_cpu(), problem=problem)
    import torch

    try:
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
    except (RuntimeError, AssertionError) as error:  # torch raises either one when it cannot start CUDA
        said = str(error).splitlines()[0]
        problem = f"driver {driver} answers but torch {torch.__version__} cannot use the GPU: {said}"
        return replace(_this_cpu(), driver=driver, problem=problem)
    capability = (properties.major, properties.minor)
    return Hardware(properties.name, "cuda", capability, total / 2**30, max(free, 1) / 2**30, driver=driver)


@functools.cache
def _driver(timeout: float) -> tuple[str | None, str | None]:
    """Asked once a process: it costs a process of its own, and `detect` is called for every load."""
    return ask_driver(timeout)


def ask_driver(timeout: float = 5.0, command: str = "nvidia-smi") -> tuple[str | None, str | None]:
    """(driver version, problem) as `nvidia-smi` tells them; (None, None) where there is no NVIDIA GPU."""
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        if Path("/dev/nvidiactl").exists():
            return None, f"a GPU device file exists but {command} is not installed, so the driver cannot be asked"
        return None, None
    except subprocess.TimeoutExpired:
        return None, f"{command} did not answer within {timeout:g} s"
    except OSError as error:
        return None, f"{command} could not be run: {error}"
    lines = answer.stdout.strip().splitlines()
    if answer.returncode != 0 or not lines:
        said = (answer.stderr.strip() or answer.stdout.strip() or "nothing").splitlines()[0]
        return None, f"{command} failed with status {answer.returncode}: {said}"
    return lines[0].strip(), None


def _this_cpu() -> Hardware:
    name, flags, memory = platform.processor() or platform.machine(), set(), None
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        entries = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
        fields = {key.strip(): value.strip() for key, _, value in entries}
        name = fields.get("model name", name)
        flags = set(fields.get("flags", fields.get("Features", "")).split())
    if (meminfo := Path("/proc/meminfo")).exists():
        memory = int(meminfo.read_text().split("MemTotal:")[1].split()[0]) / 2**20
    known = sorted(flag for names in _CPU_FLAGS.values() for flag in names)
    features = tuple(flag for flag in known if flag in flags)
    return Hardware(f"CPU {name}", "cpu", memory_gib=memory, features=features)
