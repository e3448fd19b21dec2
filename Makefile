# Needs Python 3.11 or newer, pip and make. Everything is installed into .venv.
#
#   make demo      the story of a redirected run, on real processes
#   make test      all tests, on the built wheel        (ARGS="tests/unit -k gate" for some of them)
#   make install   .venv with regate, as demo and test use it
#   make develop   the same, with regate installed from the checkout (editable)
#   make lint format bench docs clean
#
# PYTHON=python3.12 make install   chooses the Python that .venv is made with.

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
SOURCES := $(shell find admission orchestrator workers simulators -type f -not -name '*.pyc' 2>/dev/null)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

# The first Python that is new enough and can make a virtual environment.
FIND_PYTHON = for p in python3.13 python3.12 python3.11 python3 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done
PYTHON ?= $(shell $(FIND_PYTHON))

.PHONY: install develop demo test lint format bench docs clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "regate needs Python 3.11 or newer with its venv module (on Debian: python3-venv); none was found. Name one: PYTHON=/path/to/python make install" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is not Python 3.11 or newer" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.dependencies: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt hatchling editables
	$(PIP) install --quiet -c constraints.txt --no-build-isolation '.[dev]'
	@touch $@

# The wheel is what is installed, so that the demo and the tests see what users get.
$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES) README.md LICENSE
	@rm -f dist/regate-*.whl
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(PIP) install --quiet --no-deps --force-reinstall dist/regate-*.whl
	@touch $@

develop: $(VENV)/.dependencies
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installed

demo: install
	@$(BIN)/regate demo $(ARGS)

test: install
	@.ci/test-wheel $(BIN)/python $(ARGS)

lint: $(VENV)/.dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dependencies
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	@$(BIN)/python benchmarks/admission.py $(ARGS)

# The tables of docs/protocol.md are made from the code; the tests fail where they differ.
docs: install
	$(BIN)/python docs/render_protocol.py
	@.ci/test-wheel $(BIN)/python tests -k "docs or documented or protocol_doc" $(ARGS)

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
