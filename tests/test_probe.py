"""Proof of sync: what the probe lets pass, and each planted fault that it must stop."""

import math

import pytest
import torch
from engines import each_dtype, move_adapter, with_adapter

from kit.errors import KitError
from kit.precision import NAMES, UNIT_ROUNDOFF, Precision
from kit.probe import FLOOR, MARGIN, SyncError, SyncProbe, disagreement, next_token_logprobs, trainer_score

TEXT = "Q: 123+457=?\nA: <think>steps: 3+7+0=0c 2+5+1=8 1+4+0=5</think> 580"


@pytest.mark.parametrize("name", NAMES)
def test_the_limit_is_what_rounding_explains(name):
    """Ten times the base model's disagreement, but never less than one rounding, nor than what float32 reaches."""
    least = max(UNIT_ROUNDOFF[name], FLOOR)
    assert SyncProbe(Precision(name), 0.0).limit == least
    assert SyncProbe(Precision(name), 0.5).limit == MARGIN * 0.5
    assert SyncProbe(Precision(name), least).limit == MARGIN * least


def test_float32_may_not_differ_by_more_than_1e_5_however_small_its_baseline():
    probe = SyncProbe(Precision("float32"), 1e-8)
    assert probe.check(9e-6, step=3) == 9e-6
    with pytest.raises(SyncError, match="step 3"):
        probe.check(1.1e-5, step=3)


@pytest.mark.parametrize("measured", [math.nan, math.inf, 1.0])
def test_beyond_the_limit_the_error_names_sizes_and_causes(measured):
    with pytest.raises(SyncError, match=r"bfloat16 explains at most 0.01 \(base model: 0.001\)") as error:
        SyncProbe(Precision("bfloat16"), 0.001).check(measured, step=7)
    assert all(word in str(error.value) for word in ("step 7", "stale", "lora_alpha", "resume"))
    assert isinstance(error.value, KitError)


@pytest.fixture
def synced(model, dtype, tokenizer):
    """(policy with a large adapter that the sampler holds too, sampler, token ids, probe of the base model)."""
    sampler, ids = model.kit.sampler, tokenizer(TEXT).input_ids
    sampler.drop_adapter()
    probe = SyncProbe(Precision(dtype), disagreement(model, sampler, ids, model.kit.precision))
    policy = with_adapter(model, spread=0.1)
    sampler.load_adapter(policy)
    return policy, sampler, ids, probe


def check(policy, sampler, ids, probe) -> float:
    return probe.check(disagreement(policy, sampler, ids, probe.precision), step=1)


@each_dtype
def test_after_a_sync_the_two_sides_agree(synced, dtype):
    policy, sampler, ids, probe = synced
    measured = check(*synced)
    with policy.disable_adapter():
        moved = disagreement(policy, sampler, ids, probe.precision)
    assert moved > 2 * probe.limit  # the adapter is large, so that the agreement proves something
    assert measured < 1e-5 if dtype == "float32" else measured > 1e-6


@each_dtype
def test_a_stale_adapter_is_caught(synced):
    """The trainer has made a step that the sampler did not see."""
    move_adapter(synced[0], 0.1, seed=1)
    with pytest.raises(SyncError):
        check(*synced)
    synced[1].load_adapter(synced[0])
    check(*synced)


@each_dtype
@pytest.mark.parametrize("change", [{"lora_alpha": 32}, {"r": 16}, {"use_rslora": True}])
def test_a_scaling_that_the_sampler_reads_otherwise_is_caught(synced, change):
    """It reads lora_alpha, r and use_rslora from the saved configuration when an adapter is registered."""
    policy, sampler, *_ = synced
    for name, value in change.items():
        setattr(policy.peft_config["default"], name, value)
    sampler.drop_adapter()
    sampler.load_adapter(policy)
    with pytest.raises(SyncError):
        check(*synced)


@each_dtype
def test_a_scaling_that_changes_on_the_trainers_side_is_caught_until_the_next_sync(synced):
    from peft.tuners.lora import LoraLayer

    policy, sampler, *_ = synced
    for module in policy.modules():
        if isinstance(module, LoraLayer):
            module.scaling["default"] *= 2
    with pytest.raises(SyncError):
        check(*synced)
    sampler.load_adapter(policy)
    check(*synced)


@each_dtype
def test_an_adapter_counted_twice_is_caught(synced):
    """A resume that loads merged base weights and then the adapter: the trainer's base holds the update already."""
    from peft.tuners.lora import LoraLayer

    policy = synced[0]
    for module in policy.modules():
        if isinstance(module, LoraLayer):
            module.base_layer.weight.data += module.get_delta_weight("default").to(module.base_layer.weight.dtype)
    with pytest.raises(SyncError):
        check(*synced)


@each_dtype
def test_an_adapter_that_the_sampler_never_got_is_caught(synced):
    synced[1].drop_adapter()
    with pytest.raises(SyncError):
        check(*synced)


@pytest.mark.engine("float32")
@pytest.mark.parametrize("module", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_one_projection_that_is_not_synced_is_caught(synced, module):
    """Packed projections (q, k, v in one matrix) are where a part can go missing."""
    policy = synced[0]
    parameter = next(p for name, p in policy.named_parameters() if module in name and "lora_B" in name)
    with torch.no_grad():
        parameter.zero_()
    with pytest.raises(SyncError):
        check(*synced)


@pytest.mark.engine("float32")
def test_weights_that_have_diverged_are_said_to_have(synced):
    policy = synced[0]
    with torch.no_grad():
        next(p for n, p in policy.named_parameters() if "lora_B" in n).fill_(math.nan)
    with pytest.raises(SyncError, match="weights have diverged"):
        check(*synced)


@pytest.mark.engine("float32")
def test_the_prefix_cache_never_serves_old_weights(synced):
    """The same prompt before and after a sync: cached keys and values of the old adapter would show."""
    policy, sampler, ids, _ = synced
    before = sampler.next_token_logprobs(ids)
    torch.testing.assert_close(sampler.next_token_logprobs(ids), before)  # now from the cache
    move_adapter(policy, 0.05, seed=1)
    sampler.load_adapter(policy)
    after = sampler.next_token_logprobs(ids)
    trainer = next_token_logprobs(policy, ids, Precision("float32"))[-1]
    assert (before[: len(trainer)] - trainer).abs().max() > 1e-2
    torch.testing.assert_close(after[: len(trainer)], trainer, rtol=0, atol=2e-5)


@pytest.mark.engine("float32")
def test_the_trainers_score_is_log_softmax_of_its_logits(model, tokenizer):
    ids = tokenizer(TEXT).input_ids
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    expected = torch.stack([logprobs[position, token] for position, token in enumerate(ids[1:])])
    torch.testing.assert_close(trainer_score(model, ids, Precision("float32")), expected)
