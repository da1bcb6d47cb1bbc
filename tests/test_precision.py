"""The dtype contract: what each dtype fixes, and which arguments are refused because they contradict it."""

import dataclasses
import json

import pytest
import torch

from kit.errors import KitError
from kit.precision import (
    EXPECTED_ABS_MEAN,
    EXPECTED_K3,
    NAMES,
    UNIT_ROUNDOFF,
    Precision,
    PrecisionError,
    check_arguments,
)

f32, f16, b16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("name", "short", "autocast", "loss_scaling"),
    [("float32", f32, None, False), ("float16", f16, f16, True), ("bfloat16", b16, b16, False)],
)
def test_the_contract_of_each_dtype(name, short, autocast, loss_scaling):
    assert Precision(name).contract() == {
        "base_weights": short,
        "adapters": f32,
        "autocast": autocast,
        "loss_scaling": loss_scaling,
        "logits": short,
        "sampler_weights": short,
        "sampler_adapters": short,
        "kv_cache": short,
    }


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *((word, "float16") for word in ("float16", "fp16", "half", f16, "torch.float16")),
        *((word, "bfloat16") for word in ("bfloat16", "bf16", b16, "torch.bfloat16")),
        *((word, "float32") for word in ("float32", "fp32", "float", f32)),
    ],
)
def test_a_dtype_is_given_by_name_or_as_torch_dtype(given, name):
    assert Precision.of(given) == Precision(name)
    assert Precision.of(Precision(name)) == Precision(name)


@pytest.mark.parametrize("given", [None, "auto"])
def test_auto_says_why(given):
    precision = Precision.of(given)
    assert precision.name in NAMES
    assert precision.reason.startswith("auto: ") and len(precision.reason) > len("auto: because")
    assert precision.reason in str(precision)


@pytest.mark.parametrize("unknown", ["int8", "float64", "FP16", "", torch.float64, torch.int8, 16])
def test_an_unknown_dtype_is_refused_with_the_known_ones(unknown):
    with pytest.raises(PrecisionError, match="float32, float16, bfloat16, auto") as error:
        Precision.of(unknown)
    assert repr(str(unknown).removeprefix("torch.")) in str(error.value)
    assert isinstance(error.value, KitError)


def test_a_contract_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Precision("float16").name = "bfloat16"


@pytest.mark.parametrize("name", NAMES)
def test_unit_roundoff_is_half_the_spacing_at_1(name):
    assert Precision(name).unit_roundoff == UNIT_ROUNDOFF[name] == torch.finfo(getattr(torch, name)).eps / 2
    assert torch.tensor(1 + UNIT_ROUNDOFF[name] * 1.01, dtype=torch.float64).to(getattr(torch, name)) > 1
    assert torch.tensor(1 + UNIT_ROUNDOFF[name] * 0.99, dtype=torch.float64).to(getattr(torch, name)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_description_is_json_and_whole(name):
    described = json.loads(json.dumps(Precision(name).describe()))
    assert described["name"] == name
    assert described["base_weights"] == described["kv_cache"] == name
    assert described["adapters"] == "float32"
    assert described["autocast"] == ("None" if name == "float32" else name)
    assert described["loss_scaling"] is (name == "float16")
    assert described["expected_abs_mean"] == list(EXPECTED_ABS_MEAN[name])


@pytest.mark.parametrize(
    ("name", "abs_mean", "k3"),
    [
        ("float32", 2e-7, 0.0),  # a CPU, random Qwen3
        ("float16", 2.8e-4, 1.1e-7),
        ("bfloat16", 2.1e-3, 7.2e-6),
        ("float16", 5.42e-3, 2.83e-5),  # an H200, SmolLM2-135M
        ("bfloat16", 4.36e-2, 1.83e-3),
    ],
)
def test_the_expected_bands_hold_what_was_measured(name, abs_mean, k3):
    assert EXPECTED_ABS_MEAN[name][0] <= abs_mean <= EXPECTED_ABS_MEAN[name][1]
    assert EXPECTED_K3[name][0] <= k3 <= EXPECTED_K3[name][1]


def arguments(**more):
    from kit.config import GRPOConfig

    return GRPOConfig(output_dir="unused", **more)


@pytest.mark.parametrize("name", NAMES)
def test_the_kits_defaults_contradict_no_dtype(name):
    check_arguments(Precision(name), arguments())


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("float16", {"fp16": True}),
        ("bfloat16", {"bf16": True}),
        ("float32", {"cast_lm_head_to_fp32": True}),
        *(("float16", {"model_init_kwargs": {"dtype": dtype}}) for dtype in ("auto", "float16", f16, None)),
    ],
)
def test_arguments_that_repeat_the_contract_are_fine(name, more):
    check_arguments(Precision(name), arguments(**more))


@pytest.mark.parametrize(
    ("name", "more", "named"),
    [
        ("float16", {"bf16": True}, ["bf16=True", "float16", "torch.float16"]),
        ("float32", {"bf16": True}, ["bf16=True", "float32"]),
        ("bfloat16", {"fp16": True}, ["fp16=True", "bfloat16"]),
        ("float32", {"fp16": True}, ["fp16=True", "float32"]),
        ("float16", {"model_init_kwargs": {"dtype": "bfloat16"}}, ["model_init_kwargs", "bfloat16", "float16"]),
        ("float16", {"model_init_kwargs": {"torch_dtype": b16}}, ["model_init_kwargs", "bfloat16", "float16"]),
        ("float16", {"fp16": True, "fp16_full_eval": True}, ["fp16_full_eval=True"]),
        ("bfloat16", {"bf16_full_eval": True}, ["bf16_full_eval=True"]),
        ("float16", {"cast_lm_head_to_fp32": True}, ["cast_lm_head_to_fp32=True", "float16", "float32"]),
    ],
)
def test_contradictions_are_refused_with_the_reason(name, more, named):
    with pytest.raises(PrecisionError) as error:
        check_arguments(Precision(name), arguments(**more))
    assert all(word in str(error.value) for word in named)


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_trls_own_default_is_bf16_and_is_refused_with_a_hint(name):
    import trl

    with pytest.raises(PrecisionError, match=r"trl.GRPOConfig sets bf16=True .* kit.GRPOConfig"):
        check_arguments(Precision(name), trl.GRPOConfig(output_dir="unused", use_cpu=True))
    check_arguments(Precision("bfloat16"), trl.GRPOConfig(output_dir="unused", use_cpu=True))


@pytest.mark.parametrize("more", [{"kl_share": 0}, {"kl_share": 1.5}, {"sync": "copied"}])
def test_impossible_settings_of_the_kit_are_refused(more):
    with pytest.raises(KitError, match=next(iter(more))):
        arguments(**more)
