"""What the notebooks share: settings that the environment may change, the choice of a model, what suits that model, and
a run of it from start to end.

Nothing here is needed outside them. A notebook's first cells read: a value (a form field in Colab), then the widget
that starts from it; `make demo` and the tests run the same cells with other values (KIT_STEPS=5).
"""

import base64
import io
import os
import random
import textwrap
from dataclasses import asdict, replace
from pathlib import Path

from kit import arithmetic
from kit.errors import ArgumentError, KitError
from kit.precision import Precision
from kit.records import Run, RunExists, free_path, list_runs, require_run
from kit.training import TrainSettings


def setting(name: str, value):
    """The value written in the cell, unless the environment variable KIT_<name> gives another of the same type.

    >>> setting("NO_SUCH_SETTING", 40)
    40
    """
    given = os.environ.get(f"KIT_{name}")
    return value if given is None else type(value)(given)


def suited_settings(model: str, dtype: str, steps: int = 40, **changes) -> TrainSettings:
    """Settings of a run on the arithmetic task: the defaults suit the bundled model.

    For a larger one they are a start, not a tuned recipe; `plan_text` says what they need.
    """
    settings = TrainSettings(model=model, dtype=dtype, steps=steps)
    if not is_bundled(model):
        settings = replace(settings, learning_rate=2e-5, rank=32, alpha=64, micro_batch=8,
                           max_prompt_length=256, max_completion_length=160)  # fmt: skip
    return replace(settings, **changes)


def settings_text(settings: TrainSettings, width: int = 96) -> str:
    """The settings of a run as text, without those that are off (0 or empty)."""
    told = [f"{name} {value}" for name, value in asdict(settings).items() if value not in (0, "")]
    return textwrap.fill(", ".join(told).replace(" ", "\0").replace(",\0", ", "), width).replace("\0", " ")


def is_bundled(model: str) -> bool:
    """Whether the model has seen the task's format in its pre-training; others are shown it by examples."""
    return model == "tiny"


def problems(model: str, split: str, size: int, seed: int = 0):
    """`kit.arithmetic.make_dataset`, with two worked examples before each question for a model that needs them."""
    dataset = arithmetic.make_dataset(split, size, seed)
    if is_bundled(model):
        return dataset
    from datasets import Dataset

    rng = random.Random(seed)
    source = arithmetic.stream("pretrain", rng)
    worked = "".join(_worked_example(next(source), rng) for _ in range(2))
    return Dataset.from_dict(dataset.to_dict() | {"prompt": [worked + prompt for prompt in dataset["prompt"]]})


def stop_strings(model: str) -> list[str]:
    """What ends a completion besides the end token: a base model that was shown examples would go on with more."""
    return [] if is_bundled(model) else ["\n\n"]


def _worked_example(problem, rng):
    return arithmetic.prompt_text(problem) + arithmetic.completion_text(problem, rng, arithmetic.CAREFUL) + "\n\n"


def show(figure, words: str = "") -> None:
    """A figure in the notebook, as wide as it was made for, with the same in words under it (and for screen readers).

    The kit's figures keep away from pyplot, so that any thread can draw; a notebook then has to be handed the picture.
    """
    from IPython.display import display

    data, metadata = _picture(figure, words)
    display(data, raw=True, metadata=metadata)
    if words:
        print(words)


def _picture(figure, words):
    """(data, metadata) of a display: PNG at twice the size shown, alternative text."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=200, facecolor=figure.get_facecolor())
    width, height = (round(100 * inches) for inches in figure.get_size_inches())
    size = {"width": width, "height": height, "alt": words or "figure"}
    data = {"image/png": base64.b64encode(picture.getvalue()).decode("ascii"), "text/plain": "Figure."}
    return data, {"image/png": size}


def plan_text(model: str, dtype: str, **changes) -> str:
    """What the choice means before anything loads: the dtype with its reason, and memory part by part.

    changes: fields of `TrainSettings` that differ from those that suit the model. A choice that cannot work is answered
    with the reason, in words.
    """
    from kit.hardware import detect
    from kit.memory import Settings, plan_memory
    from kit.shapes import shape_of

    try:
        machine, precision = detect(), Precision.of(dtype)
        s = suited_settings(model, precision.name, **changes)
        length = s.max_prompt_length + s.max_completion_length
        plan = plan_memory(Settings(
            shape_of(model), machine, precision.name, rank=s.rank, length=length, group=s.group,
            prompts=s.completions // s.group, micro_batch=s.micro_batch or s.completions, shared=machine.kind == "cuda",
            cuda_graphs=machine.kind == "cuda", checkpointing=not is_bundled(model),
        ))  # fmt: skip
    except (KitError, ValueError, LookupError) as error:
        return f"This choice cannot work here: {error}"
    step = f"{s.completions // s.group} questions a step, {s.group} answers each, learning rate {s.learning_rate:g}"
    return f"dtype {precision}\n{step}\n{plan.table()}"


# What `choose` offers besides model and dtype: (field of TrainSettings, values). 0 stands for what suits the model.
NUMBERS = {
    "rank": ("rank", (4, 8, 16, 32, 64)),
    "length": ("max_completion_length", (48, 96, 160, 256, 512, 1024)),
    "group": ("group", (2, 4, 8, 16)),
    "learning_rate": ("learning_rate", (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3)),
}


class Choice:
    """The chosen `model`, `dtype` and `numbers` (by the names of NUMBERS): as given, until a control changes them."""

    def __init__(self, model: str, dtype: str, numbers: dict[str, float] | None = None):
        self.model, self.dtype, self.numbers = model, dtype, numbers or {}

    @property
    def changes(self) -> dict[str, float]:
        """The fields of `TrainSettings` that were chosen; an adapter's alpha is twice its rank."""
        chosen = {NUMBERS[name][0]: value for name, value in self.numbers.items() if value}
        return chosen | ({"alpha": 2 * chosen["rank"]} if "rank" in chosen else {})

    def settings(self, steps: int, **more) -> TrainSettings:
        """`suited_settings` for this choice."""
        return suited_settings(self.model, self.dtype, steps, **(self.changes | more))

    def plan(self) -> str:
        """`plan_text` for this choice."""
        return plan_text(self.model, self.dtype, **self.changes)

    def __repr__(self):
        return ", ".join(
            [f"model {self.model}", f"dtype {self.dtype}", *(f"{k} {v:g}" for k, v in self.changes.items())]
        )


def choose(model: str, dtype: str, **numbers: float) -> Choice:
    """A dropdown for model and dtype, and one for each of the numbers given, with the memory plan under them, which
    follows at once. Untouched, they mean what was given.

    numbers: `rank`, `length` [tokens of a completion], `group`, `learning_rate`; 0 for what suits the model. Without
    ipywidgets only the plan is shown.

    Raises:
        ArgumentError: another number than these.
    """
    from IPython.display import display

    if unknown := set(numbers) - set(NUMBERS):
        raise ArgumentError(f"There is no control for {', '.join(sorted(unknown))}; there are {', '.join(NUMBERS)}.")
    choice = Choice(model, dtype, dict(numbers))
    dropdowns = _dropdowns(choice)
    display(*_rows(dropdowns))
    shown = display({"text/plain": choice.plan()}, raw=True, display_id=True)

    def follow(change):
        name = next(name for name, dropdown in dropdowns.items() if dropdown is change["owner"])
        if name in NUMBERS:
            choice.numbers[name] = change["new"]
        else:
            setattr(choice, name, change["new"])
        shown.update({"text/plain": choice.plan()}, raw=True)

    for dropdown in dropdowns.values():
        dropdown.observe(follow, "value")
    return choice


def _dropdowns(choice):
    from kit.widgets import dtype_dropdown, model_dropdown, number_dropdown

    try:
        return {"model": model_dropdown(choice.model), "dtype": dtype_dropdown(choice.dtype)} | {
            name: number_dropdown(name.replace("_", " "), NUMBERS[name][1], value)
            for name, value in choice.numbers.items()
        }
    except ImportError as missing:
        print(missing)
        return {}


def _rows(dropdowns):
    """Model and dtype below each other, as wide as their labels; the numbers side by side."""
    numbers = [dropdown for name, dropdown in dropdowns.items() if name in NUMBERS]
    others = [dropdown for name, dropdown in dropdowns.items() if name not in NUMBERS]
    if not numbers:
        return others
    from ipywidgets import HBox

    return [*others, HBox(numbers, layout={"flex_flow": "row wrap"})]


def train_arm(
    settings: TrainSettings, out: str | Path, *, resume: bool = False, on_record=None, run_control=None
) -> Run:
    """`kit.training.train` on this lesson's task, for any model: one that was not pre-trained on it is shown examples.

    Raises:
        kit.records.RunExists: `out` holds a run and `resume` is false.
    """
    from kit import training

    if is_bundled(settings.model):
        return training.train(settings, out, resume=resume, on_record=on_record, run_control=run_control)
    if not resume and free_path(out) != Path(out):
        raise RunExists(f"{out} already holds a run. Take a free name: {free_path(out)}.")
    model, tokenizer = training.load(settings)
    from kit.trainer import GRPOTrainer

    arguments = training.training_arguments(settings, out)
    arguments.generation_kwargs = {"stop": stop_strings(settings.model)}
    arguments.gradient_checkpointing = True
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=arithmetic.correct_answer,
        args=arguments,
        train_dataset=problems(settings.model, "rl", settings.problems, settings.seed),
        on_record=on_record,
        run_info={"train_settings": asdict(settings), "task": "arithmetic"},
        run_control=run_control,
    )
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        trainer.sampler.close()
    return Run.load(out)


def go_on(out: str | Path, **shown) -> Run:
    """Continue a run of this lesson from its last checkpoint, in any kernel: the model is loaded again.

    shown: `on_record` and `run_control`, as in `train_arm`.

    Raises:
        kit.records.RunNotFound, kit.records.RunBusy, kit.checkpoints.NoCheckpoint: each says what to do.
    """
    from kit.training import settings_of

    return train_arm(settings_of(out), out, resume=True, **shown)


def overlay(names: str = "", root: str | Path = "runs") -> None:
    """A list of the runs in `root`; those chosen are drawn over each other, with what their settings differ in.

    names: the runs to begin with, e.g. "grpo pair-float16"; none means the two newest. Without ipywidgets these are
    shown.
    """
    from IPython.display import display

    found = [path.name for path in sorted(list_runs(root), key=lambda path: (path / "run.json").stat().st_mtime)]
    chosen = names.split() or found[-2:]
    for name in chosen:
        require_run(Path(root) / name)
    if len(found) < 2:
        print(f"There are {len(found)} runs in {root}; a comparison needs two.")
        return
    chooser = _chooser(found[::-1], chosen)
    if chooser:
        display(chooser)
    figure, words = (display({"text/plain": ""}, raw=True, display_id=True) for _ in range(2))

    def follow(change):
        _overlay(figure, words, [Path(root) / name for name in change["new"]])

    follow({"new": chosen})
    if chooser:
        chooser.observe(follow, "value")


def _chooser(names, chosen):
    from kit.widgets import run_list

    try:
        return run_list(names, chosen)
    except ImportError as missing:
        print(missing)
        return None


def _overlay(figure, words, paths):
    from kit.comparison import comparison_table
    from kit.plots import training_figure

    try:
        runs = [Run.load(path) for path in paths]
        text = comparison_table(runs)
        data, metadata = _picture(training_figure(runs), text)
    except ArgumentError as error:
        text, data, metadata = str(error), {"text/plain": ""}, {}
    figure.update(data, raw=True, metadata=metadata)
    words.update({"text/plain": text}, raw=True)
