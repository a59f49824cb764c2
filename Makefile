# `make test` is all a fresh machine needs: it has python3, make and a C compiler, the rest follows.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
comma := ,
EXTRAS := cpu,dev$(if $(HAS_GPU),$(comma)cuda)
STAMP := $(VENV)/.$(subst $(comma),+,$(EXTRAS))

PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint fmt check traces bench kernels gpu-check clean

help:  ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP)  ## a virtual environment in .venv with everything that work here needs

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV), and building ggml: some two minutes, more on a busy machine'
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

demo: setup  ## fetch a small model, serve it, show one streamed answer; ARGS='"your question"'
	$(BIN)/phaseloop demo $(ARGS)

test: setup  ## all tests; ARGS="tests/core -k seal" for some
	$(PYTEST) $(ARGS)

test-all: setup  ## and those that take an hour: whole grids, long random walks
	PHASELOOP_WALKS=5000 $(PYTEST) -m "grid or not grid" $(ARGS)

lint: setup  ## format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --project pyproject.toml

fmt: setup  ## put the format right, and what style can be fixed by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint test  ## what CI runs

traces: setup  ## record fixtures/traces again; the commit says which decisions changed
	PYTHON=$(BIN)/python fixtures/traces/record.sh

bench: setup  ## measure the budgets and write docs/performance.md; ARGS="--only trace" for some
	$(BIN)/python benchmarks/bench.py $(ARGS)

kernels: setup  ## compile all kernels for Volta and write their figures to docs/kernels.md
	$(BIN)/python benchmarks/kernels_page.py $(ARGS)
	$(BIN)/python benchmarks/fragments_drawing.py $(ARGS)

gpu-check:  ## check the kernels on this machine's GPU, and measure what they reach; no setup needed
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu_check.py $(ARGS)

clean:  ## remove what was made
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
