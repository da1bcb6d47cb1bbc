"""The pictures of the README, made again: `python -m kit pictures` (`make pictures`).

Notebook 03 is run in JupyterLab in a browser, the bundled model in float16 and in bfloat16. Its window is photographed
in a light and in a dark theme, and the two runs that it made are drawn. Without a browser, or with runs that are given,
only the figure is made.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from kit.comparison import comparison_table, save_comparison
from kit.records import Run, free_path

IMAGES = Path(__file__).parents[1] / "notebooks" / "images"
TARGET = IMAGES / "training.png"
NOTEBOOK, SHOWN = "03_fp16_vs_bf16.ipynb", "## 9. Any runs"
WINDOW = (1180, 1085)  # pixels: that section as far as the chart


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


def photograph(steps: int, folder: Path) -> tuple[list[Run], list[Path]]:
    """Run the notebook in a browser, in `folder`: the runs that it made, and its pictures.

    Raises:
        kit.browser.BrowserMissing, kit.browser.CellFailed: no Chromium; a cell ended in an error.
    """
    from kit.browser import THEMES, Lab, NotebookPage, chromium

    pictures = [IMAGES / f"notebook-{theme}.png" for theme in THEMES]
    out = folder.absolute() / "arm"
    with chromium() as browser, Lab(folder, {"KIT_STEPS": str(steps), "KIT_OUT": str(out)}) as lab:
        notebook = NotebookPage(browser, lab, NOTEBOOK, size=WINDOW, scale=1.5)
        notebook.run_all()
        _report(notebook)
        notebook.finished()
        for theme, picture in zip(THEMES, pictures, strict=True):
            notebook.show(theme)
            notebook.window(picture, notebook.index_of(SHOWN, "markdown"), WINDOW[1])
    return [Run.load(f"{out}-{dtype}") for dtype in ("float16", "bfloat16")], pictures


def _report(notebook):
    """A line a step on stderr while the notebook runs."""
    cells, told = [notebook.index_of(f"train_arm(arm_{number}") for number in (1, 2)], ""
    while not notebook.has_ended():
        lines = [line for cell in cells for line in notebook.outputs(cell).splitlines() if line.startswith("step ")]
        if lines and lines[-1] != told:
            told = lines[-1]
            print(told, file=sys.stderr, flush=True)
        notebook.page.wait_for_timeout(1000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit pictures`."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="runs to draw; none: the two arms are run now")
    parser.add_argument("--steps", type=int, default=40, help="GRPO steps an arm (default 40)")
    parser.add_argument("--json", action="store_true", help="print runs and files as JSON")


def run(args: argparse.Namespace) -> int:
    """`python -m kit pictures`: photograph, draw, and print the table that goes with it."""
    from kit.browser import chromium_path

    files: list[Path] = []
    if args.runs:
        runs = [Run.load(path) for path in args.runs]
    elif chromium_path():
        runs, files = photograph(args.steps, _free_folder(Path("runs/pictures")))
    else:
        print("No Chromium is installed: the figure alone is made (apt-get install chromium).", file=sys.stderr)
        runs = make_arms(args.steps)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    files.append(save_comparison(runs, TARGET))
    if args.json:
        print(json.dumps({"runs": [str(run.path) for run in runs], "files": [str(path) for path in files]}, indent=2))
    else:
        print(comparison_table(runs))
        print(*(f"Picture: {path}" for path in files), sep="\n")
    return 0


def _free_folder(root):
    return next(path for number in range(1, 10_000) if not (path := root / f"lab-{number}").exists())
