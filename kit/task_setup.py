"""From a run's settings to what it trains on: task, prompts in the model's format, rewards. Nothing heavy is loaded.

Everything that can be wrong with data or rewards is said here, before an engine starts.
"""

import json
from dataclasses import dataclass

from kit.errors import ArgumentError
from kit.task_rewards import Rewards, parse
from kit.tasks import Task, load_task, with_prompts
from kit.templates import BUNDLED, PLAIN, Tags, set_template


@dataclass(frozen=True)
class Prepared:
    """A task with its prompts, its rewards, and the chat template of the prompts (None: they came as they are)."""

    task: Task
    rewards: Rewards
    chat_template: str | None
    notes: tuple[str, ...]


def prepare(settings, held_out: int | None = None) -> Prepared:
    """What a `kit.training.TrainSettings` asks for.

    Args:
        held_out: evaluation problems; default: the settings'.

    Raises:
        ArgumentError: missing columns, prompts that are all too long, unknown rewards.
        kit.task_data.DataNotFound, kit.loading.ModelNotFound.
    """
    tags = tags_of(settings)
    task = load_task(
        settings.task,
        size=settings.problems,
        held_out=settings.held_out if held_out is None else held_out,
        seed=settings.seed,
        tags=tags,
        question=settings.question,
        answer=settings.answer,
        solution=settings.solution,
        level=settings.level,
    )
    template, notes = None, []
    if "prompt" not in task.train.column_names:
        tokenizer = _tokenizer(settings.model)
        notes.append(f"Prompts use {set_template(tokenizer, tags, settings.template)}.")
        instructions = "" if settings.model == "tiny" else tags.instructions()
        task = with_prompts(task, tokenizer, instructions=instructions, max_prompt_length=settings.max_prompt_length)
        template = tokenizer.chat_template
    notes += [f"{settings.task}: {note}." for note in task.notes]
    rewards = parse(settings.rewards or default_rewards(settings.task), task, settings.max_completion_length)
    return Prepared(task, rewards, template, tuple(notes))


def check_size(prepared: Prepared, settings) -> None:
    """Refuse a task with fewer training problems than one step takes: TRL would end without a step, and no word."""
    found, needed = len(prepared.task.train), settings.completions // settings.group
    if found < needed:
        raise ArgumentError(
            f"{settings.task} has {found} training problems, and a step needs {needed} different ones (completions / "
            f"group). Lower --completions to {found * settings.group}, or give more problems."
        )


def tags_of(settings) -> Tags:
    """The tags that the settings name: `plain` for none, four separated by commas, or those that suit the model."""
    if settings.tags == "plain":
        return PLAIN
    if settings.tags:
        words = [word.strip() for word in settings.tags.split(",")]
        if len(words) != 4:
            raise ArgumentError(
                f"tags is {settings.tags!r}; expected 'plain', or four separated by commas: start and end of the "
                f"working out, start and end of the answer (an empty one is not used)."
            )
        return Tags(*words)
    return BUNDLED if settings.model == "tiny" else Tags()


def default_rewards(task: str) -> str:
    """The answer for the bundled sums; the answer and a little for the format elsewhere."""
    if task == "arithmetic":
        return "answer"
    return "answer=1,exact=0,format=0.1" if task.startswith("reasoning-gym:") else "answer=1,format=0.1"


def stop_strings(text: str) -> list[str]:
    r"""The stop strings that a setting names: one text, or a JSON list of them; `\n` is a line break.

    >>> stop_strings("\\n\\n"), stop_strings('["Q:", "\\n"]'), stop_strings("")
    (['\n\n'], ['Q:', '\n'], [])
    """
    if not text.startswith("["):
        return [text.replace("\\n", "\n")] if text else []
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(word, str) and word for word in found):
        raise ArgumentError(f"stop is {text!r}; expected a text, or a JSON list of texts.")
    return found


def _tokenizer(model):
    from transformers import AutoTokenizer

    from kit.loading import resolve

    return AutoTokenizer.from_pretrained(resolve(model))
