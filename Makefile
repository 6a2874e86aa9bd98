PYTHON_HERE := .venv/bin/python
OLD_PYTHON ?= python3.9
SECONDS ?= 600
SEED ?= 1
NODES ?= 10
CODE := src tests scripts examples $(dir $(wildcard bench/__main__.py))

.DEFAULT_GOAL := help
.PHONY: help setup check test test-remote chaos mutants demo bench docs clean

help:         ## Show what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 24

setup:        ## Make .venv and install what is missing
	@scripts/setup.sh

check: setup  ## Lint, types, direction of imports, sizes, docs
	.venv/bin/ruff check $(CODE)
	.venv/bin/mypy $(CODE)
	.venv/bin/lint-imports --no-cache
	$(PYTHON_HERE) -m pytest -q tests/unit/test_project.py
	$(PYTHON_HERE) -m ugro.config.reference --check docs/configuration.md docs/jobs.md
	$(PYTHON_HERE) scripts/cli_reference.py --check docs/cli.md
	$(PYTHON_HERE) scripts/state_diagram.py --check ARCHITECTURE.md

test: setup   ## Run all tests, three files at a time: most of them wait
	$(PYTHON_HERE) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-remote:  ## Load the node program with an old Python: OLD_PYTHON=python3.9
	$(OLD_PYTHON) scripts/remote_on_old_python.py

chaos: setup  ## Faults of every kind on ten sshds: SECONDS=600 SEED=1 NODES=10
	$(PYTHON_HERE) -m tests.proof.chaos --seed $(SEED) --seconds $(SECONDS) --nodes $(NODES) \
		--record build/chaos-$(SEED).jsonl

mutants: setup  ## Take each guard of the protocol away: some test must notice
	$(PYTHON_HERE) -m tests.proof.mutants

demo: setup   ## Try UGRO on this machine
	.venv/bin/ugro demo

bench:        ## Measure, against other tools where they are installed
	@scripts/setup.sh dev bench
	$(PYTHON_HERE) -m bench

docs: setup   ## Write the generated docs again
	$(PYTHON_HERE) -m ugro.config.reference docs/configuration.md docs/jobs.md
	$(PYTHON_HERE) scripts/cli_reference.py docs/cli.md
	$(PYTHON_HERE) scripts/state_diagram.py ARCHITECTURE.md

clean:        ## Remove caches and builds; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
