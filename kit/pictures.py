"""The pictures of the README, made again from two runs: `python -m kit pictures` (`make pictures`).

Two arms of notebook 03 on the bundled model. Runs that are given are drawn; otherwise the arms are run first.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from kit.comparison import comparison_table, save_comparison
from kit.records import Run, free_path

TARGET = Path(__file__).parents[1] / "notebooks" / "images" / "training.png"


def make_arms(steps: int, root: str | Path = "runs/pictures") -> list[Run]:
    """Train the bundled model in float16, then in bfloat16, with nothing else different."""
    from kit.live import LiveView
    from kit.training import TrainSettings, train

    arm = TrainSettings(steps=steps, held_out=256)
    runs = []
    for dtype in ("float16", "bfloat16"):
        out = free_path(Path(root) / dtype)
        runs.append(train(replace(arm, dtype=dtype), out, on_record=LiveView()))
    return runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit pictures`."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="runs to draw; none: the two arms are run now")
    parser.add_argument("--steps", type=int, default=40, help="GRPO steps an arm (default 40)")
    parser.add_argument("--json", action="store_true", help="print runs and files as JSON")


def run(args: argparse.Namespace) -> int:
    """`python -m kit pictures`: draw, and print the table that goes with it."""
    runs = [Run.load(path) for path in args.runs] or make_arms(args.steps)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    save_comparison(runs, TARGET)
    if args.json:
        print(json.dumps({"runs": [str(run.path) for run in runs], "files": [str(TARGET)]}, indent=2))
    else:
        print(comparison_table(runs))
        print(f"Figure: {TARGET}")
    return 0
