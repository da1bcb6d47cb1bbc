"""Load, sample, close, load in another dtype, in one process: what stays in memory after each close.

Prints a table to standard error and JSON to standard output. Nothing is asserted; the aim is growth below 5 % from the
first close to the last.
"""

import argparse
import gc
import json
import sys

from kit import FastLanguageModel
from kit.loading import close_current
from kit.process_memory import used_memory_gib
from kit.provenance import machine, versions


def load_and_close(dtype: str) -> dict:
    """Memory in use with the model loaded, and after its close [GiB]."""
    model, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, dtype=dtype)
    model = FastLanguageModel.get_peft_model(model)
    model.kit.sampler.load_adapter(model)
    model.fast_generate(["Q: 12+45=?\nA: "] * 64)
    loaded = used_memory_gib()
    del model
    close_current()
    gc.collect()
    return {"dtype": dtype, "loaded_gib": loaded, "closed_gib": used_memory_gib()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="float16,bfloat16,float32,float16,bfloat16", help="comma-separated")
    args = parser.parse_args()
    rows = []
    for dtype in args.dtypes.split(","):
        rows.append(load_and_close(dtype))
        loaded, closed = rows[-1]["loaded_gib"], rows[-1]["closed_gib"]
        print(f"{dtype:12}{loaded:10.3f} GiB loaded{closed:10.3f} GiB closed", file=sys.stderr)
    growth = [rows[-1]["closed_gib"] / row["closed_gib"] - 1 for row in rows[:2]]
    print(f"growth from the first close to the last {growth[0]:.1%}, from the second {growth[1]:.1%}", file=sys.stderr)
    found = {"loads": rows, "growth_from_first": growth[0], "growth_from_second": growth[1]}
    print(json.dumps(found | {"versions": versions(), "hardware": machine()}, indent=1))


if __name__ == "__main__":
    main()
