"""Fixtures of several modules: a broker's files after many writes, and a broker in a cluster."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.interchange import (
    BROKER,
    coordinators,
    fingerprint,
    write_groups,
    write_records,
)
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka
from tests.support.member import Member
from tests.support.waits import until
from tests.support.zookeeper_brokers import Brokers


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """Print the logs of a failed test's brokers, which are deleted after the test."""
    try:
        yield
    except Exception as error:
        for fixture in item.funcargs.values():
            if isinstance(fixture, Brokers):
                error.add_note(fixture.describe())
                break
        raise


@dataclass
class Written:
    """The state of a broker, and its directory after each way of stopping the broker."""

    records: dict[str, Any]
    coordinators: dict[str, Any]
    producer: dict[str, int]
    images: dict[str, Path]


@pytest.fixture(scope="session")
def by_kafka(tmp_path_factory: pytest.TempPathFactory) -> Written:
    root = tmp_path_factory.mktemp("by-kafka")
    kafka, images = Kafka(root, {**BROKER, "log.initial.task.delay.ms": "500"}), {}
    kafka.start()
    assert kafka.child is not None
    try:
        with Cluster(kafka.bootstrap) as cluster:
            producer = write_records(cluster, kafka.bootstrap, kafka.data_dir)
            write_groups(cluster, kafka.bootstrap, kafka.data_dir)
            records, groups = fingerprint(cluster), coordinators(cluster)
        starts = kafka.data_dir / "log-start-offset-checkpoint"
        until(lambda: "trimmed 0 17" in starts.read_text(), "a checkpoint of the log start")
        kafka.child.kill()
        images["killed"] = shutil.copytree(kafka.data_dir, root / "killed")
        kafka.start()
        with Cluster(kafka.bootstrap) as cluster:
            until(lambda: cluster.leaders("txn") == 2, "leaders")
        kafka.child.terminate(deadline_s=60)
        images["stopped"] = shutil.copytree(kafka.data_dir, root / "stopped")
    finally:
        kafka.child.kill()
    return Written(records, groups, producer, images)


@pytest.fixture(scope="session")
def by_fencepost(tmp_path_factory: pytest.TempPathFactory) -> Written:
    root = tmp_path_factory.mktemp("by-fencepost")
    daemon, images = Daemon(root / "data", BROKER).start(), {}
    assert daemon.child is not None
    try:
        with Cluster(daemon.bootstrap) as cluster:
            producer = write_records(cluster, daemon.bootstrap, daemon.data_dir)
            write_groups(cluster, daemon.bootstrap, daemon.data_dir)
            records, groups = fingerprint(cluster), coordinators(cluster)
        daemon.kill()
        images["killed"] = shutil.copytree(daemon.data_dir, root / "killed")
        daemon.start()
        daemon.stop()
        images["stopped"] = shutil.copytree(daemon.data_dir, root / "stopped")
    finally:
        daemon.child.kill()
    return Written(records, groups, producer, images)


@pytest.fixture
def member(kafka: Kafka, tmp_path: Path) -> Iterator[Member]:
    """Yield a broker of Fencepost in the cluster of the module's Apache Kafka."""
    broker = Member(tmp_path, kafka.controller)
    broker.start()
    yield broker
    broker.kill()
