"""How long until the first step, how long a step, how much memory: `python -m kit train` on the bundled model.

Prints a table to standard error and JSON to standard output. Nothing is asserted; the aims are those of the project:
a first step within 30 s of the process's start, at most 3 s a step for 64 completions, less than 6 GiB.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kit.provenance import machine, versions
from kit.records import Run


def first_step(process: subprocess.Popen, records: Path, started: float) -> float:
    """Seconds from the process's start to the first line of its record."""
    while not (records.exists() and b"\n" in records.read_bytes()):
        if process.poll() is not None:
            sys.exit(f"The run ended before its first step, with status {process.returncode}.")
        time.sleep(0.02)
    return time.perf_counter() - started


def measure(dtype: str, steps: int, completions: int) -> dict:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "kit", "train", "--model", "tiny", "--dtype", dtype, "--steps", str(steps)]
        started = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--completions", str(completions), "--out", str(out)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        first = first_step(process, out / "records.jsonl", started)
        if process.wait():
            sys.exit(f"The run failed with status {process.returncode}.")
        run = Run.load(out)
        later = [record for record in run.records if record["step"] > 1]
        return {
            "first_step_s": first,
            "step_s": statistics.median(record["time/step"] for record in later),
            "slowest_step_s": max(record["time/step"] for record in later),
            "rollout_s": statistics.median(record["time/rollout"] for record in later),
            "tokens_per_s": statistics.median(record["speed/tokens_per_s"] for record in later),
            "peak_gib": max(run.column("memory/peak_gib")),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="float32,float16,bfloat16", help="comma-separated")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--completions", type=int, default=64)
    args = parser.parse_args()
    found = {dtype: measure(dtype, args.steps, args.completions) for dtype in args.dtypes.split(",")}
    names = list(next(iter(found.values())))
    print(f"{'':12}" + "".join(f"{name:>16}" for name in names), file=sys.stderr)
    for dtype, row in found.items():
        print(f"{dtype:12}" + "".join(f"{row[name]:16.2f}" for name in names), file=sys.stderr)
    settings = {"steps": args.steps, "completions": args.completions}
    print(json.dumps({**settings, "dtypes": found, "versions": versions(), "hardware": machine()}, indent=1))


if __name__ == "__main__":
    main()
