# Two commands do all the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
TESTS ?= tests

.PHONY: install quickstart test lint types unit test-slow bench docs versions clean

install: .venv/installed

.venv/installed: versions.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r versions.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

quickstart: install
	$(BIN)/isqn study online-plain --tasks Acrobot-v1 --seeds 20 21 22 23 24 --out quickstart

test: lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest -n 3 --dist worksteal $(TESTS)

# What takes minutes: kills at random moments, every preset started, resumed and stopped.
test-slow: install
	$(BIN)/python -m pytest -n 2 -m slow $(TESTS)

bench: install
	$(BIN)/python -m benchmarks

# The documentation as a site in build/site; fails on a broken link and on anything loaded from the network.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Renew the file of exact versions from the lower bounds in pyproject.toml.
versions:
	$(PYTHON) -m venv .venv-versions
	.venv-versions/bin/python -m pip install --quiet --disable-pip-version-check ".[atari,minatar,dmc,offline,language,report,video,ray,slurm,dev,docs]" hatchling editables
	.venv-versions/bin/python -m pip freeze --exclude isqn > versions.txt
	rm -r .venv-versions

clean:
	rm -rf .venv .venv-versions .mypy_cache .ruff_cache .pytest_cache .hypothesis build/site
