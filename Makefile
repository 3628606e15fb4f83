# Each target creates .venv and installs by itself: a fresh machine needs python3 (3.11 to 3.13) and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/pronghorn demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# BENCH passes options on, for instance BENCH='--workloads llama-1b --path unsloth=/opt/peers'; what is there is not measured again.
bench: $(READY)
	$(BIN)/python -m benchmarks.ops --json benchmarks/results/ops.json
	$(BIN)/pronghorn bench --out benchmarks/results $(BENCH)
	$(BIN)/python -m benchmarks.table --write

# torch goes first and alone: its pin finds the CPU build on machines that offer one, before anything else asks for a range.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv build dist src/*.egg-info
