"""One run as a few final figures, in words, and as pictures: `python -m kit report runs/NAME`.

`python -m kit report --out card.json` is about the machine instead: a report card (`kit.report_cards`), and a folder of
GPU measurements gives the README's tables (`kit.benchmark_tables`).

`final_figures` is what `kit.comparison` and `kit.demo` print too, so that a number means the same everywhere.
"""

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path

from kit.benchmark_tables import has_results, tables
from kit.errors import ArgumentError
from kit.records import Run
from kit.summary import dtype_of, finite, skipped_steps, summary_text

LAST = 5  # steps in "last": one step of 64 completions is too noisy to be quoted alone


def final_figures(run: Run) -> dict[str, float | int | str | None]:
    """The figures to quote of a run; None where nothing was recorded.

    `_first` is the first step's value, `_last` the mean of the last five; `_median` is over all steps. Accuracies are
    shares of completions, `kl` and `mismatch` nats a token, `seconds` those of a step, held-out figures from run.json.
    """
    held_out = run.info.get("summary", {})
    return {
        "dtype": dtype_of(run),
        "steps": len(run.records),
        "accuracy_first": _first(run, "accuracy"),
        "accuracy_last": _last(run, "accuracy"),
        "held_out_before": held_out.get("held_out_before"),
        "held_out_after": held_out.get("held_out_after"),
        "mismatch_abs_mean_median": _median(run, "mismatch/abs_mean"),
        "mismatch_k3_median": _median(run, "mismatch/k3"),
        "mismatch_seq_abs_median": _median(run, "mismatch/seq_abs"),
        "grad_norm_median": _median(run, "grad_norm"),
        "kl_last": _last(run, "kl"),
        "skipped_updates": len(skipped_steps(run)),
        "loss_scale_last": next((value for value in reversed(finite(run, "scaler/scale")) if value is not None), None),
        "seconds_median": _median(run, "time/step"),
        "tokens_per_s_median": _median(run, "speed/tokens_per_s"),
        "memory_peak_gib": max(_values(run, "memory/peak_gib"), default=None),
    }


def held_out_summary(before, after) -> dict[str, float | int]:
    """Two `kit.evaluation.Evaluation`s as the entry `summary` of run.json, from where figures and tables take them."""
    return {
        "held_out_problems": after.problems,
        "held_out_before": before.pass_at_1,
        "held_out_before_standard_error": before.standard_error,
        "held_out_after": after.pass_at_1,
        "held_out_after_standard_error": after.standard_error,
    }


def _values(run, key):
    return [value for value in finite(run, key) if value is not None]


def _first(run, key):
    return next(iter(_values(run, key)), None)


def _last(run, key):
    values = _values(run, key)[-LAST:]
    return statistics.fmean(values) if values else None


def _median(run, key):
    values = _values(run, key)
    return statistics.median(values) if values else None


def save_figures(run: Run) -> list[Path]:
    """Draw the run into its `figures` folder; returns the files. A figure that is there is replaced."""
    from kit.plots import training_figure

    run.figures_dir.mkdir(exist_ok=True)
    target = run.figures_dir / "training.png"
    training_figure(run, dpi=150).savefig(target)
    return [target]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit report`."""
    parser.add_argument(
        "run", nargs="?", help="a run's folder (runs/NAME), a report card, or a folder of GPU measurements"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the final figures and the files, or the card, as JSON"
    )
    card = parser.add_argument_group("a report card of this machine: the mismatch by dtype and by length")
    card.add_argument("--out", metavar="CARD.json", help="measure, and write the card there")
    card.add_argument("--model", default="tiny", help="tiny, a folder, or a name on the hub")
    card.add_argument("--dtypes", help="comma-separated; default: all that this device has")
    card.add_argument("--sequences", type=int, help="completions in each dtype; default 64")
    card.add_argument("--tokens", type=int, help="length of each; default 1024 on a CPU, 2048 on a GPU")
    card.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """`python -m kit report`: a run in words and figures, or a report card."""
    if bool(args.run) == bool(args.out):
        raise ArgumentError("Give either a run's folder (runs/NAME), or --out card.json for a report card.")
    if args.out or args.run.endswith(".json"):
        return _card(args)
    if has_results(Path(args.run)):
        print(tables(args.run))
        return 0
    loaded = Run.load(args.run)
    files = save_figures(loaded)
    if args.json:
        out = {"run": str(loaded.path), "status": loaded.status, "warnings": loaded.warnings}
        print(json.dumps(out | {"figures": final_figures(loaded), "files": [str(path) for path in files]}, indent=2))
    else:
        print(summary_text(loaded))
        print(*(f"Figure: {path}" for path in files), sep="\n")
    return 0


def _card(args):
    """Measure a card and write it, or read one; print it."""
    from kit.report_cards import card_text, make_card, read_card, write_card

    if args.out:
        dtypes = [name.strip() for name in (args.dtypes or "").split(",") if name.strip()]
        with contextlib.redirect_stdout(sys.stderr):  # notes on the way; standard output has the result alone
            card = make_card(args.model, dtypes, args.sequences, args.tokens, args.seed)
            print(f"Card: {write_card(card, args.out)}")
    else:
        card = read_card(args.run)
    print(json.dumps(card, indent=2) if args.json else card_text(card))
    return 0
