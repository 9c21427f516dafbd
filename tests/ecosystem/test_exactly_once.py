"""Programs that copy a topic exactly once on Fencepost, killed while transactions are open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ecosystem.programs import (
    HERE,
    PARTITIONS,
    assert_exactly_once,
    compiled,
    environment,
    fed,
    jars,
    java,
    killed_amid_transactions,
)
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.kafka import jars as kafka_jars
from tests.support.kafka import required
from tests.support.processes import Child
from tests.wire.command_line import cli

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]

TOTAL = 12_000
QUIX = "quixstreams==3.28.1"

Program = Callable[[str, str, str], Child]
"""A function that starts a program, given the bootstrap servers, the source and the target."""


def spring(tmp_path: Path) -> Program:
    libs = jars("spring", "spring-kafka-*.jar")
    classes = compiled("SpringCopy.java", libs, tmp_path / "classes")
    return lambda *arguments: java(libs, "SpringCopy", *arguments, classes=classes)


def flink(tmp_path: Path) -> Program:
    libs = jars("flink", "flink-connector-kafka-*.jar")
    classes = compiled("FlinkCopy.java", libs, tmp_path / "classes")
    checkpoints = str(tmp_path / "checkpoints")
    return lambda *arguments: java(libs, "FlinkCopy", *arguments, checkpoints, classes=classes)


def streams(tmp_path: Path) -> Program:
    with required("Kafka Streams"):
        libs = kafka_jars()
    classes = compiled("StreamsCopy.java", libs, tmp_path / "classes")
    state = str(tmp_path / "state")
    return lambda *arguments: java(libs, "StreamsCopy", *arguments, state, classes=classes)


def quix(tmp_path: Path) -> Program:
    python = environment("quix", QUIX)
    command = [str(python), str(HERE / "quix_copy.py")]
    return lambda *arguments: Child([*command, *arguments, str(tmp_path / "state")])


@pytest.mark.parametrize(
    "program", [spring, flink, streams, quix], ids=lambda program: program.__name__
)
def test_copier_killed_inside_transactions_copies_each_record_once(
    fencepost: Daemon, program: Callable[[Path], Program], tmp_path: Path
) -> None:
    start = program(tmp_path)
    source, target = unique("numbers"), unique("copies")
    with Cluster(fencepost.bootstrap) as cluster:
        for topic in (source, target):
            cluster.create_topic(topic, PARTITIONS)
        with fed(fencepost.bootstrap, source, TOTAL):
            child = killed_amid_transactions(
                cluster, lambda: start(fencepost.bootstrap, source, target), target, TOTAL
            )
        try:
            assert_exactly_once(fencepost.bootstrap, target, TOTAL, child)
            # Although they were killed, the programs break no rule of exactly-once.
            cli(fencepost.bootstrap, "doctor", "--topic", target, status=0)
            cli(fencepost.bootstrap, "doctor", "--topic", source, status=0)
        finally:
            child.kill()
