"""`python -m kit COMMAND`: the same functions as in the notebooks. Every command takes --json."""

import argparse
import sys
from importlib import import_module

from kit.errors import KitError
from kit.quiet import keep_quiet

# command -> (module with add_arguments(parser) and run(args), one line of help)
COMMANDS = {
    "doctor": ("kit.doctor", "what this machine can do, and what would go wrong, before anything loads"),
    "plan": ("kit.plan", "memory by part for a model, a dtype and a card"),
    "train": ("kit.training", "GRPO on a task, sampled by vLLM, recorded"),
    "evaluate": ("kit.task_evaluate", "accuracy at a task; of a run before and after, paired"),
    "save": ("kit.saving", "a run's adapter or merged model as a folder that others can load"),
    "mismatch": ("kit.measure", "sampler against trainer on the same tokens, by dtype"),
    "experiment": ("kit.experiments", "questions of the literature, asked here; each leaves JSON and a figure"),
    "compare": ("kit.comparison", "runs side by side, and what their settings differ in"),
    "report": ("kit.report", "a run's summary and figures"),
    "watch": ("kit.live", "follow a run that another process writes"),
    "pictures": ("kit.pictures", "the README's pictures, made again from runs"),
    "demo": ("kit.demo", "notebook 02 on the bundled model, executed and exported"),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line; only the chosen command's module is imported."""
    parser = argparse.ArgumentParser(prog="python -m kit", description="fp16 against bf16 for RL, measured.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == chosen:
            import_module(module).add_arguments(command)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit status: 0 fine, 1 a finding, 2 a bad request, 130 interrupted."""
    args = parse(arguments)
    keep_quiet()
    try:
        return import_module(COMMANDS[args.command][0]).run(args)
    except KitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; the record up to the last whole step is kept.", file=sys.stderr)
        return 130
