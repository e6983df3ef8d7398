# Each target installs what it needs into .venv, pinned by constraints.txt. A stamp file in .venv
# makes the second time quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-says narrow integrations lint bench report docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed-demo ## forgetting and wrong labels, with and without NVRM; about a minute and a half
	$(BIN)/neuvar demo

# One thread per process: more would slow down two processes on two cores. Tests of a file share their
# fixtures. Files with slow tests come first, so that both processes end together.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: test-says $(VENV)/.installed-dev lint ## lint, type check and all tests; 6 to 8 minutes on two cores
	$(PYTEST) --durations 20 -m "not integrations"

test-says:
	@echo "make test: ruff, mypy, all tests, and the examples in docstrings and documents."
	@echo "It takes 6 to 8 minutes on two cores, and some more the first time, to install packages."
	@for name in chromium chromium-browser google-chrome; do \
		command -v $$name >/dev/null && exit; done; \
		echo "There is no Chromium: tests of pages in a browser will be skipped."

# Results must not depend on how the CPU rounds. Tests of files, pages and processes are left out by
# name, so that new test files are run.
NARROW := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
NOT_NUMERICAL := cleaning_browser cli cli_choosing cli_run cli_showing cli_timing data data_fuzz \
	data_idx data_sources data_verified docstring_markup documents engine engine_cluster engine_ray \
	engine_results house report report_browser report_examples startup

narrow: $(VENV)/.installed-dev ## the numerical tests with the narrowest instruction set; about 5 minutes
	$(NARROW) $(PYTEST) -m "not integrations" $(NOT_NUMERICAL:%=--ignore=tests/test_%.py)

# fastai asks for torchvision and spaCy, which its training loop does not use.
$(VENV)/.installed-frameworks: $(VENV)/.installed-dev $(VENV)/.installed-integrations
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps fastai
	@touch $@

integrations: $(VENV)/.installed-frameworks ## install Lightning, Hugging Face and others, test with them; at most 10 minutes
	$(PYTEST) --durations 20 -m integrations tests/integrations src/neuvar/integrations docs

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-bench ## speed and memory beside peers
	$(BIN)/python benchmarks/optimizers.py

CLAIMS := $(patsubst %,benchmarks/claims_%.py,robustness generalization noise_types gradient_noise)

report: $(VENV)/.installed-dev ## figures, page and documents from the lines in results/
	$(BIN)/neuvar report all $(CLAIMS) --out docs/report --into docs/results.md docs/reproduction.md
	$(BIN)/python tools/write_tables.py

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
