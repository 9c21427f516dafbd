"""Limits of groups with real clients: a member over a limit never shares a partition."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import aiokafka
import confluent_kafka
import pytest

from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.targets import SETTINGS
from tests.support.waits import until, until_async, until_true
from tests.wire.clients import aio_consumer

pytestmark = pytest.mark.slow

PARTITIONS = 1_500
"""Partitions of the topic. A librdkafka member that owns all of them sends 12 KB of metadata."""
ROOM = {"classic": 20_500, "consumer": 1_500 * 512 + 12_000, "eager": 12_000}
"""The memory limit of the group in bytes. Two members with their partitions fit, even when a member
rejoins while its former membership still counts. The first member's later subscription does not
fit.
"""
MANY_NAMES = ["n" * 200 + str(number) for number in range(50)]
"""The topics of a subscription; their names take 13 KB."""
SETTLED = 5
"""How many records each burst writes to each of its partitions."""


@pytest.fixture(params=["classic", "consumer"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def daemon(tmp_path: Path, protocol: str) -> Iterator[Daemon]:
    """Yield a broker whose limits allow one small group."""
    settings = {
        **SETTINGS,
        "fencepost.groups.max.bytes": str(ROOM[protocol]),
        "group.consumer.session.timeout.ms": "5000",
        "group.consumer.min.session.timeout.ms": "5000",
        "group.consumer.heartbeat.interval.ms": "100",
        "group.consumer.min.heartbeat.interval.ms": "100",
    }
    started = Daemon(tmp_path, settings).start()
    yield started
    started.stop()


@pytest.fixture
def small(daemon: Daemon) -> Iterator[Cluster]:
    with Cluster(daemon.bootstrap) as connected:
        yield connected


class Readers:
    """Two consumers of one group; no partition may ever belong to both."""

    def __init__(self, one: confluent_kafka.Consumer, other: confluent_kafka.Consumer) -> None:
        self.both = one, other
        self.read: Counter[bytes] = Counter()
        self.errors: set[int] = set()

    def step(self) -> None:
        for consumer in self.both:
            message = consumer.poll(0.02)
            if message is not None and message.error():
                self.errors.add(message.error().code())
            elif message is not None:
                self.read[message.value()] += 1
                consumer.commit(message, asynchronous=False)
        mine, theirs = (self.held(consumer) for consumer in self.both)
        assert not mine & theirs, f"{len(mine & theirs)} partitions have two readers"

    def held(self, consumer: confluent_kafka.Consumer) -> set[tuple[str, int]]:
        # A consumer with a fatal error has no assignment.
        with contextlib.suppress(confluent_kafka.KafkaException):
            return {(partition.topic, partition.partition) for partition in consumer.assignment()}
        return set()

    def until(self, probe: Callable[[], object], what: str) -> None:
        def stepped() -> object:
            self.step()
            return probe()

        until(stepped, what, deadline_s=40, poll_s=0)


def burst(
    cluster: Cluster, topic: str, name: str, partitions: Sequence[int] = range(0, PARTITIONS, 99)
) -> set[bytes]:
    values = {at: [f"{name}-{at}-{n}".encode() for n in range(SETTLED)] for at in partitions}
    for at, batch in values.items():
        cluster.produce(topic, batch, partition=at)
    return {value for batch in values.values() for value in batch}


def test_librdkafka_releases_its_partitions_when_a_limit_is_exceeded(
    daemon: Daemon, small: Cluster, protocol: str
) -> None:
    topic = small.create_topic(unique("many"), partitions=PARTITIONS)
    lost: list[confluent_kafka.TopicPartition] = []
    conf = {
        "bootstrap.servers": daemon.bootstrap,
        "group.id": unique("g"),
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "fetch.wait.max.ms": 100,
    }
    if protocol == "classic":
        conf |= {"partition.assignment.strategy": "cooperative-sticky", "session.timeout.ms": 5_000}
    one, other = confluent_kafka.Consumer(conf), confluent_kafka.Consumer(conf)
    with contextlib.closing(one), contextlib.closing(other):
        readers = Readers(one, other)
        one.subscribe([topic], on_lost=lambda _, partitions: lost.extend(partitions))
        readers.until(lambda: len(readers.held(one)) == PARTITIONS, "the first member's partitions")
        first = burst(small, topic, "first")
        readers.until(lambda: first == readers.read.keys(), "the first records")
        other.subscribe([topic])
        if protocol == "consumer":
            # Owned partitions, which members send by topic id, do not count against the limit.
            readers.until(lambda: len(readers.held(other)) == PARTITIONS // 2, "half of them")
            one.subscribe([topic, *MANY_NAMES], on_lost=lambda _, got: lost.extend(got))
        readers.until(lambda: lost, "the first member to lose its partitions")
        remaining = PARTITIONS if protocol == "consumer" else PARTITIONS // 2
        readers.until(lambda: len(readers.held(other)) == remaining, "the other's partitions")
        if protocol == "classic":
            readers.until(lambda: len(readers.held(one)) == PARTITIONS // 2, "those it gets back")
        second = burst(small, topic, "second")
        readers.until(lambda: first | second <= readers.read.keys(), "the second records")
        assert set(readers.read.values()) == {1}, "records were read twice"
        if protocol == "consumer":
            assert confluent_kafka.KafkaError._FATAL in readers.errors, "the limit was not told"


@pytest.mark.parametrize("protocol", ["eager"], indirect=True)
async def test_aiokafka_releases_its_partitions_when_a_limit_is_exceeded(
    daemon: Daemon, small: Cluster
) -> None:
    topic, group = small.create_topic(unique("few"), partitions=20), unique("g")
    read: Counter[bytes | None] = Counter()
    async with (
        aio_consumer(daemon.bootstrap, topic, group_id=group) as one,
        aio_consumer(daemon.bootstrap, topic, group_id=group) as other,
    ):

        async def read_all(*values: set[bytes]) -> bool:
            for consumer in (one, other):
                with contextlib.suppress(aiokafka.errors.KafkaError):
                    for records in (await consumer.getmany(timeout_ms=20)).values():
                        read.update(record.value for record in records)
                        await consumer.commit()
            assert not one.assignment() & other.assignment()
            return set().union(*values) <= read.keys()

        def held() -> tuple[int, int]:
            return len(one.assignment()), len(other.assignment())

        await until_true(lambda: held() == (10, 10), "both members' partitions")
        first = burst(small, topic, "first", range(20))
        await until_async(lambda: read_all(first), "the first records")
        one.subscribe([topic, *MANY_NAMES])

        async def is_alone() -> bool:
            await read_all()
            return held() == (0, 20)

        await until_async(is_alone, "the other's partitions")
        second = burst(small, topic, "second", range(20))
        await until_async(lambda: read_all(first, second), "the second records")
    assert set(read.values()) == {1}, "records were read twice"
