"""Where the mismatch of a real model comes from, on a GPU, as JSON.

    python tests/benchmarks/gpu/attribution.py --model FOLDER --out attribution.json

No network. Engines one after the other, each with half of the card: four for each dtype; for the first dtype one more
for each attention backend in --backends, and one compiled. Some six minutes in all with the defaults, on an H200 whose
engines start in 16 s and the compiled one in a minute; the file is written again after each dtype. --mantissa adds the
line of emulated formats.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--dtypes", default="bfloat16,float16", help="coarse dtypes, comma-separated")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backends", default="TRITON_ATTN,FLEX_ATTENTION", help="attention backends to change to")
    parser.add_argument("--no-compiled", action="store_true", help="leave compiled kernels out; saves minutes")
    parser.add_argument("--mantissa", action="store_true", help="also emulate 4 to 23 mantissa bits")
    args = parser.parse_args()

    from kit import provenance
    from kit.attribution import AttributionSettings, text
    from kit.attribution_scores import attribute
    from kit.mantissa import measure_mantissa

    result = {
        "settings": {name: value for name, value in vars(args).items() if name not in ("model", "out")},
        "hardware": provenance.machine(),
        "versions": provenance.versions(),
        "dtypes": {},
    }

    def write() -> None:  # after each part: a later one that fails costs itself alone
        Path(args.out).write_text(json.dumps(result, indent=1, default=str))

    for place, dtype in enumerate(args.dtypes.split(",")):
        started = time.perf_counter()
        backends = tuple(name for name in args.backends.split(",") if name and place == 0)
        settings = AttributionSettings(
            args.model, dtype, args.sequences, args.tokens, args.seed,
            batch=args.batch, backends=backends, compiled=place == 0 and not args.no_compiled,
        )  # fmt: skip
        found = attribute(settings)
        print(text(found), flush=True)
        named = {name: found.pop(name) for name in ("model", "settings_used")}
        result["model"] = Path(named["model"]).name
        result["dtypes"][dtype] = found | {"seconds": time.perf_counter() - started}
        write()
    if args.mantissa:
        result["mantissa"] = measure_mantissa(
            args.model, sequences=args.sequences, tokens=min(args.tokens, 256), seed=args.seed, batch=args.batch
        ) | {"model": Path(args.model).name}
        write()


if __name__ == "__main__":
    main()
