# Every target of CI is a target here. `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := $(BIN)/python -m
# Test files of one run; e.g. make test ARGS="-k fencing"
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test lint oracle crash bench readme clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Fencepost needs Python 3.11 or newer; name one with PYTHON=…" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml
	$(RUN) pip install --quiet --disable-pip-version-check --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(RUN) pip install --quiet --disable-pip-version-check --editable '.[demo,dev]'
	@touch $@ $(VENV)/.demo

setup: $(VENV)/.demo  ## install Fencepost and what the demo needs into .venv
setup-dev: $(VENV)/.dev  ## install what the tests need as well

demo: $(VENV)/.demo  ## the main job: 336,776 flights exactly once, under kill -9
	$(RUN) examples.flights.demo

test: $(VENV)/.dev  ## unit, scenario, real-client and crash tests (under five minutes)
	$(RUN) pytest --numprocesses 2 --dist loadfile tests/unit tests/test_tidy.py tests/fuzz tests/wire tests/crash --ignore tests/crash/test_sweep.py $(ARGS)

lint: $(VENV)/.dev  ## ruff, mypy --strict, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(RUN) pytest --quiet tests/test_tidy.py

oracle: $(VENV)/.dev  ## the same client scenarios on a real Apache Kafka 4.3, traces compared (needs java and mvn)
	$(RUN) pytest --target=kafka tests/wire $(ARGS)
	$(RUN) pytest tests/oracle $(ARGS)

crash: $(VENV)/.dev  ## kill the real daemon at every step of transactions, recovery and whole pipelines
	$(RUN) pytest --numprocesses 2 --dist loadfile $(or $(ARGS),tests/crash)

bench: $(VENV)/.dev  ## figures side by side with Apache Kafka in one run (needs java and mvn)
	$(RUN) bench $(ARGS)

readme: $(VENV)/.dev  ## write the generated parts of README.md anew
	$(RUN) coordinator.readme README.md

clean:  ## remove everything that make has created
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache build *.egg-info
