"""Questions and answers from a file, a folder or the hub, read by `datasets`; columns are named, never guessed.

A known name (`gsm8k`, `math`, `dapo`) says where on the hub a set is and what its columns mean; the same options
override that, and a local copy is read with `--task FILE --question ... --answer ...`. The perfectible set of arXiv
2510.26788 (MATH problems that a 1.5B model solves in 20 to 80 % of its tries) is a folder of
github.com/sail-sg/Precision-RL: clone it, then `--task Precision-RL/oat/data/train/math_1k5`.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kit.errors import ArgumentError, KitError

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


class DataNotFound(KitError, OSError):
    """No such file, or the hub did not give the data set."""


@dataclass(frozen=True)
class Source:
    """Where a data set is, and which of its columns mean what; `final` takes the answer from the answer column's text.

    `solution` is the column with worked solutions, for a warm-up; `level` the one by which results are broken down.
    """

    name: str
    config: str | None = None
    train: str = "train"
    held_out: str | None = None
    question: str = ""
    answer: str = ""
    solution: str = ""
    level: str = ""
    final: Callable[[str], str] = str.strip


def after_hashes(text: str) -> str:
    """GSM8K's final answer, without thousands separators.

    >>> after_hashes("48/2 = <<48/2=24>>24 clips in May.\\n#### 1,024")
    '1024'
    """
    return text.rpartition("####")[2].strip().replace(",", "")


def last_boxed(text: str) -> str:
    r"""What stands in the last `\boxed{...}`, braces balanced; the whole text if there is none.

    >>> last_boxed(r"so it is $\boxed{\frac{1}{2}}$.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return text.strip()
    depth, begin = 0, start + len("\\boxed")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin + 1 : position].strip()
    return text[begin + 1 :].strip()


def without_calculator(text: str) -> str:
    """A GSM8K solution without its calculator notes and without the final line.

    >>> without_calculator("48/2 = <<48/2=24>>24 clips.\\n#### 24")
    '48/2 = 24 clips.'
    """
    return re.sub(r"<<[^>]*>>", "", text.rpartition("####")[0]).strip()


KNOWN = {
    "gsm8k": Source("openai/gsm8k", "main", held_out="test", question="question", answer="answer", solution="answer",
                    final=after_hashes),
    "math": Source("DigitalLearningGmbH/MATH-lighteval", held_out="test", question="problem", answer="solution",
                   solution="solution", level="level", final=last_boxed),
    "dapo": Source("open-r1/DAPO-Math-17k-Processed", "en", question="prompt", answer="solution"),
}  # fmt: skip


def source_of(name: str, **columns: str) -> Source:
    """A known source, or one that only has the given columns; columns that are given win."""
    known = KNOWN.get(name.lower(), Source(name))
    given = {key: value for key, value in columns.items() if value}
    return Source(**(vars(known) | given)) if given else known


def read(source: Source, split: str):
    """The rows of one split as a `datasets.Dataset`.

    Raises:
        DataNotFound: no such file, nothing readable in it, or the hub refused or could not be reached.
    """
    path = Path(source.name).expanduser()
    if path.exists():
        return _local(path)
    if path.suffix in READERS or source.name.startswith((".", "/", "~")):
        raise DataNotFound(f"There is no file {source.name}. Give a {', '.join(READERS)} file, or a name on the hub.")
    return _from_hub(source, split)


def _local(path):
    import datasets
    from datasets import load_dataset, load_from_disk

    try:
        if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            found = load_from_disk(str(path))
            return found["train"] if isinstance(found, dict) else found
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in READERS)
        if not files or files[0].suffix not in READERS:
            raise DataNotFound(f"{path} holds no data that can be read; expected one of {', '.join(READERS)}.")
        bars = datasets.utils.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            return load_dataset(READERS[files[0].suffix], data_files=[str(f) for f in files], split="train")
        finally:
            if bars:
                datasets.enable_progress_bars()
    except DataNotFound:
        raise
    except Exception as error:  # each reader has errors of its own
        cause = error.__cause__ or error
        raise DataNotFound(
            f"{path} could not be read as {path.suffix or 'a data set'}: {type(cause).__name__}: "
            f"{str(cause).splitlines()[0] if str(cause) else 'no reason given'}"
        ) from error


def _from_hub(source, split):
    from datasets import load_dataset

    try:
        return load_dataset(source.name, source.config, split=split)
    except Exception as error:  # offline, gated, unknown, no such split: as many classes as reasons
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataNotFound(
            f"The data set {source.name!r} ({split}) could not be had from the Hugging Face hub{offline}: {reason} "
            f"Check the name and the connection (and HF_TOKEN for gated data), or give a local copy: --task FILE "
            f"--question COLUMN --answer COLUMN."
        ) from error


def column(dataset, name: str, meaning: str) -> list[str]:
    """A column as texts; a missing one is an error that lists those there are."""
    if not name:
        raise ArgumentError(
            f"Which column holds the {meaning}? Give --{meaning} COLUMN; there are {', '.join(dataset.column_names)}."
        )
    if name not in dataset.column_names:
        raise ArgumentError(
            f"There is no column {name!r} for the {meaning}; there are {', '.join(dataset.column_names)}."
        )
    return [_text(value) for value in dataset[name]]


def _text(value):
    """A cell as text: a number as it is written, a conversation's last message, nothing as the empty text."""
    if value is None:
        return ""
    if isinstance(value, list) and value and isinstance(value[-1], dict) and "content" in value[-1]:
        return str(value[-1]["content"])
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
