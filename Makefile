# Two commands: `make demo` and `make test`. Each sets up everything it needs first.
PYTHON ?= python3
BASE ?= HEAD
VENV ?= .venv
MYPY_CACHE ?= .mypy_cache
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(shell find native CMakeLists.txt -type f 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-changed test-times test-mutants smoke test-all lint style prose types format bench results docs page clean

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

lint: style types prose  ## check formatting, style, imports, types and wording

style: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

prose: $(STAMP)
	$(BIN)/python tests/prose.py --quiet

types: $(STAMP)
	$(BIN)/mypy --cache-dir $(MYPY_CACHE)/src
	$(BIN)/mypy --cache-dir $(MYPY_CACHE)/tests --config-file tests/mypy.ini tests

# One process per core, at most four, since many tests start further processes. They start, stop and
# time real processes on shared machines, so a failed test is repeated in a separate process, which
# records and measures again. A test that passes then is listed as a flake, and fails the third time on
# this machine. A test that hangs fails without ending the run. Types are checked at the same time.
PYTEST := $(BIN)/python -m pytest -m "not full" --timeout 300
test: style  ## run every test that must pass on any machine
	@mkdir -p build; $(MAKE) --no-print-directory types >build/types.log 2>&1 & types=$$!; \
	$(PYTEST) --times -n logical --maxprocesses 4 --dist worksteal $(PYTEST_ARGS); code=$$?; \
	if [ $$code -eq 1 ]; then echo "Repeating the failed tests:"; \
	  $(PYTEST) --flakes --last-failed --last-failed-no-failures none $(PYTEST_ARGS); code=$$?; fi; \
	wait $$types || { cat build/types.log; code=2; }; tail -n 2 build/types.log; exit $$code

test-changed: lint  ## run only the tests that changes since BASE (default: uncommitted ones) can reach
	$(PYTEST) --changed $(BASE) -n logical --maxprocesses 4 --dist worksteal $(PYTEST_ARGS) \
	  || test $$? -eq 5  # pytest's code for "no tests"

test-times: $(STAMP)  ## report the CPU time of each folder of tests
	$(PYTEST) --times -n logical --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

test-mutants: $(STAMP)  ## check that tests catch small faults in the code (SAMPLE=40 tries 40 of them)
	$(BIN)/python tests/mutants.py $(if $(SAMPLE),--sample $(SAMPLE)) $(MUTANTS_ARGS)

smoke: $(STAMP)  ## run the few tests that every supported pair of torch and Python must pass
	$(BIN)/python -m pytest -m smoke --timeout 300 $(PYTEST_ARGS)

test-all: lint  ## also run the long tests: fuzzing, kill loops, sanitizers
	$(BIN)/python -m pytest --hypothesis-profile=search $(PYTEST_ARGS)

bench: $(STAMP)  ## measure every benchmark quickly
	$(BIN)/slipstream bench all --quick

results: $(STAMP)  ## generate docs/results.md and docs/results/ from the recorded benchmarks
	$(BIN)/python docs/make_results.py

docs: results  ## the same, and the API reference in build/docs/api
	$(BIN)/python docs/make_reference.py build/docs/api

page:  ## build the report's page from page/ (needs node; the result is committed)
	npm --prefix page ci --silent
	npm --prefix page run --silent build

format: $(STAMP)  ## format, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove build products (your results in .slipstream stay)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
