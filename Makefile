# Two commands do everything: `make run` (the laptop example) and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

NATIVE := src/etude/weights/delta/libetude_native
AGENT  := src/etude/environments/agent/etude-agent
CRATES := native native/agent
CARGO  := --release --quiet --locked --offline

.PHONY: run test test-native test-all mutants lint lint-python lint-native bench wheel clean
.DELETE_ON_ERROR:

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.run: $(VENV)/.python pyproject.toml constraints.txt hatch_build.py $(wildcard native/Cargo.* native/src/*.rs native/agent/Cargo.* native/agent/src/*.rs)
	@echo "installing etude into $(VENV) (the first time takes a few minutes)"
	$(PIP) "$$(grep -E '^torch==' constraints.txt)"
	$(PIP) -e ".[train]"
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) -e ".[dev]"
	touch $@

run: $(VENV)/.run
	$(BIN)/etude run examples/laptop/config.toml

# Lint and the tests of the crates use one processor each: two at a time.
MAKEFLAGS += --jobs=2

lint: lint-python lint-native

lint-python: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks hatch_build.py
	$(BIN)/ruff format --check src tests benchmarks hatch_build.py
	$(BIN)/mypy

lint-native: $(VENV)/.dev
	+@if ls $(NATIVE).* > /dev/null 2>&1 && cargo fmt --version > /dev/null 2>&1; then \
		for crate in $(CRATES); do (cd $$crate && cargo fmt --check) || exit 1; done; fi
	+@if ls $(NATIVE).* > /dev/null 2>&1 && cargo clippy --version > /dev/null 2>&1; then \
		for crate in $(CRATES); do (cd $$crate && cargo clippy $(CARGO) --all-targets -- -D warnings) || exit 1; done; fi

test-native: lint-native
	+@if ls $(NATIVE).* > /dev/null 2>&1 && cargo --version > /dev/null 2>&1; then \
		for crate in $(CRATES); do (cd $$crate && cargo test $(CARGO)) || exit 1; done; fi

test: lint test-native
	$(BIN)/pytest -m "not slow" -n 3 --dist loadfile

test-all: lint
	$(BIN)/python tests/everything.py
	$(BIN)/pytest

mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants --write

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

wheel: $(VENV)/.python
	$(PIP) build hatchling
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf $(VENV) build dist native/target native/agent/target $(NATIVE).* $(AGENT) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
