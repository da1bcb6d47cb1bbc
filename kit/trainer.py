"""GRPO on TRL, sampled by the kit's sampler, measured at every step.

Scope: a small subclass. TRL does the algorithm (advantages, losses, corrections); this class hands it the sampler
through the public hook `rollout_func`, keeps the dtype contract, proves each sync, and writes the record.
On-policy, the mismatch comes from the loss's own forward pass: no extra pass is made for it.
"""

import contextlib
import copy
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from peft.helpers import disable_input_dtype_casting
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from kit import checkpoints, provenance
from kit.completions import CompletionRows
from kit.config import GRPOConfig
from kit.cpu_half import float16_products
from kit.live import LiveView
from kit.loading import Loaded
from kit.meter import StepMeter
from kit.precision import check_arguments
from kit.preparation import adapt_arguments, check_dataset, check_model, compute_backward_in
from kit.probe import SyncProbe, disagreement
from kit.process_memory import peak_memory_gib
from kit.records import Run, RunWriter
from kit.rewards import ACCURACY_REWARDS, checked_reward
from kit.rollout import request_seed, rollout_output, sampling_settings
from kit.scaling import attach_scaler, first_nonfinite_activation, first_nonfinite_gradient
from kit.shortage import explained

__all__ = ["GRPOConfig", "GRPOTrainer"]

PROBE_TOKENS = 48


class GRPOTrainer(trl.GRPOTrainer):
    """`trl.GRPOTrainer` under the contract of the model it is given.

    Args:
        model: from `FastLanguageModel.get_peft_model`.
        reward_funcs: one or more functions in TRL's signature; each result is checked.
        args: `kit.GRPOConfig` (or TRL's); `args.output_dir` is the run's folder.
        train_dataset: with a column `prompt`; other columns reach the reward functions.
        processing_class: the tokenizer.
        on_record: called with each step's record; None shows a live view (in a terminal: a line a step).
        run_info: further entries for run.json.
        run_control: object whose `check()` returns "run" or "stop", asked after each step (`kit.widgets.RunControl`).
        callbacks, optimizers: as in TRL.

    Raises:
        kit.precision.PrecisionError: arguments that contradict the contract.
        kit.errors.ArgumentError: no adapter, an empty dataset or one without `prompt`, prompts that do not fit.
    """

    def __init__(
        self,
        model,
        reward_funcs,
        args=None,
        train_dataset=None,
        processing_class=None,
        *,
        on_record=None,
        run_info: dict | None = None,
        run_control=None,
        callbacks=None,
        optimizers=(None, None),
    ):
        self.loaded: Loaded = check_model(model)
        args = copy.copy(args) if args is not None else GRPOConfig()
        check_arguments(self.loaded.precision, args)
        check_dataset(train_dataset, processing_class, args, self.loaded)
        self.run_dir = Path(args.output_dir)
        own = args if isinstance(args, GRPOConfig) else GRPOConfig()
        self._kl_share, self._merged = own.kl_share, own.sync == "merged"
        correction = args.use_vllm and args.vllm_importance_sampling_correction
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        super().__init__(
            model=model,
            reward_funcs=[
                checked_reward(f) if callable(f) and not isinstance(f, torch.nn.Module) else f for f in functions
            ],
            args=adapt_arguments(args, self.loaded),
            train_dataset=train_dataset,
            processing_class=processing_class,
            callbacks=[*(callbacks or []), _EachStep(self)],
            optimizers=optimizers,
            rollout_func=_sample,
        )
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        attach_scaler(self.accelerator, self.loaded.precision)
        compute_backward_in(self.accelerator, self._arithmetic)
        if correction:  # TRL's own correction code, fed by this sampler; costs TRL's extra forward pass
            self.use_vllm, self._last_loaded_step = True, -1
            self.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        self.sampler = self.loaded.sampler
        self.settings = sampling_settings(args)
        if self.settings.bias():
            print(f"Note: {self.settings.bias()}")
        self.run_info, self.run_control = run_info or {}, run_control
        self._listeners = _listeners(on_record)
        self._writer: RunWriter | None = None
        self._meter = StepMeter()
        self._synced_step: int | None = None
        self._probe: SyncProbe | None = None
        self._probe_ids: list[int] | None = None
        self._loss_logprobs = None
        self._sampled_ids: list[list[int]] = []
        self._rows = CompletionRows(processing_class)

    # ---- the run ----

    def train(self, resume_from_checkpoint: "bool | str | None" = None, **kwargs):
        """Train and record. Resume with True (the last whole checkpoint) or a checkpoint's folder; after the last step
        that loads the adapter and returns None.

        An interrupt saves the adapter, closes the sampler and is raised again; any other error saves the adapter. The
        record keeps every finished step either way.

        Raises:
            kit.records.RunExists: the folder holds a run already, and this is no resume.
            kit.probe.SyncError, kit.rewards.RewardError, kit.shortage.OutOfMemory: see there.
        """
        from kit.audit import audit

        checkpoint = checkpoints.find(self.run_dir, resume_from_checkpoint)
        if checkpoint:
            self._writer = RunWriter.resume(self.run_dir, checkpoints.step_of(checkpoint))
        else:
            self._writer = RunWriter.create(self.run_dir, self._info())
        with self._shown(self._writer), self._writer as writer:
            try:
                audit(self)
                if checkpoint and checkpoints.step_of(checkpoint) >= self.args.max_steps > 0:
                    self._load_from_checkpoint(checkpoint)  # transformers 5.17 would train a step too many
                    writer.update(status="finished")
                    return None
                result = super().train(resume_from_checkpoint=checkpoint, **kwargs)
                writer.update(status="finished" if self.state.global_step >= self.state.max_steps else "stopped")
                return result
            except KeyboardInterrupt:
                self.sampler.close()
                raise
            except torch.OutOfMemoryError as error:
                raise explained(error, self) from error
            finally:
                checkpoints.save_adapter_in_the_end(self.model, writer.adapter_dir)

    @contextlib.contextmanager
    def _shown(self, writer):
        """Live views among the listeners get the run's beginning, its earlier steps if it is resumed, and its end."""
        views = [listener for listener in self._listeners if isinstance(listener, LiveView)]
        for view in views:
            view.begin(writer.info, total=self.args.max_steps)
            view.records.extend(Run.load(writer.path).records)
        try:
            yield
        finally:
            for view in views:
                view.close(status=writer.info["status"])

    def _info(self) -> dict:
        return {
            "model": Path(self.loaded.path).name,
            "precision": self.loaded.precision.describe(),
            "settings": provenance.training_settings(self.args, self.model.peft_config["default"]),
            "seed": self.args.seed,
            "steps": self.args.max_steps,
            "sampler": {"name": self.sampler.name, "version": self.sampler.version},
            "sampling_bias": self.settings.bias(),
            "weights": self.loaded.shared_weights,
            "versions": provenance.versions(),
            "hardware": provenance.machine(),
        } | self.run_info

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        checkpoints.mark_complete(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")

    # ---- sampling ----

    def _sync(self):
        """Load the trainer's adapter into the sampler, once per optimizer step, and prove that it arrived."""
        if self._synced_step == self.state.global_step:
            return
        if self._probe is None:
            self._measure_baseline()
        load = self.sampler.load_merged if self._merged else self.sampler.load_adapter
        self._meter.values["sync/seconds"] = load(self.accelerator.unwrap_model(self.model))
        self._meter.values["sync/probe_abs"] = self._probe.check(self._disagreement(), self.state.global_step)
        self._synced_step = self.state.global_step

    def _measure_baseline(self):
        """How far apart the two sides are on the base model: what the dtype explains."""
        self.sampler.drop_adapter()  # it may hold one, of an evaluation or of an earlier run
        prompt = self._tokenize_prompts([self.train_dataset[0]["prompt"]])[0][0]
        settings = replace(self.settings, max_tokens=min(PROBE_TOKENS, self.settings.max_tokens))
        completion = self.sampler.generate([prompt], settings, [request_seed(self.args.seed, -1, 0)])[0]
        self._probe_ids = self._cut_to_score(prompt + completion.token_ids)
        with self.model.disable_adapter():
            self._probe = SyncProbe(self.loaded.precision, self._disagreement())

    def _cut_to_score(self, token_ids):
        """vLLM scores a text by sampling one more token, for which the context must have room."""
        return token_ids[: self.loaded.max_seq_length - 1]

    # ---- arithmetic ----

    @contextlib.contextmanager
    def _arithmetic(self):
        """How the loss is computed forward and backward, beside autocast."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(float16_products(self.loaded.precision, self.accelerator.device.type))
            if self.loaded.precision.autocast:
                # PEFT casts an adapter's input to float32 and autocast casts it back: same numbers, two more kernels
                stack.enter_context(disable_input_dtype_casting(self.model))
            yield

    def _disagreement(self):
        return disagreement(self.model, self.sampler, self._probe_ids, self.loaded.precision)

    # ---- measuring ----

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            # the batch is shuffled and split after this; the row number finds a completion again
            output["row"] = torch.arange(len(output["completion_ids"]), device=output["completion_ids"].device)
        return output

    def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
        with self._arithmetic():
            result = super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)
        if torch.is_grad_enabled():
            self._loss_logprobs = result[0].detach()
        return result

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.model.training:
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            # after an update within the batch the loss's forward is a newer policy; TRL then kept the old logprobs
            trainer = inputs.get("old_per_token_logps", self._loss_logprobs)
            self._meter.add_batch(trainer, inputs["sampling_per_token_logps"], mask, inputs["row"])
            self._measure_kl(model, inputs, mask)
            if not torch.isfinite(loss):
                self._name_bad_activation(model, inputs)
        return loss

    def _measure_kl(self, model, inputs, mask):
        """KL to the base: from TRL's reference with beta, else from some completions of the first micro-batch."""
        if "ref_per_token_logps" in inputs:
            self._meter.add_kl(self._loss_logprobs, inputs["ref_per_token_logps"], mask)
        elif not self._meter.has_kl:
            completions = len(mask) * self.current_gradient_accumulation_steps
            rows = min(len(mask), math.ceil(completions * self._kl_share))
            with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
                self._meter.add_kl(self._loss_logprobs, self._forward_logprobs(model, inputs, rows), mask)

    def _forward_logprobs(self, model, inputs, rows):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)[:rows]
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)[:rows]
        return self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))[0]

    def _name_bad_activation(self, model, inputs):
        forward = lambda: self._forward_logprobs(model, inputs, len(inputs["completion_ids"]))  # noqa: E731
        name = first_nonfinite_activation(self.accelerator.unwrap_model(model), forward)
        self._meter.values.setdefault("scaler/first_nonfinite", f"activation of {name}" if name else "the loss itself")

    def training_step(self, model, inputs, num_items_in_batch=None):
        self._meter.start()
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._name_bad_gradient(model)
            self._scale_before_update = self._scale()
        return loss

    def _scale(self):
        return self.accelerator.scaler.get_scale() if self.accelerator.scaler else None

    def _name_bad_gradient(self, model):
        """Before gradients are clipped: clipping by a norm that is NaN makes all of them NaN."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if gradients and not torch.isfinite(torch.nn.utils.get_total_norm(gradients)):
            name = first_nonfinite_gradient(self.accelerator.unwrap_model(model))
            if name:
                self._meter.values.setdefault("scaler/first_nonfinite", f"gradient of {name}")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Complete TRL's metrics with the record's, pass them to the trackers, and write the record."""
        is_step = "grad_norm" in logs and self._writer is not None
        if is_step:
            logs.update(self._measured())
        super().log(logs, start_time)
        if is_step:
            self._record(logs)

    def _measured(self):
        scale, metrics = self._scale(), self._metrics["train"]
        lengths = metrics.get("completions/mean_length")  # none in a step that uses earlier completions again
        accuracy = next(
            (f"rewards/{name}/mean" for name in ACCURACY_REWARDS if f"rewards/{name}/mean" in metrics), None
        )
        return self._meter.finish() | {
            "accuracy": metrics[accuracy][-1] if accuracy else None,
            "completion_length": lengths[-1] if lengths else None,
            "scaler/scale": scale,
            # a fused optimizer is called and skips by itself, which accelerate 1.15 takes for a step
            "scaler/skipped": int(scale < self._scale_before_update) if scale else None,
            "memory/peak_gib": peak_memory_gib(),
        }

    def _record(self, logs):
        record = {"step": self.state.global_step} | {k: v for k, v in logs.items() if k != "total_flos"}
        self._writer.write(record)
        if self._meter.sampled_tokens:
            rows = self._rows.build(self._logs, self._sampled_ids, self._meter.token_mismatch)
            self._writer.write_completions(self.state.global_step, rows)
        self._meter = StepMeter()
        for listener in self._listeners:
            listener(record)


class _EachStep(TrainerCallback):
    """Asks the run control whether to go on."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.run_control is not None and self.trainer.run_control.check() == "stop":
            control.should_training_stop = control.should_save = True
        return control


def _sample(prompts, trainer):
    """TRL's `rollout_func`: sync if the weights are new, then one completion for each prompt (groups are repeated)."""
    started = time.perf_counter()
    trainer._sync()
    prompt_ids = trainer._tokenize_prompts(prompts)[0]
    step, seed = trainer.state.global_step, trainer.args.seed
    seeds = [request_seed(seed, step, index) for index in range(len(prompt_ids))]
    sampling = time.perf_counter()
    completions = trainer.sampler.generate(prompt_ids, trainer.settings, seeds)
    output = rollout_output(prompt_ids, completions, trainer.processing_class.eos_token_id)
    trainer._sampled_ids = output["completion_ids"]
    trainer._probe_ids = trainer._cut_to_score(prompt_ids[0] + output["completion_ids"][0][:PROBE_TOKENS])
    now = time.perf_counter()
    trainer._meter.add_rollout(sum(map(len, trainer._sampled_ids)), now - sampling, now - started)
    return output


def _listeners(on_record):
    if on_record is None:
        return [LiveView()]
    return list(on_record) if isinstance(on_record, (list, tuple)) else [on_record]
