# Every target of CI is a target here. `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := $(BIN)/python -m
# Test files of one run; e.g. make test ARGS="-k fencing"
ARGS   ?=
# A failed test is played so many times more, and counted as rerun; CI allows two
RERUNS ?= 0
PYTEST := $(RUN) pytest$(if $(filter-out 0,$(RERUNS)), --reruns $(RERUNS) --rerun-show-tracebacks)
# One part of the test files of slow, spark, crash and oracle; PART=2/4 is every fourth one
PART   ?= 1/1

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev quickstart demo examples spark-examples test slow sim lint console oracle ecosystem containers crash lives compared-lives mqtt spark package lock sbom bench readme docs matrix clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Fencepost needs Python 3.11 or newer; name one with PYTHON=…" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml
	$(RUN) pip install --quiet --disable-pip-version-check --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(RUN) pip install --quiet --disable-pip-version-check --editable '.[demo,dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: $(VENV)/.dev
	$(RUN) pip install --quiet --disable-pip-version-check --editable '.[demo,dev,docs]'
	@touch $@

$(VENV)/.spark: $(VENV)/.dev
	$(RUN) pip install --quiet --disable-pip-version-check --editable '.[demo,dev,spark]'
	@touch $@ $(VENV)/.story

$(VENV)/.story: $(VENV)/.demo
	$(RUN) pip install --quiet --disable-pip-version-check --editable '.[demo,spark]'
	@touch $@

setup: $(VENV)/.demo  ## install Fencepost and what the demo needs into .venv
setup-dev: $(VENV)/.dev  ## install what the tests need as well

quickstart: $(VENV)/.demo  ## 336,776 flights exactly once, under kill -9, without Spark
	$(RUN) examples.flights.demo

demo: $(VENV)/.story  ## the main job: flights over MQTT and a loader, through PySpark, exactly once, under kill -9
	$(RUN) examples.delays.demo

# Workers full of daemons need not wait for one disk: their files are in memory, if there is
# enough (MEMORY= is the disk). A kill finds there what it finds on a disk; power loss is simulated. What
# passed leaves nothing there.
MEMORY := $(shell df -k --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 > 4194304 { print "/dev/shm" }')
# A daemon or command that has to compile itself takes twice as long to start, and hundreds start.
# The longest files, of few tests each, begin first: else one worker ends long before the others.
# `make lint` runs tests/test_tidy.py.
TEST_RUN = PYTHONDONTWRITEBYTECODE= $(if $(MEMORY),TMPDIR=$(MEMORY) )$(PYTEST) -o tmp_path_retention_policy=failed --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder tests/crash tests/mqtt tests/sim tests/wire tests/lives tests/answers tests/plugin tests/fuzz tests/docs tests/systems tests/console/test_api.py tests/unit --ignore tests/crash/test_sweep.py --ignore tests/crash/test_java_copier.py --ignore tests/crash/test_cluster_faults.py --ignore tests/crash/test_cluster_sweep.py --ignore tests/crash/test_controller_sweep.py --ignore tests/crash/test_failed_appends.py

# Tests wait for timeouts and for the processes they start: three workers leave two cores idle for a
# fifth of the run.
test: WORKERS := 4
test: export POWER_STATES ?= 300
test: $(VENV)/.dev  ## unit, scenario, real-client and crash tests (five to six minutes on two cores)
	$(TEST_RUN) -m "not slow" $(ARGS)

# What `make crash` runs larger, and what needs stages of its own, is in neither.
slow: WORKERS := 2
slow: export POWER_STATES ?= 2100
slow: $(VENV)/.dev  ## the rest of the same: kills at every step, a random life of all clients, whole searches
	$(TEST_RUN) -m slow --part=$(PART) $(ARGS)

# The types of the Spark source and sink can only be checked beside Spark's own.
lint: $(VENV)/.spark  ## ruff, mypy --strict for Linux, macOS and Windows, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --platform linux
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32
	$(RUN) pytest --quiet --strict-config tests/test_tidy.py

console: $(VENV)/.dev  ## the web console in a real Chromium, screenshots in build/console-screenshots (needs Debian's chromium)
	$(PYTEST) $(or $(ARGS),tests/console)

oracle: $(VENV)/.spark  ## the same client scenarios on a real Apache Kafka 4.4, traces and random lives compared (needs java, mvn, Mosquitto)
	$(PYTEST) --numprocesses 2 --dist loadfile --target=kafka tests/wire --part=$(PART) $(ARGS)
	$(PYTEST) --numprocesses 2 --dist loadfile --no-loadscope-reorder tests/oracle --part=$(PART) $(ARGS)

ecosystem: $(VENV)/.dev  ## Flink, Connect, MirrorMaker 2, Spring, Quix and a schema registry killed while they work (needs a JDK and mvn)
	$(PYTEST) tests/ecosystem $(ARGS)

containers: $(VENV)/.spark  ## clients, pipelines and Spark on Apache Kafka in a container (needs a Docker engine, java, mvn, busybox, Mosquitto)
	$(PYTEST) --target=container $(or $(ARGS),tests/wire tests/mqtt/test_bridge.py tests/mqtt/test_sessions.py)
	$(if $(ARGS),,$(PYTEST) --target=container -m judge tests/spark)

crash: export POWER_STATES ?= $(or $(N),10500)
crash: export CLUSTER_POINTS ?= 300
crash: export CONTROLLER_POINTS ?= 100
crash: $(VENV)/.dev  ## kills and power loss at every step, also of three brokers (CLUSTER_POINTS=all) and of a controller on ZooKeeper (CONTROLLER_POINTS=all), a fleet of groups, histories of logs (N=100000: more of each)
	$(PYTEST) --numprocesses 2 --dist loadfile --part=$(PART) $(or $(ARGS),tests/crash)
	HISTORIES=$(or $(N),20000) $(PYTEST) --quiet -rP --numprocesses 2 --dist load --rebalances $(or $(N),20000) tests/unit/groups/test_fleet.py tests/unit/logcore/test_histories.py

sim: $(VENV)/.dev  ## a cluster on a simulated network, with disks and clocks that fail, from seeds (SEED=1 N=200 WORLD=both)
	$(RUN) tests.sim.run --world $(or $(WORLD),both) --processes 2 --seed $(or $(SEED),1) --count $(or $(N),200)

lives: $(VENV)/.dev  ## a long life of clients that ask anything (SEED=7 N=1000000)
	$(PYTEST) -s tests/lives/test_lives.py --seed $(or $(SEED),1) --requests $(or $(N),1000000)

compared-lives: $(VENV)/.dev  ## a longer life led on Apache Kafka 4.4 as well, answers compared (SEED=7 N=1000; needs java and mvn)
	$(PYTEST) -s tests/oracle/test_lives.py --seed $(or $(SEED),1) --requests $(or $(N),300)

mqtt: $(VENV)/.dev  ## 50,000 messages over MQTT, under kill -9 of bridge, broker and daemon (needs Mosquitto)
	MQTT_MESSAGES=50000 $(PYTEST) tests/mqtt $(ARGS)

EXAMPLES := exactly_once_copy word_count dead_letters work_queue replay move_to_kafka secured mqtt_ingestion
examples: $(VENV)/.demo  ## every example, each with its own check
	set -e; for name in $(EXAMPLES); do echo "== $$name"; $(RUN) examples.$$name; done

spark-examples: $(VENV)/.story  ## the examples on Spark, each with its own check
	$(RUN) examples.windowed_join

SPARK_RUN := $(PYTEST) --numprocesses 2 --dist loadfile
# What else is marked judge runs on Apache Kafka with ARGS=tests/spark.
SPARK_JUDGED := tests/spark/test_crashes.py tests/spark/test_broker_failures.py tests/spark/test_secured.py
spark: $(VENV)/.spark  ## source and exactly-once sink on a real local Spark, killed at every step; a part on Apache Kafka too
	$(SPARK_RUN) --stock --part=$(PART) $(or $(ARGS),tests/spark)
	$(SPARK_RUN) --target=kafka -m judge --part=$(PART) $(or $(ARGS),$(SPARK_JUDGED))

package: $(VENV)/.spark  ## wheel and sdist in clean environments, beside packages with the names of our parts (needs Mosquitto)
	$(PYTEST) tests/package $(ARGS)

lock: $(BIN)/python  ## the versions and hashes of what the image is made of, in packaging/
	$(PYTHON) -m venv build/lock-tool
	build/lock-tool/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	build/lock-tool/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make lock" --output-file packaging/requirements.txt pyproject.toml
	echo 'setuptools>=77' | build/lock-tool/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make lock" --output-file packaging/build-requirements.txt -

# What a user's environment would hold: the package and its dependencies, nothing of the tests.
sbom: $(BIN)/python  ## a software bill of materials (CycloneDX) of the package and what it needs, in build/
	rm -rf build/sbom
	$(PYTHON) -m venv --without-pip build/sbom
	$(RUN) pip --python build/sbom/bin/python install --quiet --disable-pip-version-check .
	$(PYTHON) -m venv build/sbom-tool
	build/sbom-tool/bin/python -m pip install --quiet --disable-pip-version-check 'cyclonedx-bom>=7.5,<8'
	build/sbom-tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file build/fencepost.cdx.json build/sbom/bin/python

bench: $(VENV)/.spark  ## figures side by side with Apache Kafka in one run (needs java and mvn)
	$(RUN) bench $(ARGS)

docs: $(VENV)/.docs  ## the site of the documentation into build/docs (begin at build/docs/index.html)
	$(RUN) sphinx --fail-on-warning --keep-going --quiet --fresh-env --write-all -c docs -b html . build/docs

readme: $(VENV)/.dev  ## write the generated parts of README.md and docs/ anew
	$(RUN) docs.generate

MATRIX_RUN := $(PYTEST) --numprocesses 2 --dist loadfile tests/wire $(ARGS)
matrix: $(VENV)/.dev  ## the client scenarios on both brokers, and what came of them into docs/compatibility.md
	-$(MATRIX_RUN) --results build/results/fencepost.json
	-$(MATRIX_RUN) --target=kafka --results build/results/kafka.json
	$(RUN) docs.matrix build/results/fencepost.json build/results/kafka.json
	$(RUN) docs.generate

clean:  ## remove everything that make has created
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache build *.egg-info
