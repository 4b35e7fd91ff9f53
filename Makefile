# Everything a person does with this repository. `make` lists it.
#   PYTHON=python3.12   interpreter for a new .venv (3.11 or 3.12)
#   EXTRA=gpu           vLLM's GPU build instead of the CPU one
#   ARGS='...'          more arguments for quickstart, example, bench, chaos and pytest

SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV ?= .venv
EXTRA ?= cpu
PYTHON ?=
ARGS ?=
BIN := $(VENV)/bin
# A process for each core; tests/conftest.py says which tests share one.
PARALLEL := -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations 15 --durations-min 2
SETUP := VENV="$(VENV)" PYTHON="$(PYTHON)" launch/install.sh

# Another virtual environment's or conda's settings must not reach ours.
unexport VIRTUAL_ENV CONDA_PREFIX PYTHONHOME PYTHONPATH

.PHONY: help install install-test quickstart example test test-all fuzz mutants lint typecheck bench bench-estimators bench-growth chaos docs docs-serve requirements clean

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: ## Make .venv and install the package (nothing when done already)
	@$(SETUP) $(EXTRA)

install-test:
	@$(SETUP) $(EXTRA) test

quickstart: install ## Run the whole way, data to tuned policy, in a few minutes on two cores
	@$(BIN)/rlhf-ray quickstart $(ARGS)

example: install ## Teach sums by rewarding right answers, or ARGS=tools, frozen_lake, reasoning_gym, in minutes on two cores
	@$(BIN)/rlhf-ray example$(if $(filter-out -%,$(firstword $(ARGS))),, arithmetic) $(ARGS)

test: install-test ## Run the default tests, in about twelve minutes on two cores
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-all: ## Run all tests that need no GPU, with the optional packages (W&B, Trackio, MLflow, S3) installed
	@$(SETUP) $(EXTRA) test-all
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu" --timeout 3600 $(ARGS)

fuzz: install-test ## Try thousands of senseless configurations, rows, replies and files (FUZZ_CASES=2000 of each kind)
	FUZZ_CASES=$${FUZZ_CASES:-2000} $(BIN)/python -m pytest tests/fuzz --timeout 3600 $(ARGS)

mutants: install-test ## Change the code in 300 places, and list the changes that no unit test notices
	$(BIN)/python -m tests.mutants $(ARGS)

lint: install-test typecheck ## Check style, imports and types
	$(BIN)/ruff check .

typecheck: install-test
	$(BIN)/mypy

bench: install ## Run the benchmarks
	@$(BIN)/python -m benchmarks $(ARGS)

bench-estimators: install ## Run every estimator on the quickstart's task, three seeds each
	@$(BIN)/python -m benchmarks.estimators $(ARGS)

bench-growth: install ## Measure how cost grows with model size and response length, role by role
	@$(BIN)/python -m benchmarks.growth $(ARGS)
	@$(BIN)/python -m benchmarks.cluster_model

chaos: install-test ## Kill, stop and damage what runs depend on, in about an hour on two cores
	@$(BIN)/python -m chaos $(ARGS)

docs: ## Write docs/configuration.md, and build the documentation site in build/site
	@$(SETUP) $(EXTRA) docs
	@$(BIN)/python -m rlhf_ray.config.config_docs docs/configuration.md
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

docs-serve: docs ## Serve the documentation site at http://127.0.0.1:8000, and build it again when a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

requirements: install ## Export requirements/cpu.txt and gpu.txt: exact versions with hashes
	@VENV="$(VENV)" requirements/export.sh

clean: ## Remove caches and builds; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find rlhf_ray tests -name __pycache__ -type d -prune -exec rm -rf {} +
