"""Corrections: weights against closed forms and TRL's own, gradients against autograd, arms with a stale sampler."""

import json
import math

import pytest
import torch
from engines import kit_command, move_adapter, share_of_digits, with_adapter
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerCallback

from kit import corrections, importance
from kit.cli import main
from kit.corrections import CorrectionSettings, lags
from kit.errors import ArgumentError
from kit.gradients import Judging, compare, gradients, judge_batch, snapshot
from kit.importance import CAP, CORRECTIONS, advantages, chosen, token_share, weight_figures, weights

TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
differences = st.lists(st.lists(st.floats(-3, 3), min_size=4, max_size=4), min_size=1, max_size=4).map(torch.tensor)


# ---- weights against closed forms


@given(d=differences)
def test_token_weights_are_bounded_ratios(d):
    mask = torch.ones_like(d)
    truncated, masked = (weights(d, mask, rule) for rule in ("token_truncate", "token_mask"))
    assert torch.allclose(truncated, torch.minimum(d.exp(), torch.tensor(CAP)))
    assert torch.allclose(masked, torch.where(d.exp() > CAP, 0.0, d.exp()))
    assert (masked <= truncated).all()


@given(d=differences)
def test_sequence_weights_are_one_for_all_tokens(d):
    mask = torch.ones_like(d)
    ratio = d.sum(-1).exp()
    for rule, expected in (
        ("sequence_truncate", ratio.clamp(max=CAP)),
        ("sequence_mask", torch.where(ratio > CAP, 0.0, ratio)),
    ):
        found = weights(d, mask, rule)
        assert torch.allclose(found, expected[:, None].expand_as(d))


@given(d=differences, rule=st.sampled_from(TRL_MODES))
def test_without_mismatch_every_weight_is_one(d, rule):
    mask = torch.ones_like(d)
    assert torch.equal(weights(torch.zeros_like(d), mask, rule), mask)
    assert torch.equal(weights(torch.zeros_like(d), mask, "gspo", advantages_P=torch.ones(len(d))), mask)
    assert torch.equal(weights(d, mask, "none"), mask)


def test_what_is_masked_or_not_finite_neither_counts_nor_spoils():
    d = torch.tensor([[0.5, math.nan, 100.0], [math.inf, -math.inf, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    for rule in TRL_MODES:
        found = weights(d, mask, rule)
        assert found.isfinite().all() and (found[:, 2] == 0).all()
        assert torch.allclose(found[0, :2], weights(torch.tensor([[0.5, 0.0]]), torch.ones(1, 2), rule)[0])
        assert torch.equal(found[1, :2], torch.ones(2))


def test_gspo_is_the_geometric_mean_and_ends_where_clipping_does():
    """d/dtheta of min(s A, clip(s) A) is s A dlog s, and 0 where the clipped branch is the smaller (autograd)."""
    for mean in (-0.4, -0.1, 0.0, 0.1, 0.4):
        for advantage in (-1.0, 1.0):
            shift = torch.tensor(0.0, requires_grad=True)
            s = (torch.tensor(mean) + shift).exp()
            torch.minimum(s * advantage, s.clamp(0.8, 1.2) * advantage).backward()
            d = torch.full((1, 3), mean)
            found = weights(d, torch.ones(1, 3), "gspo", advantages_P=torch.tensor([advantage]))
            assert torch.allclose(found * advantage, shift.grad.expand(1, 3))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("rule",), "Unknown rule 'rule'"), (("gspo",), "needs advantages_P")],
)
def test_impossible_weights_are_refused(arguments, named):
    with pytest.raises(ArgumentError, match=named):
        weights(torch.zeros(1, 2), torch.ones(1, 2), *arguments)
    with pytest.raises(ArgumentError, match="cap is 0"):
        weights(torch.zeros(1, 2), torch.ones(1, 2), "token_mask", cap=0)


# ---- figures, advantages, losses


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=20))
def test_sample_size_is_kish(values):
    w = torch.tensor([values])
    found = weight_figures(w, torch.ones_like(w))
    assert found["ess"] == pytest.approx(sum(values) ** 2 / (len(values) * sum(v * v for v in values)), rel=1e-4)
    assert 1 / len(values) - 1e-6 <= found["ess"] <= 1 + 1e-6 and found["masked_share"] == 0


def test_all_masked_is_no_sample_and_no_tokens_is_refused():
    assert weight_figures(torch.zeros(1, 3), torch.ones(1, 3))["ess"] == 0.0
    assert weight_figures(torch.tensor([[0.0, 1.0]]), torch.ones(1, 2)) | {} == {
        "ess": 0.5, "masked_share": 0.5, "mean": 0.5, "max": 1.0
    }  # fmt: skip
    with pytest.raises(ArgumentError, match="no tokens"):
        weight_figures(torch.zeros(1, 3), torch.zeros(1, 3))


def test_advantages_are_within_groups():
    rewards = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert torch.allclose(advantages(rewards, 2, divide=False), torch.tensor([-0.5, 0.5, 0.0, 0.0]))
    assert torch.allclose(advantages(rewards, 2)[:2], torch.tensor([-1.0, 1.0]) / math.sqrt(2), atol=1e-3)
    for bad in (1, 3):
        with pytest.raises(ArgumentError, match="whole groups"):
            advantages(rewards, bad)


def test_token_shares_add_up_as_the_losses_do():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert torch.allclose(token_share(mask, "dapo", 8), mask / 6)
    assert torch.allclose(token_share(mask, "grpo", 8), mask / torch.tensor([[2.0], [4.0]]) / 2)
    assert torch.allclose(token_share(mask, "dr_grpo", 8), mask / 16)
    with pytest.raises(ArgumentError, match="Unknown loss"):
        token_share(mask, "ppo", 8)


def test_gradients_are_compared_by_direction_and_length():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([-6.0, -8.0])
    assert compare(a, b) == {"cosine": pytest.approx(-1), "share": pytest.approx(0.5)}
    assert compare(torch.zeros(2), b) == {"cosine": None, "share": 0.0}
    assert compare(a, torch.zeros(2))["cosine"] is None


# ---- the table


def test_every_correction_is_made_of_arguments_that_trl_has():
    import dataclasses

    from kit.config import GRPOConfig

    names = {f.name for f in dataclasses.fields(GRPOConfig)}
    for correction in CORRECTIONS.values():
        assert correction.arguments.keys() <= names
        args = GRPOConfig(output_dir="runs/none", **correction.arguments)
        assert args.loss_type == correction.loss
    assert {c.rule for c in CORRECTIONS.values()} >= {"none", "gspo", *TRL_MODES}


def test_unknown_names_are_refused():
    with pytest.raises(ArgumentError, match=r"'TIS'.*token TIS"):
        chosen(["TIS"])
    with pytest.raises(ArgumentError, match="none given"):
        chosen([])


@pytest.mark.parametrize(
    "bad",
    [
        {"updates": 0},
        {"steps": -1},
        {"every": 0},
        {"judged": 12},
        {"judged": 0},
        {"corrections": ("TIS",)},
        {"cap": 0.0},
    ],
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ArgumentError):
        CorrectionSettings(**bad)


@given(st.integers(1, 200))
def test_lags_rise_from_none_to_all(updates):
    found = lags(updates)
    assert found == sorted(set(found)) and found[0] == 0 and found[-1] == updates


def test_a_bad_request_is_one_line(tmp_path, capsys):
    for words in (["--corrections", "magic"], ["--dtypes", ""], ["--every", "0"]):
        assert main(["experiment", "corrections", *words, "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "out").exists()


# ---- against TRL, and on a real policy


class Moves(TrainerCallback):
    """Moves the trainer's adapter after each step, so that the sampler lags behind by it."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        move_adapter(model, 0.1, state.global_step)


@pytest.mark.engine("float32")
@pytest.mark.parametrize("name", ["token TIS", "token MIS", "sequence TIS", "sequence MIS"])
def test_weights_are_those_that_trl_computes(engines, dtype, problems, tmp_path, name):
    """The ratio in TRL's own batch, from a sampler that is behind by a moved adapter."""
    from kit import GRPOConfig
    from kit.stale import StaleTrainer

    batches, records = [], []
    keys = ("importance_sampling_ratio", "completion_mask", "old_per_token_logps", "sampling_per_token_logps")

    class Watched(StaleTrainer):
        def _compute_loss(self, model, inputs):
            batches.append({key: inputs[key] for key in keys})
            return super()._compute_loss(model, inputs)

    arguments = GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=8, num_generations=8,
        max_completion_length=16, save_strategy="no", **CORRECTIONS[name].arguments,
    )  # fmt: skip
    trainer = Watched(
        model=with_adapter(engines.model(dtype)), reward_funcs=share_of_digits, args=arguments, train_dataset=problems,
        processing_class=engines.tokenizer, on_record=records.append, callbacks=[Moves()], every=100,
    )  # fmt: skip
    trainer.train()
    first, second = batches
    for batch in (first, second):
        d, mask = batch["old_per_token_logps"] - batch["sampling_per_token_logps"], batch["completion_mask"].bool()
        expected = weights(d, mask, CORRECTIONS[name].rule)
        assert torch.allclose(batch["importance_sampling_ratio"].expand_as(expected) * mask, expected, atol=1e-5)
    assert d[mask].abs().max() > 1e-2  # of the second: the sampler was behind
    found = weight_figures(expected, mask)
    assert records[1]["correction/masked_share"] == pytest.approx(found["masked_share"])
    assert records[1]["correction/weight_mean"] == pytest.approx(found["mean"], rel=1e-5)


@pytest.mark.engine("float32")
def test_the_gradient_without_correction_is_that_of_the_loss(model, tokenizer, problems):
    """Finite differences of the weighted loss along a random direction."""
    from kit import arithmetic
    from kit.gradients import _logprobs, draw
    from kit.sampler import SamplingSettings

    policy = with_adapter(model, spread=0.05)
    policy.kit.sampler.load_adapter(policy)
    few = problems.select(range(2))
    batch = draw(policy, tokenizer, few, arithmetic.correct_answer, SamplingSettings(max_tokens=32), 4, seed=5)
    batch.rewards.copy_(torch.arange(8).float() % 3)
    found, d = gradients(policy, batch, chosen(["none", "sequence MIS"]), 4, 32)
    assert d.abs().max() < 1e-4
    assert compare(found["none"], found["sequence MIS"])["cosine"] == pytest.approx(1.0, abs=1e-4)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    direction = torch.randn(len(found["none"]), generator=torch.Generator().manual_seed(0)).double()

    def loss(step):
        with torch.no_grad():
            for p, part in zip(parameters, direction.split([p.numel() for p in parameters]), strict=True):
                p += step * part.reshape(p.shape).float()
            share = advantages(batch.rewards, 4)[:, None] * token_share(batch.mask, "dapo", 32)
            return -(share * _logprobs(policy, batch, slice(0, 8)).cpu()).double().sum()

    step = 1e-4
    difference = (loss(step) - loss(-2 * step)) / (2 * step)
    assert float(difference) == pytest.approx(float(found["none"] @ direction), rel=0.05)


@pytest.mark.engine("float32")
def test_a_sampler_further_behind_leaves_less_and_agrees_less(model, tokenizer, problems):
    from kit import arithmetic

    policy = with_adapter(model)
    snapshots = [snapshot(policy)]
    for seed in range(2):
        move_adapter(policy, 0.15, seed)
        snapshots.append(snapshot(policy))
    how = Judging(list(CORRECTIONS.values()), arithmetic.correct_answer, 8, 32)
    rows = judge_batch(policy, tokenizer, snapshots, [0, 2], problems.select(range(4)), how)
    assert len(rows) == 2 * len(CORRECTIONS)
    by = {(row["lag"], row["correction"]): row for row in rows}
    for name in CORRECTIONS:
        assert by[0, name]["abs_mean"] < 1e-4 < by[2, name]["abs_mean"]
        assert by[0, name]["ess"] == pytest.approx(1.0, abs=1e-3) and by[0, name]["masked_share"] == 0
    for name in ("token TIS", "token MIS", "sequence TIS", "sequence MIS"):
        assert by[2, name]["ess"] < 0.999
    bound = Judging(chosen(["token TIS", "token MIS", "sequence MIS"]), arithmetic.correct_answer, 8, 32, cap=1.1)
    for row in judge_batch(policy, tokenizer, snapshots, [2], problems.select(range(4)), bound):
        assert row["max"] <= 1.1 + 1e-6 and (row["masked_share"] > 0) == row["correction"].endswith("MIS")
    words = corrections.batch_table("float32", rows)
    assert "sampler 2 updates behind" in words and all(name in words for name in CORRECTIONS)


@pytest.mark.engine
def test_the_command_judges_trains_and_draws(tmp_path):
    process = kit_command(
        "experiment", "corrections", "--dtypes", "float16", "--corrections", "none,token TIS,Dr. GRPO", "--updates", 2,
        "--judged", 32, "--steps", 3, "--every", 2, "--completions", 16, "--out", tmp_path, "--json",
    )  # fmt: skip
    printed, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    result = json.loads(printed)
    found = result["dtypes"]["float16"]
    assert {row["lag"] for row in found["batch"]} == {0, 1, 2}
    assert list(found["training"]) == ["none", "token TIS", "Dr. GRPO"]
    assert all(arm["steps"] == 3 for arm in found["training"].values())
    assert found["training"]["token TIS"]["weight_mean"] == pytest.approx(1, abs=0.2)
    assert found["training"]["none"]["masked_share"] is None
    assert (tmp_path / "figure.png").stat().st_size > 20_000
    assert importance.CORRECTIONS.keys() >= found["training"].keys()
    assert corrections.text(result).count("gradient norm") == 3
