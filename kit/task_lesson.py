"""What notebook 9 needs beside the kit's own parts: settings by model, an offline data set, and tables in words."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

from kit import arithmetic
from kit.evaluation import Evaluation
from kit.task_rewards import Rewards
from kit.training import TrainSettings


def math_settings(model: str, dtype: str, steps: int, task: str = "", folder: str | Path = "runs") -> TrainSettings:
    """Settings of a run on mathematics that suit the model.

    Args:
        task: as in `kit.tasks`; default: GSM8K, and sums from a file, which `sums_file` writes into `folder`, for the
            bundled model.
    """
    if model == "tiny":
        return TrainSettings(
            model=model, dtype=dtype, steps=steps, task=task or str(sums_file(Path(folder) / "sums.jsonl")),
            question="question", answer="answer", solution="solution", level="digits", rewards="answer,format=0.1",
            template="kit", warm_up=8, warm_up_learning_rate=2e-3, completions=64, group=8, held_out=64,
        )  # fmt: skip
    return TrainSettings(
        model=model, dtype=dtype, steps=steps, task=task or "gsm8k", rewards="answer=1,format=0.3,approximate=0.2",
        template="kit", warm_up=30, warm_up_learning_rate=2e-4, learning_rate=1e-5, rank=32, alpha=64, completions=64,
        group=8, micro_batch=8, problems=4000, held_out=200, max_prompt_length=320, max_completion_length=1024,
        stop="</answer>", save_steps=25,
    )  # fmt: skip


def sums_file(path: Path, size: int = 800, seed: int = 0) -> Path:
    """A data set as people have them, a JSONL file: columns `question`, `answer`, `solution` (the work) and `digits`.

    The sums are those that the bundled model was not pre-trained on.
    """
    rng, rows = random.Random(seed), []
    for row in arithmetic.make_dataset("rl", size, seed):
        a, b = map(int, row["prompt"].removeprefix("Q: ").partition("=")[0].split("+"))
        text = arithmetic.completion_text(arithmetic.Problem(a, b), rng, arithmetic.CAREFUL)
        work = text.removeprefix("<think>").partition("</think>")[0]
        rows.append({"question": f"{a}+{b}=?", "answer": str(a + b), "solution": work, "digits": row["digits"]})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reward_table(rewards: Rewards, prompt: str, completions: Mapping[str, str], answer: str) -> str:
    """What each reward gives to completions of one prompt, a line each, with the weighted sum.

    Args:
        completions: what it is, in words -> the text.
        answer: the reference.
    """
    texts = list(completions.values())
    given = {"prompts": [prompt] * len(texts), "completions": texts, "answer": [answer] * len(texts),
             "completion_ids": [list(text) for text in texts]}  # fmt: skip
    columns = [function(**given) for function in rewards.functions]
    names = [function.__name__ for function in rewards.functions]
    width = max(map(len, completions))
    lines = [" " * width + "".join(f"{name:>20}" for name in names) + f"{'sum':>8}"]
    for index, what in enumerate(completions):
        values = [column[index] for column in columns]
        total = sum(weight * (value or 0.0) for weight, value in zip(rewards.weights, values, strict=True))
        words = "".join(f"{'none' if value is None else format(value, '.2f'):>20}" for value in values)
        lines.append(f"{what:{width}}{words}{total:>8.2f}")
    return "\n".join(lines)


def evaluation_table(evaluations: Mapping[str, Evaluation]) -> str:
    """Evaluations side by side: pass@k, majority, truncated, and pass@1 by difficulty; a column each."""
    found = list(evaluations.values())
    rows = [("pass@1", [f"{one.pass_at_1:.3f} ± {one.standard_error:.3f}" for one in found])]
    rows += [(f"pass@{k}", [f"{one.pass_at[k]:.3f}" for one in found]) for k in found[0].pass_at if k > 1]
    if found[0].majority is not None:
        rows.append(("majority", [f"{one.majority:.3f}" for one in found]))
    rows.append(("cut off", [f"{one.truncated:.1%}" for one in found]))
    for level, (_, count) in found[0].by_level.items():
        rows.append((f"level {level} ({count})", [f"{one.by_level[level][0]:.3f}" for one in found]))
    width = max(len(name) for name, _ in rows) + 2
    head = " " * width + "".join(f"{name:>18}" for name in evaluations)
    return "\n".join([head, *(f"{name:{width}}" + "".join(f"{v:>18}" for v in values) for name, values in rows)])
