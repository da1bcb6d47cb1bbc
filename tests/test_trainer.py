"""The trainer on real engines: TRL's own updates, every record provable, and what it does with bad input."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from datasets import Dataset
from engines import (
    MAX_SEQ_LENGTH,
    adapter_weights,
    constant_reward,
    each_dtype,
    planted,
    share_of_digits,
    with_adapter,
)

from kit.errors import ArgumentError, KitError
from kit.precision import EXPECTED_ABS_MEAN, EXPECTED_K3, PrecisionError
from kit.probe import SyncError
from kit.records import RECORD_KEYS, Run, RunExists
from kit.rewards import RewardError

GPU_ONLY = {"scaler/scale", "scaler/skipped"}  # null where nothing is scaled


def moved(policy, before) -> float:
    """Largest change of an adapter's weight."""
    return max((value - before[name]).abs().max().item() for name, value in adapter_weights(policy).items())


# ---- sync and mismatch ----


@pytest.mark.engine("float32")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_in_float32_sampler_and_trainer_stay_one_policy_however_far_it_moves(make_trainer, temperature):
    trainer = make_trainer(max_steps=4, learning_rate=2e-2, temperature=temperature)
    trainer.train()
    assert [record["step"] for record in trainer.seen] == [1, 2, 3, 4]
    for record in trainer.seen:
        assert record["mismatch/abs_mean"] < 1e-5
        assert record["sync/probe_abs"] < 1e-5
    assert trainer.seen[-1]["kl"] > 1e-3  # the policy moved so far that old weights would show


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=pytest.mark.engine(d)) for d in ("float16", "bfloat16")])
def test_the_mismatch_of_16_bits_is_in_the_band_that_the_contract_names(make_trainer, dtype):
    trainer = make_trainer(max_steps=2)
    trainer.train()
    for record in trainer.seen:
        assert EXPECTED_ABS_MEAN[dtype][0] < record["mismatch/abs_mean"] < EXPECTED_ABS_MEAN[dtype][1]
        assert EXPECTED_K3[dtype][0] < record["mismatch/k3"] < EXPECTED_K3[dtype][1]
        assert record["mismatch/abs_mean"] > EXPECTED_ABS_MEAN["float32"][1]


@pytest.mark.engine("float32")
def test_a_fault_of_the_sync_stops_the_run_and_keeps_the_record(make_trainer):
    """From the second sync on, the sampler keeps what it has."""
    trainer = make_trainer(max_steps=5, learning_rate=2e-2)
    loads = []

    def stale(real):
        return lambda policy: loads.append(1) or (real(policy) if len(loads) == 1 else 0.0)

    with planted(trainer.sampler, "load_adapter", stale), pytest.raises(SyncError, match="sync of step 1"):
        trainer.train()
    run = Run.load(trainer.run_dir)
    assert (run.status, run.column("step")) == ("failed", [1])
    assert "SyncError" in run.info["error"]
    assert (run.adapter_dir / "adapter_model.safetensors").exists()


@pytest.mark.engine("float32")
def test_the_probes_baseline_is_the_base_models_whatever_the_sampler_held_before(make_trainer, model, dtype, engines):
    """Otherwise the first run's adapter would pass for rounding, and no later fault would be found."""
    model.kit.sampler.load_adapter(with_adapter(model, spread=0.2))
    trainer = make_trainer(policy=with_adapter(engines.model(dtype), spread=0.1), max_steps=1)
    trainer.train()
    assert trainer._probe.baseline < 1e-5


@pytest.mark.engine("float32")
def test_an_adapter_of_another_rank_replaces_the_one_before_wholly(make_trainer, model, engines, dtype):
    model.kit.sampler.load_adapter(with_adapter(model, spread=0.2, r=16))
    narrow = with_adapter(engines.model(dtype), spread=0.1, r=4, target_modules=["q_proj", "down_proj"])
    trainer = make_trainer(policy=narrow, max_steps=2)
    trainer.train()
    assert all(record["mismatch/abs_mean"] < 1e-5 for record in trainer.seen)


@pytest.mark.engine("float32")
def test_weights_that_have_diverged_end_the_run_with_that_reason(make_trainer):
    trainer = make_trainer(max_steps=6, learning_rate=1e30, max_grad_norm=0.0)
    with pytest.raises(SyncError, match="weights have diverged"):
        trainer.train()


# ---- TRL's algorithm, unchanged ----


@pytest.mark.engine("float32")
def test_the_updates_are_those_of_trls_own_trainer(make_trainer, engines, dtype, problems, tmp_path):
    """The same completions through `trl.GRPOTrainer` alone give the same adapter after two steps."""
    import trl

    from kit.rollout import request_seed

    ours = make_trainer(max_steps=2, learning_rate=1e-3)
    ours.train()
    theirs, sampler, tokenizer = with_adapter(engines.model(dtype)), ours.sampler, engines.tokenizer

    def rollout(prompts, trainer):
        sampler.load_adapter(trainer.model)
        ids = tokenizer(prompts).input_ids
        seeds = [request_seed(trainer.args.seed, trainer.state.global_step, index) for index in range(len(ids))]
        completions = sampler.generate(ids, ours.settings, seeds)
        return {"prompt_ids": ids, "completion_ids": [c.token_ids for c in completions],
                "logprobs": [c.logprobs for c in completions]}  # fmt: skip

    config = trl.GRPOConfig(
        output_dir=str(tmp_path / "trl"), bf16=False, use_cpu=True, report_to="none", save_strategy="no", max_steps=2,
        learning_rate=1e-3, lr_scheduler_type="constant", per_device_train_batch_size=16, num_generations=8,
        max_completion_length=32, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trl.GRPOTrainer(model=theirs, reward_funcs=share_of_digits, args=config, train_dataset=problems,
                    processing_class=tokenizer, rollout_func=rollout).train()  # fmt: skip
    expected = adapter_weights(theirs)
    assert moved(ours.model, adapter_weights(with_adapter(engines.model(dtype)))) > 1e-3
    for name, value in adapter_weights(ours.model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.engine("float16")
def test_accumulating_4_micro_batches_is_one_batch_up_to_rounding(make_trainer, engines, dtype):
    """Stochastic gradient descent, so that the update is the gradient; TRL shuffles, but the rows are the same."""

    def update(micro_batch):
        policy = with_adapter(engines.model(dtype))
        before = adapter_weights(policy)
        trainer = make_trainer(
            policy=policy, name=f"micro-{micro_batch}", max_steps=1, optim="sgd", learning_rate=1.0,
            max_grad_norm=1e9, per_device_train_batch_size=micro_batch, gradient_accumulation_steps=16 // micro_batch,
        )  # fmt: skip
        trainer.train()
        after = adapter_weights(policy)
        return torch.cat([(after[name] - before[name]).flatten() for name in before]), trainer.seen[0]

    (whole, record), (parts, accumulated) = update(16), update(4)
    assert whole.isfinite().all() and parts.isfinite().all()
    assert (whole - parts).norm() < 0.02 * whole.norm()
    assert accumulated["grad_norm"] == pytest.approx(record["grad_norm"], rel=0.02)
    assert accumulated["mismatch/abs_mean"] == pytest.approx(record["mismatch/abs_mean"], rel=0.2)
    assert accumulated["reward"] == record["reward"]


@pytest.mark.engine("float32")
def test_gradient_checkpointing_changes_no_update(make_trainer, engines, dtype):
    def update(recompute):
        policy = with_adapter(engines.model(dtype), use_gradient_checkpointing=recompute)
        make_trainer(policy=policy, name=f"recompute-{recompute}", max_steps=2).train()
        return adapter_weights(policy)

    plain, recomputed = update(False), update(True)
    for name, value in plain.items():
        torch.testing.assert_close(recomputed[name], value, rtol=0, atol=1e-6)


@pytest.mark.engine("float32")
def test_a_second_pass_over_the_same_completions_is_measured_against_the_policy_that_sampled_them(make_trainer):
    """num_iterations=2: the second update's own forward is another policy than the sampler's, and no mismatch."""
    trainer = make_trainer(max_steps=4, num_iterations=2, learning_rate=2e-2)
    trainer.train()
    assert [record["step"] for record in trainer.seen] == [1, 2, 3, 4]
    assert all(record["mismatch/abs_mean"] < 1e-5 for record in trainer.seen)
    assert [record["speed/tokens_per_s"] is None for record in trainer.seen] == [False, True, False, True]


# ---- corrections, KL, truncation ----


@pytest.mark.engine("float16")
def test_with_corrections_on_the_mismatch_is_still_that_before_the_clamp(make_trainer):
    """TRL masks every sequence here (cap 1e-6), and its logged ratio is 0; the record's numbers do not move."""
    correct = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask"}
    plain, corrected = make_trainer(name="off", max_steps=1), make_trainer(name="on", max_steps=2, **correct)
    masked = make_trainer(name="masked", max_steps=1, vllm_importance_sampling_clip_max=1e-6, **correct)
    for trainer in (plain, corrected, masked):
        trainer.train()
    first = [trainer.seen[0] for trainer in (plain, corrected, masked)]
    for key in ("abs_mean", "abs_max", "k3", "seq_abs", "ratio_max", "ess"):
        assert first[1][f"mismatch/{key}"] == pytest.approx(first[0][f"mismatch/{key}"], rel=1e-3)
        assert first[2][f"mismatch/{key}"] == pytest.approx(first[0][f"mismatch/{key}"], rel=1e-3)
    assert first[2]["sampling/importance_sampling_ratio/max"] == 0.0
    assert first[2]["mismatch/ratio_max"] >= 1.0
    for record in corrected.seen:
        assert record["mismatch/abs_mean"] == pytest.approx(record["sampling/sampling_logp_difference/mean"], rel=1e-4)
        assert record["mismatch/abs_max"] == pytest.approx(record["sampling/sampling_logp_difference/max"], rel=1e-4)


@pytest.mark.engine("float32")
def test_the_kl_at_beta_0_is_trls_kl(make_trainer):
    """kl_share 1 and a beta too small to matter measure the same thing on the same completions."""
    far = {"learning_rate": 1e-2, "max_steps": 2}
    zero, tiny = make_trainer(name="zero", kl_share=1.0, **far), make_trainer(name="tiny", beta=1e-12, **far)
    zero.train()
    tiny.train()
    assert zero.seen[0]["kl"] == 0.0  # a new adapter is the base model
    for ours, theirs in zip(zero.seen[1:], tiny.seen[1:], strict=True):
        assert ours["kl"] > 1e-5
        assert ours["kl"] == pytest.approx(theirs["kl"], rel=1e-3)


@pytest.mark.engine("float32")
@pytest.mark.parametrize(("share", "micro", "rows"), [(1 / 16, 16, 1), (0.3, 16, 5), (1 / 16, 4, 1), (1.0, 4, 4)])
def test_the_kl_costs_one_pass_of_its_share_and_no_more(make_trainer, share, micro, rows):
    trainer = make_trainer(
        max_steps=1, kl_share=share, per_device_train_batch_size=micro, gradient_accumulation_steps=16 // micro
    )
    scored = []
    with planted(trainer, "_forward_logprobs", lambda real: lambda *args: scored.append(args[2]) or real(*args)):
        trainer.train()
    assert scored == [rows]


@pytest.mark.engine("float32")
def test_beta_trains_towards_the_base_model(make_trainer):
    free, held = make_trainer(name="free"), make_trainer(name="held", beta=100.0)
    free.train()
    held.train()
    assert held.seen[-1]["kl"] < free.seen[-1]["kl"]
    assert all(record["mismatch/abs_mean"] < 1e-5 for record in held.seen)


@pytest.mark.engine("float32")
def test_top_p_is_said_to_bias_the_mismatch_and_does(make_trainer, capsys):
    trainer = make_trainer(max_steps=1, top_p=0.8)
    assert "Note: top_p=0.8: the sampler renormalises" in capsys.readouterr().out
    trainer.train()
    assert trainer.seen[0]["mismatch/abs_mean"] > 1e-3
    assert "top_p=0.8" in Run.load(trainer.run_dir).info["sampling_bias"]


@pytest.mark.engine("float32")
def test_without_truncation_no_bias_is_noted(make_trainer, capsys):
    trainer = make_trainer(max_steps=1)
    trainer.train()
    assert "Note:" not in capsys.readouterr().out
    assert Run.load(trainer.run_dir).info["sampling_bias"] is None


# ---- loss scaling ----


@pytest.mark.engine("float16")
def test_an_overflow_is_skipped_counted_and_named(make_trainer):
    trainer = make_trainer(max_steps=3)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = adapter_weights(trainer.model)
    trainer.train()
    assert [record["scaler/skipped"] for record in trainer.seen] == [1, 1, 1]
    assert [record["scaler/scale"] for record in trainer.seen] == [2.0**39, 2.0**38, 2.0**37]
    assert moved(trainer.model, before) == 0.0
    run = Run.load(trainer.run_dir)
    for record in run.records:
        assert record["scaler/first_nonfinite"].startswith("gradient of model.layers.3.")  # the last layer, of four
        assert record["grad_norm"] is None
        assert math.isfinite(record["loss"]) and record["mismatch/abs_mean"] > 0


@pytest.mark.engine("float16")
def test_after_the_scale_has_come_down_training_goes_on(make_trainer):
    trainer = make_trainer(max_steps=11, per_device_train_batch_size=8)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**25)
    before = adapter_weights(trainer.model)
    trainer.train()
    skipped = [record["scaler/skipped"] for record in trainer.seen]
    assert skipped[0] == 1 and skipped.count(0) > 2
    scales = [2.0**25, *(record["scaler/scale"] for record in trainer.seen)]
    assert [after / before for before, after in pairwise(scales)] == [0.5 if s else 1.0 for s in skipped]
    assert [r.get("scaler/first_nonfinite") is not None for r in trainer.seen] == [bool(s) for s in skipped]
    assert moved(trainer.model, before) > 1e-4


@pytest.mark.engine("bfloat16")
def test_a_gradient_that_turns_nan_on_the_way_back_is_named_where_it_did(make_trainer):
    """Planted: what the second layer (1) passes back is NaN. Clipping by a NaN norm would spoil all the others."""
    trainer = make_trainer(max_steps=1)
    layer = trainer.model.get_base_model().model.layers[1]
    layer.register_full_backward_hook(lambda module, inputs, outputs: tuple(g * math.nan for g in inputs))
    trainer.train()
    assert trainer.seen[0]["scaler/first_nonfinite"].startswith("gradient of model.layers.0.")


@pytest.mark.engine("float32")
def test_a_loss_that_is_not_finite_names_the_activation(make_trainer):
    """Planted: the third layer's attention gives infinity, in the loss's forward pass only."""
    trainer = make_trainer(max_steps=1)
    attention = trainer.model.get_base_model().model.layers[2].self_attn.o_proj

    def spoil(module, inputs, output):
        return output * math.inf if trainer._meter.sampled_tokens else None

    attention.base_layer.register_forward_hook(spoil)
    trainer.train()
    assert trainer.seen[0]["scaler/first_nonfinite"] == "activation of model.layers.2.self_attn.o_proj.base_layer"


# ---- the record ----


@each_dtype
def test_a_record_has_every_key_and_on_a_cpu_only_the_scalers_may_be_null(make_trainer, dtype):
    from kit.arithmetic import correct_answer

    trainer = make_trainer(max_steps=2, reward_funcs=[correct_answer, share_of_digits])
    trainer.train()
    run = Run.load(trainer.run_dir)
    assert [record["step"] for record in run.records] == [1, 2]
    for record in run.records:
        assert list(record)[: len(RECORD_KEYS)] == list(RECORD_KEYS)
        nulls = {key for key in RECORD_KEYS if record[key] is None}
        assert nulls == (set() if dtype == "float16" else GPU_ONLY)
        assert record["mismatch/nonfinite"] == 0
        assert record["time/rollout"] + record["time/train"] == pytest.approx(record["time/step"])
        assert 0 < record["sync/seconds"] < record["time/rollout"]
        assert 0 < record["mismatch/ess"] <= 1
        assert record["mismatch/abs_mean"] <= record["mismatch/abs_p99"] <= record["mismatch/abs_max"]
    assert run.info["precision"]["name"] == dtype
    assert run.info["sampler"]["name"] == "vllm"
    assert run.status == "finished"


@pytest.mark.engine("float32")
def test_completions_are_written_with_their_rewards_advantages_and_mismatch(make_trainer):
    """The numbers of the record, computed again from completions.jsonl."""
    from kit.arithmetic import correct_answer

    trainer = make_trainer(
        max_steps=2, per_device_train_batch_size=8, reward_funcs=[correct_answer, share_of_digits],
        max_completion_length=64, learning_rate=2e-2,
    )  # fmt: skip
    trainer.train()
    run = Run.load(trainer.run_dir)
    answers = dict(zip(trainer.train_dataset["prompt"], trainer.train_dataset["answer"], strict=True))
    for record in run.records:
        rows = [row for row in run.completions if row["step"] == record["step"]]
        assert len(rows) == 8
        texts, prompts = [row["completion"] for row in rows], [row["prompt"] for row in rows]
        right = correct_answer(completions=texts, answer=[answers[p] for p in prompts])
        assert [row["rewards"]["correct_answer"] for row in rows] == right
        assert [row["rewards"]["share_of_digits"] for row in rows] == pytest.approx(share_of_digits(texts))
        assert record["accuracy"] == pytest.approx(sum(right) / 8)
        rewards = torch.tensor([sum(row["rewards"].values()) for row in rows])
        assert record["reward"] == pytest.approx(rewards.mean().item())
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        assert [row["advantage"] for row in rows] == pytest.approx(advantages.tolist(), abs=1e-4)
        lengths = [len(row["tokens"]) for row in rows]
        assert record["completion_length"] == pytest.approx(sum(lengths) / 8)
        assert ["".join(row["tokens"]).removesuffix("<eos>") for row in rows] == texts
        differences = [value for row in rows for value in row["token_mismatch"]]
        assert record["mismatch/abs_mean"] == pytest.approx(sum(differences) / len(differences), rel=1e-4)
        assert record["mismatch/abs_max"] == pytest.approx(max(differences), rel=1e-6)


@pytest.mark.engine("float32")
def test_the_runs_settings_are_those_it_ran_with(make_trainer):
    trainer = make_trainer(max_steps=1, learning_rate=7e-4, seed=5, temperature=0.9, beta=0.0)
    trainer.train()
    info = Run.load(trainer.run_dir).info
    assert (info["seed"], info["steps"]) == (5, 1)
    expected = {"learning_rate": 7e-4, "temperature": 0.9, "num_generations": 8, "lora_r": 8, "lora_alpha": 16}
    assert {key: info["settings"][key] for key in expected} == expected
    assert info["versions"]["trl"] and info["hardware"]["kind"] == "cpu"
    json.dumps(info)


@pytest.mark.engine("float32")
def test_stopping_from_outside_ends_after_a_whole_step_with_a_checkpoint(make_trainer):
    class AfterTwo:
        def check(self):
            return "stop" if len(trainer.seen) >= 1 else "run"

    trainer = make_trainer(max_steps=5, save_strategy="steps", save_steps=100)
    trainer.run_control = AfterTwo()
    trainer.train()
    run = Run.load(trainer.run_dir)
    assert run.status == "stopped"
    assert run.column("step") == [1, 2]
    assert (run.checkpoints_dir / "checkpoint-2" / "complete").exists()


# ---- bad input ----


@each_dtype
def test_equal_rewards_in_every_group_give_no_gradient_and_are_said_to(make_trainer):
    from kit.live import progress_line
    from kit.summary import summary_text

    trainer = make_trainer(max_steps=2, reward_funcs=constant_reward)
    before = adapter_weights(trainer.model)
    trainer.train()
    for record in trainer.seen:
        assert record["grad_norm"] == 0.0
        assert record["loss"] == 0.0
        assert record["reward_std"] == 0.0
        assert "no gradient: rewards are equal in every group" in progress_line([record])
    assert "no gradient in 2 steps, where rewards were equal" in summary_text([Run.load(trainer.run_dir)])
    assert moved(trainer.model, before) == 0.0


@pytest.mark.engine("float32")
def test_completions_without_tokens_count_for_nothing_and_break_nothing(make_trainer):
    """Every fourth completion of each step is empty."""
    trainer = make_trainer(max_steps=2, per_device_train_batch_size=8)

    def empty(real):
        def generate(prompts, settings, seeds=None):
            completions = real(prompts, settings, seeds)
            return [replace(c, token_ids=[], logprobs=[]) if i % 4 == 3 else c for i, c in enumerate(completions)]

        return generate

    with planted(trainer.sampler, "generate", empty):
        trainer.train()
    run = Run.load(trainer.run_dir)
    for record in run.records:
        rows = [row for row in run.completions if row["step"] == record["step"]]
        assert [row["completion"] == "" for row in rows] == [False, False, False, True] * 2
        lengths = [len(row["tokens"]) if row["completion"] else 0 for row in rows]
        assert record["completion_length"] == pytest.approx(sum(lengths) / 8)
        assert record["mismatch/abs_mean"] < 1e-5
        assert record["mismatch/nonfinite"] == 0
        assert math.isfinite(record["loss"]) and record["grad_norm"] > 0


@pytest.mark.engine("float32")
def test_a_batch_of_only_empty_completions_changes_nothing(make_trainer):
    trainer = make_trainer(max_steps=2)
    before = adapter_weights(trainer.model)

    def empty(real):
        def generate(prompts, settings, seeds=None):
            return [replace(c, token_ids=[], logprobs=[]) for c in real(prompts, settings, seeds)]

        return generate

    with planted(trainer.sampler, "generate", empty):
        trainer.train()
    for record in Run.load(trainer.run_dir).records:
        assert record["mismatch/abs_mean"] is record["mismatch/ess"] is record["kl"] is None
        assert record["completion_length"] == 0
        assert record["loss"] == record["grad_norm"] == 0.0
    assert moved(trainer.model, before) == 0.0


@pytest.mark.engine("float32")
@pytest.mark.parametrize("correction", [False, True])
def test_logprobs_that_the_sampler_lacks_are_counted_and_left_out(make_trainer, correction):
    trainer = make_trainer(max_steps=2, vllm_importance_sampling_correction=correction)
    plain = make_trainer(max_steps=2, name="plain", vllm_importance_sampling_correction=correction)

    def spoil(real):
        def generate(prompts, settings, seeds=None):
            completions = real(prompts, settings, seeds)
            bad = [math.nan, -math.inf, math.inf]
            return [replace(c, logprobs=[bad[i], *c.logprobs[1:]]) if i < 3 and len(completions) > 3 else c
                    for i, c in enumerate(completions)]  # fmt: skip

        return generate

    with planted(trainer.sampler, "generate", spoil):
        trainer.train()
    plain.train()
    for record, unspoilt in zip(trainer.seen, plain.seen, strict=True):
        assert record["mismatch/nonfinite"] == 3
        assert record["mismatch/abs_mean"] < 1e-5
        assert record["loss"] == pytest.approx(unspoilt["loss"], abs=1e-5)  # their ratio is 1
        assert record["grad_norm"] == pytest.approx(unspoilt["grad_norm"], rel=1e-3)


def on_third_call(action):
    calls = []

    def fragile(completions, **kwargs):
        calls.append(1)
        return action(completions) if len(calls) == 3 else share_of_digits(completions)

    return fragile


def failing(completions):
    raise ZeroDivisionError("no judge today")


@pytest.mark.engine("float32")
@pytest.mark.parametrize(
    ("action", "named"),
    [
        (failing, "'fragile' raised ZeroDivisionError: no judge today"),
        (lambda completions: [1.0], "'fragile' returned 1 rewards for 16 completions"),
        (lambda completions: [math.nan] * 16, "'fragile' returned nan for completion 0"),
    ],
)
def test_a_reward_fault_is_named_and_the_record_up_to_it_stays(make_trainer, action, named):
    trainer = make_trainer(max_steps=5, reward_funcs=on_third_call(action))
    with pytest.raises(RewardError, match=named):
        trainer.train()
    run = Run.load(trainer.run_dir)
    assert (run.status, run.column("step"), run.warnings) == ("failed", [1, 2], [])
    assert len(run.completions) == 32
    assert "RewardError" in run.info["error"]
    assert (run.adapter_dir / "adapter_model.safetensors").exists()
    assert not trainer.sampler.is_closed


@pytest.mark.engine("float32")
def test_rewards_that_do_not_apply_are_left_out(make_trainer):
    """None for a completion means that this reward does not apply to it."""
    trainer = make_trainer(max_steps=1, reward_funcs=lambda completions, **kwargs: [None, 1.0] * 8)
    trainer.train()
    assert trainer.seen[0]["reward"] == 1.0
    assert trainer.seen[0]["grad_norm"] == 0.0


@pytest.mark.engine("float32")
def test_async_reward_functions_work(make_trainer):
    async def judge(completions, **kwargs):
        return share_of_digits(completions)

    trainer, plain = make_trainer(max_steps=1, reward_funcs=judge), make_trainer(max_steps=1, name="plain")
    trainer.train()
    plain.train()
    assert trainer.seen[0]["reward"] == plain.seen[0]["reward"]


@pytest.mark.engine("float32")
def test_prompts_and_completions_that_fill_the_context_exactly(make_trainer):
    """The probe scores what was sampled, and scoring needs room for a token."""
    prompt = ("Q: 12+45=?\nA: " * 9)[: MAX_SEQ_LENGTH - 40]
    trainer = make_trainer(
        max_steps=2, train_dataset=Dataset.from_dict({"prompt": [prompt] * 4}), max_completion_length=40,
        generation_kwargs={"ignore_eos": True}, per_device_train_batch_size=8,
    )  # fmt: skip
    trainer.train()
    assert [record["completion_length"] for record in trainer.seen] == [40, 40]
    assert all(record["sync/probe_abs"] < 1e-5 for record in trainer.seen)


@pytest.mark.engine("float32")
@pytest.mark.parametrize(
    ("rows", "more", "named"),
    [
        ({"prompt": []}, {}, "train_dataset is empty"),
        ({"question": ["1+1"]}, {}, "no column 'prompt'; it has question"),
        ({"prompt": ["Q: 1+1=?\nA: "]}, {"max_completion_length": 149}, "max_seq_length is 160, too small.*12 tokens"),
    ],
)
def test_a_dataset_that_cannot_work_is_refused_and_nothing_is_written(make_trainer, tmp_path, rows, more, named):
    with pytest.raises(ArgumentError, match=named):
        make_trainer(train_dataset=Dataset.from_dict(rows), **more)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine("float32")
def test_no_dataset_and_no_tokenizer_are_refused(engines, dtype, problems, tmp_path):
    from kit import GRPOConfig, GRPOTrainer

    policy, args = with_adapter(engines.model(dtype)), GRPOConfig(output_dir=str(tmp_path / "run"))
    with pytest.raises(ArgumentError, match="train_dataset is empty"):
        GRPOTrainer(policy, share_of_digits, args, None, engines.tokenizer)
    with pytest.raises(ArgumentError, match="train_dataset is a stream"):
        GRPOTrainer(policy, share_of_digits, args, problems.to_iterable_dataset(), engines.tokenizer)
    with pytest.raises(ArgumentError, match="processing_class"):
        GRPOTrainer(policy, share_of_digits, args, problems, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine("float32")
def test_a_model_without_adapter_or_from_elsewhere_is_refused(make_trainer, engines, dtype):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with pytest.raises(ArgumentError, match="without an adapter"):
        make_trainer(policy=engines.model(dtype))
    elsewhere = AutoModelForCausalLM.from_pretrained(engines.get(dtype).path)
    elsewhere = get_peft_model(elsewhere, LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ArgumentError, match="no precision contract"):
        make_trainer(policy=elsewhere)


@pytest.mark.engine("float16")
def test_contradicting_arguments_are_refused_before_anything_is_built(make_trainer, tmp_path):
    import trl

    with pytest.raises(PrecisionError, match="bf16=True contradicts dtype float16"):
        make_trainer(bf16=True)
    with pytest.raises(PrecisionError, match="model_init_kwargs dtype bfloat16"):
        make_trainer(model_init_kwargs={"dtype": "bfloat16"})
    with pytest.raises(PrecisionError, match=r"trl.GRPOConfig sets bf16=True"):
        make_trainer(config=trl.GRPOConfig, use_cpu=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine("bfloat16")
def test_trls_own_config_works_where_it_does_not_contradict(make_trainer):
    import trl

    trainer = make_trainer(config=trl.GRPOConfig, use_cpu=True, report_to="none", max_steps=1)
    trainer.train()
    assert trainer.seen[0]["mismatch/abs_mean"] > 0


@pytest.mark.engine("float32")
def test_a_folder_that_holds_a_run_is_never_overwritten(make_trainer):
    first = make_trainer(max_steps=1)
    first.train()
    before = {path: path.read_bytes() for path in first.run_dir.glob("*.json*")}
    assert len(before) == 3
    with pytest.raises(RunExists, match="already holds a run") as error:
        make_trainer(max_steps=1).train()
    assert isinstance(error.value, KitError)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.engine("float32")
def test_the_callers_arguments_are_not_changed(engines, dtype, problems, tmp_path):
    from kit import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=8, num_generations=8, max_completion_length=16
    )
    before = args.to_dict()
    GRPOTrainer(with_adapter(engines.model(dtype)), share_of_digits, args, problems, engines.tokenizer)
    assert args.to_dict() == before


# ---- the stand-in by transformers ----


@pytest.mark.engine("float32")
def test_the_trainer_works_with_the_transformers_sampler(make_trainer, engines, dtype):
    from kit.transformers_sampler import TransformersSampler

    base = engines.model(dtype)
    base.kit.sampler = TransformersSampler(base, engines.tokenizer, base.kit.precision, max_seq_length=MAX_SEQ_LENGTH)
    trainer = make_trainer(policy=with_adapter(base), max_steps=3, learning_rate=2e-2)
    trainer.train()
    assert all(record["mismatch/abs_mean"] < 1e-5 for record in trainer.seen)
    assert all(record["sync/probe_abs"] == 0.0 for record in trainer.seen)
    assert Run.load(trainer.run_dir).info["sampler"]["name"] == "transformers"
