"""What the notebooks share: settings that the environment may change, the choice of a model, what suits that model.

Nothing here is needed outside them. A notebook's first cells read: a value (a form field in Colab), then the widget
that starts from it; `make demo` and the tests run the same cells with other values (KIT_STEPS=5).
"""

import base64
import io
import os
import random
from dataclasses import replace

from kit import arithmetic
from kit.errors import KitError
from kit.precision import Precision
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

    picture = io.BytesIO()
    figure.savefig(picture, dpi=200, facecolor=figure.get_facecolor())
    width, height = (round(100 * inches) for inches in figure.get_size_inches())
    size = {"width": width, "height": height, "alt": words or "figure"}
    data = {"image/png": base64.b64encode(picture.getvalue()).decode("ascii"), "text/plain": "Figure."}
    display(data, raw=True, metadata={"image/png": size})
    if words:
        print(words)


def plan_text(model: str, dtype: str) -> str:
    """What the choice means before anything loads: the dtype with its reason, and memory part by part [GiB].

    A choice that cannot work is answered with the reason, in words.
    """
    from kit.hardware import detect
    from kit.memory import Settings, plan_memory
    from kit.shapes import shape_of

    try:
        machine, precision = detect(), Precision.of(dtype)
        s = suited_settings(model, precision.name)
        length = s.max_prompt_length + s.max_completion_length
        plan = plan_memory(Settings(
            shape_of(model), machine, precision.name, rank=s.rank, length=length, group=s.group,
            prompts=s.completions // s.group, micro_batch=s.micro_batch or s.completions, shared=machine.kind == "cuda",
            cuda_graphs=machine.kind == "cuda", checkpointing=not is_bundled(model),
        ))  # fmt: skip
    except (KitError, ValueError, LookupError) as error:
        return f"This choice cannot work here: {error}"
    return f"dtype {precision}\n{plan.table()}"


class Choice:
    """The chosen `model` and `dtype`: as given, until a dropdown changes them."""

    def __init__(self, model: str, dtype: str):
        self.model, self.dtype = model, dtype

    def __repr__(self):
        return f"model {self.model}, dtype {self.dtype}"


def choose(model: str, dtype: str) -> Choice:
    """Two dropdowns with the memory plan under them, which follows at once. Untouched, they mean what was given.

    Without ipywidgets only the plan is shown.
    """
    from IPython.display import display

    choice = Choice(model, dtype)
    dropdowns = _dropdowns(choice)
    display(*dropdowns.values())
    shown = display({"text/plain": plan_text(model, dtype)}, raw=True, display_id=True)

    def follow(change):
        name = next(name for name, dropdown in dropdowns.items() if dropdown is change["owner"])
        setattr(choice, name, change["new"])
        shown.update({"text/plain": plan_text(choice.model, choice.dtype)}, raw=True)

    for dropdown in dropdowns.values():
        dropdown.observe(follow, "value")
    return choice


def _dropdowns(choice):
    from kit.widgets import dtype_dropdown, model_dropdown

    try:
        return {"model": model_dropdown(choice.model), "dtype": dtype_dropdown(choice.dtype)}
    except ImportError as missing:
        print(missing)
        return {}
