# Each target creates .venv and installs by itself: a fresh machine needs python3 (3.11 to 3.13) and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Empty is unset: some containers set it, and every process that a test starts would compile what it imports again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test studio-test cluster-test lint suite every-case dropin-cases gpu-test bench clean fuzz

demo: $(READY)
	$(BIN)/pronghorn demo

# mypy takes 40 s on one core, so it runs beside the tests.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 lint suite

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# Without a GPU even where there is one, so that it says the same on every machine; what needs one is in gpu-test.
suite: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n 2 --dist worksteal

# The studio in Chromium. Sets itself up (Debian's chromium, selenium, axe-core), and says why where that cannot be.
studio-test: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python tests/studio/in_a_browser.py

# A run under Slurm on this machine, and files of launch read by who defines them. Sets itself up (Debian's slurm-wlm and munge;
# kubeflow-trainer-api, skypilot in an environment of their own), and says why where that cannot be.
cluster-test: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python tests/clusters/with_publishers.py
	CUDA_VISIBLE_DEVICES= $(BIN)/python tests/clusters/with_slurm.py

# Needs a GPU machine. A change to kernels/, model/, memory/ or train/ ends with its result, benchmarks/results/gpu-test.json.
gpu-test: $(READY)
	$(BIN)/python tests/gpu_gate.py

# The suite, with all cases that tests/tables.py keeps for later.
every-case: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n 2 --dist worksteal --every-case

# Every use of other people's trainers with every kind of model beside stock libraries (10 minutes on one core); the suite has a part.
dropin-cases: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest --every-case tests/dropin/test_trainer_uses.py tests/dropin/test_trl_cases.py tests/scripts/test_public_scripts.py tests/scripts/test_other_scripts.py

# Damaged caches, data files, recipes and model folders, 2,000 of each (20 minutes on one core); FUZZ passes options on, for
# instance FUZZ='--only cache_bits'.
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --count 2000 $(FUZZ)

# BENCH passes options on, for instance BENCH='--workloads llama-1b --path unsloth=/opt/peers'; what is there is not measured again.
bench: $(READY)
	$(BIN)/python -m benchmarks.ops --json benchmarks/results/ops.json
	$(BIN)/python -m benchmarks.bench --out benchmarks/results $(BENCH)
	$(BIN)/python -m benchmarks.table --write

# A new pip first: the 23.2 that comes with Python 3.11 needs 55 s of CPU time for these packages, 26.3 needs 29. torch goes
# before the others and alone: its pin finds the CPU build on machines that offer one, before anything else asks for a range.
# What is installed is compiled afterwards, on all cores (62 s of CPU time) and without its tests, of which some do not compile.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a few minutes the first time)"
	$(PIP) --upgrade pip
	$(PIP) --no-compile torch
	$(PIP) --no-compile -e '.[dev]'
	-$(BIN)/python -m compileall -q -j 0 -x '/(tests|testing)/' .venv/lib
	touch $(READY)

clean:
	rm -rf .venv build dist src/*.egg-info
