# `make demo` and `make test` do all the set-up on a fresh machine; `make help` lists the rest.

PYTHON ?= python3
PORT ?= 3000
VENV := .venv
PY := $(VENV)/bin/python
DEMO := runs/demo
SYSTEM := $(shell uname -s)
# Exported, so that pip also uses it in the environments in which it builds packages.
export PIP_CONSTRAINT := $(abspath constraints.txt)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# OpenMP threads that spin while they wait are very slow on a machine that is busy with something else.
export OMP_WAIT_POLICY := PASSIVE
# With this variable set, every process would compile everything that it imports again.
unexport PYTHONDONTWRITEBYTECODE
# pip's list of everything that is already there is left out; what it downloads and builds is shown, with sizes. A pip that fails
# is noticed by `pipefail`, which each of these recipes sets itself: make 3.81, that of macOS, knows no .SHELLFLAGS.
SHELL := bash
INSTALL = -m pip install --progress-bar off
SHOWN = | { grep -E --line-buffered '^ *(Downloading|Building|Installing|ERROR|error:)' || true; }
# Compiled once here, so that servers that are not started by make are also fast to start.
COMPILE = -m compileall -q serving models training export tests

# Only the wheels for Linux contain CUDA libraries.
define SMALLER
'import importlib.util as u, shutil; shutil.which("nvidia-smi") or u.find_spec("torch") or print("no GPU found: PyTorch for the CPU alone is much smaller and can be installed first, see docs/howto/install.md")'
endef

DIST := dist

.PHONY: help demo demo-loop demo-teach test test-long test-failed check bench compare soak fuzz audit sbom release clean
.DELETE_ON_ERROR:

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(DEMO)/samples ## Learn, export and serve the default on port 3000 (PORT= changes it)
	@$(PY) -m serving.demo $(DEMO) --port $(PORT)

demo-loop: $(DEMO)/metrics.json ## Run the whole loop: 8s and 9s are unknown, get labels, are learned and served, without a pause
	@$(PY) -m export.demo_loop $(DEMO) --out runs/demo-loop --port $(PORT)

demo-teach: $(VENV)/train ## Teach a running server two classes that it does not know, without a pause
	@$(PY) -m export.demo_teach --out runs/demo-teach --port $(PORT)

# Three processes keep two processors busy. More OpenMP threads in each would only slow them down.
test test-long test-failed: export OMP_NUM_THREADS := 1
PYTEST = $(PY) -m pytest --numprocesses 3 --no-loadscope-reorder

test: $(VENV)/dev $(VENV)/serving-only ## Run the checks and all tests but the long ones
	@mkdir -p runs
	@$(MAKE) check >runs/check.log 2>&1 & checks=$$!; \
	$(PYTEST) -m 'not long'; failed=$$?; \
	wait $$checks || failed=1; cat runs/check.log; exit $$failed

test-long: $(VENV)/dev $(VENV)/serving-only ## Run the long tests: the learned default, whole loops, kills, load and browsers
	$(PYTEST) -m long

test-failed: check ## Run the tests that failed last, one at a time
	$(PY) -m pytest -p no:xdist --last-failed --last-failed-no-failures none

check: $(VENV)/dev ## Lint, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(VENV)/bench ## Measure speed: ratios against baselines, in one run
	$(PY) -m pytest tests/benchmarks --benchmarks -s

compare: $(VENV)/compare ## Measure Avalanche's strategies on MNIST (DATA= has or gets it, UNKNOWN= has other images), or with DATASET=digits
	OMP_NUM_THREADS=1 PYTHONPATH=. .venv-compare/bin/python -m tests.benchmarks.alternatives $(if $(DATASET),--dataset $(DATASET)) \
	    $(if $(DATA),--data $(DATA)) $(if $(UNKNOWN),--unknown $(UNKNOWN))

# Counts are shown while a campaign runs, so that one that is stopped has some.
CAMPAIGN = OMP_NUM_THREADS=1 $(PY) -m pytest --soak -s -p no:xdist

soak: $(VENV)/dev ## Kill, restart and fill up everything for a long time; prints counts
	$(CAMPAIGN) tests/soak --ignore tests/soak/test_structures.py --ignore tests/soak/test_requests.py

fuzz: $(VENV)/dev ## Send hostile files and requests for a long time; prints counts
	$(CAMPAIGN) tests/soak/test_structures.py tests/soak/test_requests.py

audit: $(VENV)/audit ## Look up the pinned versions in a database of vulnerabilities (OSV= names a copy, for work without a network)
	$(if $(OSV),$(PY) .ci/audit.py $(OSV),.venv-audit/bin/pip-audit --no-deps --disable-pip --requirement constraints.txt)

sbom: $(VENV)/audit $(VENV)/serving-only $(VENV)/dev ## Write bills of materials and licences of a server and the image into docs/
	.venv-audit/bin/python .ci/sbom.py .venv-serving/bin/python $(PY)

release: $(VENV)/dev ## Build wheels, sources, bento and checksums into dist/ (DIST= changes it; DRY=1: even if the tree is not ready)
	$(PY) .ci/release.py --out $(DIST) $(if $(DRY),--dry-run)

clean: ## Remove environments, runs and caches
	rm -rf $(VENV) .venv-serving .venv-bench .venv-compare .venv-audit runs dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d: make PYTHON=python3.11" % v)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/train: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV): a few minutes once, mostly PyTorch$(if $(filter Linux,$(SYSTEM)), and its CUDA libraries)"
	@echo "After \"Installing collected packages\" pip unpacks$(if $(filter Linux,$(SYSTEM)), several GB) and prints nothing for a while."
	$(if $(filter Linux,$(SYSTEM)),@$(PY) -c $(SMALLER))
	set -o pipefail; $(PY) $(INSTALL) -e '.[train,photos,client]' $(SHOWN)
	@$(PY) $(COMPILE)
	@touch $@

$(VENV)/dev: $(VENV)/train
	set -o pipefail; $(PY) $(INSTALL) -e '.[train,photos,dev]' $(SHOWN)
	@touch $@

# Contestants that need httptools have an environment of their own, because httptools must not be installed beside our server.
$(VENV)/bench: $(VENV)/dev
	$(PYTHON) -m venv .venv-bench
	set -o pipefail; .venv-bench/bin/python $(INSTALL) -e '.[bench]' $(SHOWN)
	@touch $@

# An environment over ours, so that PyTorch is there once. Avalanche's wheel brings a package `tests`, which would hide ours.
$(VENV)/compare: $(VENV)/train
	$(PYTHON) -m venv .venv-compare
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >$$(echo .venv-compare/lib/python*/site-packages)/ours.pth
	set -o pipefail; .venv-compare/bin/python $(INSTALL) avalanche-lib==0.6.0 $(SHOWN)
	rm -rf .venv-compare/lib/python*/site-packages/tests
	@touch $@

# Not constrained: these tools check the constraints and are no part of what is shipped.
$(VENV)/audit: | $(VENV)/bin/python
	$(PYTHON) -m venv .venv-audit
	set -o pipefail; PIP_CONSTRAINT= .venv-audit/bin/python $(INSTALL) cyclonedx-bom pip-audit $(SHOWN)
	@touch $@

# Only the packages that a server needs. Tests check that they are enough.
$(VENV)/serving-only: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PYTHON) -m venv .venv-serving
	set -o pipefail; .venv-serving/bin/python $(INSTALL) -e . $(SHOWN)
	@touch $@

$(DEMO)/metrics.json: | $(VENV)/train
	$(PY) -m training.fit --out $(DEMO) $(if $(wildcard $(DEMO)/checkpoint*.safetensors),--resume)

$(DEMO)/bundle/manifest.json: $(DEMO)/metrics.json
	$(PY) -m export $(DEMO) --out $(DEMO)/bundle

$(DEMO)/samples: $(DEMO)/bundle/manifest.json
	$(PY) -m export.samples $(DEMO) --out $@
