"""Runs side by side: final figures, what their settings differ in, one picture. `python -m kit compare RUN RUN ...`.

Scope: a table over `kit.report.final_figures`; how arms are checked is in `kit.summary`, how they look in `kit.plots`.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from kit.errors import ArgumentError
from kit.records import Run
from kit.report import LAST, final_figures
from kit.summary import differing, dtype_of, fairness_text, finite, labels, number, provenance, skipped_steps

# figure -> (its row in the table, whether a ratio of two runs says something)
ROWS = {
    "dtype": ("dtype", False),
    "steps": ("steps", False),
    "accuracy_first": ("accuracy, first step", False),
    "accuracy_last": ("accuracy, last 5 steps", False),
    "held_out_before": ("held-out accuracy before", False),
    "held_out_after": ("held-out accuracy after", False),
    "mismatch_abs_mean_median": ("mismatch |d|, median [nats]", True),
    "mismatch_k3_median": ("mismatch k3, median [nats a token]", True),
    "mismatch_seq_abs_median": ("mismatch of a sequence, median [nats]", True),
    "grad_norm_median": ("gradient norm, median", True),
    "kl_last": ("KL to base, last 5 steps [nats a token]", True),
    "skipped_updates": ("skipped updates", False),
    "loss_scale_last": ("loss scale, last", False),
    "seconds_median": ("seconds a step, median", True),
    "tokens_per_s_median": ("tokens a second, median", True),
    "memory_peak_gib": ("peak memory [GiB]", False),
}


def compare(runs: Sequence[Run]) -> dict:
    """{"runs": {label: final figures}, "differences": {setting: {label: value}}, "fair": differ in dtype at most}.

    Raises:
        ArgumentError: fewer than two runs, the same run twice, or one without a step.
    """
    if len(runs) < 2 or len({run.path.resolve() for run in runs}) < len(runs):
        given = ", ".join(str(run.path) for run in runs)
        raise ArgumentError(f"A comparison needs at least two different runs; got {given}.")
    if empty := [str(run.path) for run in runs if not run.records]:
        raise ArgumentError(f"No step is recorded in {', '.join(empty)}; there is nothing to compare yet.")
    figures = dict(zip(labels(runs), map(final_figures, runs), strict=True))
    differences = differing(runs)
    return {"runs": figures, "differences": differences, "fair": not differences}


def comparison_table(runs: Sequence[Run]) -> str:
    """The comparison as text: a row a figure, a column a run; of two runs also second / first, where that says much."""
    figures = compare(runs)["runs"]
    columns = list(figures.values())
    rows = [["", *figures, *(["ratio"] if len(runs) == 2 else [])]]
    for key, (title, has_ratio) in ROWS.items():
        values = [column[key] for column in columns]
        if any(value is not None for value in values):
            ratio = [_ratio(values) if has_ratio else ""] if len(runs) == 2 else []
            rows.append([title, *map(_word, values), *ratio])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join([*lines, "", fairness_text(runs), provenance(runs)]).rstrip()


def _word(value):
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else str(value)


def _ratio(values):
    first, second = values
    return f"{number(second / first)} x" if first and second is not None else ""


def statements(first: Run, second: Run) -> list[str]:
    """What two runs show, in sentences computed from their records: mismatch, learning, stability.

    A difference of accuracies counts as one beyond two standard errors of the last steps' means.
    """
    return [_mismatch_statement(first, second), _learning_statement(first, second), _stability_statement(first, second)]


def _mismatch_statement(first, second):
    one, two = final_figures(first), final_figures(second)
    ratio = two["mismatch_abs_mean_median"] / one["mismatch_abs_mean_median"]
    k3 = two["mismatch_k3_median"] / one["mismatch_k3_median"]
    theory = {("float16", "bfloat16"): " Three bits of significand explain 8 and 64."}
    return (
        f"Mismatch: |d| of {dtype_of(second)} is {number(ratio)} times {dtype_of(first)}'s, its k3 {number(k3)} times "
        f"(medians over the steps).{theory.get((dtype_of(first), dtype_of(second)), '')}"
    )


def _learning_statement(first, second):
    (a, error_a), (b, error_b) = map(_accuracy, (first, second))
    words = f"{dtype_of(first)} {a:.3f} ± {error_a:.3f}, {dtype_of(second)} {b:.3f} ± {error_b:.3f}"
    noise = 2 * math.hypot(error_a, error_b)
    steps = min(2 * LAST, len(first.records), len(second.records))
    if abs(b - a) <= noise:
        verdict = "the same within noise, so in this run one learned as well as the other"
    else:
        verdict = f"{dtype_of(second if b > a else first)} learned more, by more than the noise ({noise:.3f})"
    return f"Learning: accuracy over the last {steps} steps {words}: {verdict}."


def _accuracy(run):
    """(mean, standard error of the mean) of the last steps' accuracies."""
    values = [value for value in finite(run, "accuracy") if value is not None][-2 * LAST :]
    if len(values) < 2:
        raise ArgumentError(f"{run.path} has {len(values)} steps with an accuracy; expected at least 2.")
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _stability_statement(first, second):
    parts = []
    for run in (first, second):
        norms = [value for value in finite(run, "grad_norm") if value is not None]
        peak = max(norms) / statistics.median(norms) if norms and statistics.median(norms) else math.nan
        lost = len(run.records) - len(norms)
        parts.append(
            f"{dtype_of(run)}: largest gradient norm {peak:.1f} times its median, {lost} without a finite one, "
            f"{len(skipped_steps(run))} updates skipped"
        )
    return f"Stability: {'; '.join(parts)}."


def save_comparison(runs: Sequence[Run], target: str | Path | None = None) -> Path:
    """Draw the runs over each other and return the file: `target`, or `compare-A-B.png` beside the first run."""
    from kit.plots import training_figure

    target = Path(target) if target else runs[0].path.parent / f"compare-{'-'.join(run.name for run in runs)}.png"
    if not target.parent.is_dir():
        raise ArgumentError(f"There is no folder {target.parent} to write {target.name} to.")
    training_figure(runs, dpi=150).savefig(target)
    return target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit compare`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, for example runs/a runs/b")
    parser.add_argument("--figure", metavar="PNG", help="where to draw them; default: beside the first run")
    parser.add_argument("--json", action="store_true", help="print figures and differences as JSON")


def run(args: argparse.Namespace) -> int:
    """`python -m kit compare`: the table, the differences, the picture."""
    runs = [Run.load(path) for path in args.runs]
    result = compare(runs)
    target = save_comparison(runs, args.figure)
    if args.json:
        print(json.dumps(result | {"figure": str(target)}, indent=2))
    else:
        print(comparison_table(runs))
        print(*(warning for run in runs for warning in run.warnings), f"Figure: {target}", sep="\n")
    return 0
