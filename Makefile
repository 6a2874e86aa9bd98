PYTHON_HERE := .venv/bin/python
PYTEST := $(PYTHON_HERE) -m pytest
OLD_PYTHON ?= python3.9
# More processes than cores: most tests wait for something most of the time.
WORKERS ?= 4
IN_PARALLEL := -n $(WORKERS) --dist worksteal
SECONDS ?= 600
SEED ?= 1
NODES ?= 10
CODE := src tests scripts examples $(dir $(wildcard bench/__main__.py))

# A part of `make proof` is a room of tests/integration, or one of these.
ROOMS := $(notdir $(patsubst %/__init__.py,%,$(wildcard tests/integration/*/__init__.py)))
PARTS := $(ROOMS) crashes fuzz chaos mutants
PART ?= $(PARTS)

.DEFAULT_GOAL := help
.PHONY: help parts setup setup-proof check test proof $(PARTS:%=proof-%) test-remote chaos mutants demo bench docs lock audit clean

help:         ## Show what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 24
	@echo "Parts of make proof, each below 20 minutes, as in make proof PART=crashes:"
	@echo "  $(PARTS)" | fold -s -w 100

parts:
	@echo $(PARTS)

setup:        ## Make .venv and install what tests need
	@scripts/setup.sh

setup-proof:
	@scripts/setup.sh proof

check:        ## Lint, types, direction of imports, sizes, docs
	@scripts/setup.sh dev
	.venv/bin/ruff check $(CODE)
	.venv/bin/mypy $(CODE)
	.venv/bin/lint-imports --no-cache
	$(PYTEST) -q tests/unit/test_project.py tests/unit/test_lock.py
	$(PYTHON_HERE) -m ugro.kernel.config.reference --check docs/configuration.md docs/jobs.md docs/serving.md docs/quotas.md
	$(PYTHON_HERE) scripts/cli_reference.py --check docs/cli.md
	$(PYTHON_HERE) scripts/state_diagram.py --check ARCHITECTURE.md
	$(PYTHON_HERE) scripts/measure.py --check

test: setup   ## Run what a change must pass: a few minutes
	$(PYTEST) $(IN_PARALLEL) -m "not proof"

proof: $(PART:%=proof-%)  ## Run all that takes longer, or one part of it: PART=crashes

$(ROOMS:%=proof-%): proof-%: setup-proof
	$(PYTEST) $(IN_PARALLEL) -m proof tests/integration/$*

proof-crashes: setup-proof
	$(PYTEST) $(IN_PARALLEL) -m proof tests/proof tests/unit

proof-fuzz: setup-proof
	$(PYTEST) $(IN_PARALLEL) -m hypothesis --hypothesis-profile=proof

proof-chaos: chaos

proof-mutants: mutants

test-remote:  ## Load the node program with an old Python: OLD_PYTHON=python3.9
	$(OLD_PYTHON) scripts/remote_on_old_python.py

chaos: setup  ## Faults of every kind on ten sshds: SECONDS=600 SEED=1 NODES=10
	$(PYTHON_HERE) -m tests.proof.chaos --seed $(SEED) --seconds $(SECONDS) --nodes $(NODES) \
		--record build/chaos-$(SEED).jsonl

mutants: setup  ## Take each guard of the protocol away: some test must notice
	$(PYTHON_HERE) -m tests.proof.mutants

demo:         ## Try UGRO on this machine
	@scripts/setup.sh demo
	.venv/bin/ugro demo

bench:        ## Measure, against other tools where they are installed
	@scripts/setup.sh test bench
	$(PYTHON_HERE) -m bench

docs:         ## Write the generated docs again
	@scripts/setup.sh dev
	$(PYTHON_HERE) -m ugro.kernel.config.reference docs/configuration.md docs/jobs.md docs/serving.md docs/quotas.md
	$(PYTHON_HERE) scripts/cli_reference.py docs/cli.md
	$(PYTHON_HERE) scripts/state_diagram.py ARCHITECTURE.md

lock:         ## Resolve what pyproject.toml asks for, with hashes; UPGRADE=--upgrade takes newest versions
	@scripts/setup.sh dev
	test -x build/lock/bin/uv || { $(PYTHON_HERE) -m venv build/lock && build/lock/bin/pip install -q uv; }
	$(PYTHON_HERE) scripts/lock.py --uv build/lock/bin/uv $(UPGRADE)

audit:        ## Look for known weaknesses in what is locked
	@scripts/setup.sh dev
	test -x build/audit/bin/pip-audit || { $(PYTHON_HERE) -m venv build/audit && build/audit/bin/pip install -q pip-audit; }
	build/audit/bin/pip-audit --strict --require-hashes --disable-pip --requirement requirements/proof.txt

clean:        ## Remove caches and builds; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
