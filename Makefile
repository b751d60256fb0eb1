# One entry point for people and for CI. Everything installs into .venv; nothing needs root except test-system.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS := tests/e2e tests/storage

.PHONY: help install demo test test-rooms test-jobs test-system bench soak check docs format clean
help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# torch by itself first: the resolver of all the rest then finds it there and can choose no other.
install: $(STAMP) ## create .venv (or VENV=...) and install the project with its development tools
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), this takes a few minutes"
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP) ## train a small model on 2 ranks, merge what they wrote, print how they compare
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python launch/demo.py

test: test-rooms test-jobs ## every test that needs no root and no apt

# Two halves, so that "make -j2 -Otarget test" lets one compute while the other waits for processes and stores.
test-rooms: $(STAMP) ## the half of "test" that looks at rooms by themselves, on ranks too, and at the merge
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -m "not system" $(JOBS:%=--ignore=%)

test-jobs: $(STAMP) ## the half of "test" that runs whole jobs and stores
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -m "not system" $(JOBS)

# -P keeps the scripts' own folder, where a file is called profile.py, off the import path.
bench: $(STAMP) ## tables of what measuring costs, as ratios; nothing in them is asserted
	set -e; for script in $(filter-out tests/benchmarks/soak.py,$(wildcard tests/benchmarks/*.py)); do OMP_NUM_THREADS=1 $(BIN)/python -P "$$script"; done

soak: $(STAMP) ## ten minutes of training against a store that keeps failing; every row has to arrive once
	OMP_NUM_THREADS=1 $(BIN)/python -P tests/benchmarks/soak.py

test-system: $(STAMP) ## the tests that need root or a browser: a small disk that is really full, a report in Chromium
	@if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver fonts-dejavu-core; fi
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -m system

check: $(STAMP) ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

docs: $(STAMP) ## the documentation in docs/_build/html, every warning an error, and its doctests
	$(BIN)/sphinx-build -nWq -d docs/_build/doctrees docs docs/_build/html
	$(BIN)/sphinx-build -nWq -d docs/_build/doctrees -b doctest docs docs/_build/doctest

format: $(STAMP) ## put the code into the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and caches
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist docs/_build
