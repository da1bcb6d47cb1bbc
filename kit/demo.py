"""The demonstration: notebook 02 on the bundled model, executed in a kernel of its own. `python -m kit demo --out DIR`.

What a person would do by hand (open the notebook, run all, export it), with a line a step in the terminal while it
runs. DIR is also the run's folder: run.json, records.jsonl, completions.jsonl, figures/, the executed notebook and its
HTML. Not here: anything about training; the notebook does that.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from kit.errors import ArgumentError
from kit.live import RecordTail, progress_line
from kit.records import Run, RunExists, free_path
from kit.report import LAST, final_figures, save_figures
from kit.summary import number

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "02_grpo_with_vllm.ipynb"
POLL_S = 0.3


@dataclass(frozen=True)
class Outcome:
    """What came of a notebook: how long it took [s], and what stopped it, in words (empty: nothing did)."""

    seconds: float
    problem: str = ""
    interrupted: bool = False


class Execution(threading.Thread):
    """Executes a notebook in a fresh kernel, in a thread, so that the main one can report and be interrupted.

    environment: variables added for the kernel. on_heading: called with the text of each heading when it is reached.
    `notebook` holds the outputs so far at any time; `error` is what ended it early; `log` is what the kernel's process
    said besides (libraries' warnings, and the reason if it dies).
    """

    def __init__(self, path: Path, environment: dict[str, str], on_heading):
        import nbformat
        from nbclient import NotebookClient

        super().__init__(name="kit.demo", daemon=True)
        self._ended = threading.Event()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.notebook, self.error = nbformat.read(path, as_version=4), None
        self._environment, self._on_heading = os.environ | environment, on_heading
        resources = {"metadata": {"path": str(path.parent)}}
        self._client = NotebookClient(
            self.notebook, timeout=None, kernel_name="python3", resources=resources, on_cell_start=self._cell_started,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
        )  # fmt: skip

    def run(self) -> None:
        try:
            self._client.execute(env=self._environment, stdout=self.log, stderr=self.log)
        except BaseException as error:  # a cancelled task too: none may pass for success
            self.error = error
        finally:
            self._ended.set()

    def ended_within(self, seconds: float) -> bool:
        """Wait that long at most. (`Thread.join` of Python 3.11 takes a thread for ended when Ctrl-C interrupts it.)"""
        return self._ended.wait(seconds)

    def last_words(self, most: int = 2000) -> str:
        """The end of `log`."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-most:].strip()

    def interrupt(self) -> None:
        """As the stop button of a notebook: the running cell gets a KeyboardInterrupt."""
        if self._client.km is not None and self._client.km.has_kernel:
            asyncio.run(self._client.km.interrupt_kernel())

    def _cell_started(self, cell, cell_index):
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            self._on_heading(cell.source.splitlines()[0].removeprefix("## "))


class Relay:
    """Prints the steps of a run that another process writes, as they come, after the seconds since the start."""

    def __init__(self, run_dir: Path):
        self._run_dir, self._started = run_dir, time.monotonic()
        self._tail, self._total, self._records = None, None, []

    @property
    def seconds(self) -> float:
        """Since this was made."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """One line, at once."""
        print(f"{self.seconds:4.0f} s  {text}", file=sys.stderr, flush=True)

    def poll(self) -> None:
        """Print what is new in the record."""
        if self._tail is None:
            if not (self._run_dir / "run.json").exists():
                return
            self._tail, self._total = RecordTail(self._run_dir), Run.load(self._run_dir).info.get("steps")
        for record in self._tail.poll()[1]:
            self._records.append(record)
            self.say(progress_line(self._records, self._total))


def run_notebook(path: Path, out: Path, environment: dict[str, str]) -> Outcome:
    """Execute a notebook, report on the run it writes to `out`, and save it there as far as it came, with its HTML."""
    relay = Relay(out)
    relay.say(f"{path.name} in a kernel of its own; the first step comes within half a minute or so.")
    execution = Execution(path, environment, relay.say)
    execution.start()
    ended = interrupted = False
    while not ended:
        try:
            ended = execution.ended_within(POLL_S)
            relay.poll()
        except KeyboardInterrupt:
            if interrupted:
                raise  # asked twice: do not wait for the cell
            interrupted = True
            relay.say("Interrupted: the record is kept, the adapter is saved ...")
            execution.interrupt()
    out.mkdir(parents=True, exist_ok=True)
    export(execution.notebook, out / path.name)
    return Outcome(relay.seconds, _problem(execution), interrupted)


def _problem(execution):
    """An execution's error as a person wants it: which error, and what it said."""
    error = execution.error
    if error is None:
        return ""
    if type(error).__name__ == "CellExecutionError":
        return f"{error.ename}: {error.evalue}"
    if type(error).__name__ == "DeadKernelError":
        reason = "Most often the machine ran out of memory (the system log says so), or the process was killed."
        return "\n".join(filter(None, [f"The kernel died. {reason}", execution.last_words()]))
    return f"{type(error).__name__}: {error}"


def export(notebook, target: Path) -> tuple[Path, Path]:
    """Write an executed notebook to `target` and its HTML beside it; returns both."""
    import nbformat
    from nbconvert import HTMLExporter

    page = target.with_suffix(".html")
    nbformat.write(notebook, target)
    page.write_text(HTMLExporter().from_notebook_node(notebook, {"metadata": {"name": target.stem}})[0])
    return target, page


def demo(
    out: str | Path, *, steps: int, dtype: str = "float16", model: str = "tiny", notebook: Path | None = None
) -> Run:
    """Execute the notebook (02, unless another is given) and return the run it made, drawn and exported.

    Raises:
        RunExists: `out` holds a run; nothing is written.
        ArgumentError: the notebook is not there, or fewer than one step.
        DemoFailed: a cell failed or was interrupted; the notebook up to there is kept.
    """
    out, notebook = Path(out).absolute(), notebook or NOTEBOOK
    if free_path(out) != out:
        raise RunExists(f"{out} already holds a run, and is left as it is. Remove it, or give --out {free_path(out)}.")
    if steps < 1:
        raise ArgumentError(f"steps is {steps}; expected at least 1.")
    if not notebook.is_file():
        raise ArgumentError(f"There is no notebook {notebook}. The demo runs from a clone of the repository.")
    settings = {"OUT": str(out), "STEPS": str(steps), "DTYPE": dtype, "MODEL": model}
    outcome = run_notebook(notebook, out, {f"KIT_{name}": value for name, value in settings.items()})
    if outcome.problem:
        raise DemoFailed(outcome, out / notebook.name)
    made = Run.load(out)
    save_figures(made)
    return made


class DemoFailed(ArgumentError):
    """A cell of the notebook failed or was interrupted; the message says which error, and what is kept."""

    def __init__(self, outcome: Outcome, notebook: Path):
        kept = f"The notebook up to there: {notebook} (and .html)."
        super().__init__(f"{outcome.problem}\n{'Stopped' if outcome.interrupted else 'A cell failed'}. {kept}")
        self.outcome = outcome


def demo_summary(run: Run, seconds: float | None = None) -> str:
    """The demonstration in a few lines: what was learned, how far both sides disagreed, how long it took."""
    figures = final_figures(run)
    lines = [
        f"{figures['steps']} steps of GRPO in {figures['dtype']}, sampled by {_sampler(run)}:",
        f"  accuracy on training problems  {_word(figures['accuracy_first'])} at step 1 -> "
        f"{_word(figures['accuracy_last'])} (mean of the last {min(LAST, figures['steps'])} steps)",
        f"  accuracy on held-out problems  {_with_error(run, 'before')} -> {_with_error(run, 'after')}",
        f"  mismatch, median of the steps  mean |d| {_word(figures['mismatch_abs_mean_median'])} nats, "
        f"k3 {_word(figures['mismatch_k3_median'])} nats a token",
        f"  time                           {_word(figures['seconds_median'])} s a step"
        + (f", {seconds:.0f} s in all" if seconds is not None else ""),
    ]
    return "\n".join(lines)


def _sampler(run):
    sampler = run.info.get("sampler", {})
    return f"{sampler.get('name', 'an unknown sampler')} {sampler.get('version', '')}".strip()


def _word(value):
    return "not recorded" if value is None else number(value)


def _with_error(run, when):
    summary = run.info.get("summary", {})
    value, error = summary.get(f"held_out_{when}"), summary.get(f"held_out_{when}_standard_error")
    return _word(value) if error is None else f"{number(value)} ± {number(error, 2)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit demo`."""
    parser.add_argument("--out", default="runs/demo", help="folder of the run; must not hold one (default runs/demo)")
    parser.add_argument("--steps", type=int, default=40, help="GRPO steps (default 40)")
    parser.add_argument("--dtype", default="float16", help="default float16")
    parser.add_argument("--model", default="tiny", help="default tiny, the bundled one")
    parser.add_argument("--json", action="store_true", help="print the final figures and the paths as JSON")


def run(args: argparse.Namespace) -> int:
    """`python -m kit demo`: 0 fine, 1 a cell failed, 130 interrupted."""
    started = time.monotonic()
    try:
        made = demo(args.out, steps=args.steps, dtype=args.dtype, model=args.model)
    except DemoFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 130 if failure.outcome.interrupted else 1
    seconds, out = time.monotonic() - started, Path(args.out)
    page = out / NOTEBOOK.with_suffix(".html").name
    paths = {
        "executed notebook": page.with_suffix(".ipynb"),
        "as a page": page,
        "figures": out / "figures",
        "record": out / "records.jsonl",
        "completions": out / "completions.jsonl",
    }
    if args.json:
        told = {"seconds": round(seconds, 1), "figures": final_figures(made), "summary": made.info.get("summary")}
        print(json.dumps(told | {"paths": {name: str(path) for name, path in paths.items()}}, indent=2))
    else:
        print(demo_summary(made, seconds), "", sep="\n")
        print(*(f"{name:18}  {path}" for name, path in paths.items()), sep="\n")
    return 0
