# Everything here sets itself up: a virtual environment in .venv, the extras that the target needs,
# pinned by constraints.txt. A stamp file in .venv makes the second time quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test marked lint bench report docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-7s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed-demo ## forgetting and wrong labels, with and without NVRM; about a minute
	$(BIN)/neuvar demo

test: $(VENV)/.installed-dev lint ## lint, type check and all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not browser and not ray" -n 2 --dist loadfile

marked: $(VENV)/.installed-dev ## the tests that make test leaves out: a browser, a Ray cluster
	$(BIN)/python -m pytest -m "browser or ray"

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-bench ## speed and memory beside peers
	$(BIN)/python benchmarks/optimizers.py

report: $(VENV)/.installed-dev ## figures, page and documents from the lines in results/
	$(BIN)/neuvar report --out docs/report --into README.md docs/reproduction.md

docs: $(VENV)/.installed-docs ## build the site into site/
	$(BIN)/mkdocs build --strict

clean: ## remove everything that was made here, the environment too
	rm -rf $(VENV) out site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "neuvar needs Python 3.11 or newer; set PYTHON=..., this one is: $$($(PYTHON) -V 2>&1)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$*]"
	@touch $@
