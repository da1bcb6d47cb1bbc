"""Watching a run: one figure in the notebook that is updated in place, or a line a step in a terminal.

    with LiveView() as view:
        kit.GRPOTrainer(..., on_record=view).train()

In a notebook two outputs appear in the cell that trains: the figure (`plots.training_figure`) and the same in words.
Each has a display id and is only ever updated; nothing is cleared, no widget is involved, and the executed notebook
keeps the last frame. Threads of the view publish, a process of its own draws (painter.py), so a step only appends to a
list. Drawing is throttled to a share of the run's time, by what it measurably costs.
"""

import argparse
import base64
import json
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from kit.painter import Frame, Painter, PainterError, paint
from kit.records import Run, is_locked, require_run
from kit.summary import number, summary_text

LIVE_DPI, FINAL_DPI = 100, 200  # both shown at the size of 100
SHORTEST_PAUSE_S = 0.5  # between frames; faster is not read by anyone
# What a second of drawing costs the run. The drawing process has the lowest priority, so it takes idle time; but where
# two processors share a core (Colab's do), it still slows its neighbour by about a quarter.
NEIGHBOUR_COST = 0.25
CLEAR_LINE = "\r\x1b[K"  # of a terminal
WORDS_WIDTH = 88  # columns that a notebook shows beside an open file browser


def progress_line(records: Sequence[dict], total: int | None = None) -> str:
    """One step in one line: the last record's numbers and, if the total is known, the time left.

    >>> progress_line([{"step": 3, "accuracy": 0.5, "kl": 0.0125, "time/step": 2.0}], total=5)
    'step 3/5  accuracy 0.5  KL 0.0125  2 s a step  0:04 left'
    """
    record = records[-1]
    parts = [f"step {record['step']}/{total}" if total else f"step {record['step']}"]
    quality = "accuracy" if record.get("accuracy") is not None else "reward"
    names = {
        quality: quality,
        "grad_norm": "grad norm",
        "kl": "KL",
        "mismatch/k3": "mismatch k3",
        "scaler/scale": "scale",
    }
    parts += [f"{name} {number(record[key])}" for key, name in names.items() if record.get(key) is not None]
    if record.get("scaler/skipped"):
        parts.append("update skipped (overflow)")
    if record.get("frac_reward_zero_std") == 1:
        parts.append("no gradient: rewards are equal in every group")
    if record.get("speed/tokens_per_s") is not None:
        parts.append(f"{number(record['speed/tokens_per_s'])} tokens/s")
    times = [past["time/step"] for past in records[-10:] if past.get("time/step") is not None]
    if times:
        parts.append(f"{number(times[-1])} s a step")
        if total:
            left = round(sum(times) / len(times) * (total - record["step"]))
            parts.append(f"{left // 60}:{left % 60:02} left" if left < 3600 else f"{left / 3600:.1f} h left")
    return "  ".join(parts)


def progress_bar(step: int, total: int, width: int = 40) -> str:
    """How far a run is, for a terminal.

    >>> progress_bar(10, 40, width=8)
    '##......  10/40 (25%)'
    """
    done = min(step / total, 1.0)
    return f"{'#' * int(done * width):.<{width}}  {step}/{total} ({done:.0%})"


def wrapped(text: str) -> str:
    """The lines of a text broken at spaces to WORDS_WIDTH; a notebook would break them within words."""
    indent = "      "
    return "\n".join(
        textwrap.fill(line, WORDS_WIDTH, subsequent_indent=indent, break_long_words=False) for line in text.splitlines()
    )


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code: a terminal, also IPython's, cannot update an image in place."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and shell.has_trait("kernel")


class _Updater(threading.Thread):
    """Calls `publish` when there is news and one more call, as costly as those so far, stays within the share of time.

    The cost is this thread's processor time, and what `publish(last)` returns: seconds lost elsewhere. The first and
    the last call are always made.
    """

    def __init__(self, publish: Callable[[bool], float], share: float):
        super().__init__(name="kit.LiveView", daemon=True)
        self._publish, self._share = publish, share
        self._condition, self._news, self._closing = threading.Condition(), False, False
        self.calls, self.seconds, self.cost = 0, 0.0, 0.0
        self.start()

    def notify(self) -> None:
        with self._condition:
            self._news = True
            self._condition.notify()

    def finish(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify()
        self.join()

    def run(self) -> None:
        began = previous = time.monotonic()
        last = False
        while not last:
            with self._condition:
                while not self._closing and not (self._news and self._affordable(began, previous)):
                    self._condition.wait(SHORTEST_PAUSE_S / 2 if self._news else None)
                last, self._news = self._closing, False
            start = time.thread_time()
            elsewhere = self._publish(last)
            spent = time.thread_time() - start
            self.seconds, self.cost = self.seconds + spent, self.cost + spent + elsewhere
            self.calls, previous = self.calls + 1, time.monotonic()

    def _affordable(self, began: float, previous: float) -> bool:
        if self.calls == 0:
            return True
        now = time.monotonic()
        cost = self.cost * (1 + 1 / self.calls)
        return cost <= self._share * (now - began) and now - previous >= SHORTEST_PAUSE_S


class LiveView:
    """Shows a run while it is made. Call it with each record; `begin` before the first, `close` after the last.

    compare: finished runs to draw beside the live one. share: of the run's time that the view may cost.
    What it took: `frames`; processor time `draw_seconds` in the drawing process and `publish_seconds` in this one;
    `step_seconds` and `slowest_step_s`, the time that the training thread spent here, in all and at most.
    """

    def __init__(self, compare: Sequence[Run] = (), share: float = 0.02):
        self.compare, self.share = list(compare), share
        self.draw_seconds, self.step_seconds, self.slowest_step_s = 0.0, 0.0, 0.0
        self.problem = ""
        self.info, self.total, self.records = {}, None, []
        self._painter = Painter()
        self._updaters: list[_Updater] = []
        self._open = self._bar = False

    def begin(self, info: dict, total: int | None = None) -> None:
        """A new run: its run.json, and the number of steps to come. Makes the outputs, in the cell that calls it.

        Outputs that `show` made before, and that show no run yet, are used.
        """
        if self.records:
            self.close()
        self.info, self.total, self.records = dict(info), total, []
        self.show()

    def show(self) -> None:
        """Makes the outputs in the running cell, unless they are there. Does nothing outside a notebook."""
        if self._open or not in_notebook():
            return
        from IPython.display import display

        self._open = True
        self._figure = display({"text/plain": "The figure comes with the first step."}, raw=True, display_id=True)
        self._words = display({"text/plain": "No steps yet."}, raw=True, display_id=True)
        self._painter.start()
        # two threads: words stay up to date while a figure is drawn
        self._updaters = [
            _Updater(self._publish_words, 0.1 * self.share),
            _Updater(self._publish_figure, 0.9 * self.share),
        ]

    def __call__(self, record: dict) -> None:
        start = time.perf_counter()
        self.records.append(dict(record))
        if in_notebook():
            self.show()
            for updater in self._updaters:
                updater.notify()
        else:
            self._print()
        spent = time.perf_counter() - start
        self.step_seconds += spent
        self.slowest_step_s = max(self.slowest_step_s, spent)

    def close(self, **info: object) -> None:
        """The last words and frame, sharper; blocks until they are out. info: news of the run, e.g. its status."""
        self.info |= info
        if self._bar:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)
            self._bar = False
        if self._open:
            self._open = False
            try:
                for updater in self._updaters:
                    updater.finish()
            finally:
                self._painter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def runs(self) -> list[Run]:
        """What is drawn: the runs to compare with, and this one so far."""
        return [*self.compare, Run(Path(self.info.get("name", "run")), self.info, list(self.records), [])]

    @property
    def frames(self) -> int:
        return self._updaters[1].calls if self._updaters else 0

    @property
    def publish_seconds(self) -> float:
        return sum(updater.seconds for updater in self._updaters)

    def _print(self) -> None:
        """A line a step; on a terminal a bar under the last one, which the next step replaces."""
        line = progress_line(self.records, self.total)
        self._bar = bool(self.total) and sys.stderr.isatty()
        if self._bar:
            bar = progress_bar(self.records[-1]["step"], self.total)
            print(f"{CLEAR_LINE}{line}\n{bar}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _publish_words(self, last: bool) -> float:
        lines = [progress_line(self.records, self.total)] if self.records and not last else []
        lines.append(summary_text(self.runs))
        if self.problem:
            lines.append(f"The figure is drawn at the end only: {self.problem}")
        self._words.update({"text/plain": wrapped("\n".join(lines))}, raw=True)
        return 0.0

    def _publish_figure(self, last: bool) -> float:
        runs = self.runs
        frame = self._draw(runs, last)
        if frame is None:
            return 0.0
        data = {"image/png": frame.png, "text/plain": "Figure of the run; the same in words follows."}
        size = {"width": frame.width, "height": frame.height, "alt": summary_text(runs)}
        self._figure.update(data, raw=True, metadata={"image/png": size})
        self.draw_seconds += frame.seconds
        return NEIGHBOUR_COST * frame.seconds

    def _draw(self, runs: Sequence[Run], last: bool) -> Frame | None:
        """In the drawing process; in this one if that has failed, and then only the last frame."""
        if not self.problem:
            try:
                return self._painter.draw(runs, FINAL_DPI if last else LIVE_DPI)
            except PainterError as error:
                self.problem = str(error)
        return paint(runs, FINAL_DPI) if last else None


class RecordTail:
    """Reads a run that another process writes: `poll` gives the new records, and whether it had to start over.

    A resumed run replaces its file (records.py); the tail then reads it from the start.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = require_run(path) / "records.jsonl"
        self._inode, self._offset = None, 0

    def poll(self) -> tuple[bool, list[dict]]:
        if not self._path.exists():
            return False, []
        with open(self._path, "rb") as file:
            state = os.fstat(file.fileno())
            restarted = self._inode not in (None, state.st_ino) or state.st_size < self._offset
            if restarted:
                self._offset = 0
            self._inode = state.st_ino
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return restarted, [record for record in map(_record_of, whole.splitlines()) if record is not None]


def _record_of(line: bytes) -> dict | None:
    """The record in a line; None for what is none, which `Run.load` leaves out too and warns of."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("step"), int) else None


def batches(path: str | os.PathLike, pause_s: float = 0.5) -> Iterator[tuple[bool, list[dict]]]:
    """What `RecordTail.poll` gives, until the writer of the run has ended; at once if it has already."""
    tail = RecordTail(path)
    while True:
        alive = is_locked(path)  # asked before reading, so what was written before the end is read
        yield tail.poll()
        if not alive:
            return
        time.sleep(pause_s)


def follow(path: str | os.PathLike, view: LiveView | None = None, pause_s: float = 0.5) -> Run:
    """Shows a run that another process writes, from its first step until its writer ends; then returns it."""
    view, info = view or LiveView(), Run.load(path).info
    view.begin(info, info.get("steps"))
    try:
        for restarted, records in batches(path, pause_s):
            if restarted:  # resumed: what is still in the file stays, the steps after the checkpoint go
                kept = [record for record in view.records if record in records]
                view.records, records = kept, [record for record in records if record not in kept]
            for record in records:
                view(record)
    finally:
        view.close(status=Run.load(path).status)
    return Run.load(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's directory, e.g. runs/NAME")
    parser.add_argument("--figure", metavar="PNG", help="when the run has ended, also save its figure")
    parser.add_argument("--json", action="store_true", help="print each record as a line of JSON instead")


def run(args: argparse.Namespace) -> int:
    """`python -m kit watch runs/NAME`: a line a step until the run ends, then its summary."""
    if args.json:
        for _, records in batches(args.run):
            for record in records:
                print(json.dumps(record), flush=True)
        return 0
    watched = follow(args.run)
    print(summary_text(watched))
    if args.figure:
        Path(args.figure).write_bytes(base64.b64decode(paint([watched], FINAL_DPI).png))
    return 0
