"""The audit: a table when everything is as agreed, and an error that names both sides when it is not."""

import dataclasses

import pytest
import torch
from engines import each_dtype, with_adapter

from kit.audit import Audit, AuditError, AuditRow, audit
from kit.errors import KitError
from kit.loading import Loaded
from kit.precision import Precision


@each_dtype
def test_what_both_sides_hold_is_read_back_and_agrees(make_trainer, dtype):
    found = audit(make_trainer())
    scaled, autocast = str(dtype == "float16").lower(), "off" if dtype == "float32" else dtype
    assert [(row.side, row.what, row.realised) for row in found.rows] == [
        ("trainer", "base_weights", dtype),
        ("trainer", "adapters", "float32"),
        ("trainer", "autocast", autocast),
        ("trainer", "loss_scaling", scaled),
        ("trainer", "logits", dtype),
        ("sampler", "weights", dtype),
        ("sampler", "adapters", dtype),
        ("sampler", "kv_cache", dtype),
    ]
    assert found.differences == ()


def test_the_table_reads_in_a_terminal_and_in_a_notebook():
    rows = (
        AuditRow("base_weights", "trainer", "float16", "float16"),
        AuditRow("weights", "sampler", "float16", "bfloat16"),
    )
    table = Audit(rows)
    assert str(table).splitlines() == [
        "              side     contract  realised",
        "base_weights  trainer  float16   float16   ok",
        "weights       sampler  float16   bfloat16  DIFFERS",
    ]
    html = table._repr_html_()
    assert html.count("<tr>") == 3 and "<b>differs</b>" in html
    assert table.differences == rows[1:]


@pytest.mark.engine("bfloat16")
def test_a_sampler_built_by_hand_in_another_dtype_is_named_on_both_sides(make_trainer, engines, dtype):
    """The trainer is float16's in everything; the engine is bfloat16's."""
    from transformers import AutoModelForCausalLM

    loaded = engines.get(dtype)
    model = AutoModelForCausalLM.from_pretrained(loaded.path, dtype=torch.float16)
    model.requires_grad_(False)
    model.kit = dataclasses.replace(loaded, precision=Precision.of("float16"))
    assert isinstance(model.kit, Loaded)
    trainer = make_trainer(policy=with_adapter(model))
    with pytest.raises(AuditError) as error:
        audit(trainer)
    message = str(error.value)
    assert "sampler weights: contract float16, realised bfloat16" in message
    assert "sampler kv_cache: contract float16, realised bfloat16" in message
    assert "trainer" in message and "base_weights  trainer  float16   float16   ok" in message
    assert isinstance(error.value, KitError)
    with pytest.raises(AuditError):  # and training does not start
        trainer.train()
    assert trainer.seen == []


@pytest.mark.engine("float16")
def test_an_adapter_in_16_bits_is_named(make_trainer):
    trainer = make_trainer()
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.half()
    with pytest.raises(AuditError, match="trainer adapters: contract float32, realised float16"):
        audit(trainer)


@pytest.mark.engine("float16")
def test_one_weight_that_was_cast_is_enough(make_trainer):
    trainer = make_trainer()
    trainer.model.get_base_model().model.layers[2].mlp.up_proj.base_layer.float()
    with pytest.raises(AuditError, match="trainer base_weights: contract float16, realised float16 and float32"):
        audit(trainer)


@pytest.mark.engine("float16")
def test_missing_loss_scaling_is_named(make_trainer):
    trainer = make_trainer()
    trainer.accelerator.scaler = None
    with pytest.raises(AuditError, match="trainer loss_scaling: contract true, realised false"):
        audit(trainer)


@pytest.mark.engine("float16")
def test_another_autocast_is_named(make_trainer):
    """What a second trainer of another dtype, built meanwhile, does to accelerate's shared state."""
    trainer = make_trainer()
    trainer.accelerator.state._mixed_precision = "bf16"
    with pytest.raises(AuditError, match="trainer autocast: contract float16, realised bfloat16"):
        audit(trainer)


@pytest.mark.engine("float16")
def test_logits_of_another_dtype_are_named(make_trainer):
    trainer = make_trainer()
    head = trainer.model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: output.float())
    with pytest.raises(AuditError, match="trainer logits: contract float16, realised float32"):
        audit(trainer)
