"""What the metrics cost: one run whose steps are measured and bare in turn, so that both see the same machine.

Bare steps leave out the probe, the mismatch, the KL to the base model and the look for bad gradients; sampling, loss,
update and record are the same, and every completion has the full length. Prints a table to standard error and JSON to
standard output. Nothing is asserted; the aim is at most 2 %, and 5 % for float16 on the bundled model.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time

import trl
from transformers import TrainerCallback

from kit import FastLanguageModel, GRPOConfig, GRPOTrainer, arithmetic
from kit.provenance import machine, versions

WARM_UP = 4  # steps


class AlternatingTrainer(GRPOTrainer):
    """Measures in odd steps only."""

    @property
    def bare(self) -> bool:
        """True in steps without metrics (and not in the log after them: the step is counted before it)."""
        return self.state.global_step % 2 == 1

    def _sync(self):
        if self.bare:
            self.sampler.load_adapter(self.model)
            self._synced_step = self.state.global_step
        else:
            super()._sync()

    def _compute_loss(self, model, inputs):
        return trl.GRPOTrainer._compute_loss(self, model, inputs) if self.bare else super()._compute_loss(model, inputs)

    def _name_bad_gradient(self, model):
        if not self.bare:
            super()._name_bad_gradient(model)

    def _measured(self):
        was_bare = not self.bare
        return {} if was_bare else super()._measured()


class Clock(TrainerCallback):
    """The time at which each step begins."""

    def __init__(self):
        self.begins = []

    def on_step_begin(self, *args, **kwargs):
        self.begins.append(time.perf_counter())


def step_seconds(dtype: str, steps: int, completions: int, tokens: int) -> tuple[list[float], list[float]]:
    """(seconds of the measured steps, of the bare ones), in pairs of neighbours."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        "tiny", max_seq_length=tokens + 32, dtype=dtype, max_lora_rank=16, max_num_seqs=completions
    )
    model = FastLanguageModel.get_peft_model(model)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=f"{folder}/run", max_steps=WARM_UP + 2 * steps + 1, learning_rate=1e-6, save_strategy="no",
            per_device_train_batch_size=completions, num_generations=8, max_completion_length=tokens,
            generation_kwargs={"ignore_eos": True},
        )  # fmt: skip
        trainer = AlternatingTrainer(
            model, arithmetic.correct_answer, arguments, arithmetic.make_dataset("rl", 256, 0), tokenizer,
            on_record=[], callbacks=[clock],
        )  # fmt: skip
        trainer.train()
    trainer.sampler.close()
    seconds = [after - before for before, after in zip(clock.begins, clock.begins[1:], strict=False)][WARM_UP:]
    return seconds[::2], seconds[1::2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps")
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    measured, bare = step_seconds(args.dtype, args.steps, args.completions, args.tokens)
    costs = [with_metrics / without - 1 for with_metrics, without in zip(measured, bare, strict=True)]
    quartiles = statistics.quantiles(costs, n=4)
    result = {
        "measured_s": statistics.median(measured),
        "bare_s": statistics.median(bare),
        "cost": statistics.median(costs),
        "cost_quartiles": [quartiles[0], quartiles[2]],
    }
    print(
        f"{args.dtype}: {result['measured_s']:.3f} s a step with metrics, {result['bare_s']:.3f} s without; the "
        f"median pair differs by {result['cost']:.1%} (quartiles {quartiles[0]:.1%} and {quartiles[2]:.1%}).",
        file=sys.stderr,
    )
    print(json.dumps(vars(args) | result | {"versions": versions(), "hardware": machine()}, indent=1))


if __name__ == "__main__":
    main()
