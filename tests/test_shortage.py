"""Out of memory in the middle of a run: the record stays, and the message says what to reduce, the most first."""

from dataclasses import replace

import pytest
import torch
from engines import planted

from kit.hardware import lookup
from kit.memory import GIB, Settings, plan_memory
from kit.records import Run
from kit.shapes import shape_of
from kit.shortage import OutOfMemory, remedies

T4_JOB = Settings(shape_of("Qwen3-4B-Base"), lookup("T4"), "float16", micro_batch=8, prompts=4)


def test_remedies_are_sorted_and_are_what_the_plan_would_save():
    found = remedies(T4_JOB)
    savings = [saved for _, saved in found]
    assert savings == sorted(savings, reverse=True) and len(found) >= 4
    smaller = plan_memory(replace(T4_JOB, micro_batch=4)).total
    assert dict(found)[next(name for name, _ in found if "batch_size=4" in name)] == pytest.approx(
        (plan_memory(T4_JOB).total - smaller) / GIB
    )


def test_what_is_reduced_already_is_not_named():
    least = replace(T4_JOB, micro_batch=1, prompts=1, rank=1, eight_bit_optimizer=True)
    assert [name for name, _ in remedies(least) if "length" not in name] == []


@pytest.mark.engine("float32")
def test_the_record_stays_and_the_message_says_what_to_do(make_trainer):
    trainer = make_trainer(max_steps=4)

    def full(real):
        def training_step(*args, **kwargs):
            if trainer.state.global_step == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.16 GiB.\nGPU 0 has ...")
            return real(*args, **kwargs)

        return training_step

    with planted(trainer, "training_step", full), pytest.raises(OutOfMemory) as caught:
        trainer.train()
    message = str(caught.value)
    assert message.startswith("Memory ran out: CUDA out of memory. Tried to allocate 1.16 GiB.\n")
    assert "The record up to step 2 and the adapter are kept" in message and "per_device_train_batch_size=8" in message
    run = Run.load(trainer.run_dir)
    assert run.column("step") == [1, 2] and run.status == "failed"
    assert (trainer.run_dir / "adapter" / "adapter_model.safetensors").exists()
