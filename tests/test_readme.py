"""The README's figures are those of the measured files, and what it links to exists."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_gpu_tables_are_the_measured_ones():
    script = ROOT / "tests" / "benchmarks" / "gpu" / "table.py"
    rendered = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.strip()
    between = re.search(r"<!-- tests/benchmarks/gpu/table.py .*? -->\n(.*?)\n<!-- end -->", README, re.S).group(1)
    assert between == rendered


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
