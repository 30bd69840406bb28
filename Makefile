# Every target sets up .venv by itself. Needed: Python >= 3.11 with venv and pip, make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench mutants soak format wheel clean

help:
	@echo "make setup | demo | test | check | bench | mutants | soak | format | wheel | clean"

setup: $(READY)

# pip knows dependency groups (--group) since 25.1
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install 'pip>=25.1'
	$(PIP) install -c constraints.txt -e '.[transformers,plot]' --group dev torch==2.13.0
	touch $@

demo: $(READY)
	$(BIN)/pagoda demo

test: $(READY)
	$(BIN)/python -m pytest -q -n auto -m 'not soak'

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# make bench ARGS='--quick --json'
bench: $(READY)
	$(BIN)/python benchmarks/local.py $(ARGS)
	$(BIN)/python benchmarks/cache.py $(ARGS)
	$(BIN)/python benchmarks/blocks.py $(ARGS)

mutants: $(READY)
	$(BIN)/python tests/mutants/run.py $(ARGS)

soak: $(READY)
	$(BIN)/python tests/soak.py $(ARGS)
	$(BIN)/python -m pytest -q -m soak

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)
	$(BIN)/python -m build --no-isolation --wheel --outdir dist

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
