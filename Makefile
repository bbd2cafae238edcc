# Everything a developer does, in one place; `make help` lists it.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

# Interpreters to try, in order. TORCH_INDEX names an extra package index that has CPU wheels of torch,
# for machines whose own index would take a CUDA build of several GB.
PYTHON ?= python3.11 python3
VENV ?= .venv
TORCH_INDEX ?=
PYTEST_ARGS ?=

bin := $(VENV)/bin
stamp := $(VENV)/.installed
model := models/smollm2-135m-instruct
benchmarks := cpu_engine gateway_overhead
is_supported := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))

.PHONY: help install model lint format format-check typecheck arch test test-ray test-gpu \
	test-slow check serve demo bench docs

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(stamp) ## Create .venv and install both distributions, pinned (quick when nothing changed)

$(stamp): pyproject.toml clients/python/pyproject.toml constraints.txt
	@if ! $(bin)/python -c '$(is_supported)' 2>/dev/null; then \
		python=; \
		for candidate in $(PYTHON); do \
			if "$$candidate" -c '$(is_supported)' 2>/dev/null; then python=$$candidate; break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo "Python 3.11 or 3.12 is needed; none of '$(PYTHON)' is one. Install it, or name it: make install PYTHON=/path/to/python3.11" >&2; \
			exit 1; \
		fi; \
		echo "Creating $(VENV) with $$("$$python" --version)"; \
		"$$python" -m venv --clear $(VENV) || { \
			echo "The venv module does not work here; on Debian and Ubuntu install python3-venv." >&2; \
			exit 1; \
		}; \
	fi
	@echo "Installing orthros-service and orthros-client (a few minutes the first time)"
	@$(bin)/python -m pip install --quiet --disable-pip-version-check --no-input \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		--constraint constraints.txt --editable '.[dev]' --editable clients/python
	@touch $@

model: $(model)/orthros.json ## Prepare the default model (once)

$(model)/orthros.json: | $(stamp)
	@$(bin)/orthros models prepare

lint: install ## ruff: rules
	@$(bin)/ruff check .

format-check: install ## ruff: is everything formatted?
	@$(bin)/ruff format --check .

format: install ## ruff: format and apply safe fixes
	@$(bin)/ruff check --fix --exit-zero --quiet .
	@$(bin)/ruff format .

typecheck: install ## mypy --strict
	@$(bin)/mypy

# Without its cache, which misjudges imports of a folder that became a package later.
arch: install ## import-linter: who may import what
	@$(bin)/lint-imports --no-cache

test: install model ## Every test that needs neither a GPU nor minutes
	@$(bin)/pytest $(PYTEST_ARGS)

test-ray: install model ## Only the tests on a local Ray cluster
	@$(bin)/pytest -m ray $(PYTEST_ARGS)

# The kernel tests run compiled there, not in Triton's interpreter.
test-gpu: install ## The kernels' tests, compiled, on a CUDA device
	@TRITON_INTERPRET=0 $(bin)/pytest -m "gpu or not gpu" tests/kernels tests/gpu $(PYTEST_ARGS)

test-slow: install model ## Only the tests that take minutes
	@$(bin)/pytest -m slow $(PYTEST_ARGS)

check: lint format-check typecheck arch test ## Everything CI runs

serve: install model ## Start the service on this machine (Ctrl-C stops it)
	@$(bin)/orthros serve

# -P keeps this folder off the import path, where `kernels` would hide another distribution.
demo: install ## The whole service once, start to end, on a real document
	@$(bin)/python -P -m orthros_deployments.demo

bench: install model ## The benchmarks that need no data, a quarter of an hour (benchmarks/results)
	@for name in $(benchmarks); do $(bin)/python "benchmarks/$$name.py"; done

docs: install ## Write docs/settings.md from the settings
	@$(bin)/python docs/settings_reference.py
