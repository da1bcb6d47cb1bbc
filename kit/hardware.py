"""What a device can do: dtypes in hardware, vLLM versions with an attention backend, the cascade attention fault.

Pure rules over two tables, `kit.cards.CARDS` and `ATTENTION`; only `detect` looks at the machine. Non-goals: AMD and
Intel GPUs, speed, several GPUs. Each rule names where it can be checked; what is only reported says so.
"""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from kit.cards import CARDS, Hardware, UnknownCard, check_capability, dotted, from_facts, lookup, parse_capability

__all__ = [
    "ATTENTION", "CARDS", "DTYPES", "Finding", "Hardware", "UnknownCard", "UnsupportedDtype", "ask_driver",
    "attention_backend", "cascade_attention_fault", "check_capability", "check_dtype", "detect", "dotted", "dtypes_of",
    "engine_arguments", "from_facts", "lookup", "parse_capability", "parse_version", "recommended_dtype",
]  # fmt: skip

DTYPES = ("float32", "float16", "bfloat16")
LEVELS = ("ok", "warn", "error")


class UnsupportedDtype(ValueError):
    """A dtype was asked for that this hardware does not have."""


@dataclass(frozen=True)
class Finding:
    """One thing found out about a machine: the fact, what follows from it, what to do about it.

    `level` is "ok", "warn" or "error". `sources` are addresses where the fact can be checked.
    """

    level: str
    topic: str
    fact: str
    consequence: str = ""
    action: str = ""
    sources: tuple[str, ...] = ()

    def __post_init__(self):
        if self.level not in LEVELS:
            raise ValueError(f"a finding's level is one of {LEVELS}, not {self.level!r}")


def parse_version(version: str) -> Version:
    """A version that compares as versions do; a ValueError says what one looks like.

    >>> parse_version("0.10.2") < parse_version("0.11.0")
    True
    """
    try:
        return Version(str(version).strip())
    except InvalidVersion as error:
        raise ValueError(f"{version!r} is not a version; expected something like '0.11.0'") from error


# --- dtypes ----------------------------------------------------------------------------------------------------------

# CPU flags (as /proc/cpuinfo spells them, x86 first, then Arm) that make a 16-bit dtype native rather than emulated.
_CPU_FLAGS = {
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
}
# Lowest compute capability that computes a dtype: CUDA C++ Programming Guide, arithmetic instructions.
_LOWEST_CAPABILITY = {"float16": (5, 3), "bfloat16": (8, 0)}


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


# --- vLLM: attention backends ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionRule:
    """What attention a range of compute capabilities (both ends included) gets from vLLM, `since` <= version < `until`.

    `level` is "ok" where documented or measured, "warn" where only reports exist, "error" where no kernel is built.
    """

    lowest: tuple[int, int]
    highest: tuple[int, int]
    since: str
    until: str
    level: str
    backend: str
    why: str
    use_instead: str = ""
    sources: tuple[str, ...] = ()


_VLLM = "https://github.com/vllm-project/vllm"
_DOCS = "https://docs.vllm.ai/en"
# 0.11.2 on Turing: the pin that Unsloth's GRPO notebooks moved to after runs on Colab's T4s. 0.10.2 on Volta: the last
# with the V0 engine, whose xFormers attention served it.
_T4_PIN = "https://github.com/unslothai/notebooks/pull/336"
ATTENTION = (
    AttentionRule((7, 0), (7, 2), "0", "0.11.0", "ok", "XFORMERS",
                  "xFormers serves it on the V0 engine", sources=(f"{_VLLM}/issues/13398",)),
    AttentionRule((7, 0), (7, 2), "0.11.0", "0.20.0", "warn", "FLEX_ATTENTION or TRITON_ATTN",
                  "0.11.0 removed the V0 engine, 0.12.0 xFormers; Triton supports 8.0 and above, hangs were reported",
                  "vllm==0.10.2", (f"{_VLLM}/pull/36439",)),
    AttentionRule((7, 0), (7, 2), "0.20.0", "9999", "error", "none",
                  "from 0.20.0 vLLM is built with CUDA 13, which dropped it; the documented minimum is 7.5",
                  "vllm==0.10.2", (f"{_VLLM}/blob/main/docs/getting_started/installation/gpu.cuda.inc.md",)),
    AttentionRule((7, 5), (7, 5), "0", "0.12.0", "ok", "XFORMERS",
                  "xFormers serves it; 0.12.0 removed that backend", sources=(_T4_PIN, f"{_VLLM}/issues/15853")),
    AttentionRule((7, 5), (7, 5), "0.12.0", "9999", "warn", "FLASHINFER to 0.23, TRITON_ATTN from 0.24",
                  "7.5 is still vLLM's documented minimum and engines were reported to start, but FlashInfer was "
                  "broken there (off from 0.24), Triton supports 8.0 and above, and this kit has not been run on it",
                  "vllm==0.11.2", (f"{_VLLM}/issues/47549", f"{_VLLM}/pull/45375", _T4_PIN)),
    AttentionRule((8, 0), (8, 9), "0", "9999", "ok", "FLASH_ATTN (FlashAttention 2)",
                  "the default there", sources=(f"{_DOCS}/v0.32.0/design/attention_backends/",)),
    AttentionRule((9, 0), (9, 0), "0", "9999", "ok", "FLASH_ATTN (FlashAttention 3 on the V1 engine)",
                  "the default there", sources=(f"{_DOCS}/v0.32.0/design/attention_backends/",)),
    AttentionRule((10, 0), (12, 1), "0", "0.9.0", "error", "none",
                  "it needs CUDA 12.8, which vLLM is built with from 0.9.0 on", "vllm>=0.11.0",
                  (f"{_DOCS}/v0.9.0/getting_started/installation/gpu.html",)),
    AttentionRule((10, 0), (12, 1), "0.9.0", "9999", "ok", "FLASHINFER or FLASH_ATTN",
                  "the defaults there", sources=(f"{_DOCS}/v0.32.0/design/attention_backends/",)),
)  # fmt: skip


def attention_backend(vllm_version: str, capability: tuple[int, int] | None) -> Finding:
    """Whether this vLLM has an attention backend for the capability (None: a CPU), and which vLLM to use if not.

    >>> attention_backend("0.31.0", (9, 0)).level, attention_backend("0.31.0", (7, 0)).level
    ('ok', 'error')
    """
    version = parse_version(vllm_version)
    if capability is None:
        return Finding("ok", "attention backend", f"vLLM {version} samples on a CPU with CPU_ATTN")
    check_capability(capability)
    for rule in ATTENTION:
        if rule.lowest <= capability <= rule.highest and Version(rule.since) <= version < Version(rule.until):
            break
    else:
        rule = AttentionRule(capability, capability, "0", "9999", "error", "none", "known are 7.0 to 12.1")
    fact = f"vLLM {version} on compute capability {dotted(capability)}: attention backend {rule.backend}; {rule.why}"
    consequence = {"ok": "", "warn": "the engine may fail to start, or hang", "error": "the engine cannot start"}
    action = "" if rule.level == "ok" else "sample with transformers: fast_inference=False"
    if rule.use_instead:
        action = f"use {rule.use_instead} in an environment of its own, or {action}"
    return Finding(rule.level, "attention backend", fact, consequence[rule.level], action, rule.sources)


# --- vLLM: cascade attention -----------------------------------------------------------------------------------------

CASCADE_SOURCES = (
    f"{_VLLM}/issues/22103",  # A100: 10 of 18 right, 18 with the switch; H100: 18
    f"{_VLLM}/issues/19384",  # Qwen3 on Ampere, cured by the switch; one comment says the same of a GB200
    "https://github.com/vllm-project/flash-attention/pull/87",  # the cause, and its fix
    f"{_VLLM}/pull/25537",  # the fix reaches vLLM in September 2025, released with 0.11.0
)
_CASCADE_SINCE = Version("0.7.0")  # vllm PR 11635 added cascade attention
_CASCADE_SWITCH = Version("0.8.2")  # vllm PR 15243 added disable_cascade_attn
_CASCADE_FIXED = Version("0.11.0")


def cascade_attention_fault(vllm_version: str | None, capability: tuple[int, int] | None) -> Finding | None:
    """The faulty cascade attention of vLLM before 0.11.0 on compute capability below 9.0; None where there is none.

    Known: on an A100 (8.0) a batch with a shared prefix got wrong completions; on an H100, and on the A100 with cascade
    attention off, right ones. The cause is the log-sum-exp of FlashAttention 2 when it splits the keys. Inferred: 8.6
    and 8.9 run the same kernel. Below 8.0 that kernel does not run; the report's range is kept there because the switch
    costs nothing. Hopper runs FlashAttention 3. Sources: `CASCADE_SOURCES`.

    >>> cascade_attention_fault("0.10.2", (8, 0)).level, cascade_attention_fault("0.11.0", (8, 0))
    ('warn', None)
    """
    if vllm_version is None or capability is None:
        return None
    version = parse_version(vllm_version)
    if not _CASCADE_SINCE <= version < _CASCADE_FIXED or check_capability(capability) >= (9, 0):
        return None
    if capability == (8, 0):
        evidence = "known: reported and reproduced on A100"
    elif capability > (8, 0):
        evidence = "inferred: the kernel is the one that failed on A100"
    else:
        evidence = "inferred: inside the report's range, below 9.0, though the faulty kernel needs 8.0"
    has_switch = version >= _CASCADE_SWITCH
    off = "the kit builds the engine with cascade attention off (disable_cascade_attn=True)"
    return Finding(
        "warn" if has_switch else "error",
        "cascade attention",
        f"vLLM {version} has a faulty cascade attention on compute capability {dotted(capability)} ({evidence}): "
        "FlashAttention 2 returns a wrong log-sum-exp when it splits the keys",
        "a batch with a shared prefix, as every GRPO group is, gets wrong completions and log-probabilities",
        "update to vLLM 0.11.0 or later; "
        + (f"until then {off}" if has_switch else "this version cannot switch it off (0.8.2 added the argument)"),
        CASCADE_SOURCES,
    )


def engine_arguments(
    vllm_version: str, capability: tuple[int, int] | None, override: bool | None = None
) -> dict[str, bool]:
    """Arguments that this vLLM needs on this capability: cascade attention off where it is faulty, else none.

    `override` is the user's own `disable_cascade_attn` and wins. A ValueError where the argument does not exist.

    >>> engine_arguments("0.10.2", (8, 0)), engine_arguments("0.11.0", (8, 0))
    ({'disable_cascade_attn': True}, {})
    """
    has_switch = parse_version(vllm_version) >= _CASCADE_SWITCH
    if override is not None:
        if not has_switch:
            raise ValueError(f"vLLM {vllm_version} has no disable_cascade_attn (0.8.2 added it); update vLLM")
        return {"disable_cascade_attn": bool(override)}
    faulty = cascade_attention_fault(vllm_version, capability) is not None
    return {"disable_cascade_attn": True} if faulty and has_switch else {}


# --- this machine ----------------------------------------------------------------------------------------------------


def detect(timeout: float = 5.0) -> Hardware:
    """The device that a run would use: the first GPU that PyTorch sees, else this CPU.

    A GPU whose driver does not answer within `timeout` seconds, or that PyTorch cannot use, gives this CPU with
    `problem` set to the reason: nothing hangs, nothing raises.
    """
    driver, problem = ask_driver(timeout)
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
