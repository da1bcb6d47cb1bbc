"""The model card of a saved run: what it is, how to load it, how it was trained, what was measured."""

import json
import re

from kit.records import Run
from kit.report import final_figures
from kit.summary import number


def card(run: Run, merged_dtype: str | None, roundings: list) -> str:
    """README.md of a saved folder.

    Args:
        run: its settings, versions and figures are written down.
        merged_dtype: of a merged model; None for an adapter.
        roundings: `kit.saving.Rounding`s of a merged model.
    """
    name = run.info.get("train_settings", {}).get("model") or run.info.get("model", "an unknown model")
    parts = [
        _head(name, merged_dtype),
        f"# {run.name}\n",
        _what(run, name, merged_dtype),
        "## Load it\n",
        _load(merged_dtype),
    ]
    parts += ["## Measured while training\n", _table(final_figures(run).items())]
    summary = run.info.get("summary") or {}
    if summary:
        parts += ["## Evaluated\n", _table(summary.items())]
    if roundings:
        parts += ["## What merging and rounding cost\n", _roundings(roundings)]
    parts += ["## Settings\n", _table(_settings(run).items()), "## Versions and hardware\n"]
    hardware = {
        key: value for key, value in run.info.get("hardware", {}).items() if isinstance(value, (str, int, float))
    }
    parts.append(_table((run.info.get("versions", {}) | hardware).items()))
    return "\n".join(parts) + "\n"


def is_hub_name(name: str) -> bool:
    """Whether a model's name is one on the hub: not a folder, not the bundled one.

    >>> is_hub_name("Qwen/Qwen3-4B-Base"), is_hub_name("tiny"), is_hub_name("/data/model")
    (True, False, False)
    """
    return "/" in name and not name.startswith((".", "/", "~"))


def _head(name, merged_dtype):
    lines = ["library_name: " + ("transformers" if merged_dtype else "peft"), "pipeline_tag: text-generation"]
    if is_hub_name(name):
        lines.append(f"base_model: {name}")
    return "\n".join(["---", *lines, "tags: [grpo, trl, lora]", "---", ""])


def _what(run, name, merged_dtype):
    what = (
        f"The model merged in float32 and rounded once to {merged_dtype}" if merged_dtype else "A LoRA adapter (PEFT)"
    )
    steps = run.records[-1]["step"] if run.records else 0
    dtype = run.info.get("precision", {}).get("name", "an unknown dtype")
    task = run.info.get("task", "a task that the record does not name")
    return (
        f"{what}, trained from `{_short(name)}` with GRPO, {steps} steps on {_short(task)}: trainer and sampler in "
        f"{dtype}. Status of the run: {run.status}.\n"
    )


def _load(merged_dtype):
    if merged_dtype:
        code = [f'model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="{merged_dtype}")',
                f'# or: llm = vllm.LLM(FOLDER, dtype="{merged_dtype}")']  # fmt: skip
        first = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    else:
        code = ["model = AutoPeftModelForCausalLM.from_pretrained(FOLDER)"]
        first = "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
    return "\n".join(["```python", first, "", *code, "tokenizer = AutoTokenizer.from_pretrained(FOLDER)", "```", ""])


def _settings(run):
    settings = run.info.get("settings", {}) | run.info.get("train_settings", {})
    return {key: value for key, value in settings.items() if value not in (None, "")}


def _roundings(roundings):
    lines = [
        "| saved in | weights, relative | of the update | mean abs logprob difference [nats] |",
        "|---|---|---|---|",
    ]
    for row in roundings:
        logprob = "not measured" if row.logprob_abs is None else f"{row.logprob_abs:.2g}"
        lines.append(f"| {row.dtype} | {row.relative:.2g} | {row.lost:.2g} | {logprob} |")
    return "\n".join([*lines, ""])


def _table(items):
    lines = ["| | |", "|---|---|"]
    lines += [f"| {key} | {_word(value)} |" for key, value in items if value is not None]
    return "\n".join([*lines, ""])


def _word(value):
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_word(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_word, value))
    text = value if isinstance(value, str) else json.dumps(value)
    return _short(text).replace("|", "\\|").replace("\n", " ")


def _short(text):
    """Paths by their last part: a card is read on other machines.

    >>> _short("/data/me/sums.jsonl"), _short("answer,/home/me/mine.py:brevity=0.1"), _short("Qwen/Qwen3-4B-Base")
    ('sums.jsonl', 'answer,mine.py:brevity=0.1', 'Qwen/Qwen3-4B-Base')
    """
    return re.sub(r"(^|[\s,])[~.]*/(?:[^\s,]*/)?", r"\1", text.rstrip("/"))
