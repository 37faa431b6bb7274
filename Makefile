# The development commands, as CI runs them. Set VENV to use another environment.
VENV ?= .venv
BIN := $(VENV)/bin
CPP := $(shell git ls-files 'csrc/*.cpp' 'csrc/*.h')

.PHONY: setup clients build format lint type check test test-slow nightly coverage docs bench soak

setup:  ## an environment with everything needed for development
	python3 -m venv $(VENV)
	$(BIN)/pip install 'scikit-build-core>=0.10' 'nanobind>=2.4' 'cmake>=3.26' ninja
	$(BIN)/pip install --no-build-isolation -e '.[test,dev]'

clients:  ## further client libraries, in a separate environment: some need older versions of our packages
	test -d $(VENV)-clients || python3 -m venv $(VENV)-clients
	$(VENV)-clients/bin/pip install -q '.[test]'  # first: resolving both together takes pip minutes
	$(VENV)-clients/bin/pip install -q $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"])')

build:  ## the native library, in place
	$(BIN)/pip install --no-build-isolation --no-deps -e .

format:
	$(BIN)/ruff format src tests tools benchmarks examples
	$(BIN)/ruff check --fix src tests tools benchmarks examples
	$(BIN)/clang-format -i $(CPP)

lint:
	$(BIN)/ruff check src tests tools benchmarks examples
	$(BIN)/ruff format --check src tests tools benchmarks examples
	$(BIN)/clang-format --dry-run --Werror $(CPP)

type:  ## for Linux, macOS and Windows
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32

check:  ## dependency directions, budgets, plain English, recorded figures
	$(BIN)/python tools/check_structure.py
	$(BIN)/python tools/check_prose.py
	$(BIN)/python tools/make_figures.py --check

test:
	$(BIN)/pytest -n 2 --dist loadfile

test-slow: clients  ## the large models, long property runs, emulated instruction sets, further client libraries
	$(BIN)/pytest -m slow
	$(VENV)-clients/bin/pytest tests/server/further_clients

nightly:  ## everything: .ci/run all, slow tests, a second compiler, clang-tidy, fuzzers, coverage
	.ci/nightly

coverage:  ## lines and branches of src/ and lines of csrc/ covered by tests; reports in build/coverage
	PATH="$(abspath $(BIN)):$$PATH" .ci/coverage

docs:  ## the documentation site at http://127.0.0.1:8001, rebuilt on every change
	$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/pip install -q 'mkdocs-material>=9.6' 'mkdocstrings[python]>=1'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve -a 127.0.0.1:8001

bench:
	$(BIN)/octavo bench latency smollm2
	$(BIN)/octavo bench throughput smollm2

soak:  ## an hour of mixed requests, with crashes, a reload and memory checks; SOAK_MINUTES=15 for a shorter run
	$(BIN)/python benchmarks/soak.py --octavo $(BIN)/python --minutes $(or $(SOAK_MINUTES),60) --adapter
