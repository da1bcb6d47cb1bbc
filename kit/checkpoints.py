"""Checkpoints that are whole or not there, and an adapter folder that is never half-written."""

import os
import shutil
import sys
from pathlib import Path

from kit.errors import KitError

MARKER = "complete"


class NoCheckpoint(KitError, FileNotFoundError):
    """There is nothing to resume from."""


def step_of(checkpoint: str | Path) -> int:
    """The optimizer step after which a checkpoint was saved.

    Example:
        >>> step_of("runs/a/checkpoints/checkpoint-20")
        20
    """
    return int(Path(checkpoint).name.rpartition("-")[2])


def mark_complete(checkpoint: Path) -> None:
    """Say that everything in the folder is on the disk; a kill before this leaves a folder that is not used."""
    (checkpoint / MARKER).touch()


def last_complete(run_dir: Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    whole = [p.parent for p in (run_dir / "checkpoints").glob(f"checkpoint-*/{MARKER}")]
    return max(whole, key=step_of, default=None)


def find(run_dir: Path, resume: "bool | str | Path | None") -> str | None:
    """The checkpoint folder that a resume argument means; None for a new run. Half-written checkpoints are removed.

    Raises:
        NoCheckpoint: a resume was asked for, and there is no whole checkpoint.
    """
    if not resume:
        return None
    if resume is not True:
        if not (Path(resume) / MARKER).exists():
            raise NoCheckpoint(f"{resume} is no whole checkpoint. Those of this run: {_names(run_dir)}.")
        return str(resume)
    found = last_complete(run_dir)
    if found is None:
        raise NoCheckpoint(
            f"{run_dir} has no checkpoint to resume from: it stopped before the first one was saved. Start it anew "
            f"under another name, or lower save_steps."
        )
    for folder in (run_dir / "checkpoints").glob("checkpoint-*"):
        if not (folder / MARKER).exists():
            shutil.rmtree(folder)
    return str(found)


def save_adapter(model, folder: Path) -> None:
    """Write the adapter (PEFT format) beside the old one, then put it in its place."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh, selected_adapters=["default"])
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(fresh, folder)


def save_adapter_in_the_end(model, folder: Path) -> None:
    """`save_adapter` for a `finally`: where an error is on its way already, one of saving becomes a note to it."""
    under_way = sys.exc_info()[1]
    try:
        save_adapter(model, folder)
    except OSError as error:
        if under_way is None:
            raise
        under_way.add_note(f"The adapter could not be saved either: {error}")


def _names(run_dir):
    return ", ".join(sorted(p.parent.name for p in (run_dir / "checkpoints").glob(f"checkpoint-*/{MARKER}"))) or "none"
