"""Kafka Connect's exactly-once source and MirrorMaker 2 on Fencepost, killed while they work."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from fencepost.tools.ports import hold_port
from tests.ecosystem.programs import (
    DEADLINE_S,
    KILLS,
    PARTITIONS,
    assert_exactly_once,
    committed,
    fed,
    jars,
    java,
    killed_amid_transactions,
)
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.pipeline import QUIET
from tests.support.processes import Child
from tests.support.waits import until
from tests.wire.command_line import cli

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]

LINES = 20_000
SPARE = 1_000
"""Number of last lines of the file that FileStreamSourceTask may still have in its buffer."""
TOTAL = 12_000
RESTART_POLL_S = 0.5
"""The interval at which the status of a task is requested."""


def properties(path: Path, settings: dict[str, object]) -> str:
    """Write a properties file and return its name."""
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return str(path)


def rest_address() -> str:
    """Return HOST:PORT for a REST interface; the port is free at the time of the call."""
    with hold_port() as port:
        return f"127.0.0.1:{port.getsockname()[1]}"


def ask(url: str, method: str = "GET", body: object = None) -> Any:
    """Send a request to Connect's REST interface; return the response, None if Connect is down."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.loads(response.read() or b"{}")
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


@contextmanager
def restarted_task(task: str) -> Iterator[None]:
    """Within the block, restart a task (its URL) if its producer ends a transaction too early.

    The producer of Kafka 4.3 checks whether any batch is unsent before it takes the next request
    from its queue (``Sender.maybeSendAndPollTransactionalRequest``). If the task's thread sends and
    commits between the two steps, EndTxn overtakes the first batch. The coordinator then has no
    transaction to commit, and responds with INVALID_TXN_STATE, which fails the task.
    """
    leave = threading.Event()

    def watch() -> None:
        while not leave.wait(RESTART_POLL_S):
            status = ask(f"{task}/status") or {}
            if "InvalidTxnStateException" in (status.get("trace") or ""):
                ask(f"{task}/restart", "POST")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def test_connect_source_killed_inside_transactions_writes_each_line_once(
    fencepost: Daemon, tmp_path: Path
) -> None:
    libs, bootstrap = jars("connect", "connect-runtime-*.jar"), fencepost.bootstrap
    lines, topic, rest = tmp_path / "lines.txt", unique("lines"), rest_address()
    lines.write_text("".join(f"{number}\n" for number in range(LINES + SPARE)))
    name = unique("connect")
    worker = properties(
        tmp_path / "worker.properties",
        {
            "bootstrap.servers": bootstrap,
            "group.id": name,
            "exactly.once.source.support": "enabled",
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.storage.StringConverter",
            "listeners": f"http://{rest}",
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 1000,
            "scheduled.rebalance.max.delay.ms": 0,
            **{
                f"{kind}.storage.{what}": value
                for kind in ("offset", "config", "status")
                for what, value in (("topic", f"{name}-{kind}"), ("replication.factor", 1))
            },
        },
    )
    connector = {
        "connector.class": "org.apache.kafka.connect.file.FileStreamSourceConnector",
        "tasks.max": 1,
        "file": str(lines),
        "topic": topic,
        "batch.size": 20,
        "exactly.once.support": "required",
        "transaction.boundary": "poll",
        "producer.override.transaction.timeout.ms": 10_000,
    }

    def start() -> Child:
        return java(libs, "org.apache.kafka.connect.cli.ConnectDistributed", worker)

    def start_first() -> Child:
        child = start()
        until(
            lambda: ask(f"http://{rest}/connectors/lines/config", "PUT", connector),
            f"Connect takes a connector: {child.tail(20)}",
            deadline_s=DEADLINE_S,
            poll_s=0.2,
        )
        return child

    starts = chain([start_first], repeat(start))

    def start_next() -> Child:
        return next(starts)()

    with restarted_task(f"http://{rest}/connectors/lines/tasks/0"):
        with Cluster(bootstrap) as cluster:
            cluster.create_topic(topic, PARTITIONS)
            child = killed_amid_transactions(cluster, start_next, topic, LINES)
        try:
            assert_exactly_once(bootstrap, topic, LINES, child, spare=SPARE)
            cli(bootstrap, "doctor", "--topic", topic, status=0)
        finally:
            child.kill()


def test_killed_mirror_maker_mirrors_each_record_once_both_ways(
    fencepost: Daemon, tmp_path: Path
) -> None:
    libs = jars("connect", "connect-mirror-*.jar")
    other = Daemon(tmp_path / "other").start()
    try:
        mirrored(libs, {"a": fencepost.bootstrap, "b": other.bootstrap}, tmp_path)
    finally:
        other.stop()


def mirrored(libs: Path, clusters: dict[str, str], tmp_path: Path) -> None:
    """Mirror a topic of each cluster to the other, with a group's offsets, in spite of kills."""
    topic, group = unique("numbers"), unique("readers")
    settings = properties(
        tmp_path / "mirror.properties",
        {
            "clusters": "a, b",
            "a.bootstrap.servers": clusters["a"],
            "b.bootstrap.servers": clusters["b"],
            "a->b.enabled": "true",
            "b->a.enabled": "true",
            "topics": topic,
            "groups": group,
            "replication.factor": 1,
            "checkpoints.topic.replication.factor": 1,
            "heartbeats.topic.replication.factor": 1,
            "offset-syncs.topic.replication.factor": 1,
            "offset.storage.replication.factor": 1,
            "status.storage.replication.factor": 1,
            "config.storage.replication.factor": 1,
            "a.exactly.once.source.support": "enabled",
            "b.exactly.once.source.support": "enabled",
            "dedicated.mode.enable.internal.rest": "true",
            "listeners": f"http://{rest_address()}",
            "sync.group.offsets.enabled": "true",
            "sync.group.offsets.interval.seconds": 1,
            "emit.checkpoints.interval.seconds": 1,
            "refresh.topics.interval.seconds": 2,
            "refresh.groups.interval.seconds": 2,
            "offset.flush.interval.ms": 200,
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 1000,
            "scheduled.rebalance.max.delay.ms": 0,
        },
    )
    for bootstrap in clusters.values():
        with Cluster(bootstrap) as cluster:
            cluster.create_topic(topic, PARTITIONS)
    ways = {(clusters["b"], f"a.{topic}"), (clusters["a"], f"b.{topic}")}

    def start() -> Child:
        return java(libs, "org.apache.kafka.connect.mirror.MirrorMaker", settings)

    def have_arrived(least: int) -> bool:
        return all(
            topic in AdminClient({"bootstrap.servers": bootstrap, **QUIET}).list_topics().topics
            and sum(committed(bootstrap, topic).values()) > least
            for bootstrap, topic in ways
        )

    with fed(clusters["a"], topic, TOTAL), fed(clusters["b"], topic, TOTAL):
        for kill in range(KILLS):
            child, least = start(), TOTAL * (kill + 1) // (KILLS + 2)
            try:
                until(
                    lambda least=least: have_arrived(least),
                    f"{least} records mirrored both ways: {child.tail(20)}",
                    deadline_s=DEADLINE_S,
                    poll_s=0.1,
                )
            finally:
                child.kill()
        child = start()
    try:
        for bootstrap, mirror in sorted(ways):
            assert_exactly_once(bootstrap, mirror, TOTAL, child)
        assert_group_follows(clusters, topic, group, child)
        assert_keeps_rules([*ways, *((address, topic) for address in clusters.values())])
    finally:
        child.kill()


def assert_keeps_rules(topics: list[tuple[str, str]]) -> None:
    """Assert that ``fencepost doctor`` finds no broken rule on any topic's broker."""
    for bootstrap, topic in sorted(topics):
        cli(bootstrap, "doctor", "--topic", topic, status=0)


def assert_group_follows(clusters: dict[str, str], topic: str, group: str, child: Child) -> None:
    """Assert that a group's offsets are translated to valid offsets of the mirrored topic."""
    reader = consumer(clusters["a"], group)
    ends = [TopicPartition(topic, index, TOTAL // PARTITIONS) for index in range(PARTITIONS)]
    reader.commit(offsets=ends, asynchronous=False)
    reader.close()
    follower = consumer(clusters["b"], group)
    mirrors = [TopicPartition(f"a.{topic}", index) for index in range(PARTITIONS)]
    until(
        lambda: all(position.offset > 0 for position in follower.committed(mirrors, timeout=30)),
        f"the group's offsets are translated: {child.tail(20)}",
        deadline_s=DEADLINE_S,
        poll_s=0.5,
    )
    positions = follower.committed(mirrors, timeout=30)
    assert all(
        position.offset <= follower.get_watermark_offsets(position, timeout=30)[1]
        for position in positions
    )
    follower.close()


def consumer(bootstrap: str, group: str) -> Consumer:
    return Consumer(
        {"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False, **QUIET}
    )
