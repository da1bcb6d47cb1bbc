"""Does the mismatch halve with each mantissa bit? `python -m kit experiment mantissa`.

Both sides are emulated in formats of 4 to 23 mantissa bits (`kit.emulation`) and score the same texts, which the
float32 sampler wrote; the real formats score them too. If rounding is all there is, mean |d| falls by a factor of 2 a
bit: a straight line on a log axis, with float16 and bfloat16 near it. Weights stay as they are stored, on both sides:
rounding them moves both alike.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict

from kit.errors import ArgumentError
from kit.intervals import told
from kit.summary import number

BITS = (4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 23)
REAL = {"bfloat16": 7, "float16": 10, "float32": 23}
EXPONENT_BITS = 8


def fit(bits: Sequence[int], values: Sequence[float]) -> dict[str, float | None]:
    """Least squares of log2(value) over the bits: {"slope", "error", "at_zero"}; -1 is a factor 2 a bit.

    `error` is the standard error of the slope, None for two points. Values of zero are left out.

    Raises:
        kit.errors.ArgumentError: fewer than two different numbers of bits with a value above zero.

    Example:
        >>> fit([4, 5, 6], [0.5, 0.25, 0.125])
        {'slope': -1.0, 'error': 0.0, 'at_zero': 3.0}
    """
    points = [(m, math.log2(value)) for m, value in zip(bits, values, strict=True) if value > 0]
    if len({m for m, _ in points}) < 2:
        raise ArgumentError(f"A line needs two different numbers of bits with a mismatch above zero; got {points}.")
    middle = sum(m for m, _ in points) / len(points)
    height = sum(y for _, y in points) / len(points)
    spread = sum((m - middle) ** 2 for m, _ in points)
    slope = sum((m - middle) * (y - height) for m, y in points) / spread
    left = sum((y - height - slope * (m - middle)) ** 2 for m, y in points)
    error = math.sqrt(left / (len(points) - 2) / spread) if len(points) > 2 else None
    return {"slope": slope, "error": error, "at_zero": height - slope * middle}


def measure_mantissa(
    model_name: str = "tiny", bits: Sequence[int] = BITS, *, sequences: int = 64, tokens: int = 64, seed: int = 0,
    batch: int = 16,
) -> dict:  # fmt: skip
    """Mismatch against mantissa bits, emulated and real, on the same texts; progress is printed.

    Args:
        model_name: "tiny", a folder, or a name on the hub.
        bits: mantissa bits to emulate, 1 to 23; 23 is float32 itself.
        sequences, tokens: completions, and the longest of them.
        seed: of the sampling.
        batch: texts in one trainer forward pass.

    Returns:
        {"points": [{"bits", "both", "trainer", "sampler"}], "real": {dtype: {"bits", "both"}}, "fit",
        "fit_above_floor", ...}; mean |d| [nats] as {"value", "low", "high"}. `trainer` and `sampler` are those sides
        alone in the format, the other in float32.

    Raises:
        kit.errors.ArgumentError: bits out of range, or a length beyond the model's; nothing is loaded then.
    """
    from kit import teacher_forcing
    from kit.formats import FloatFormat
    from kit.intervals import interval_note
    from kit.length import prompts_for
    from kit.loading import close_current, resolve

    formats = {m: FloatFormat(EXPONENT_BITS, m) for m in sorted(set(bits))}
    if len(formats) < 2:
        raise ArgumentError(f"bits are {list(bits)}; expected at least two different numbers, for a line.")
    path = resolve(model_name)
    prompts, longest = prompts_for(path, model_name, sequences)
    teacher_forcing.check_sizes(path, sequences, tokens, longest)
    texts, exact, points = _emulated_points(path, prompts, longest, tokens, seed, batch, formats)
    real = {"float32": {"bits": REAL["float32"], "both": _abs_mean(*exact, texts)}}
    for name in ("float16", "bfloat16"):
        real[name] = {"bits": REAL[name], "both": _real_point(path, name, texts, batch)}
    close_current()
    floor = real["float32"]["both"]["value"]
    above = [point for point in points if point["both"]["value"] > 4 * floor]
    return {
        "model": model_name,
        "sequences": len(texts.completions),
        "tokens": int(texts.mask.sum()),
        "exponent_bits": EXPONENT_BITS,
        "intervals": interval_note(len(texts.completions)),
        "points": points,
        "real": real,
        "fit": _fit_points(points),
        "fit_above_floor": _fit_points(above) if len(above) > 1 else None,
    }


def _fit_points(points):
    bits = [point["bits"] for point in points]
    return fit(bits, [point["both"]["value"] for point in points]) | {"bits": [min(bits), max(bits)]}


def _emulated_points(path, prompts, longest, tokens, seed, batch, formats):
    """(texts, float32 logprobs of trainer and sampler, a point a format)."""
    from transformers import AutoTokenizer

    from kit.drawn_policy import load_trainer
    from kit.emulation import emulated, emulated_sampler
    from kit.precision import Precision
    from kit.sampler import SamplingSettings
    from kit.teacher_forcing import open_sampler, sample_texts, sampler_scores, trainer_scores

    float32 = Precision("float32")
    sampler = open_sampler(path, "float32", longest + tokens, len(prompts), start="eager")
    model = load_trainer(path, float32)
    prompt_ids = AutoTokenizer.from_pretrained(path)(prompts).input_ids
    texts, _ = sample_texts(sampler, prompt_ids, SamplingSettings(tokens), seed)
    exact = trainer_scores(model, texts, float32, batch=batch), sampler_scores(sampler, texts)
    points = []
    for bits, form in formats.items():
        with emulated_sampler(sampler, form), emulated(model, form, weights=False):
            sides = trainer_scores(model, texts, float32, batch=batch), sampler_scores(sampler, texts)
        pairs = {"both": sides, "trainer": (sides[0], exact[1]), "sampler": (exact[0], sides[1])}
        point = {"bits": bits} | {name: _abs_mean(*pair, texts) for name, pair in pairs.items()}
        points.append(point)
        print(f"{bits:2} mantissa bits: mean |d| {number(point['both']['value'])} nats", flush=True)
    return texts, exact, points


def _real_point(path, name, texts, batch):
    from kit.drawn_policy import load_trainer
    from kit.precision import Precision
    from kit.teacher_forcing import open_sampler, sampler_scores, trainer_scores

    sampled = sampler_scores(open_sampler(path, name, texts.longest, len(texts.whole)), texts)
    precision = Precision(name)
    return _abs_mean(trainer_scores(load_trainer(path, precision), texts, precision, batch=batch), sampled, texts)


def _abs_mean(trainer, sampler, texts):
    from kit.intervals import token_mean

    difference = (trainer - sampler).abs()
    return asdict(token_mean(difference, texts.mask & difference.isfinite()))


# ---- the experiment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit experiment mantissa`."""
    parser.add_argument("--model", default="tiny", help="tiny, a folder, or a name on the hub")
    parser.add_argument("--bits", default=",".join(map(str, BITS)), help="mantissa bits to emulate, comma-separated")
    parser.add_argument("--sequences", type=int, default=64, help="completions to score")
    parser.add_argument("--tokens", type=int, default=64, help="longest completion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16, help="texts in one trainer forward pass")


def measure(args: argparse.Namespace) -> dict:
    """`python -m kit experiment mantissa`."""
    try:
        bits = [int(part) for part in args.bits.split(",") if part.strip()]
    except ValueError:
        raise ArgumentError(f"bits are {args.bits!r}; expected whole numbers such as 4,7,10,23.") from None
    return measure_mantissa(
        args.model, bits, sequences=args.sequences, tokens=args.tokens, seed=args.seed, batch=args.batch
    )


def figure(result: dict):
    """Mismatch over mantissa bits."""
    from kit.experiment_plots import mantissa_figure

    return mantissa_figure(result)


def text(result: dict) -> str:
    """What the figure shows: a line a format, and the slope."""
    lines = [
        f"Mean |d| by mantissa bits, {result['sequences']} sequences, {result['tokens']} tokens of {result['model']}, "
        f"{result['exponent_bits']} exponent bits [nats]",
        result["intervals"],
        f"{'bits':>4}  {'both sides':34}{'trainer alone':>14}{'sampler alone':>14}",
    ]
    for point in result["points"]:
        alone = "".join(f"{number(point[side]['value']):>14}" for side in ("trainer", "sampler"))
        lines.append(f"{point['bits']:>4}  {told(point['both']):34}{alone}")
    for name, point in result["real"].items():
        lines.append(f"{point['bits']:>4}  {told(point['both']):34}real {name}, both sides")
    lines.append(_slope_text(result["fit"], "all points"))
    if result["fit_above_floor"]:
        lines.append(_slope_text(result["fit_above_floor"], "points above 4 times real float32's"))
    return "\n".join(lines)


def _slope_text(found, which):
    error = "" if found["error"] is None else f" ± {found['error']:.3f}"
    low, high = found["bits"]
    return (
        f"A factor of {2 ** -found['slope']:.2f} a bit from {low} to {high} bits ({which}): slope {found['slope']:.3f}"
        f"{error} of log2, where rounding alone gives -1."
    )
