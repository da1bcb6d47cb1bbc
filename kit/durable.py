"""Files that survive what happens to runs: whole lines, whole replacements, one writer at a time.

The parts under records.py; nothing here knows what a record is. Imports the standard library only.
"""

import fcntl
import json
import os
import socket
import time
import warnings
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from kit.errors import KitError

SYNC_EVERY_S = 10.0  # a kill loses nothing; a power cut may lose this much


class RunBusy(KitError, RuntimeError):
    """Another writer has the run open."""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def replace_file(path: Path, data: bytes) -> None:
    """Puts data at path whole or not at all, also when the machine stops in between."""
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


class AppendFile:
    """A file that grows by whole lines: a write that cannot finish is taken back.

    Unbuffered: what was appended is with the system, and outlives kill -9.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._synced = time.monotonic()

    def append(self, data: bytes) -> None:
        start = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:  # KeyboardInterrupt included
            if os.fstat(self._file.fileno()).st_size > start:
                os.ftruncate(self._file.fileno(), start)
            raise
        if time.monotonic() - self._synced > SYNC_EVERY_S:
            self.sync()

    def sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()


class RunLock:
    """One writer a run. The system drops an flock when its process ends, so no lock is ever stale, not after kill -9.

    A forked child would keep the lock alive after its parent died, so it closes its copy.
    """

    held: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self, directory: Path):
        self.path = directory / ".lock"
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        try:
            self._take(directory)
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now()}).encode())
        RunLock.held.add(self)

    def _take(self, directory: Path) -> None:
        for attempt in range(6):  # a reader that asks `is_locked` holds it for a moment
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if attempt < 5:
                    time.sleep(0.02)
            except OSError as error:  # e.g. ENOSYS: a Lustre mount without flock
                warnings.warn(f"{directory} is on a file system without locks ({error}): "
                              "nothing stops a second writer there.", stacklevel=4)  # fmt: skip
                return None
        raise RunBusy(
            f"{directory} is being written by {self._holder()}. Wait for it, stop it, or choose another name."
        )

    def _holder(self) -> str:
        self._file.seek(0)
        try:
            owner = json.loads(self._file.read())
        except ValueError:  # taken a moment ago, not signed yet
            return "another process"
        if owner["pid"] == os.getpid() and owner["host"] == socket.gethostname():
            return f"this very process (since {owner['since']}): close the earlier trainer or writer first"
        return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"

    def release(self) -> None:
        self._file.close()
        RunLock.held.discard(self)


def _close_inherited_locks() -> None:
    for lock in list(RunLock.held):
        lock.release()


os.register_at_fork(after_in_child=_close_inherited_locks)


def is_locked(path: str | os.PathLike) -> bool:
    """Whether a live writer has the run open. False on a file system without locks."""
    try:
        with open(Path(path) / ".lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or a file system without locks
        return False
    return False
