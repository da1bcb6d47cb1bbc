"""Draws figures in a process of its own, so that drawing never holds up a training step.

A figure of six panels takes 0.2 s or more. In the training thread that is a delay; in a second thread it still is one,
because matplotlib is Python and holds the interpreter lock. So a child process draws, at the lowest priority, and is
told what to draw as a line of JSON. It ends when its standard input closes, also when the parent is killed.
"""

import base64
import io
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kit.records import Run, plain
from kit.summary import panels

TIMEOUT_S = 120.0  # at the lowest priority on a busy machine a frame can take tens of seconds


class PainterError(RuntimeError):
    """The drawing process failed, with its reason."""


@dataclass(frozen=True)
class Frame:
    """A drawn figure: PNG in base64, size on the page [pixels], processor time of drawing it [s]."""

    png: str
    width: int
    height: int
    seconds: float


def paint(runs: Sequence[Run], dpi: int) -> Frame:
    """Draws `plots.training_figure` in this process. The size on the page is that of 100 dots an inch."""
    from kit.plots import training_figure

    start = time.process_time()
    figure = training_figure(runs, dpi=dpi)
    buffer = io.BytesIO()
    figure.canvas.print_png(buffer)
    width, height = figure.get_size_inches()
    png = base64.b64encode(buffer.getvalue()).decode("ascii")
    return Frame(png, round(100 * width), round(100 * height), time.process_time() - start)


class Painter:
    """The drawing process. Started by the first `draw`, or earlier by `start`, which does not wait for it."""

    def __init__(self):
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        if self._process is not None:
            return
        path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kit.painter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what goes wrong comes back as a reply
            process_group=0,  # Ctrl-C, or an interrupted cell, is not meant for it
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"},
        )

    def draw(self, runs: Sequence[Run], dpi: int) -> Frame:
        """Blocks until the frame is there, without the interpreter lock. PainterError after TIMEOUT_S or on failure."""
        self.start()
        try:
            self._process.stdin.write(_request(runs, dpi))
            self._process.stdin.flush()
            reply = json.loads(self._read_line())
        except (OSError, ValueError) as error:  # a broken pipe, or an end in the middle of a reply
            self.close()
            raise PainterError(f"the drawing process stopped ({error})") from error
        if "error" in reply:
            raise PainterError(reply["error"])
        return Frame(**reply)

    def _read_line(self) -> bytes:
        descriptor, deadline, parts = self._process.stdout.fileno(), time.monotonic() + TIMEOUT_S, []
        while not (parts and parts[-1].endswith(b"\n")):
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no figure within {TIMEOUT_S:.0f} s")
            parts.append(os.read(descriptor, 1 << 16))
            if not parts[-1]:
                raise OSError("it closed its output")
        return b"".join(parts)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


def _request(runs: Sequence[Run], dpi: int) -> bytes:
    keys = {"step", "scaler/skipped", *(panel.key for panel in panels(runs))}  # a tenth of what a record holds
    told = [
        {
            "path": str(run.path),
            "info": run.info,
            "records": [{key: value for key, value in record.items() if key in keys} for record in run.records],
            "completions": [],
        }
        for run in runs
    ]
    return json.dumps(plain({"runs": told, "dpi": dpi})).encode("ascii") + b"\n"


def main() -> None:
    """The child: a request a line on standard input, a reply a line on standard output."""
    os.nice(19)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that an import prints may get between the replies
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            runs = [Run(**(run | {"path": Path(run["path"])})) for run in request["runs"]]
            reply = vars(paint(runs, request["dpi"]))
        except Exception:
            reply = {"error": traceback.format_exc(limit=-2)}
        replies.write(json.dumps(reply).encode("ascii") + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
