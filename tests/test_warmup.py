"""The warm-up: what is taught, that it is learnt under the contract, and that the sampler speaks for the result."""

import pytest
import torch
from engines import adapter_weights, with_adapter

from kit.errors import ArgumentError
from kit.tasks import Task, load_task
from kit.templates import BUNDLED
from kit.warmup import warm_up, worked_examples


@pytest.fixture(scope="module")
def task():
    return load_task("arithmetic", size=64, held_out=1)


@pytest.mark.engine("float32")
def test_only_the_completion_is_taught_with_its_end_and_in_the_samplers_tokens(task, tokenizer):
    examples = worked_examples(task, tokenizer, max_length=160)
    assert len(examples) == 64
    row, example = task.train[0], examples[0]
    taught = [token for token in example["labels"] if token != -100]
    assert taught[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(taught[:-1])
    assert text.startswith("<think>steps: ") and text.endswith(f"</think> {row['answer']}")
    prompt = tokenizer(row["prompt"]).input_ids  # what the sampler gets
    assert example["input_ids"] == prompt + taught and example["labels"] == [-100] * len(prompt) + taught
    assert len(worked_examples(task, tokenizer, max_length=55)) < 64


@pytest.mark.parametrize(
    "dtype", [pytest.param(name, marks=pytest.mark.engine(name)) for name in ("float32", "float16")]
)
def test_the_model_learns_the_careful_style_and_both_sides_agree(model, tokenizer, task, dtype):
    policy = with_adapter(model, r=8)
    before = adapter_weights(policy)
    warmed = warm_up(policy, tokenizer, task, steps=12, learning_rate=5e-3, batch=8)
    assert warmed.steps == 12 and warmed.loss_last < 0.7 * warmed.loss_first
    assert warmed.probe_after <= max(10 * warmed.probe_before, 1e-5)
    assert dtype != "float32" or warmed.probe_after < 1e-5
    after = adapter_weights(policy)
    assert all(weight.dtype == torch.float32 for weight in after.values())
    assert any(not torch.equal(after[name], before[name]) for name in after)
    texts = policy.kit.sampler.generate(tokenizer(list(task.held_out["prompt"])).input_ids, settings(), [1])
    assert "steps" in tokenizer.decode(texts[0].token_ids)


def settings():
    from kit.sampler import SamplingSettings

    return SamplingSettings(max_tokens=90, temperature=0.1)


@pytest.mark.engine("float32")
def test_grpo_goes_on_from_there(make_trainer, model, tokenizer, task):
    policy = with_adapter(model)
    warm_up(policy, tokenizer, task, steps=3, learning_rate=5e-3, batch=8)
    warmed = adapter_weights(policy)
    trainer = make_trainer(policy=policy, max_steps=2)
    trainer.train()
    assert [record["step"] for record in trainer.seen] == [1, 2]
    assert trainer.seen[0]["kl"] > 1e-5  # the policy begins where the warm-up left it, not at the base
    assert all(record["sync/probe_abs"] < 1e-5 for record in trainer.seen)
    moved = max((adapter_weights(policy)[name] - warmed[name]).abs().max().item() for name in warmed)
    assert 0 < moved < 0.1


@pytest.mark.engine("float32")
def test_a_task_without_worked_solutions_says_so(tokenizer, task):
    without = Task("mine", task.train.remove_columns("solution"), None, None, BUNDLED)
    with pytest.raises(ArgumentError, match="mine has no worked solutions"):
        worked_examples(without, tokenizer, 160)
    with pytest.raises(ArgumentError, match="fits into 12 tokens"):
        worked_examples(task, tokenizer, 12)
