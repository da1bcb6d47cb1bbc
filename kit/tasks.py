"""A task: problems to train on, problems held out, and what counts as right. Four things, whatever it comes from.

    arithmetic                      the bundled sums
    reasoning-gym:FAMILY            procedural, offline, scored by the family (kit.task_gym)
    gsm8k, math, dapo               from the hub (kit.task_data)
    FILE or a name on the hub       any questions with answers; columns are named

Both parts are free of duplicates and of each other's questions. Which part a question belongs to is a matter of its
text, not of the seed, unless the data set has a test split of its own: what was held out of one run is held out of all.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from kit.errors import ArgumentError
from kit.templates import BUNDLED, Tags, rendered

HELD_OUT_PERCENT = 10  # of the questions of a data set without a test split
GYM_HELD_OUT_PERCENT = 20  # of a procedural family, which has as many as one asks for
GYM_ATTEMPTS = 3  # to make enough different questions, each with twice as many as the last


@dataclass(frozen=True)
class Task:
    """Problems and what counts as right.

    Args:
        train, held_out: `datasets.Dataset`s with columns `question` or `prompt`, `answer`, and whatever else `score` or
            a table by difficulty (`level`) needs; `solution`, if it is there, is worked out and serves a warm-up.
        score: score(answers, **columns) -> a number from 0 to 1 for each answer (text, or None where there was none);
            1 is right.
        tags: where in a completion the answer is.
        notes: what was dropped on the way here, in words.
    """

    name: str
    train: object
    held_out: object
    score: Callable[..., list[float]]
    tags: Tags
    notes: tuple[str, ...] = ()

    def correct_answer(self, completions: list[str], **columns) -> list[float]:
        """Reward in TRL's signature: the task's score of each completion's answer."""
        answers = [self.tags.answer_of(text) for text in completions]
        known = {name: values for name, values in columns.items() if name in self.train.column_names}
        return self.score(answers, **known)


def load_task(
    name: str = "arithmetic",
    *,
    size: int = 512,
    held_out: int = 256,
    seed: int = 0,
    tags: Tags | None = None,
    question: str = "",
    answer: str = "",
    solution: str = "",
    level: str = "",
) -> Task:
    """Load a task by name.

    Args:
        name: see the module.
        size: training problems, drawn with `seed`; fewer where there are not as many (a note says so).
        held_out: evaluation problems; 0 still keeps them out of training.
        tags: around working out and answer; default: `kit.templates.Tags()`, the bundled model's for arithmetic.
        question, answer, solution, level: columns of a file or hub data set.

    Raises:
        ArgumentError: missing columns, nothing but empty rows, a single question, an unknown family.
        kit.task_data.DataNotFound: no such file, or the hub refused.
    """
    from kit.task_gym import PREFIX

    if name == "arithmetic":
        return _arithmetic(size, held_out, seed)
    if name.startswith(PREFIX):
        return _from_gym(name, size, held_out, seed, tags or Tags())
    columns = {"question": question, "answer": answer, "solution": solution, "level": level}
    return _from_data(name, columns, size, held_out, seed, tags or Tags())


def with_prompts(task: Task, tokenizer, *, instructions: str = "", max_prompt_length: int) -> Task:
    """The task with a column `prompt`, rendered by the tokenizer's chat template, without prompts that are too long.

    Args:
        instructions: the system message; none where it is empty.
        max_prompt_length: longest prompt [tokens].

    Raises:
        ArgumentError: every prompt is longer than `max_prompt_length`.
    """
    parts, notes = {}, list(task.notes)
    for part in ("train", "held_out"):
        rows = getattr(task, part)
        if len(rows) == 0:
            parts[part] = rows
            continue
        if "prompt" not in rows.column_names:
            prompts = [rendered(tokenizer, text, instructions) for text in rows["question"]]
            rows = rows.add_column("prompt", prompts)
        lengths = [len(ids) for ids in tokenizer(list(rows["prompt"])).input_ids]
        short = [index for index, length in enumerate(lengths) if length <= max_prompt_length]
        if not short:
            raise ArgumentError(
                f"Every prompt of {task.name} is longer than max_prompt_length={max_prompt_length} tokens; the "
                f"shortest has {min(lengths)}, the longest {max(lengths)}. Give --max-prompt-length {max(lengths)}."
            )
        if len(short) < len(lengths):
            notes.append(f"{len(lengths) - len(short)} of {len(lengths)} {part.replace('_', '-')} prompts are longer "
                         f"than {max_prompt_length} tokens and left out")  # fmt: skip
        parts[part] = rows.select(short)
    return replace(task, **parts, notes=tuple(notes))


def worked(task: Task, prompt: str, solution: str, answer: str) -> str:
    """A worked solution as a completion of this prompt, in the task's tags.

    The opening tag is left out where the prompt ends with it already.
    """
    tags = task.tags
    opening = "" if prompt.rstrip().endswith(tags.work_start) else tags.work_start
    closing = f"{tags.answer_start}{answer}{tags.answer_end}"
    return f"{opening}{solution}{tags.work_end} {closing}" if solution else f" {closing}"


def normal(question: str) -> str:
    """A question as it is compared with others: without case and without differences in white space.

    >>> normal("What  is\\n2+2?") == normal("what is 2+2?")
    True
    """
    return " ".join(question.split()).casefold()


def is_held_out(question: str, percent: int) -> bool:
    """Whether a question belongs to the held-out part, by a hash of its text."""
    digest = hashlib.blake2b(normal(question).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % 100 < percent


def split(rows: list[dict], percent: int, test_rows: list[dict] | None = None) -> tuple[list[dict], list[dict], list]:
    """(training rows, held-out rows, notes): empty ones and duplicates dropped, no question in both parts.

    Args:
        rows: with `question` and `answer` as texts.
        percent: of them held out, by a hash of the question, unless `test_rows` are.

    Raises:
        ArgumentError: fewer than two different questions with an answer.
    """
    notes: list[str] = []
    rows = _clean(rows, "rows", notes)
    if test_rows is not None:
        test = _clean(test_rows, "test rows", notes)
        taken = {normal(row["question"]) for row in test}
        train = [row for row in rows if normal(row["question"]) not in taken]
        if len(train) < len(rows):
            notes.append(f"{len(rows) - len(train)} training questions are in the test split and left out")
    else:
        test = [row for row in rows if is_held_out(row["question"], percent)]
        if not test and len(rows) > 1:
            test = [min(rows, key=lambda row: hashlib.blake2b(normal(row["question"]).encode()).digest())]
        taken = {normal(row["question"]) for row in test}
        train = [row for row in rows if normal(row["question"]) not in taken]
    if not train or not test:
        raise ArgumentError(
            f"There are {len(rows)} different questions with an answer; expected at least 2, one to train on and one "
            f"to evaluate with. {'; '.join(notes)}".rstrip(" ;")
        )
    return train, test, notes


def _clean(rows, what, notes):
    whole = [row for row in rows if row["question"].strip() and row["answer"].strip()]
    if len(whole) < len(rows):
        notes.append(f"{len(rows) - len(whole)} of {len(rows)} {what} without a question or an answer left out")
    first = {}
    for row in whole:
        first.setdefault(normal(row["question"]), row)
    if len(first) < len(whole):
        notes.append(f"{len(whole) - len(first)} of {len(whole)} {what} repeat a question and are left out")
    return list(first.values())


def _drawn(train, test, size, held_out, seed, notes):
    """Training rows in an order given by the seed, and the first held-out rows; fewer where there are not as many."""
    from datasets import Dataset

    if len(train) < size:
        notes.append(f"{len(train)} training problems, {size} were asked for")
    if len(test) < held_out:
        notes.append(f"{len(test)} held-out problems, {held_out} were asked for")
    chosen = random.Random(seed).sample(train, min(size, len(train)))
    return Dataset.from_list(chosen), Dataset.from_list(test[:held_out])


def _arithmetic(size, held_out, seed):
    from kit import arithmetic

    def score(answers, answer, **columns):
        return arithmetic.correct_answer([f"</think>{text or ''}" for text in answers], answer)

    train = arithmetic.make_dataset("rl", size, seed)
    rng = random.Random(seed)
    train = train.add_column("solution", [_careful_work(prompt, rng) for prompt in train["prompt"]])
    test = arithmetic.make_dataset("test", max(held_out, 1), seed).select(range(held_out))
    return Task("arithmetic", train, test, score, BUNDLED)


def _careful_work(prompt, rng):
    from kit import arithmetic

    a, b = prompt.removeprefix("Q: ").partition("=")[0].split("+")
    text = arithmetic.completion_text(arithmetic.Problem(int(a), int(b)), rng, arithmetic.CAREFUL)
    return text.removeprefix("<think>").partition("</think>")[0]


def _from_gym(name, size, held_out, seed, tags):
    from kit import task_gym

    percent = GYM_HELD_OUT_PERCENT
    count = max(size * 100 // (100 - percent), held_out * 100 // percent) * 5 // 4 + 20
    for attempt in range(GYM_ATTEMPTS):  # a family repeats itself, one with few questions more and more
        dataset = task_gym.make(name, count, seed)
        train, test, notes = split(task_gym.rows(dataset), percent)
        if (len(train) >= size and len(test) >= held_out) or attempt == GYM_ATTEMPTS - 1:
            break
        count *= 2
    notes = [note for note in notes if "repeat" not in note]
    train, test = _drawn(train, test, size, held_out, seed, notes)
    return Task(name, train, test, task_gym.scorer(name, count, seed), tags, tuple(notes))


def _from_data(name, columns, size, held_out, seed, tags):
    from kit import task_data
    from kit.task_answers import same_answer

    source = task_data.source_of(name, **columns)
    rows = _rows(task_data.read(source, source.train), source)
    own_test = _rows(task_data.read(source, source.held_out), source) if source.held_out else None
    train, test, notes = split(rows, HELD_OUT_PERCENT, own_test)
    train, test = _drawn(train, test, size, held_out, seed, notes)

    def score(answers, answer, **columns):
        return [float(same_answer(wanted, given)) for wanted, given in zip(answer, answers, strict=True)]

    return Task(name, train, test, score, tags, tuple(notes))


def _rows(dataset, source):
    from kit import task_data

    meanings = {"question": source.question, "answer": source.answer}
    meanings |= {key: value for key in ("solution", "level") if (value := getattr(source, key))}
    columns = {meaning: task_data.column(dataset, name, meaning) for meaning, name in meanings.items()}
    columns["answer"] = [source.final(text) for text in columns["answer"]]
    if source.final is task_data.after_hashes and "solution" in columns:
        columns["solution"] = [task_data.without_calculator(text) for text in columns["solution"]]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
