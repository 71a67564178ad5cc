# Two commands: `make demo` and `make test`. Each sets up everything it needs first.
PYTHON ?= python3
BASE ?= HEAD
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(shell find native CMakeLists.txt -type f 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-changed test-times test-all lint format bench results docs page clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## make the virtual environment and install slipstream into it

$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "slipstream needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar off --upgrade pip -c constraints.txt
	@echo "Installing PyTorch (several minutes on a slow link) ..."
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt torch==2.13.0
	@touch $@

$(STAMP): $(VENV)/.torch pyproject.toml benchmarks/pyproject.toml constraints.txt $(NATIVE)
	@echo "Building the native engine and installing slipstream ..."
	$(BIN)/python -m pip install --quiet --progress-bar off -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --progress-bar off -c constraints.txt --no-deps -e benchmarks
	@touch $@

demo: $(STAMP)  ## profile, predict, apply and prove one technique on a real language model
	$(BIN)/slipstream demo

lint: $(STAMP)  ## formatting, style, types, and who imports whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests
	$(BIN)/lint-imports --no-cache

# One process a core, at most four: many tests start processes of their own. Real ones are started,
# stopped and timed on machines that others use too: what fails is tried once more, alone, in a process
# of its own, which records and measures anew, and is listed both times. A test that hangs fails, too,
# rather than the whole run.
PYTEST := $(BIN)/python -m pytest -m "not full" --timeout 300
test: lint  ## everything that must hold on any machine
	$(PYTEST) -n logical --maxprocesses 4 --dist worksteal $(PYTEST_ARGS) \
	  || { code=$$?; [ $$code -eq 1 ] || exit $$code; \
	       echo "Once more, what failed:"; \
	       $(PYTEST) --last-failed --last-failed-no-failures none $(PYTEST_ARGS); }

test-changed: lint  ## only the tests that what changed since BASE (what is not committed) can reach
	$(PYTEST) --changed $(BASE) -n logical --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

test-times: $(STAMP)  ## what every folder of tests costs, in processor seconds
	$(PYTEST) --times -n logical --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

test-all: lint  ## and the long loops: fuzzing, kill loops, sanitizers
	$(BIN)/python -m pytest --hypothesis-profile=search $(PYTEST_ARGS)

bench: $(STAMP)  ## measure every bar, quickly
	$(BIN)/slipstream bench all --quick

results: $(STAMP)  ## make docs/results.md from the recorded benchmarks
	$(BIN)/python docs/make_results.py

docs: results  ## the same, and the API reference in build/docs/api
	$(BIN)/python docs/make_reference.py build/docs/api

page:  ## build the report's page from page/ (needs node; what it makes is committed)
	npm --prefix page ci --silent
	npm --prefix page run --silent build

format: $(STAMP)  ## format and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what was built (your results in .slipstream stay)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
