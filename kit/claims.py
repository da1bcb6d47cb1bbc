"""The paper's qualitative claims, one by one, against what was measured here. `python -m kit experiment claims`.

The paper is "Defeating the Training-Inference Mismatch via FP16" (Qi et al., arXiv 2510.26788); its claims are put in
our words. Each is judged by a rule over the JSON that the other experiments leave and over the shipped report cards; a
claim that nothing here can judge says so. `python -m kit experiment claims --markdown FILE` writes the table into the
file between its two markers, so that no figure in it is typed by hand.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kit.errors import ArgumentError
from kit.summary import number

AGREES, DOES_NOT, UNASKED = "agrees", "does not", "cannot be asked here"
BEGIN, END = "<!-- python -m kit experiment claims writes this part -->", "<!-- end of claims -->"
NEEDED = ("length", "sanity", "corrections")
TOLERATED = 0.02  # of accuracy: arms closer than this count as equal


@dataclass(frozen=True)
class Claim:
    """A claim, and how it is judged: a rule over {experiment: result} that gives (verdict, our measure in words)."""

    says: str
    judge: Callable[[dict], tuple[str, str]]


# ---- rules


def _rounding(found):
    """Claim: the mismatch comes from rounding, so float16's is smaller by its three bits."""
    told, verdicts = [], []
    for where, dtypes in _measured(found).items():
        ratio = dtypes["bfloat16"]["rms"] / dtypes["float16"]["rms"]
        told.append(f"{number(ratio, 2)} times ({where})")
        verdicts.append(4 < ratio < 16)
    return _verdict(all(verdicts)), f"rms of d, bfloat16 over float16: {', '.join(told)}; three bits give 8"


def _eliminates(found):
    """Claim: float16 effectively removes the mismatch of whole completions."""
    told, verdicts = [], []
    for where, dtypes in _measured(found).items():
        kls = {name: dtypes[name]["by_length"][-1]["kl"] for name in ("bfloat16", "float16")}
        told.append(f"{number(kls['bfloat16'])} against {number(kls['float16'])} nats ({where})")
        verdicts.append(kls["float16"] < kls["bfloat16"] / 10)
    return _verdict(all(verdicts)), f"KL of a completion, bfloat16 against float16: {'; '.join(told)}"


def _grows(found):
    """Claim: the mismatch of a completion grows with its length."""
    slopes = {
        (where, name): dtypes[name]["growth"]["slope"]
        for where, dtypes in _measured(found).items()
        for name in ("bfloat16", "float16")
    }
    told = ", ".join(f"{power:.2f} ({name}, {where})" for (where, name), power in slopes.items())
    return _verdict(all(power > 0.25 for power in slopes.values())), f"|log-ratio| grows as length to the power {told}"


def _float16_learns(found):
    """Claim: float16 brings the perfectible set to nearly full training accuracy."""
    arm = found["sanity"]["arms"].get("float16")
    if arm is None:
        return UNASKED, "no float16 arm in the sanity test"
    return _verdict(arm["reached"]), _arm("float16", arm, found["sanity"])


def _bfloat16_fails(found):
    """Claim: bfloat16 fails there."""
    arm = found["sanity"]["arms"].get("bfloat16")
    if arm is None:
        return UNASKED, "no bfloat16 arm in the sanity test"
    return _verdict(not arm["reached"]), _arm("bfloat16", arm, found["sanity"])


def _plain_float16_beats(found):
    """Claim: plain policy gradient in float16 beats every correction in bfloat16."""
    training = {name: dtype["training"] for name, dtype in found["corrections"]["dtypes"].items()}
    if not training.get("float16") or not training.get("bfloat16"):
        return UNASKED, "no training of both formats among the corrections"
    plain = training["float16"]["none"]["accuracy_final"]
    best = max(training["bfloat16"], key=lambda name: training["bfloat16"][name]["accuracy_final"])
    other = training["bfloat16"][best]["accuracy_final"]
    told = f"final accuracy {plain:.3f} (float16, none) against {other:.3f} (bfloat16, {best})"
    lag = f"sampler synced every {found['corrections']['every']} steps, one seed"
    return _verdict(plain > other + TOLERATED), f"{told}; {lag}, differences below {TOLERATED} count as none"


def _sequence_costs(found):
    """Claim: corrections by whole sequences have a high variance."""
    told, verdicts = [], []
    for dtype, dtypes in found["corrections"]["dtypes"].items():
        lag = max(row["lag"] for row in dtypes["batch"])
        ess = {row["correction"]: row["ess"] for row in dtypes["batch"] if row["lag"] == lag}
        told.append(f"{ess['sequence MIS']:.2f} against {ess['token MIS']:.2f} ({dtype}, {lag} updates behind)")
        verdicts.append(ess["sequence MIS"] < ess["token MIS"])
    return _verdict(all(verdicts)), f"share of the sample left, sequence MIS against token MIS: {'; '.join(told)}"


def _no_overflow(found):
    """Claim: float16's smaller range is handled by loss scaling."""
    arm = found["sanity"]["arms"].get("float16")
    if arm is None:
        return UNASKED, "no float16 arm in the sanity test"
    share = arm["skipped"] / max(arm["steps"], 1)
    return _verdict(share < 0.1), f"{arm['skipped']} of {arm['steps']} float16 updates skipped by the loss scaler"


def _unasked(why):
    return lambda found: (UNASKED, why)


def _verdict(holds):
    return AGREES if holds else DOES_NOT


def _arm(name, arm, result):
    got = f"passed {result['target']:.0%} at step {arm['reached']}" if arm["reached"] else "did not pass the mark"
    return (
        f"{name} {got} (final accuracy {arm['accuracy_final']:.3f}), {result['model']}, completions of some 50 tokens"
    )


def _measured(found):
    """{where: its dtypes} of the length experiment and of each shipped card that has both 16-bit formats."""
    from kit.report_cards import title

    length = found["length"]
    hardware = length["hardware"]["name"].removeprefix("CPU ")
    places = {f"{hardware}, {length['model']}, {length['tokens']} tokens": length}
    places |= {f"{title(card)}, {card['settings']['tokens']} tokens": card for card in found["cards"]}
    return {where: r["dtypes"] for where, r in places.items() if {"float16", "bfloat16"} <= r["dtypes"].keys()}


CLAIMS = (
    Claim("The mismatch comes from rounding; float16's three further bits shrink it.", _rounding),
    Claim("Float16 effectively removes the mismatch of whole completions.", _eliminates),
    Claim("The mismatch of a completion grows with its length.", _grows),
    Claim("Float16 learns a perfectible set to nearly full training accuracy.", _float16_learns),
    Claim("Bfloat16 becomes unstable and does not get there.", _bfloat16_fails),
    Claim("Plain policy gradient in float16 beats every correction in bfloat16.", _plain_float16_beats),
    Claim("Corrections by whole sequences pay with variance.", _sequence_costs),
    Claim("Float16's smaller range is no obstacle, given loss scaling.", _no_overflow),
    Claim("It holds for mixtures of experts and for 14 billion parameters.", _unasked("needs several large GPUs")),
    Claim("It holds across frameworks (VeRL and Oat).", _unasked("this kit trains with TRL only")),
)


def judge(found: dict) -> list[dict]:
    """A row a claim: `claim`, `measure`, `verdict`.

    Args:
        found: {"length", "sanity", "corrections": their results, "cards": shipped report cards}.
    """
    rows = []
    for claim in CLAIMS:
        verdict, measure = claim.judge(found)
        rows.append({"claim": claim.says, "measure": measure, "verdict": verdict})
    return rows


def markdown(rows: list[dict]) -> str:
    """The rows as a Markdown table.

    >>> print(markdown([{"claim": "It holds.", "measure": "1 | 2", "verdict": "agrees"}]))
    | the paper's claim, in our words | our measure | verdict |
    |---|---|---|
    | It holds. | 1 \\| 2 | agrees |
    """
    lines = ["| the paper's claim, in our words | our measure | verdict |", "|---|---|---|"]
    for row in rows:
        cells = [row[key].replace("|", "\\|") for key in ("claim", "measure", "verdict")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_into(path: str | Path, rows: list[dict]) -> None:
    """Replace what stands between the two markers of a Markdown file by the table.

    Raises:
        kit.errors.ArgumentError: no such file, or it has not exactly these two markers.
    """
    from kit.durable import replace_file

    path = Path(path)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ArgumentError(f"{path} has not the two lines between which the table goes: {BEGIN} and {END}.")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    replace_file(path, f"{before}{BEGIN}\n{markdown(rows)}\n{END}{after}".encode())


# ---- the experiment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit experiment claims`."""
    parser.add_argument("--results", default="runs/experiments", help="folder with length, sanity, corrections in it")
    parser.add_argument("--markdown", metavar="FILE", help="write the table between the two markers of this file")


def measure(args: argparse.Namespace) -> dict:
    """`python -m kit experiment claims`: reads what is there, measures nothing."""
    from kit.report_cards import shipped_cards

    found = {name: _read(Path(args.results), name) for name in NEEDED}
    rows = judge(found | {"cards": shipped_cards()})
    if args.markdown:
        write_into(args.markdown, rows)
    return {"claims": rows}


def _read(folder, name):
    for path in (folder / name / "result.json", folder / f"{name}.json"):
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
    raise ArgumentError(f"There is no {folder / name / 'result.json'}. Make it: python -m kit experiment {name}.")


def text(result: dict) -> str:
    """The table as text."""
    return "\n".join(f"{row['verdict']:>20}: {row['claim']}\n{'':22}{row['measure']}" for row in result["claims"])


def figure(result: dict):
    """The table as a picture."""
    from kit.study_plots import claims_figure

    return claims_figure(result["claims"])
