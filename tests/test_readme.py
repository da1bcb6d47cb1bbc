"""The README's figures are those of the measured files, and what it links to exists."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit.benchmark_tables import tables
from kit.errors import ArgumentError
from kit.hardware import lookup
from kit.memory import GIB, Settings, plan_memory
from kit.shapes import shape_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


RESULTS = ROOT / "tests" / "benchmarks" / "gpu" / "results"


def test_gpu_tables_are_the_measured_ones():
    command = [sys.executable, "-m", "kit", "report", str(RESULTS)]
    rendered = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    between = re.search(r"<!-- python -m kit report .*? -->\n(.*?)\n<!-- end -->", README, re.S).group(1)
    assert between == rendered


@pytest.mark.parametrize(
    "text", ["not json", "[]", "{}", '{"hardware": {"name": "x"}, "versions": {}, "settings": {}}']
)
def test_a_file_that_is_no_measurement_is_named(tmp_path, text):
    (tmp_path / "step_kit.json").write_text(text)
    with pytest.raises(ArgumentError, match=r"step_kit\.json is no measurement"):
        tables(tmp_path)


def test_the_plan_is_within_a_tenth_of_what_the_steps_took():
    """Peak of the allocator's reserve and what lies outside it, on the card with nothing else on it."""
    measured = json.loads((RESULTS / "memory_kit_float16.json").read_text())
    used = measured["settings"]
    settings = Settings(
        shape_of("Qwen3-4B-Base"), lookup("H200"), used["dtype"], rank=32, length=used["length"] + 64,
        group=used["group"], prompts=used["completions"] // used["group"], micro_batch=used["micro_batch"],
    )  # fmt: skip
    peak = measured["peak_reserved_gib"] + measured["outside_gib"]
    assert plan_memory(settings).total / GIB == pytest.approx(peak, rel=0.1)


def test_links_lead_somewhere():
    targets = [t for t in re.findall(r"\]\(([^)]+)\)", README) if not t.startswith("http")]
    assert len(targets) >= 4
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_every_command_of_the_readme_exists():
    from kit.cli import COMMANDS

    words = re.search(r"`python -m kit ([a-z| ]+)`, each", README).group(1)
    named = [word.strip() for word in words.split("|")]
    assert len(named) >= 7
    assert [word for word in named if word not in COMMANDS] == []
