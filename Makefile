# `make demo` and `make test` do all the set-up on a fresh machine; `make help` lists the rest.

PYTHON ?= python3
PORT ?= 3000
VENV := .venv
PY := $(VENV)/bin/python
DEMO := runs/demo
# Exported, so that pip also uses it in the environments in which it builds packages.
export PIP_CONSTRAINT := $(abspath constraints.txt)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# OpenMP threads that spin while they wait are very slow on a machine that is busy with something else.
export OMP_WAIT_POLICY := PASSIVE
# With this variable set, every process would compile everything that it imports again.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = -m pip install --quiet --progress-bar off
# Compiled once here, so that servers that are not started by make are also fast to start.
COMPILE = -m compileall -q serving models training export tests

.PHONY: help demo demo-loop test check bench soak fuzz clean
.DELETE_ON_ERROR:

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(DEMO)/samples ## Learn, export and serve the default on port 3000 (PORT= changes it)
	@$(PY) -m serving.demo $(DEMO) --port $(PORT)

demo-loop: $(DEMO)/metrics.json ## Run the whole loop: 8s and 9s are unknown, get labels, are learned and served, without a pause
	@$(PY) -m export.demo_loop $(DEMO) --out runs/demo-loop --port $(PORT)

# Three processes keep two processors busy. More OpenMP threads in each would only slow them down.
test: export OMP_NUM_THREADS := 1
test: $(VENV)/dev $(VENV)/serving-only ## Run all checks and tests
	@mkdir -p runs
	@$(MAKE) check >runs/check.log 2>&1 & checks=$$!; \
	$(PY) -m pytest --numprocesses 3 --no-loadscope-reorder; failed=$$?; \
	wait $$checks || failed=1; cat runs/check.log; exit $$failed

check: $(VENV)/dev ## Lint, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(VENV)/bench ## Measure speed: ratios against baselines, in one run
	$(PY) -m pytest tests/benchmarks --benchmarks -s

soak: $(VENV)/dev ## Kill, restart and fill up everything for a long time; prints counts
	$(PY) -m pytest tests/soak --soak --ignore tests/soak/test_structures.py --ignore tests/soak/test_requests.py

fuzz: $(VENV)/dev ## Send hostile files and requests for a long time; prints counts
	$(PY) -m pytest tests/soak/test_structures.py tests/soak/test_requests.py --soak

clean: ## Remove environments, runs and caches
	rm -rf $(VENV) .venv-serving .venv-bench runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d: make PYTHON=python3.11" % v)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/train: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing (PyTorch is large: this takes a few minutes once)"
	$(PY) $(INSTALL) -e '.[train,photos,client]'
	@$(PY) $(COMPILE)
	@touch $@

$(VENV)/dev: $(VENV)/train
	$(PY) $(INSTALL) -e '.[train,photos,dev]'
	@touch $@

# Contestants that need httptools have an environment of their own, because httptools must not be installed beside our server.
$(VENV)/bench: $(VENV)/dev
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python $(INSTALL) -e '.[bench]'
	@touch $@

# Only the packages that a server needs. Tests check that they are enough.
$(VENV)/serving-only: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PYTHON) -m venv .venv-serving
	.venv-serving/bin/python $(INSTALL) -e .
	@touch $@

$(DEMO)/metrics.json: | $(VENV)/train
	$(PY) -m training.fit --out $(DEMO) $(if $(wildcard $(DEMO)/checkpoint*.safetensors),--resume)

$(DEMO)/bundle/manifest.json: $(DEMO)/metrics.json
	$(PY) -m export $(DEMO) --out $(DEMO)/bundle

$(DEMO)/samples: $(DEMO)/bundle/manifest.json
	$(PY) -m export.samples $(DEMO) --out $@
