# Two commands do all the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
TESTS ?= tests
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input install
LAWS := tests/test_losses.py tests/test_schemes.py tests/test_config.py tests/test_imports.py tests/test_numbers.py tests/test_stats.py

.PHONY: install quickstart check test lint types unit test-slow bench docs versions clean

install: .venv/installed

.venv/installed: versions.txt pyproject.toml
	@echo "installing into .venv, about 2 minutes; pip writes to .venv/install.log"
	@$(PYTHON) -m venv .venv
	@{ $(PIP) -r versions.txt && $(PIP) --no-deps --no-build-isolation -e . ; } > .venv/install.log 2>&1 || \
		{ cat .venv/install.log; echo "installing failed"; exit 1; }
	@touch $@
	@echo "installed; the command is $(BIN)/isqn"

# At most 4 minutes on two idle cores after the install.
quickstart: install
	@echo "training 4 methods on MinAtar SpaceInvaders, 3 seeds each; about 3 minutes on two cores"
	@$(BIN)/isqn study examples/quickstart.toml --out quickstart
	@echo "The page quickstart/report/index.html shows the learning curves. Next:"
	@echo "  $(BIN)/isqn train dqn --env-id CartPole-v1            train on a Gymnasium environment"
	@echo "  $(BIN)/isqn study online-plain --dry-run              the paper's comparison, at a size for this machine"

# For every save, at most 90 seconds: style, types and the fastest laws.
check: lint types
	$(BIN)/python -m pytest -q -n 2 $(LAWS)

test: lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

# Tests that take minutes: kills at random moments; every preset started, resumed and stopped.
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
	rm -rf .venv .venv-versions .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build/site
