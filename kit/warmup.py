"""Warm-up: a few minutes of supervised fine-tuning on worked solutions, on the adapter that GRPO will train.

TRL's SFTTrainer under the precision contract of the model it is given: the same base weights, the same float32
adapter, the same autocast and loss scaling as in GRPO. Prompt and completion are tokenized apart, as the sampler sees
them, so that the tokens the model is taught are those it will sample. After it, trainer and sampler score the same
text: the proof that the sampler speaks for the warmed-up model.
"""

import contextlib
import tempfile
import time
from dataclasses import asdict, dataclass

from kit.cpu_half import float16_products
from kit.errors import ArgumentError
from kit.loading import Loaded
from kit.preparation import check_model, compute_backward_in
from kit.probe import SyncProbe, disagreement
from kit.scaling import attach_scaler
from kit.tasks import Task, worked


@dataclass(frozen=True)
class WarmUp:
    """What a warm-up did: mean loss [nats a token] of the first and the last steps, and mean |trainer - sampler
    logprob| [nats] on a worked solution before and after it."""

    steps: int
    loss_first: float
    loss_last: float
    probe_before: float
    probe_after: float
    seconds: float

    def as_dict(self) -> dict:
        """JSON-able form."""
        return asdict(self)

    def __str__(self):
        return (
            f"{self.steps} steps in {self.seconds:.0f} s: loss {self.loss_first:.3f} -> {self.loss_last:.3f} nats a "
            f"token; trainer and sampler differ by {self.probe_after:.2g} nats (before: {self.probe_before:.2g})"
        )


def worked_examples(task: Task, tokenizer, max_length: int):
    """Rows `input_ids` and `labels` (-100 on the prompt) of worked solutions that fit; the end token is taught too.

    Raises:
        ArgumentError: the task has no worked solutions, or none that fits.
    """
    from datasets import Dataset

    if "solution" not in task.train.column_names:
        raise ArgumentError(
            f"{task.name} has no worked solutions to warm up with. Name their column (--solution COLUMN), or leave the "
            f"warm-up out."
        )
    rows = []
    for row in task.train:
        prompt = tokenizer(row["prompt"]).input_ids
        text = worked(task, row["prompt"], row["solution"], row["answer"])
        completion = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        if row["solution"] and len(prompt) + len(completion) <= max_length:
            rows.append({"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion})
    if not rows:
        raise ArgumentError(f"No worked solution of {task.name} fits into {max_length} tokens with its prompt.")
    return Dataset.from_list(rows)


def warm_up(
    model, tokenizer, task: Task, *, steps: int, learning_rate: float = 2e-4, batch: int = 16, seed: int = 0
) -> WarmUp:
    """Train the model's adapter on the task's worked solutions.

    Args:
        model: from `FastLanguageModel.get_peft_model`; its adapter is trained in place.
        task: with a column `solution`, and prompts (`kit.tasks.with_prompts`).
        steps, batch: of the optimizer, and sequences in each.

    Raises:
        kit.errors.ArgumentError: no worked solutions, or none that fits; no adapter.
        kit.probe.SyncError: trainer and sampler disagree afterwards by more than the dtype explains.
    """
    loaded = check_model(model)
    examples = worked_examples(task, tokenizer, loaded.max_seq_length)
    probe_ids = examples[0]["input_ids"][: loaded.max_seq_length - 1]
    loaded.sampler.drop_adapter()
    with model.disable_adapter():
        probe = SyncProbe(loaded.precision, disagreement(model, loaded.sampler, probe_ids, loaded.precision))
    print(f"Warm-up: {steps} steps on {len(examples)} worked solutions ...")
    started = time.perf_counter()
    losses = _train(model, tokenizer, loaded, examples, steps, learning_rate, batch, seed)
    loaded.sampler.load_adapter(model)
    after = probe.check(disagreement(model, loaded.sampler, probe_ids, loaded.precision), steps)
    few = max(1, min(5, len(losses) // 2))
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    return WarmUp(steps, first, last, probe.baseline, after, time.perf_counter() - started)


def _train(model, tokenizer, loaded: Loaded, examples, steps, learning_rate, batch, seed) -> list[float]:
    """The loss of each step."""
    trainer_class = _trainer_class()
    with tempfile.TemporaryDirectory(prefix="kit-warm-up-") as folder:
        trainer = trainer_class(
            model=model,
            args=_arguments(loaded, folder, steps, learning_rate, batch, seed),
            train_dataset=examples,
            processing_class=tokenizer,
        )
        attach_scaler(trainer.accelerator, loaded.precision)
        trainer.arithmetic = lambda: _arithmetic(model, loaded, trainer.accelerator.device.type)
        compute_backward_in(trainer.accelerator, trainer.arithmetic)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _arguments(loaded, folder, steps, learning_rate, batch, seed):
    """TRL's configuration; the dtype flags come from the contract, after its own checks (as in kit.preparation)."""
    import torch
    from trl import SFTConfig

    arguments = SFTConfig(
        output_dir=folder,
        max_steps=steps,
        learning_rate=learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=max(1, steps // 10),
        per_device_train_batch_size=batch,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},  # tokenized, labelled and short enough already
        gradient_checkpointing=loaded.gradient_checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        fp16=False,
        seed=seed,
    )
    arguments.bf16, arguments.fp16 = loaded.precision.name == "bfloat16", loaded.precision.name == "float16"
    arguments.mixed_precision = loaded.precision.mixed_precision
    return arguments


@contextlib.contextmanager
def _arithmetic(model, loaded, device_type):
    """How the loss is computed forward and backward, beside autocast: as in `kit.trainer`."""
    from peft.helpers import disable_input_dtype_casting

    with contextlib.ExitStack() as stack:
        stack.enter_context(float16_products(loaded.precision, device_type))
        if loaded.precision.autocast:
            stack.enter_context(disable_input_dtype_casting(model))
        yield


def _trainer_class():
    """TRL's SFTTrainer with the contract's arithmetic; a function, because importing TRL takes seconds."""
    from transformers import PrinterCallback, ProgressCallback
    from trl import SFTTrainer

    class WarmUpTrainer(SFTTrainer):
        arithmetic = staticmethod(contextlib.nullcontext)

        def __init__(self, **arguments):
            super().__init__(**arguments)
            for callback in (PrinterCallback, ProgressCallback):
                self.remove_callback(callback)

        def compute_loss(self, *args, **kwargs):
            with self.arithmetic():
                return super().compute_loss(*args, **kwargs)

        def log(self, logs, start_time=None):
            super().log(logs, start_time)
            step, total = self.state.global_step, self.state.max_steps
            if "loss" in logs and (step in (1, total) or step % max(1, total // 10) == 0):
                print(f"  step {step}/{total}: loss {logs['loss']:.3f} nats a token")

    return WarmUpTrainer
