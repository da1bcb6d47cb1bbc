"""Where does the mismatch come from? `python -m kit experiment attribution`.

Texts are sampled once, by the sampler in the coarse dtype, and then scored again with one thing changed at a time: the
head, the activations and the weights of each side on the way to float32, a chain whose steps add up
(`kit.decomposition`), and beside it kernels, batches, the adapter, and settings that one side forgot. The policy is a
base model with a drawn adapter (`kit.drawn_policy`), merged where nothing else is said. `kit.attribution_scores`
measures; here are the settings, the command and the words.
"""

import argparse
import textwrap
from dataclasses import dataclass

from kit.intervals import told
from kit.summary import number


@dataclass(frozen=True)
class AttributionSettings:
    """What to measure.

    Args:
        model: "tiny", a folder, or a name on the hub.
        dtype: the coarse one, bfloat16 or float16.
        sequences, tokens: completions, and the longest of them.
        seed: of the drawn adapter and the sampling.
        spread: standard deviation of the drawn adapter's B.
        batch: texts in one trainer forward pass.
        backends: further attention backends of vLLM to change to, each an engine of its own (a GPU has several).
        compiled: also change both sides from eager to compiled kernels (a GPU; minutes).
    """

    model: str = "tiny"
    dtype: str = "bfloat16"
    sequences: int = 128
    tokens: int = 64
    seed: int = 0
    spread: float = 0.01
    batch: int = 16
    backends: tuple[str, ...] = ()
    compiled: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit experiment attribution`."""
    parser.add_argument("--model", default="tiny", help="tiny, a folder, or a name on the hub")
    parser.add_argument("--dtype", default="bfloat16", help="the coarse dtype: bfloat16 or float16")
    parser.add_argument("--sequences", type=int, default=128, help="completions to score")
    parser.add_argument("--tokens", type=int, default=64, help="longest completion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spread", type=float, default=0.01, help="standard deviation of the drawn adapter's B")
    parser.add_argument("--batch", type=int, default=16, help="texts in one trainer forward pass")
    parser.add_argument("--backends", default="", help="further attention backends of vLLM, comma-separated (GPU)")
    parser.add_argument("--compiled", action="store_true", help="also change both sides to compiled kernels (GPU)")


def measure(args: argparse.Namespace) -> dict:
    """`python -m kit experiment attribution`."""
    from kit.attribution_scores import attribute

    backends = tuple(name.strip() for name in args.backends.split(",") if name.strip())
    return attribute(AttributionSettings(
        args.model, args.dtype, args.sequences, args.tokens, args.seed, args.spread, args.batch, backends, args.compiled
    ))  # fmt: skip


def figure(result: dict):
    """The waterfall, the pairs, the single changes, and which tokens it comes from."""
    from kit.experiment_plots import attribution_figure

    return attribution_figure(result)


# ---- words


def text(result: dict) -> str:
    """What the figure shows: totals, parts, pairs, single changes, settings, tokens, and what cannot be separated."""
    lines = [
        f"Mean d^2 from {result['coarse']} everything to float32 everything, {result['sequences']} sequences, "
        f"{result['tokens']} tokens of {result['model']} [nats^2 a token]",
        result["intervals"],
        "",
        f"{result['coarse'] + ' everything':26}{told(result['total']['coarse'])}",
        *(_part_line(part, result) for part in result["parts"]),
        f"{'float32 everything':26}{told(result['total']['exact'])}",
        f"The parts add up to the difference, {told(result['total']['difference'])}; "
        f"{number(abs(result['remainder']))} is left over.",
        "",
        "In this order, each step measured: mean d^2",
        *(f"  {step['name']:56}{told(step)}" for step in result["steps"]),
        f"  {'weights rounded on the trainer alone, all else float32':56}{number(result['grid'][2][3])}",
        f"Rounding the weights moves each side's logprobs by {number(result['weights_move']['value'])} nats, alike.",
        "",
        "Pairs (above zero: two errors that add; below: that cancel), the largest:",
        *(f"  {' with '.join(pair['pair']):50}{told(pair)}" for pair in largest_pairs(result)),
        "",
        f"One thing changed at the {result['coarse']} end: mean d^2 after it; how far it moves a logprob [nats]:",
        *(f"  {row['name']:56}{told(row['square'])}; {number(row['moved']['value'])}" for row in result["changes"]),
        "",
        "A setting that the trainer forgets (its own texts): mean |d| [nats]",
        *(f"  {row['name']:56}{told(row['abs_mean'])}" for row in result["forgotten"]),
        "",
        *_bins("token's place", result["by_position"]),
        *_bins("token's probability", result["by_probability"]),
        "",
        *(textwrap.fill(f"Not separated: {note}", 110, subsequent_indent="  ") for note in result["not_separated"]),
    ]
    return "\n".join(lines)


def largest_pairs(result: dict, most: int = 5) -> list[dict]:
    """The pairs with the largest interactions, whichever sign."""
    return sorted(result["pairs"], key=lambda pair: -abs(pair["value"]))[:most]


def share_text(part: dict, result: dict) -> str:
    """`share_of` in percent, without a sign before zero."""
    percent = round(100 * share_of(part, result))
    return f"{percent or 0}%"


def share_of(part: dict, result: dict) -> float:
    """A part as a share of the whole difference."""
    return part["part"]["value"] / result["total"]["difference"]["value"]


def _part_line(part, result):
    alone = f"alone {number(part['alone']['value'])}, changed first {number(part['first']['value'])}"
    return f"  {part['name']:24}{told(part['part'])}, {share_text(part, result)}; {alone}"


def _bins(what, bins):
    for found in bins:
        if found["tokens"]:
            mean, share = told(found["abs_mean"]), f"{found['share']:.0%} of d^2"
            yield f"  {what} {found['label']:12} {found['tokens']:6} tokens, mean |d| {mean}, {share}"
