"""`python -m kit experiment NAME`: questions of the literature, asked here. Each leaves JSON, a figure and its words.

An experiment is a module with `add_arguments(parser)`, `measure(args) -> dict` (plain values), `text(result) -> str`
and `figure(result) -> Figure`. It imports torch and the rest inside its functions, so that `--help` answers at once.
This module is only the table and what all of them share.
"""

import argparse
import contextlib
import json
import sys
import time
from importlib import import_module
from pathlib import Path

from kit.durable import replace_file
from kit.errors import ArgumentError

# experiment -> (its module, one line of help)
EXPERIMENTS: dict[str, tuple[str, str]] = {
    "length": ("kit.length", "does the mismatch of a completion walk or drift with its length"),
    "sanity": ("kit.sanity", "problems that can all be learned: which dtype learns them"),
    "corrections": ("kit.corrections", "what importance weights can repair, on one batch and in training"),
    "claims": ("kit.claims", "the paper's claims, one by one, judged by the results of the others"),
    "mantissa": ("kit.mantissa", "does the mismatch halve with each mantissa bit, in formats that no hardware has"),
    "attribution": ("kit.attribution", "where the mismatch comes from: one thing changed at a time"),
}
SHARED = ("command", "experiment", "json", "out")  # not settings of the experiment itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit experiment`: a subcommand an experiment, and what all of them take."""
    names = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    for name, (module, text) in EXPERIMENTS.items():
        chosen = names.add_parser(name, help=text, description=text)
        import_module(module).add_arguments(chosen)
        chosen.add_argument("--out", help="folder for result.json and figure.png; default: runs/experiments/NAME")
        chosen.add_argument("--json", action="store_true", help="print the whole result as JSON")


def run(args: argparse.Namespace) -> int:
    """`python -m kit experiment`: measure, write result and figure, print one of them."""
    module = import_module(EXPERIMENTS[args.experiment][0])
    out = Path(args.out or f"runs/experiments/{args.experiment}")
    if out.exists() and not out.is_dir():  # said before the minutes that measuring takes
        raise ArgumentError(f"{out} is a file; expected a folder to write result.json and figure.png to.")
    with contextlib.redirect_stdout(sys.stderr):  # notes on the way; standard output has the result alone
        result = measured(module, args)
        files = save(result, module.figure(result), out)
    if args.json:
        print(json.dumps(result | files, indent=2))
    else:
        print(module.text(result))
        print(*(f"{name.capitalize()}: {path}" for name, path in files.items()), sep="\n")
    return 0


def measured(module, args: argparse.Namespace) -> dict:
    """The module's result with name, settings, seconds, hardware and versions beside it."""
    from kit import provenance

    started = time.perf_counter()
    result = module.measure(args)
    settings = {name: value for name, value in vars(args).items() if name not in SHARED}
    origin = {"hardware": provenance.machine(), "versions": provenance.versions()}
    seconds = round(time.perf_counter() - started, 1)
    return {"experiment": args.experiment, "settings": settings, "seconds": seconds, **origin, **result}


def save(result: dict, figure, folder: str | Path) -> dict[str, str]:
    """Write `result.json` and `figure.png` into the folder, replacing those of an earlier call; returns their paths."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "result.json", (json.dumps(result, indent=1) + "\n").encode())
        figure.savefig(folder / "figure.png", dpi=150, facecolor=figure.get_facecolor())
    except OSError as error:
        raise ArgumentError(f"The result cannot be written to {folder}: {error}. Give another --out.") from error
    return {"result": str(folder / "result.json"), "figure": str(folder / "figure.png")}
