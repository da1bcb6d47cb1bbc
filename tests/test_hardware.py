"""Cards, dtypes, attention backends, the cascade fault: values over the whole table, and the driver for real."""

import time
from pathlib import Path

import pytest
import torch

from kit import hardware
from kit.attention import ATTENTION
from kit.cards import CARDS, Hardware, UnknownCard, check_capability, from_facts, lookup, parse_capability
from kit.errors import ArgumentError
from kit.findings import Finding, parse_version
from kit.hardware import (
    UnsupportedDtype,
    ask_driver,
    attention_backend,
    cascade_attention_fault,
    check_dtype,
    detect,
    dtypes_of,
    engine_arguments,
    recommended_dtype,
)

BOTH, NO_BF16 = ("float32", "float16", "bfloat16"), ("float32", "float16")

# name that people write, card, capability, dtypes in hardware
NAMES = (
    ("Tesla T4", "T4", (7, 5), NO_BF16),
    ("T4", "T4", (7, 5), NO_BF16),
    ("Tesla V100-SXM2-16GB", "V100 16GB", (7, 0), NO_BF16),
    ("Tesla V100-SXM2-32GB", "V100 32GB", (7, 0), NO_BF16),
    ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti", (7, 5), NO_BF16),
    ("rtx 2060", "RTX 2060", (7, 5), NO_BF16),
    ("NVIDIA GeForce RTX 3090", "RTX 3090", (8, 6), BOTH),
    ("3080ti", "RTX 3080 Ti", (8, 6), BOTH),
    ("rtx4090", "RTX 4090", (8, 9), BOTH),
    ("RTX 4080 SUPER", "RTX 4080", (8, 9), BOTH),
    ("4060 Ti 16GB", "RTX 4060 Ti 16GB", (8, 9), BOTH),
    ("NVIDIA GeForce RTX 5090", "RTX 5090", (12, 0), BOTH),
    ("RTX-5070", "RTX 5070", (12, 0), BOTH),
    ("NVIDIA A10", "A10", (8, 6), BOTH),
    ("NVIDIA A10G", "A10G", (8, 6), BOTH),
    ("NVIDIA L4", "L4", (8, 9), BOTH),
    ("NVIDIA L40S", "L40S", (8, 9), BOTH),
    ("NVIDIA A100-SXM4-40GB", "A100 40GB", (8, 0), BOTH),
    ("NVIDIA A100-SXM4-80GB", "A100 80GB", (8, 0), BOTH),
    ("a100", "A100 40GB", (8, 0), BOTH),
    ("NVIDIA H100 80GB HBM3", "H100 80GB", (9, 0), BOTH),
    ("NVIDIA H200", "H200", (9, 0), BOTH),
    ("NVIDIA B200", "B200", (10, 0), BOTH),
    ("cpu", "CPU", None, ("float32",)),
    ("CPU with AMX", "CPU AMX", None, BOTH),
    ("CPU avx512_fp16", "CPU avx512_fp16", None, BOTH),
    ("CPU avx512_bf16", "CPU avx512_bf16", None, ("float32", "bfloat16")),
)


@pytest.mark.parametrize(("asked", "name", "capability", "dtypes"), NAMES)
def test_a_name_finds_its_card(asked, name, capability, dtypes):
    card = lookup(asked)
    assert (card.name, card.capability, dtypes_of(card)) == (name, capability, dtypes)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_has_its_own_name_and_a_dtype(card):
    assert lookup(card.name) is card
    name, reason = recommended_dtype(card)
    assert name in dtypes_of(card)
    assert card.name in reason
    assert name == ("float16" if card.kind == "cuda" or "avx512_fp16" in card.features else "float32")
    assert check_dtype(card, name)


@pytest.mark.parametrize("name", ["", "foo", "RTX", "RTX 9999", "A1000", "GTX 1080", "A100 24GB", "RTX 5090 Laptop"])
def test_an_unknown_card_is_named_with_the_known_ones(name):
    with pytest.raises(UnknownCard, match=r"T4.*A100 40GB.*H200") as caught:
        lookup(name)
    assert isinstance(caught.value, ArgumentError)


@pytest.mark.parametrize("card", [c for c in CARDS if c.kind == "cuda"], ids=lambda card: card.name)
def test_bfloat16_is_refused_exactly_below_capability_8(card):
    if card.capability >= (8, 0):
        assert "computed in hardware" in check_dtype(card, "bfloat16")
    else:
        with pytest.raises(UnsupportedDtype, match=r"needs compute capability 8\.0.*Use dtype=float16.*emulate"):
            check_dtype(card, "bfloat16")


@pytest.mark.parametrize(
    ("card", "dtype", "word"),
    [
        ("CPU", "float32", "in hardware"),
        ("CPU", "float16", "emulated"),
        ("CPU", "bfloat16", "emulated"),
        ("CPU avx512_bf16", "bfloat16", "in hardware"),
        ("CPU avx512_bf16", "float16", "emulated"),
        ("CPU avx512_fp16", "float16", "in hardware"),
        ("CPU AMX", "bfloat16", "in hardware"),
    ],
)
def test_a_cpu_emulates_what_it_lacks_and_says_so(card, dtype, word):
    assert word in check_dtype(lookup(card), dtype)


@pytest.mark.parametrize("dtype", ["float8", "fp16", "", "torch.float16"])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(UnsupportedDtype, match="float32, float16, bfloat16"):
        check_dtype(lookup("H100"), dtype)


# vLLM version -> whether cascade attention is faulty there, by capability
CAPABILITIES = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
FAULTY = {
    "0.6.6": (False,) * 8,
    "0.7.0": (True,) * 5 + (False,) * 3,
    "0.8.1": (True,) * 5 + (False,) * 3,
    "0.8.2": (True,) * 5 + (False,) * 3,
    "0.9.2": (True,) * 5 + (False,) * 3,
    "0.10.2": (True,) * 5 + (False,) * 3,
    "0.10.2+cu128": (True,) * 5 + (False,) * 3,
    "0.11.0rc1": (True,) * 5 + (False,) * 3,
    "0.11.0": (False,) * 8,
    "0.11.2": (False,) * 8,
    "0.25.1": (False,) * 8,
    "0.31.0": (False,) * 8,
}
TABLE = [(v, c, faulty) for v, row in FAULTY.items() for c, faulty in zip(CAPABILITIES, row, strict=True)]


@pytest.mark.parametrize(("version", "capability", "faulty"), TABLE)
def test_cascade_attention_over_the_table(version, capability, faulty):
    fault = cascade_attention_fault(version, capability)
    has_switch = parse_version(version) >= parse_version("0.8.2")
    assert (fault is not None) == faulty
    assert engine_arguments(version, capability) == ({"disable_cascade_attn": True} if faulty and has_switch else {})
    if faulty:
        assert "0.11.0" in fault.action
        assert fault.level == ("warn" if has_switch else "error")
        assert ("known" if capability == (8, 0) else "inferred") in fault.fact
        assert all(source.startswith("https://github.com/") for source in fault.sources)
        assert len(fault.sources) >= 3


def test_cascade_attention_is_nothing_to_a_cpu_or_without_vllm():
    assert cascade_attention_fault("0.10.2", None) is None
    assert cascade_attention_fault(None, (8, 0)) is None
    assert engine_arguments("0.10.2", None) == {}


@pytest.mark.parametrize("override", [True, False])
def test_an_override_wins_on_either_side_of_the_fix(override):
    assert engine_arguments("0.10.2", (8, 0), override) == {"disable_cascade_attn": override}
    assert engine_arguments("0.31.0", (9, 0), override) == {"disable_cascade_attn": override}
    with pytest.raises(ArgumentError, match=r"0\.8\.2"):
        engine_arguments("0.8.1", (8, 0), override)


@pytest.mark.parametrize(
    ("version", "capability", "level", "backend", "instead"),
    [
        ("0.10.2", (7, 0), "warn", "XFORMERS", "fast_inference=False"),
        ("0.11.2", (7, 0), "warn", "FLEX_ATTENTION", "vllm==0.10.2"),
        ("0.25.1", (7, 0), "error", "none", "vllm==0.10.2"),
        ("0.10.2", (7, 5), "ok", "XFORMERS", ""),
        ("0.11.2", (7, 5), "ok", "XFORMERS", ""),
        ("0.12.0", (7, 5), "warn", "FLASHINFER", "vllm==0.11.2"),
        ("0.31.0", (7, 5), "warn", "TRITON_ATTN", "vllm==0.11.2"),
        ("0.25.1", (8, 0), "ok", "FlashAttention 2", ""),
        ("0.25.1", (8, 6), "ok", "FlashAttention 2", ""),
        ("0.25.1", (8, 9), "ok", "FlashAttention 2", ""),
        ("0.25.1", (9, 0), "ok", "FlashAttention 3", ""),
        ("0.8.5", (10, 0), "error", "none", "vllm>=0.11.0"),
        ("0.25.1", (10, 0), "ok", "FLASHINFER", ""),
        ("0.25.1", (12, 0), "ok", "FLASHINFER", ""),
        ("0.31.0", (6, 1), "error", "none", "fast_inference=False"),
        ("0.31.0", None, "ok", "CPU_ATTN", ""),
    ],
)
def test_attention_backend_by_version_and_capability(version, capability, level, backend, instead):
    finding = attention_backend(version, capability)
    assert finding.level == level
    assert backend in finding.fact
    assert instead in finding.action
    assert bool(finding.action) == (level != "ok")


def test_one_attention_rule_for_each_card_and_version():
    versions = [parse_version(f"0.{minor}.{patch}") for minor in range(6, 35) for patch in (0, 2)]
    for card in (card for card in CARDS if card.kind == "cuda"):
        for version in versions:
            fitting = [
                rule for rule in ATTENTION
                if rule.lowest <= card.capability <= rule.highest
                and parse_version(rule.since) <= version < parse_version(rule.until)
            ]  # fmt: skip
            assert len(fitting) == 1, (card.name, str(version))


@pytest.mark.parametrize("bad", [(99, 0), (0, 5), (7, 10), (-7, 5)])
def test_an_impossible_capability_is_refused(bad):
    with pytest.raises(ArgumentError, match="does not exist"):
        check_capability(bad)
    with pytest.raises(ArgumentError):
        cascade_attention_fault("0.10.2", bad)


@pytest.mark.parametrize("text", ["99", "seven", "", "7.55", "99.0", "7,5"])
def test_a_capability_that_is_none_is_refused(text):
    with pytest.raises(ArgumentError, match=r"7\.5"):
        parse_capability(text)


@pytest.mark.parametrize("text", ["banana", "", "1.x"])
def test_a_version_that_is_none_is_refused(text):
    with pytest.raises(ArgumentError, match=r"0\.11\.0"):
        attention_backend(text, (8, 0))


@pytest.mark.parametrize("memory", [0, -1, float("nan"), float("inf"), 1e9])
def test_impossible_memory_is_refused(memory):
    with pytest.raises(ArgumentError, match="GiB"):
        from_facts("T4", memory_gib=memory)


def test_facts_by_hand_fill_in_agree_and_contradict():
    assert from_facts("Tesla T4", (7, 5), 15).memory_gib == 15
    assert from_facts("Tesla T4").memory_gib == lookup("T4").memory_gib
    assert from_facts("Quadro P6000", (6, 1), 23.9).capability == (6, 1)
    assert from_facts(None, (8, 9)).kind == "cuda"
    with pytest.raises(ArgumentError, match=r"7\.5, not 8\.0"):
        from_facts("T4", (8, 0))
    with pytest.raises(ArgumentError, match="CPU"):
        from_facts("cpu", (8, 0))
    with pytest.raises(ArgumentError):
        from_facts(None)


def test_hardware_and_findings_that_make_no_sense_are_refused():
    with pytest.raises(ArgumentError, match="compute capability"):
        Hardware("card", "cuda")
    with pytest.raises(ArgumentError, match="tpu"):
        Hardware("card", "tpu")
    with pytest.raises(ArgumentError, match="level"):
        Finding("bad", "x", "y")


def script(folder: Path, text: str) -> str:
    """A program that stands where nvidia-smi would."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("text", "driver", "problem"),
    [
        ("echo 550.54.15", "550.54.15", None),
        ("echo 550.54.15; echo 550.54.15", "550.54.15", None),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver.'; exit 9", None, "status 9"),
        ("echo broken >&2; exit 1", None, "broken"),
        ("true", None, "failed"),
    ],
)
def test_what_a_driver_can_answer(tmp_path, text, driver, problem):
    found, said = ask_driver(command=script(tmp_path, text))
    assert found == driver
    assert (said is None) if problem is None else (problem in said)


def test_a_driver_that_does_not_answer_is_a_finding_not_a_hang(tmp_path, monkeypatch):
    script(tmp_path, "exec sleep 30")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    hardware._driver.cache_clear()
    started = time.perf_counter()
    found = detect(timeout=0.3)
    hardware._driver.cache_clear()
    assert time.perf_counter() - started < 5
    assert found.kind == "cpu"
    assert "did not answer within 0.3 s" in found.problem


def test_a_program_that_is_missing_or_not_executable(tmp_path):
    broken = tmp_path / "plain"
    broken.write_text("not a program")
    assert "could not be run" in ask_driver(command=str(broken))[1]
    missing = ask_driver(command=str(tmp_path / "absent"))
    assert missing[0] is None
    assert (missing[1] is None) == (not Path("/dev/nvidiactl").exists())


def test_detect_tells_this_machine():
    found = detect()
    assert found.problem is None
    if torch.cuda.is_available():
        assert found.capability == torch.cuda.get_device_capability(0)
        assert found.memory_gib * 2**30 == pytest.approx(torch.cuda.get_device_properties(0).total_memory, rel=0.02)
    else:
        import psutil

        assert found.kind == "cpu"
        assert found.memory_gib * 2**30 == pytest.approx(psutil.virtual_memory().total, rel=0.01)
        flags = Path("/proc/cpuinfo").read_text()
        assert ("avx512_bf16" in found.features) == ("avx512_bf16" in flags)
