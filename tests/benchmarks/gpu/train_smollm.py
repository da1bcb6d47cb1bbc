"""GRPO on real weights and a procedural task, in each dtype from the same seed, one process each; JSON and a figure.

    python tests/benchmarks/gpu/train_smollm.py --model PATH --out RESULT.json

PATH holds SmolLM2-135M-Instruct (or the base model, or `tiny` for a dry run). Nothing is downloaded. The result has
hardware, versions and settings, and for each dtype: accuracy on held-out problems before and after with the paired
difference, and every step's reward, gradient norm, loss scale and mismatch. The figure is beside it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
KEYS = (
    "reward", "accuracy", "reward_std", "grad_norm", "kl", "entropy", "completion_length", "mismatch/abs_mean",
    "mismatch/k3", "mismatch/seq_abs", "mismatch/ess", "scaler/scale", "scaler/skipped", "time/step",
    "speed/tokens_per_s", "memory/peak_gib",
)  # fmt: skip


def prepared(args, tokenizer):
    """The task with its prompts: plain answers, without tags, after a few answered questions as examples.

    A model of this size does not follow instructions; shown examples, it is right on part of the problems from the
    first step. The examples are training problems, and not trained on.
    """
    from kit.tasks import load_task, with_prompts
    from kit.templates import PLAIN, set_template

    set_template(tokenizer, PLAIN, "kit")
    count = 0 if args.model == "tiny" else args.shots  # a token a character: examples would not fit
    task = load_task(args.task, size=args.problems + count, held_out=args.held_out, seed=args.seed, tags=PLAIN)
    shots, rest = (task.train.select(rows) for rows in (range(count), range(count, len(task.train))))
    examples = "\n\n".join(f"Q: {row['question']}\nA: {row['answer']}" for row in shots)
    task = replace(task, train=rest)
    return with_prompts(task, tokenizer, instructions=examples, max_prompt_length=args.prompt_length)


def train(args) -> None:
    """One dtype: evaluate, train, evaluate; the result goes to `args.out`."""
    import kit
    from kit.evaluation import evaluate, paired_difference
    from kit.sampler import SamplingSettings
    from kit.task_rewards import parse

    model, tokenizer = kit.FastLanguageModel.from_pretrained(
        args.model, max_seq_length=args.prompt_length + args.length, dtype=args.dtype, max_lora_rank=args.rank,
        max_num_seqs=args.completions, gpu_memory_utilization=args.utilization,
    )  # fmt: skip
    task = prepared(args, tokenizer)
    policy = kit.FastLanguageModel.get_peft_model(model, r=args.rank, lora_alpha=2 * args.rank, random_state=args.seed)
    sampling = SamplingSettings(args.length, stop=("\n",))

    def measured():
        return evaluate(policy, tokenizer, task.held_out, task.correct_answer, samples=args.samples, settings=sampling,
                        seed=args.seed, answer_of=task.tags.answer_of, level="level")  # fmt: skip

    before = measured()
    print(f"{args.dtype}, before: {before}", flush=True)
    rewards = parse("answer=1,exact=0", task, args.length)
    trainer = kit.GRPOTrainer(
        model=policy, processing_class=tokenizer, reward_funcs=list(rewards.functions), train_dataset=task.train,
        args=kit.GRPOConfig(
            output_dir=args.run_dir, max_steps=args.steps, learning_rate=args.learning_rate,
            lr_scheduler_type="linear", per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=args.completions // args.micro_batch, num_generations=args.group,
            max_completion_length=args.length, reward_weights=list(rewards.weights), save_strategy="no", seed=args.seed,
            generation_kwargs={"stop": ["\n"]},
        ),
        run_info={"task": args.task},
    )  # fmt: skip
    trainer.train()
    after = measured()
    print(f"{args.dtype}, after:  {after}", flush=True)
    records = kit.Run.load(args.run_dir).records
    result = {
        "held_out_before": before.as_dict(), "held_out_after": after.as_dict(),
        "held_out_difference": paired_difference(before, after).as_dict(),
        "records": {key: [record.get(key) for record in records] for key in KEYS},
        "weights": policy.kit.shared_weights,
    }  # fmt: skip
    Path(args.out).write_text(json.dumps(result))
    trainer.sampler.close()


def summary(one: dict) -> dict:
    """The figures to quote of one dtype."""
    records = one["records"]
    few = max(1, len(records["reward"]) // 10)
    known = {key: [value for value in records[key] if value is not None] for key in records}

    def median(key):
        return statistics.median(known[key]) if known[key] else None

    return {
        "reward_first": statistics.fmean(known["reward"][:few]),
        "reward_last": statistics.fmean(known["reward"][-few:]),
        "held_out_before": one["held_out_before"]["pass_at_1"], "held_out_after": one["held_out_after"]["pass_at_1"],
        "held_out_difference": one["held_out_difference"]["mean"],
        "held_out_interval": one["held_out_difference"]["interval"],
        "grad_norm_median": median("grad_norm"), "mismatch_abs_mean_median": median("mismatch/abs_mean"),
        "mismatch_k3_median": median("mismatch/k3"), "mismatch_seq_abs_median": median("mismatch/seq_abs"),
        "skipped_updates": sum(known["scaler/skipped"]), "seconds_median": median("time/step"),
    }  # fmt: skip


def figure(runs: list[Path], target: Path) -> None:
    """The arms over each other."""
    from kit import Run, training_figure

    training_figure([Run.load(run) for run in runs], dpi=150).savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the weights, or tiny")
    parser.add_argument("--out", required=True, help="the JSON file; the figure gets the same name")
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--task", default="reasoning-gym:chain_sum:min_terms=2,max_terms=3,min_digits=1,max_digits=1")
    parser.add_argument("--shots", type=int, default=4, help="answered questions before each prompt")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt-length", type=int, default=300)
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--utilization", type=float, default=0.25)
    parser.add_argument("--run-dir", help="folder for the runs; default: one that is thrown away")
    parser.add_argument(
        "--together", action="store_true", help="the arms at the same time: step times mean nothing then"
    )
    parser.add_argument("--dtype", help=argparse.SUPPRESS)  # set in the process of one arm
    args = parser.parse_args()
    if args.dtype:
        return train(args)
    from kit import provenance

    with tempfile.TemporaryDirectory() as folder:
        root, found = Path(args.run_dir or folder), {}
        arms = []
        for dtype in args.dtypes.split(","):
            options = ["--dtype", dtype, "--out", f"{folder}/{dtype}.json", "--run-dir", str(root / f"smollm-{dtype}")]
            arms.append((dtype, subprocess.Popen([sys.executable, __file__, *sys.argv[1:], *options])))
            if not args.together:
                arms[-1][1].wait()
        for dtype, process in arms:
            if process.wait():
                sys.exit(f"The arm in {dtype} ended with status {process.returncode}.")
            found[dtype] = json.loads(Path(folder, f"{dtype}.json").read_text())
        target = Path(args.out)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure([root / f"smollm-{dtype}" for dtype in found], target.with_suffix(".png"))
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "model", "run_dir", "dtype")}
    settings["model"] = Path(args.model).name
    origin = {"settings": settings, "hardware": provenance.machine(), "versions": provenance.versions()}
    summaries = {dtype: summary(one) for dtype, one in found.items()}
    target.write_text(json.dumps({**origin, "summary": summaries, "dtypes": found}, indent=1, default=str))
    print(json.dumps(summaries, indent=1))


if __name__ == "__main__":
    main()
