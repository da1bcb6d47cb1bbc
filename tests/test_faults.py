"""Faults that other systems' users reported: for each kind the naive way, which fails, and the kit's, which does not.

The report is named above each test. What is tested elsewhere in full (planted sync faults, overflow in the backward
pass, resumed loss scales) is here in its shortest form, beside the naive way.
"""

import math

import pytest
import torch
from engines import planted, share_of_digits, with_adapter

from kit.loading import TINY, Loaded
from kit.precision import Precision, PrecisionError, check_arguments

TEXT = "Q: 123+457=?\nA: <think>steps: 3+7+0=0c 2+5+1=8 1+4+0=5</think> 580"


def base_model(dtype: str):
    """The bundled model as the kit holds it, without a sampler."""
    from transformers import AutoModelForCausalLM

    precision = Precision(dtype)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=precision.base_weights)
    model.requires_grad_(False)
    model.kit = Loaded(precision, str(TINY), None, 128, 16, "a copy")
    return model


@pytest.fixture(scope="module")
def token_ids():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)(TEXT).input_ids


def scaled_backward(policy, token_ids):
    """One loss, scaled, backwards, and unscaled as gradient clipping does it."""
    ids = torch.tensor([token_ids])
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = policy(input_ids=ids, labels=ids).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    return [p.grad for p in policy.parameters() if p.requires_grad]


# peft#1249, Qwen-VL-Series-Finetune#184: "Attempting to unscale FP16 gradients"
def test_trainable_parameters_that_inherit_float16_cannot_be_unscaled_and_the_kits_can(token_ids):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    inherited = get_peft_model(base_model("float16"), config, autocast_adapter_dtype=False)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaled_backward(inherited, token_ids)
    gradients = scaled_backward(with_adapter(base_model("float16"), spread=0.1), token_ids)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients)
    assert max(g.abs().max() for g in gradients) > 1e-4


# the cause behind it: full 16-bit parameters with Adam are infinite after one step
def test_float16_parameters_do_not_survive_adam_and_float32_ones_do():
    def after_one_step(dtype):
        parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = torch.optim.AdamW([parameter], lr=3e-4)
        parameter.grad = torch.full((4,), 1e-4, dtype=dtype)
        optimizer.step()
        return parameter

    assert not after_one_step(torch.float16).isfinite().any()
    torch.testing.assert_close(after_one_step(Precision("float16").adapters).data, torch.full((4,), 1 - 3e-4 - 3e-6))


# trl#4901, unsloth#3992: an fp16 scaler meets bf16 gradients
def test_fp16_arguments_with_a_bfloat16_model_pass_in_trl_and_are_refused_here(problems, token_ids, tmp_path):
    import trl
    from transformers import AutoTokenizer

    args = trl.GRPOConfig(output_dir=str(tmp_path), fp16=True, use_cpu=True, report_to="none", num_generations=8)
    policy = with_adapter(base_model("bfloat16"))
    naive = trl.GRPOTrainer(policy, share_of_digits, args=args, train_dataset=problems,
                            processing_class=AutoTokenizer.from_pretrained(TINY))  # fmt: skip
    assert naive.args.fp16 and naive.model.get_input_embeddings().weight.dtype == torch.bfloat16  # not a word
    with pytest.raises(PrecisionError, match="fp16=True contradicts dtype bfloat16"):
        check_arguments(Precision("bfloat16"), args)


# Soup#558: parameters checked clean, then the trainer created bf16 ones
@pytest.mark.engine("float16")
def test_a_check_before_the_trainer_exists_misses_what_the_audit_after_it_sees(make_trainer, model):
    from kit.audit import AuditError, audit

    policy = with_adapter(model)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}  # clean, before
    trainer = make_trainer(policy=policy)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    with pytest.raises(AuditError, match="adapters: contract float32, realised bfloat16"):
        audit(trainer)


# unsloth#4891: bf16=True ran fp16 autocast
@pytest.mark.engine("bfloat16")
def test_a_dtype_left_in_the_environment_decides_accelerates_autocast_and_not_the_kits(make_trainer, monkeypatch):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from kit.audit import audit

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Accelerator(cpu=True).mixed_precision == "fp16"
    found = audit(make_trainer())
    assert next(row.realised for row in found.rows if row.what == "autocast") == "bfloat16"


# unsloth-zoo PR 866: loss finite, gradient norm NaN
def test_after_clipping_by_a_nan_norm_no_gradient_tells_where_it_began_and_before_it_one_does():
    from kit.scaling import first_nonfinite_gradient

    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    layers[1].register_full_backward_hook(lambda module, inputs, outputs: tuple(g * math.nan for g in inputs))
    loss = layers(torch.ones(2, 4)).sum()
    loss.backward()
    assert loss.isfinite()
    assert first_nonfinite_gradient(layers) == "0.bias"  # 1 passed NaN back to 0
    torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
    assert first_nonfinite_gradient(layers) == "2.bias"  # the naive order names an innocent layer


# trl PR 2738, EasyR1#583, OpenRLHF#1155: the sampler's dtype differs from the trainer's, or is unknown
def test_an_engine_without_dtype_takes_the_checkpoints_and_the_kits_takes_the_contracts():
    from kit import engine

    engine.import_vllm()
    from vllm.config import ModelConfig

    assert ModelConfig(model=str(TINY)).dtype == torch.bfloat16  # while the trainer is float16
    chosen = engine.arguments(str(TINY), Precision("float16"), max_seq_length=64, max_lora_rank=8,
                              gpu_memory_utilization=0.5, max_num_seqs=4)  # fmt: skip
    assert ModelConfig(model=str(TINY), dtype=chosen["dtype"]).dtype == chosen["lora_dtype"] == torch.float16


# NeMo-RL#259, vllm#1157, vllm#946: a V100 or T4 rejects bf16
@pytest.mark.parametrize("card", ["T4", "V100 16GB"])
def test_a_card_without_bfloat16_is_known_before_anything_loads(card):
    from kit.cards import lookup
    from kit.hardware import UnsupportedDtype, check_dtype, recommended_dtype

    with pytest.raises(UnsupportedDtype, match=r"bfloat16 does not exist in hardware .* Use dtype=float16"):
        check_dtype(lookup(card), "bfloat16")
    assert recommended_dtype(lookup(card))[0] == "float16"


# trl#6684: float32 forced, out of memory
def test_a_model_loaded_by_name_in_trl_is_float32_and_the_kits_base_is_16_bits():
    from trl.trainer.utils import create_model_from_path

    def size(model):
        return sum(p.numel() * p.element_size() for p in model.parameters())

    assert size(create_model_from_path(str(TINY))) == 2 * size(base_model("float16"))


# trl#4772, trl#5814: the sequence ratio explodes or deflates with length
def test_the_ratio_of_a_long_sequence_overflows_and_its_sum_and_mean_are_both_there():
    from kit.mismatch import mismatch_metrics

    d = torch.full((1, 2048), 0.05)
    assert d.sum().exp().isinf()
    found = mismatch_metrics(-1 + d, torch.full_like(d, -1.0), torch.ones_like(d))
    assert found["mismatch/abs_mean"] == pytest.approx(0.05, rel=1e-4)  # the mean, a token
    assert found["mismatch/seq_abs"] == pytest.approx(102.4, rel=1e-4)  # the sum, a sequence
    assert math.isfinite(found["mismatch/ratio_max"]) and found["mismatch/saturated"] == 1


# torchforge#664: KL up to 6.8e9
def test_one_token_decides_the_naive_kl_and_not_the_kits():
    from kit.mismatch import mismatch_metrics

    sampler = torch.full((1, 100), -1.0)
    trainer = sampler.clone()
    sampler[0, 0] = -121.0  # a token that the sampler's rounding had made all but impossible
    d = trainer - sampler
    assert (d.exp() - d - 1).mean().isinf()
    found = mismatch_metrics(trainer, sampler, torch.ones(1, 100))
    assert math.isfinite(found["mismatch/k3"]) and found["mismatch/saturated"] == 2
    assert found["mismatch/prob_abs_max"] == pytest.approx(math.exp(-1))  # bounded by 1 whatever happens
    assert found["mismatch/k1"] == pytest.approx(-1.2)


# trl#6688: merging and unmerging in bf16 drifts
def test_merging_drifts_in_16_bits_and_compounds(token_ids):
    from kit.merging import merge_drift

    rounds = {}
    for dtype in ("float32", "float16", "bfloat16"):
        policy = with_adapter(base_model(dtype), spread=0.05)
        before = {name: p.clone() for name, p in policy.named_parameters()}
        rounds[dtype] = merge_drift(policy, token_ids, merges=8)
        assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())  # it works on a copy
    assert [r.merges for r in rounds["bfloat16"]] == list(range(1, 9))
    assert rounds["bfloat16"][0].moved > 0.05
    assert rounds["bfloat16"][-1].relative > rounds["bfloat16"][0].relative
    assert rounds["bfloat16"][-1].relative > 3 * rounds["float16"][-1].relative
    assert rounds["float16"][-1].relative > 100 * rounds["float32"][-1].relative


@pytest.mark.engine("bfloat16")
def test_after_training_native_adapters_leave_the_base_bit_for_bit_and_merging_does_not(make_trainer):
    from safetensors.torch import load_file

    stored = load_file(TINY / "model.safetensors")

    def changed(trainer):
        base = trainer.model.get_base_model().state_dict()
        return sum(not torch.equal(value, base.get(name, base.get(name.replace(".weight", ".base_layer.weight"))))
                   for name, value in stored.items())  # fmt: skip

    native, merged = make_trainer(name="native"), make_trainer(name="merged", sync="merged")
    try:
        native.train()
        merged.train()
    finally:
        merged.sampler.close()  # its base weights are merged ones now
    assert changed(native) == 0
    assert changed(merged) > 10
    assert all(record["sync/probe_abs"] < 0.1 for record in native.seen + merged.seen)


# trl#5312: sleep left stale weights
@pytest.mark.engine("float32")
def test_a_sampler_that_keeps_old_weights_goes_unnoticed_in_trl_and_not_here(make_trainer, problems, tmp_path):
    import trl

    from kit.probe import SyncError

    def stale(real):
        return lambda policy: real(policy) if trainer.state.global_step == 0 else 0.0

    def rollout(prompts, own):
        ids = tokenizer(prompts).input_ids
        sampler.load_adapter(own.model)
        completions = sampler.generate(ids, ours.settings, list(range(len(ids))))
        return {"prompt_ids": ids, "completion_ids": [c.token_ids for c in completions],
                "logprobs": [c.logprobs for c in completions]}  # fmt: skip

    ours = make_trainer(learning_rate=2e-2)
    sampler, tokenizer = ours.sampler, ours.processing_class
    args = trl.GRPOConfig(
        output_dir=str(tmp_path / "trl"), bf16=False, use_cpu=True, report_to="none", save_strategy="no", max_steps=3,
        learning_rate=2e-2, per_device_train_batch_size=16, num_generations=8, max_completion_length=32,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(with_adapter(base_model("float32")), share_of_digits, args=args, train_dataset=problems,
                              processing_class=tokenizer, rollout_func=rollout)  # fmt: skip
    with planted(sampler, "load_adapter", stale):
        trainer.train()
        assert trainer.state.global_step == 3  # all the way, on completions of the first policy
        trainer = ours
        with pytest.raises(SyncError, match="sync of step 1"):
            ours.train()


# vllm PR 6758: tied lm_head
@pytest.mark.engine("float32")
def test_the_model_of_these_tests_is_tied_and_head_and_embedding_stay_one_on_both_sides(make_trainer):
    trainer = make_trainer(learning_rate=2e-2)
    base = trainer.model.get_base_model()
    assert base.config.tie_word_embeddings
    assert base.lm_head.weight.data_ptr() == base.get_input_embeddings().weight.data_ptr()
    trainer.train()
    assert trainer.seen[-1]["kl"] > 1e-3
    assert all(record["mismatch/abs_mean"] < 1e-5 for record in trainer.seen)


# transformers#31267, vllm#18352: generation and forward logprobs differ, and nobody says by how much they may
def test_the_difference_to_expect_is_part_of_every_runs_description():
    from kit.precision import EXPECTED_ABS_MEAN

    described = {dtype: Precision(dtype).describe() for dtype in EXPECTED_ABS_MEAN}
    limits = [described[dtype]["expected_abs_mean"][1] for dtype in ("float32", "float16", "bfloat16")]
    assert limits == sorted(limits) and limits[0] == 1e-5


# accelerate 1.15 makes no scaler for fp16 on a CPU, and gradients vanish without a word
def test_a_gradient_below_float16_vanishes_without_scaling_and_not_with_it():
    weight = torch.ones(8, 8, requires_grad=True)

    def gradient(scale):
        with torch.autocast("cpu", dtype=torch.float16):
            product = torch.ones(8, 8) @ weight
        (scale * 1e-9 * product.float().sum()).backward()
        found, weight.grad = weight.grad / scale, None
        return found

    assert gradient(1.0).abs().max() == 0
    torch.testing.assert_close(gradient(2.0**16), torch.full((8, 8), 8e-9), rtol=2e-2, atol=0)
