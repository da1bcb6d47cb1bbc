# Two commands for a fresh clone: `make demo` and `make test`. `make` alone lists the rest.
# Everything runs in .venv, which is made once for each lane (GPU or CPU), clone and requirements file.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
PY := .venv/bin/python
ifndef LANE
LANE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
endif
REQUIREMENTS := $(if $(filter gpu,$(LANE)),requirements.txt,requirements-cpu.txt)

# The stamp names what .venv was made from: a content sum, not a time, so that switching branches installs nothing.
# The folder is part of it, because a venv does not survive being moved.
STAMP := .venv/ready-$(LANE)-$(shell { pwd; cat $(REQUIREMENTS); } | cksum | cut -d " " -f 1)

TESTS ?= tests notebooks
# Small models compute on one thread, so two processes share the work; each holds one engine at a time.
WORKERS ?= 2
PYTEST := $(PY) -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=900 -n $(WORKERS) --dist loadgroup
LAB_OPTIONS ?=
ROOT_OPTION := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help setup demo test lab pictures benchmark lint clean

help:
	@echo 'make setup      .venv with the pinned packages ($(LANE) lane here); the others do this first'
	@echo 'make demo       GRPO on the bundled model with vLLM: executed notebook, figures and record in runs/'
	@echo 'make test       all tests and notebooks; part of them: make test TESTS=tests/test_records.py'
	@echo 'make lab        JupyterLab on notebooks/'
	@echo 'make pictures   the pictures of the README, made again'
	@echo 'make benchmark  time and memory, by tests/benchmarks/'
	@echo 'make lint       ruff'
	@echo 'make clean      removes .venv and caches; runs/ stays'
	@echo 'Variables: PYTHON=python3.12, LANE=cpu or gpu, WORKERS=2 (test processes)'

setup: $(STAMP)
	@:

demo: setup
	@$(PY) -m kit demo --out "$$($(PY) -c 'from kit.records import free_path; print(free_path("runs/demo"))')"

test: setup
	@$(PYTEST) $(TESTS)

lab: setup
	@$(PY) -m jupyterlab $(ROOT_OPTION) --ServerApp.root_dir="$$PWD" --LabApp.default_url=/lab/tree/notebooks $(LAB_OPTIONS)

pictures: setup
	@$(PY) -m kit pictures

benchmark: setup
	@for script in tests/benchmarks/*.py; do echo "$$script"; $(PY) "$$script"; done

lint: setup
	@$(PY) -m ruff check kit tests notebooks && $(PY) -m ruff format --check kit tests notebooks

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis *.egg-info
	find kit tests notebooks -name __pycache__ -prune -exec rm -rf {} +

$(STAMP):
	@PYTHON="$(PYTHON)" .ci/setup $(LANE) $@
