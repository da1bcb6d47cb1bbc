"""A process of its own for judging answers, with a hard limit on the time and the memory of each.

Judges parse and compute what a model wrote: nested braces by the thousand, `9**9**9**9`, sums without end. In this
process such an answer could take the run with it; there it costs a restart of the helper and counts as not right.
"""

import atexit
import importlib
import json
import logging
import os
import select
import subprocess
import sys
import time
import weakref

LIMIT_S = 3.0
START_S = 120.0  # to import what judges
MEMORY_BYTES = 2 * 2**30
SAID = 3  # of the answers that were given up, how many are named


class Helper:
    """The process; started at the first question, again after one that it did not survive.

    `lost` counts the questions that were given up: too slow, too large, or the end of the process.

    Args:
        judge: `module:function`; called with `arguments` in the process, it returns what answers questions.
        arguments: JSON-able.
        limit_s: time for one question [s].
    """

    def __init__(self, judge: str, *arguments, limit_s: float = LIMIT_S):
        self.limit_s, self.lost = limit_s, 0
        self._command = [sys.executable, "-m", "kit.task_helper", judge, json.dumps(arguments)]
        self._process: subprocess.Popen | None = None
        self._owner = 0
        _all.add(self)

    def ask(self, *question) -> float | None:
        """The judge's number for a question (JSON-able); None when it could not tell in time."""
        process = self._started()
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            word = self._line(process, self.limit_s)
        except OSError:  # it died before, or while it read
            word = b""
        if not word.endswith(b"\n"):
            self.lost += 1
            self.close()
            if self.lost <= SAID:
                print(f"Note: an answer could not be judged within {self.limit_s:g} s and counts as not right: "
                      f"{str(question)[:100]}", file=sys.stderr)  # fmt: skip
            return None
        return float(word)

    def close(self) -> None:
        """End the process; the next question starts another."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _started(self):
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.close()
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip
            self._owner = os.getpid()
            self._line(self._process, START_S)
        return self._process

    def _line(self, process, limit_s):
        """One line of the process; what has come so far, if it does not come in time."""
        end, read = time.monotonic() + limit_s, b""
        while not read.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(process.stdout.fileno(), 4096) if ready else b""
            if not piece:
                return read
            read += piece
        return read


_all: "weakref.WeakSet[Helper]" = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """End every helper of this process."""
    for helper in list(_all):
        helper.close()


def serve(judge: str, arguments: list) -> None:
    """What the process does: a line in, a question; a line out, a number. A question that raises gets 0."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    module, _, name = judge.partition(":")
    answer = getattr(importlib.import_module(module), name)(*arguments)
    out, sys.stdout = sys.stdout, sys.stderr  # what a judge prints is no answer
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        try:
            number = float(answer(*json.loads(line)))
        except Exception:
            number = 0.0
        print(number, file=out, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
