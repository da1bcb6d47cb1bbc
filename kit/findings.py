"""One finding about a machine, and versions that compare as versions do."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from kit.errors import ArgumentError

LEVELS = ("ok", "warn", "error")


@dataclass(frozen=True)
class Finding:
    """One thing found out about a machine: the fact, what follows from it, what to do about it.

    `level` is "ok", "warn" or "error". `sources` are addresses where the fact can be checked.
    """

    level: str
    topic: str
    fact: str
    consequence: str = ""
    action: str = ""
    sources: tuple[str, ...] = ()

    def __post_init__(self):
        if self.level not in LEVELS:
            raise ArgumentError(f"a finding's level is one of {LEVELS}, not {self.level!r}")


def parse_version(version: str) -> Version:
    """A version that compares as versions do; an ArgumentError says what one looks like.

    >>> parse_version("0.10.2") < parse_version("0.11.0")
    True
    """
    try:
        return Version(str(version).strip())
    except InvalidVersion as error:
        raise ArgumentError(f"{version!r} is not a version; expected something like '0.11.0'") from error
