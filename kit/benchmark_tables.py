"""Tables of GPU measurements, from the files that `tests/benchmarks/gpu/measure.py` wrote: no figure is typed in.

`python -m kit report FOLDER` prints them; the README holds what it prints, and a test compares the two.
"""

import json
import statistics
from pathlib import Path

from kit.errors import ArgumentError


def has_results(folder: Path) -> bool:
    """True for a folder of measurements."""
    return any(folder.glob("step_*.json")) or any(folder.glob("numerics_*.json"))


def tables(folder: str | Path) -> str:
    """Every table that the folder's files allow, as Markdown.

    Raises:
        ArgumentError: no measurement in it, or a file that is not one.
    """
    found = {path.stem: _load(path) for path in sorted(Path(folder).glob("*.json"))}
    made = [table(found) for table in (mismatch_table, training_table, step_table, sampler_table)]
    if not any(made):
        raise ArgumentError(f"{folder} holds no measurement of tests/benchmarks/gpu/measure.py.")
    return "\n\n".join(table for table in made if table)


def _load(path):
    try:
        result = json.loads(path.read_text())
        result["hardware"]["name"], result["versions"]["torch"], result["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path} is no measurement of tests/benchmarks/gpu/measure.py: {error!r}") from None
    return result


def _origin(result):
    versions = result["versions"]
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "vllm", "transformers", "trl", "peft"))
    return f"{result['hardware']['name']}, {shown}"


def _markdown(head, rows):
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def mismatch_table(found: dict[str, dict]) -> str | None:
    """Mismatch of a real model by dtype."""
    measured = {d: found.get(f"numerics_{d}") for d in ("bfloat16", "float16", "float32")}
    if not all(measured.values()):
        return None
    head = ["dtype", "mean abs d", "k3", "sequence KL", "mean abs sequence log-ratio at 256 / 512 / 1024 / 2048 tokens"]
    rows = []
    for dtype, result in measured.items():
        values = result["dtypes"][dtype]
        by_length = " / ".join(f"{value:.2f}" for value in values["sequence_abs_by_length"].values())
        rows.append([dtype, *(f"{values[f'mismatch/{key}']:.3g}" for key in ("abs_mean", "k3", "seq_kl")), by_length])
    settings = measured["float16"]["settings"]
    about = f"SmolLM2-135M-Instruct, {settings['sequences']} completions of {settings['length']} tokens"
    return f"{_markdown(head, rows)}\n\n{about}; {_origin(measured['float16'])}."


def training_table(found: dict[str, dict]) -> str | None:
    """GRPO on real weights in each dtype from one seed: held-out accuracy, mismatch, gradient norm."""
    if (result := found.get("train_smollm2_135m")) is None:
        return None
    head = ["dtype", "held-out accuracy", "difference (95 %)", "mean abs d", "k3", "gradient norm", "skipped updates"]
    rows = []
    for dtype, arm in result["summary"].items():
        low, high = arm["held_out_interval"]
        rows.append([
            dtype, f"{arm['held_out_before']:.3f} -> {arm['held_out_after']:.3f}",
            f"{arm['held_out_difference']:+.3f} ({low:+.3f} to {high:+.3f})", f"{arm['mismatch_abs_mean_median']:.3g}",
            f"{arm['mismatch_k3_median']:.3g}", f"{arm['grad_norm_median']:.2f}", str(arm["skipped_updates"]),
        ])  # fmt: skip
    s = result["settings"]
    about = (
        f"{s['model']}, {s['task'].partition(':')[2].partition(':')[0]}, {s['steps']} GRPO steps of {s['completions']} "
        f"completions, seed {s['seed']}; medians over the steps; {_origin(result)}."
    )
    return f"{_markdown(head, rows)}\n\n{about}"


def step_table(found: dict[str, dict]) -> str | None:
    """Step time, sync and memory of the kit beside TRL's colocate mode, over all their runs."""
    runs = {side: [r for name, r in found.items() if name.startswith(f"step_{side}_")] for side in ("kit", "trl")}
    if not all(runs.values()):
        return None
    rows, medians = [], {}
    for side, label in (("kit", "kit"), ("trl", "TRL colocate")):
        seconds = [s for run in runs[side] for s in run["all_step_seconds"][2:]]  # the first two warm up
        medians[side] = statistics.median(seconds)
        sync = statistics.median(run["sync_seconds"]["median"] for run in runs[side])
        peak = max(run["peak_allocated_gib"] for run in runs[side])
        times = f"{medians[side]:.2f} s ({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} steps)"
        rows.append([f"{label}, {runs[side][0]['dtype']}", times, f"{1000 * sync:.0f} ms", f"{peak:.1f} GiB"])
    first, s = runs["kit"][0], runs["kit"][0]["settings"]
    about = (
        f"Step, kit / TRL: {medians['kit'] / medians['trl']:.2f}. Qwen3-4B's shape with random weights, LoRA rank 32 "
        f"on seven projections, {s['completions']} completions of {s['length']} tokens, micro-batch "
        f"{s['micro_batch']}, "
        f"{len(runs['kit'])} processes a side in turn; {_origin(first)}.{_under_a_cap(found)}"
    )
    return f"{_markdown(['', 'step, median (lowest to highest)', 'sync', 'peak memory'], rows)}\n\n{about}"


def _under_a_cap(found):
    if (cap := found.get("cap_kit_float16")) is None:
        return ""
    s = cap["settings"]
    return (
        f" With {cap['free_before_gib']:.1f} GiB free on the card ({s['completions']} completions of {s['length']} "
        f"tokens), {len(cap['all_step_seconds'])} steps ran with a peak of {cap['peak_allocated_gib']:.1f} GiB."
    )


def sampler_table(found: dict[str, dict]) -> str | None:
    """Tokens a second of the sampler: bare, with an adapter, and without vLLM."""
    names = {"sampler_bare": "vLLM, no adapter", "sampler_lora": "with an adapter (fused)"}
    names |= {"sampler_vllm": "with an adapter (vLLM's kernels)", "sampler_transformers": "transformers' generate"}
    if "sampler_bare" not in found or "sampler_lora" not in found:
        return None
    bare = found["sampler_bare"]["tokens_per_s"]
    rows = []
    for name, label in names.items():
        rates = found.get(name, {}).get("tokens_per_s", {})
        cells = [f"{rates[n]['seeded']:,.0f} ({_ratio(rates, bare, n)})" if n in rates else "" for n in bare]
        if any(cells):
            length = found[name]["settings"]["length"]
            other = "" if length == found["sampler_lora"]["settings"]["length"] else f", {length} tokens"
            rows.append([label + other, *cells])
    head = ["tokens a second (share of bare)", *(f"{size} sequences" for size in bare)]
    s = found["sampler_lora"]["settings"]
    about = f"Qwen3-4B's shape, {s['dtype']}, rank 32, {s['length']} tokens each; {_origin(found['sampler_lora'])}."
    return f"{_markdown(head, rows)}\n\n{about}"


def _ratio(rates, bare, size):
    ratio = rates[size]["seeded"] / bare[size]["seeded"]
    return f"{ratio:.2f}" if ratio > 0.1 else f"1/{1 / ratio:.0f}"
