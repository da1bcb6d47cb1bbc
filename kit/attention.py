"""vLLM's attention on a card: which version has a backend there, and the cascade attention fault before 0.11.0.

Pure rules over the table `ATTENTION`. Each names where it can be checked; what is only reported says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from kit.cards import check_capability, dotted
from kit.errors import ArgumentError
from kit.findings import Finding, parse_version


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
# with the V0 engine, on which it was documented.
_T4_PIN = "https://github.com/unslothai/notebooks/pull/336"
ATTENTION = (
    AttentionRule((7, 0), (7, 2), "0", "0.11.0", "warn", "XFORMERS",
                  "documented, on the V0 engine; but xFormers was reported both to serve it and to lack kernels for it",
                  sources=(f"{_DOCS}/v0.9.0/getting_started/installation/gpu.html", f"{_VLLM}/issues/10662")),
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

    `override` is the user's own `disable_cascade_attn` and wins. An ArgumentError where the argument does not exist.

    >>> engine_arguments("0.10.2", (8, 0)), engine_arguments("0.11.0", (8, 0))
    ({'disable_cascade_attn': True}, {})
    """
    has_switch = parse_version(vllm_version) >= _CASCADE_SWITCH
    if override is not None:
        if not has_switch:
            raise ArgumentError(f"vLLM {vllm_version} has no disable_cascade_attn (0.8.2 added it); update vLLM")
        return {"disable_cascade_attn": bool(override)}
    faulty = cascade_attention_fault(vllm_version, capability) is not None
    return {"disable_cascade_attn": True} if faulty and has_switch else {}
