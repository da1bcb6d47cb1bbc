"""The README's GPU tables, from the measured files: `python tests/benchmarks/gpu/table.py`. A test compares the two."""

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def load(name: str) -> dict:
    """One result of `measure.py`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def origin(result: dict) -> str:
    """Hardware and versions of a result, in one line."""
    versions = result["versions"]
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "vllm", "transformers", "trl", "peft"))
    return f"{result['hardware']['name']}, {shown}"


def mismatch_table() -> str:
    """Mismatch of a real model by dtype, as Markdown."""
    lines = [
        "| dtype | mean abs d | k3 | sequence KL | mean abs sequence log-ratio at 256 / 512 / 1024 / 2048 tokens |"
    ]
    lines.append("|---|---|---|---|---|")
    for dtype in ("bfloat16", "float16", "float32"):
        measured = load(f"numerics_{dtype}")["dtypes"][dtype]
        by_length = " / ".join(f"{value:.2f}" for value in measured["sequence_abs_by_length"].values())
        values = [measured[f"mismatch/{key}"] for key in ("abs_mean", "k3", "seq_kl")]
        lines.append(f"| {dtype} | " + " | ".join(f"{value:.3g}" for value in values) + f" | {by_length} |")
    settings = load("numerics_float16")["settings"]
    caption = f"SmolLM2-135M-Instruct, {settings['sequences']} completions of {settings['length']} tokens; "
    return "\n".join([*lines, "", caption + origin(load("numerics_float16")) + "."])


def step_table() -> str:
    """Step time, sync and memory of the kit beside TRL's colocate mode, as Markdown."""
    kit, trl, cap = load("step_kit_float16"), load("step_trl_bfloat16"), load("cap_kit_float16")
    rows = [("kit, float16", kit), ("TRL colocate, bfloat16", trl)]
    lines = ["| | step, median (lowest to highest) | sync | peak memory |", "|---|---|---|---|"]
    for name, result in rows:
        step, sync = result["step_seconds"], result["sync_seconds"]["median"]
        times = f"{step['median']:.2f} s ({step['lowest']:.2f} to {step['highest']:.2f})"
        lines.append(f"| {name} | {times} | {1000 * sync:.0f} ms | {result['peak_allocated_gib']:.1f} GiB |")
    s = kit["settings"]
    caption = (
        f"Qwen3-4B's shape with random weights, LoRA rank 32 on seven projections, {s['completions']} completions of "
        f"{s['length']} tokens, micro-batch {s['micro_batch']}, one process each, one after the other; {origin(kit)}. "
        f"With {cap['free_before_gib']:.1f} GiB free on the card ({cap['settings']['completions']} completions of "
        f"{cap['settings']['length']} tokens), {len(cap['all_step_seconds'])} steps ran with a peak of "
        f"{cap['peak_allocated_gib']:.1f} GiB."
    )
    return "\n".join([*lines, "", caption])


if __name__ == "__main__":
    print(mismatch_table(), step_table(), sep="\n\n")
