"""Dropdowns, a completion browser and a control panel: thin ipywidgets shells over plain functions.

Each widget has a twin without one, and a cell works if nobody touches its widget: `dtype_dropdown().value` is the
default, `completions_text` prints what the browser shows, a `RunControl` is paused by a call. ipywidgets (7.7 or newer)
is imported by the functions that need it; figures never do (live.py).
"""

import html
from collections.abc import Callable, Sequence
from types import ModuleType

from kit.control import RunControl, serve_widgets
from kit.records import Run
from kit.summary import number

__all__ = [
    "RunControl", "completion_browser", "completions_html", "completions_text", "control_panel", "dtype_choices",
    "dtype_dropdown", "groups_of", "model_choices", "model_dropdown", "number_dropdown", "run_list", "serve_widgets",
    "steps_of", "telling_group",
]  # fmt: skip

MODELS = {
    "tiny": "tiny: bundled, 0.8 M parameters, two CPU cores are enough",
    "Qwen/Qwen3-0.6B-Base": "Qwen3-0.6B-Base",
    "Qwen/Qwen3-1.7B-Base": "Qwen3-1.7B-Base",
    "Qwen/Qwen3-4B-Base": "Qwen3-4B-Base: the size of the paper's question, a GPU of 24 GB or more",
}


def _ipywidgets() -> ModuleType:
    try:
        import ipywidgets
    except ImportError as error:
        raise ImportError(
            "Widgets need ipywidgets: pip install ipywidgets, then restart the kernel. Nothing depends on them: set "
            'dtype = "float16" by hand, print kit.widgets.completions_text(rows), call control.pause().'
        ) from error
    return ipywidgets


# ---- choices


def dtype_choices() -> list[tuple[str, str]]:
    """(label, value) of "auto" and each dtype; the labels say what this machine does with it."""
    from kit import hardware

    machine = hardware.detect()
    choices = [(f"auto: {hardware.recommended_dtype(machine)[0]} here", "auto")]
    native = hardware.dtypes_of(machine)
    without = "emulated here, slower" if machine.kind == "cpu" else "not on this GPU"
    return choices + [(name if name in native else f"{name} ({without})", name) for name in hardware.DTYPES]


def model_choices() -> list[tuple[str, str]]:
    """(label, value) of the models the notebooks use."""
    return [(label, name) for name, label in MODELS.items()]


def dtype_dropdown(default: str = "auto") -> object:
    """A dropdown over `dtype_choices`; `.value` goes to `from_pretrained(dtype=...)`. ValueError for other defaults."""
    return _dropdown("dtype", dtype_choices(), default)


def model_dropdown(default: str = "tiny") -> object:
    """A dropdown over `model_choices`; a default that is not among them (a folder, another name) is added."""
    choices = model_choices()
    return _dropdown("model", choices if default in MODELS else [*choices, (default, default)], default)


def _dropdown(description: str, choices: list[tuple[str, str]], default: str) -> object:
    if default not in [value for _, value in choices]:
        raise ValueError(f"{default!r} is no {description}; choose {', '.join(value for _, value in choices)}.")
    layout = {"width": "max-content", "min_width": "26em"}
    return _ipywidgets().Dropdown(options=choices, value=default, description=description, layout=layout)


def number_dropdown(description: str, values: Sequence[float], default: float = 0) -> object:
    """A dropdown over numbers, with 0 first: what suits the model. A default that is not among them is added."""
    values = sorted({*values, *([default] if default else [])})
    choices = [("suits the model", 0), *((f"{value:g}", value) for value in values)]
    style, layout = {"description_width": "max-content"}, {"width": "max-content", "margin": "2px 14px 2px 2px"}
    return _ipywidgets().Dropdown(options=choices, value=default, description=description, style=style, layout=layout)


def run_list(names: Sequence[str], chosen: Sequence[str]) -> object:
    """A list of runs of which any number can be chosen (with ctrl or shift); `.value` is a tuple of names."""
    return _ipywidgets().SelectMultiple(
        options=list(names),
        value=list(chosen),
        description="runs",
        rows=min(max(len(names), 3), 8),
        layout={"width": "30em"},
    )


# ---- completions


def steps_of(run: Run) -> list[int]:
    """The steps with recorded completions, in order."""
    return sorted({row["step"] for row in run.completions})


def groups_of(run: Run, step: int) -> dict[str, list[dict]]:
    """The completions of a step by their prompt: {prompt: rows}."""
    groups: dict[str, list[dict]] = {}
    for row in run.completions:
        if row["step"] == step:
            groups.setdefault(_text(row["prompt"]), []).append(row)
    return groups


def telling_group(run: Run) -> tuple[int, str]:
    """(step, prompt) of the last group that taught something, its advantages differ; the most telling one of its step.

    Where there is none, the first group of the last step. ValueError for a run without completions.
    """
    for step in reversed(steps_of(run)):
        groups = groups_of(run, step)
        prompt = max(groups, key=lambda text: len({row.get("advantage") for row in groups[text]}))
        if len({row.get("advantage") for row in groups[prompt]}) > 1:
            return step, prompt
    if not run.completions:
        raise ValueError(f"{run.path} has no recorded completions.")
    return steps_of(run)[-1], next(iter(groups_of(run, steps_of(run)[-1])))


def _text(value: str | list[dict]) -> str:
    """A prompt or completion as text; the messages of a conversation below each other."""
    return (
        value if isinstance(value, str) else "\n".join(f"{message['role']}: {message['content']}" for message in value)
    )


def _score(row: dict) -> str:
    rewards = ", ".join(f"{name} {number(value)}" for name, value in row["rewards"].items() if value is not None)
    return f"{rewards}; advantage {row['advantage']:+.2f}" if row.get("advantage") is not None else rewards


def _coloured(row: dict) -> list[tuple[str, float]]:
    """(token, |trainer - sampler| of its logprob [nats]) of a completion; [] where they were not recorded."""
    tokens, mismatch = row.get("tokens") or [], row.get("token_mismatch") or []
    return [(token, value or 0.0) for token, value in zip(tokens, mismatch, strict=True)] if tokens else []


def completions_text(rows: Sequence[dict]) -> str:
    """A group as text: completions with rewards, advantage, and the token on which trainer and sampler differ most."""
    blocks = []
    for number_of, row in enumerate(rows, start=1):
        worst = max(_coloured(row), key=lambda pair: pair[1], default=None)
        where = f"; largest mismatch {number(worst[1])} nats, at {worst[0]!r}" if worst else ""
        blocks.append(f"{number_of}. {_score(row)}{where}\n{_text(row['completion'])}")
    return "\n\n".join(blocks)


def completions_html(rows: Sequence[dict]) -> str:
    """The same as HTML: the more a token's logprob differs between trainer and sampler, the redder it is."""
    most = max((value for row in rows for _, value in _coloured(row)), default=0.0)
    parts = [_legend(most)] if most else []
    for number_of, row in enumerate(rows, start=1):
        pairs = _coloured(row)
        body = "".join(_token(*pair, most) for pair in pairs) if pairs else html.escape(_text(row["completion"]))
        parts.append(f"<div><b>{number_of}.</b> {html.escape(_score(row))}</div><pre style='{PRE}'>{body}</pre>")
    return f"<div style='{PAGE}'>{''.join(parts)}</div>"


# A page of its own colours: readable in a light and in a dark notebook.
PAGE = "background:#fff;color:#1f2328;padding:8px 12px;border-radius:4px;line-height:1.5"
PRE = "white-space:pre-wrap;background:#fff;color:#1f2328;margin:2px 0 12px;padding:0;border:0;line-height:1.6"


def _shade(share: float) -> str:
    return f"rgba(199,80,0,{0.6 * share:.3f})"  # vermilion; black on it keeps a contrast above 7


def _token(token: str, value: float, most: float) -> str:
    shown = html.escape(token.replace("\n", "\u21b5\n"))
    return f"<span title='{number(value)} nats' style='background:{_shade(value / most if most else 0)}'>{shown}</span>"


def _legend(most: float) -> str:
    bar = "display:inline-block;width:9em;height:.8em;border:1px solid #ccc;background:linear-gradient(90deg,#fff,"
    return f"<div>|trainer - sampler| logprob: 0 <span style='{bar}{_shade(1)})'></span> {number(most)} nats</div>"


def completion_browser(run: Run) -> object:
    """A slider over the steps, a dropdown over the prompts, and the group's completions (`completions_html`).

    It begins with `telling_group`.
    """
    widgets, steps = _ipywidgets(), steps_of(run)
    if not steps:
        return widgets.HTML(f"<p>{html.escape(run.name)} has no recorded completions.</p>")
    first, telling = telling_group(run)
    step = widgets.SelectionSlider(options=steps, value=first, description="step", continuous_update=False)
    prompt = widgets.Dropdown(description="prompt", layout={"width": "40em"})
    page = widgets.HTML()

    def show_step(_: object = None) -> None:
        groups = groups_of(run, step.value)
        prompt.options = [(f"{place}. {_one_line(text)}", text) for place, text in enumerate(groups, start=1)]
        prompt.value = next(iter(groups))

    def show_group(_: object = None) -> None:
        rows = groups_of(run, step.value).get(prompt.value, [])
        asked = f"<div style='{PAGE}'><pre style='{PRE}'>{html.escape(prompt.value or '')}</pre></div>"
        page.value = asked + completions_html(rows)

    step.observe(show_step, "value")
    step.observe(show_group, "value")
    prompt.observe(show_group, "value")
    show_step()
    prompt.value = telling
    show_group()
    return widgets.VBox([widgets.HBox([step, prompt]), page])


def _one_line(text: str, length: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "\u2026"


# ---- control

STATES = {
    "ready": "ready",
    "running": "running",
    "paused": "paused before the next step",
    "stopping": "stopping after this step",
    "ended": "ended",
    "failed": "failed",
}


def control_panel(control: RunControl, start: Callable[[], object] | None = None) -> object:
    """Buttons for a run: pause or resume, stop and save; with `start`, one that starts it in the background.

    A run that was started by the button has no cell to draw in: call its view's `show` in the cell of the buttons.
    The buttons act between two steps. While a cell trains, they are served by `RunControl.check` (control.py).
    """
    widgets = _ipywidgets()
    begin = widgets.Button(description="Start", button_style="success", icon="play")
    pause = widgets.Button(description="Pause", icon="pause")
    stop = widgets.Button(description="Stop and save", button_style="warning", icon="stop")
    label = widgets.Label()

    def show(state: str) -> None:
        pause.description, pause.icon = ("Resume", "play") if state == "paused" else ("Pause", "pause")
        pause.disabled = stop.disabled = state in ("stopping", "ended", "failed")
        begin.disabled = state not in ("ready", "failed")
        label.value = STATES[state] + (f": {control.error}" if state == "failed" else "")

    begin.on_click(lambda _: control.start(start))
    pause.on_click(lambda _: control.resume() if control.state == "paused" else control.pause())
    stop.on_click(lambda _: control.stop())
    control.listen(show)
    show(control.state)
    return widgets.HBox([*([begin] if start else []), pause, stop, label])
