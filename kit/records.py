"""The run record: what a run writes down, a line a step, and how it is read back.

    runs/NAME/run.json            settings, versions, hardware, precision, seed, status; replaced whole, never edited
    runs/NAME/records.jsonl       one JSON object a step, handed to the system before the step is called done
    runs/NAME/completions.jsonl   the sampled texts, with their rewards and advantages
    runs/NAME/adapter/ checkpoints/ figures/

Everything that is drawn or reported comes from here, so the files must survive what happens to runs: a kill, a full
disk, a resume, a second kernel that opens the same run. JSON is strict: a number that is not finite is written as null.
Not here: what the numbers mean (mismatch.py), how they look (plots.py). Imports the standard library only.
"""

import errno
import json
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from kit.durable import AppendFile, RunBusy, RunLock, is_locked, now, replace_file
from kit.errors import KitError

__all__ = [
    "RECORD_KEYS", "Run", "RunBusy", "RunDiskFull", "RunExists", "RunNotFound", "RunWriter",
    "free_path", "is_locked", "list_runs", "require_run",
]  # fmt: skip

FORMAT = 1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RECORD_KEYS = (
    "step", "loss", "reward", "reward_std", "accuracy", "grad_norm", "entropy", "completion_length", "kl",
    "mismatch/abs_mean", "mismatch/abs_p99", "mismatch/abs_max", "mismatch/k1", "mismatch/k3",
    "mismatch/prob_abs_max", "mismatch/seq_kl", "mismatch/seq_abs", "mismatch/ess", "mismatch/ratio_max",
    "mismatch/nonfinite", "scaler/scale", "scaler/skipped", "sync/seconds", "sync/probe_abs",
    "time/step", "time/rollout", "time/train", "speed/tokens_per_s", "memory/peak_gib",
)  # fmt: skip


class RunExists(KitError, FileExistsError):
    """The directory already holds a run."""


class RunNotFound(KitError, FileNotFoundError):
    """There is no run at this path."""


class RunDiskFull(KitError, OSError):
    """The disk, a quota or a file size limit is exhausted; nothing half-written is left behind."""


def plain(value: object, where: str = "value") -> object:
    """The same value in JSON's own types; numbers that are not finite become None. TypeError names what cannot be.

    >>> plain({"loss": float("nan"), "steps": (1, 2)})
    {'loss': None, 'steps': [1, 2]}
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):  # a scalar of numpy or torch, neither of which is imported here
        return plain(value.item(), where)
    raise TypeError(
        f"{where} is a {type(value).__name__}, which JSON has no form for: pass a number, a text or a list."
    )


def _line(value: dict, where: str) -> bytes:
    return json.dumps(plain(value, where), allow_nan=False).encode("ascii") + b"\n"


def _read_lines(path: Path) -> Iterator[tuple[int, bytes, dict | None]]:
    """(line number, raw line, object or None where the line is no whole JSON object). A missing file has no lines."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                value = json.loads(raw, parse_constant=lambda _: None)
            except ValueError:
                value = None
            whole = raw.endswith(b"\n") and isinstance(value, dict) and isinstance(value.get("step"), int)
            yield number, raw, value if whole else None


class _RunPaths:
    """Where things are in a run's directory. The three directories are made by whoever first writes there."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def adapter_dir(self) -> Path:
        return self.path / "adapter"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def figures_dir(self) -> Path:
        return self.path / "figures"


class RunWriter(_RunPaths):
    """Writes one run. Made by `create` or `resume`; use as a context manager, or call `close`.

    Leaving the context sets the status, if nobody has: "finished", "interrupted" (Ctrl-C) or "failed" (with the error).
    """

    def __init__(self, path: Path, lock: RunLock, info: dict, last_step: int | None):
        self.path, self.info = path, info
        self.last_step = last_step
        self._lock = lock
        self._records = AppendFile(path / "records.jsonl")
        self._completions = AppendFile(path / "completions.jsonl")

    @classmethod
    def create(cls, path: str | os.PathLike, info: dict) -> Self:
        """A new run. RunExists if the directory holds one, RunBusy if a live writer has it."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(path)
        try:
            if (path / "run.json").exists() or (path / "records.jsonl").exists():
                steps = sum(1 for _, _, value in _read_lines(path / "records.jsonl") if value)
                raise RunExists(f"{path} already holds a run ({steps} steps). Resume it from a checkpoint, remove the "
                                f"directory, or take a free name such as {free_path(path)}.")  # fmt: skip
            full = {"format": FORMAT, "name": path.name, "created": now(), "status": "running"} | info
            full = plain(full, "run.json")  # as a reader will find it: a live run compares equal to a loaded one
            _write_info(path, full)
            return cls(path, lock, full, last_step=None)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def resume(cls, path: str | os.PathLike, step: int) -> Self:
        """Continues after `step`, the checkpoint's: later lines are dropped, whole file at a time, the rest is kept."""
        path = Path(path)
        require_run(path)
        lock = RunLock(path)
        try:
            last = None
            for name in ("records.jsonl", "completions.jsonl"):
                lines = list(_read_lines(path / name))
                kept = [(raw, value["step"]) for _, raw, value in lines if value and value["step"] <= step]
                if len(kept) < len(lines):
                    replace_file(path / name, b"".join(raw for raw, _ in kept))
                if name == "records.jsonl" and kept:
                    last = kept[-1][1]
            if last != step and step > 0:
                warnings.warn(f"{path}: the checkpoint is of step {step}, the record ends at step {last or 0}; what is "
                              "between was lost before it reached the disk.", stacklevel=2)  # fmt: skip
            info = _read_info(path)
            info |= {"status": "running", "resumed_from": [*info.get("resumed_from", []), step]}
            _write_info(path, info)
            return cls(path, lock, info, last_step=last)
        except BaseException:
            lock.release()
            raise

    def write(self, record: dict) -> None:
        """One line: RECORD_KEYS in order (null where missing), then other keys. ValueError if the step is not new."""
        step = record["step"]
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"step {step} is already recorded in {self.path} (last: {self.last_step}).")
        ordered = {key: record.get(key) for key in RECORD_KEYS} | record
        self._append(self._records, _line(ordered, "record"), f"step {step}")
        self.last_step = step

    def write_completions(self, step: int, rows: list[dict]) -> None:
        """One line a row: the step, then the row's keys (`prompt`, `completion`, `rewards`, `advantage`, ...)."""
        data = b"".join(_line({"step": step} | row, f"completion {index}") for index, row in enumerate(rows))
        self._append(self._completions, data, f"the completions of step {step}")

    def update(self, **info: object) -> None:
        """Merges into run.json, which is replaced whole."""
        merged = self.info | plain(info, "run.json")
        try:
            _write_info(self.path, merged)
        except OSError as error:
            raise self._explain(error, f"run.json ({', '.join(info)})") from error
        self.info = merged

    def close(self) -> None:
        """Everything on the disk, the lock given back. The status stays as it is."""
        try:
            self._records.close()
            self._completions.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.info["status"] == "running":
                if error is None:
                    self.update(status="finished")
                elif isinstance(error, KeyboardInterrupt):
                    self.update(status="interrupted")
                else:
                    self.update(status="failed", error=f"{kind.__name__}: {error}")
        except RunDiskFull as full:
            if error is None:
                raise
            error.add_note(str(full))  # the first error is the one to report
        finally:
            self.close()

    def _append(self, file: AppendFile, data: bytes, what: str) -> None:
        try:
            file.append(data)
        except OSError as error:
            raise self._explain(error, f"{file.path.name} ({what})") from error

    def _explain(self, error: OSError, what: str) -> OSError:
        if error.errno not in FULL:
            return error
        safe = "nothing was recorded yet" if self.last_step is None else f"the record up to step {self.last_step}"
        reason = f"No room to write {what} in {self.path} ({os.strerror(error.errno)})."
        return RunDiskFull(error.errno, f"{reason} Safe: {safe}, and the checkpoints saved. Make room, then resume.")


@dataclass
class Run(_RunPaths):
    """A run as it was written, also while it is, or after a kill. `warnings` says what could not be read."""

    path: Path
    info: dict
    records: list[dict]
    completions: list[dict]
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """RunNotFound, with the runs there are, if the path holds none."""
        path = Path(path)
        require_run(path)
        found: list[str] = []
        records, completions = (_load_lines(path / name, found) for name in ("records.jsonl", "completions.jsonl"))
        return cls(path, _read_info(path), records, completions, found)

    @property
    def status(self) -> str:
        """As in run.json; "killed" if that says running but no live writer has the run."""
        status = self.info.get("status", "unknown")
        return "killed" if status == "running" and not is_locked(self.path) else status

    @property
    def keys(self) -> list[str]:
        """RECORD_KEYS, then whatever else the records hold, in the order of appearance."""
        return list(dict.fromkeys([*RECORD_KEYS, *(key for record in self.records for key in record)]))

    def column(self, key: str) -> list[float | None]:
        """The values of one key, a step each. KeyError, with the keys there are, if no record has it."""
        if key not in RECORD_KEYS and not any(key in record for record in self.records):
            raise KeyError(f"no {key!r} in {self.path}; there are {', '.join(self.keys)}")
        return [record.get(key) for record in self.records]


def _load_lines(path: Path, found: list[str]) -> list[dict]:
    values, bad = [], []
    for number, raw, value in _read_lines(path):
        if value is None:
            bad.append((number, raw))
        else:
            values.append(value)
    for number, raw in bad:
        what = "is not a JSON object with a step" if raw.endswith(b"\n") else "is half-written"
        found.append(f"{path.name}: line {number} {what}; left out")
    return values


def _read_info(path: Path) -> dict:
    try:
        return json.loads((path / "run.json").read_bytes())
    except ValueError as error:
        raise ValueError(f"{path / 'run.json'} is not JSON ({error}): restore it, or remove the run.") from error


def _write_info(path: Path, info: dict) -> None:
    text = json.dumps(plain(info, "run.json"), indent=2, allow_nan=False)
    replace_file(path / "run.json", text.encode("ascii") + b"\n")


def annotate(path: str | os.PathLike, **info: object) -> None:
    """Merges into run.json of a run that nobody writes any more, for example an evaluation made after it."""
    path = Path(path)
    require_run(path)
    lock = RunLock(path)
    try:
        _write_info(path, _read_info(path) | info)
    finally:
        lock.release()


def list_runs(root: str | os.PathLike = "runs") -> list[Path]:
    """The directories of `root` that hold a run, by name."""
    return sorted(file.parent for file in Path(root).glob("*/run.json"))


def free_path(path: str | os.PathLike) -> Path:
    """`path` itself if nothing is there, else `path-2`, `path-3`, ...: for a cell that is run again."""
    path, number, candidate = Path(path), 2, Path(path)
    while (candidate / "run.json").exists() or (candidate / "records.jsonl").exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def require_run(path: str | os.PathLike) -> Path:
    """`path` if it holds a run; otherwise RunNotFound, which lists the runs that are there."""
    path = Path(path)
    if (path / "run.json").exists():
        return path
    names = ", ".join(run.name for run in list_runs(path.parent)) or "none yet"
    hint = f" Did you mean {Path('runs') / path}?" if (Path("runs") / path / "run.json").exists() else ""
    raise RunNotFound(f"There is no run at {path}.{hint} Runs in {path.parent}: {names}.")
