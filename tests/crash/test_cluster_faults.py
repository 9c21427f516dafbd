"""Three brokers and a controller as processes; one broker at a time is killed, stopped or frozen.

An idempotent producer, a transactional pipeline and groups of both protocols work all the time
(``tests/support/failover.py``). Afterwards no record is lost, duplicated or out of order,
transactions are complete, offsets have never gone back, and the replicas have the same bytes.

Nine turns inject every fault into the leaders of all three topics, in about a minute. With
``--turns 3``, as in CI, every fault and every topic occurs once. Either all brokers are
Fencepost's, or some are Apache Kafka's, under controllers of either kind. In these mixed clusters
the active controller also fails, after every third turn. ``--layouts all`` runs every mixture.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, TopicPartition

from fencepost.logcore.batch import BatchHeader, decode_records
from fencepost.logcore.dump import read_batches
from fencepost.logcore.fs import OsFileSystem
from tests.support.epochs import check_epochs, check_runs, runs_of
from tests.support.failover import (
    CONTROLLER_TURNS,
    DEADLINE_S,
    OFFSETS,
    PARTITIONS,
    SETTINGS,
    SOURCE,
    TARGET,
    TRANSACTIONS,
    TURNS,
    WAYS,
    Group,
    Nodes,
    Writer,
    at_work,
    settled,
    turn,
)
from tests.support.kafka import required
from tests.support.mixed import MixedCluster, Node
from tests.support.pipeline import Clients

pytestmark = [pytest.mark.crash, pytest.mark.timeout(3600)]


PURE = "PPP/P"
FEW = [PURE, "JPP/JJJ", "JJP/J", "JPP/P"]
LAYOUTS = [*FEW, "JJP/JJJ", "JPP/J", "JJP/P"]
"""Brokers and controllers: J is Apache Kafka's, P is Fencepost's."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    asked = metafunc.config.getoption("--layouts")
    names = {"few": FEW, "all": LAYOUTS}.get(asked) or asked.split(",")
    metafunc.parametrize("layout", names)


@pytest.fixture
def nodes(layout: str, tmp_path: Path) -> Iterator[Nodes]:
    brokers, controllers = layout.split("/")
    made = MixedCluster(tmp_path, brokers, SETTINGS, controllers=controllers)
    try:
        with required():
            made.start()
        yield Nodes(made)
    finally:
        Nodes(made).stop()


def turns_of(layout: str, count: int) -> list[tuple[str, str]]:
    """Return ``count`` broker faults; in mixed layouts a controller fault follows every third."""
    brokers = list(itertools.islice(itertools.cycle(TURNS), count))
    if layout == PURE:
        return brokers
    # Each layout begins with a different fault, so that a few turns of each cover all faults.
    first = LAYOUTS.index(layout) if layout in LAYOUTS else 0
    controllers = itertools.islice(itertools.cycle(CONTROLLER_TURNS), first, None)
    return [
        step for at in range(0, count, 3) for step in (*brokers[at : at + 3], next(controllers))
    ]


class Watch(threading.Thread):
    """Fetches the group's offsets repeatedly; an offset may never be below an earlier commit."""

    def __init__(self, clients: Clients, group: Group) -> None:
        super().__init__(name="watch", daemon=True)
        self._consumer, self._committed = clients.consumer(group.name), group.committed
        self.stopping = threading.Event()
        self.looks = 0
        self.back: list[tuple[int, int, int]] = []
        """(partition, committed offset, lower offset that was fetched)."""

    def run(self) -> None:
        asked = [TopicPartition(SOURCE, index) for index in range(PARTITIONS)]
        while not self.stopping.wait(0.05):
            floor = dict(self._committed)
            with contextlib.suppress(KafkaException):
                for position in self._consumer.committed(asked, 5):
                    if position.error is None:
                        self._looked(
                            position.partition, floor.get(position.partition, 0), position.offset
                        )
        self._consumer.close()

    def _looked(self, index: int, floor: int, found: int) -> None:
        self.looks += 1
        if max(found, 0) < floor:
            self.back.append((index, floor, found))


def test_broker_faults_lose_duplicate_and_reorder_no_records(
    nodes: Nodes, layout: str, pytestconfig: pytest.Config
) -> None:
    with at_work(nodes) as work:
        writer = work.writer
        watches = [Watch(work.clients, group) for group in work.groups]
        for watch in watches:
            watch.start()
        try:
            figures = [
                turn(nodes, writer, *step)
                for step in turns_of(layout, pytestconfig.getoption("--turns"))
            ]
            work.finish()
        finally:
            for watch in watches:
                watch.stopping.set()
            for watch in watches:
                watch.join(DEADLINE_S)
    assert writer.refused == []
    assert [watch.back for watch in watches] == [[], []]
    assert all(watch.looks for watch in watches)
    check_records(nodes, work.clients, writer, len(figures))
    check_replicas(nodes)
    for way in WAYS:
        of_way = [figure for figure in figures if figure.fault == way]
        pause_s = statistics.median(figure.pause_s for figure in of_way)
        full_s = statistics.median(figure.full_s for figure in of_way)
        print(f"{way}: longest pause {pause_s:.2f} s, full ISR after {full_s:.2f} s (medians)")
    print(f"{layout}: {len(figures)} turns, {writer.sent} records;", end=" ")
    print(f"offsets asked for {[watch.looks for watch in watches]} times;")
    print(f"the pipeline began anew after {work.pipeline.failures}, commits refused with", end=" ")
    print([dict(group.refused) for group in work.groups])


def check_records(nodes: Nodes, clients: Clients, writer: Writer, turns: int) -> None:
    """Check that both topics have every number once and in order, and that no transaction is torn.

    If librdkafka has changed its producer epoch, unacknowledged batches may be duplicated
    (``tests/support/epochs.py``).
    """
    wanted: list[list[int]] = []
    for index in range(PARTITIONS):
        runs = numbers_by_epoch(nodes, index).values()
        check_runs(f"{SOURCE}-{index}", runs, range(index, writer.sent, PARTITIONS))
        check_epochs(f"{SOURCE}-{index}", len(runs), turns)
        wanted.append([value for run in runs for value in run])
    for topic in (SOURCE, TARGET):
        found = clients.messages(topic, PARTITIONS)
        for index in range(PARTITIONS):
            values = [int(message.value()) for message in found if message.partition() == index]
            assert values == wanted[index], f"{topic}-{index}"
    # Each transaction must have as many records in the target as their headers say.
    parts: Counter[bytes] = Counter()
    sizes: dict[bytes, int] = {}
    for message in found:
        headers = dict(message.headers())
        parts[headers["txn"]] += 1
        sizes[headers["txn"]] = int(headers["size"])
    assert dict(parts) == sizes
    assert [sorted(numbers) for numbers in writer.acknowledged] == [
        list(range(index, writer.sent, PARTITIONS)) for index in range(PARTITIONS)
    ]


def numbers_by_epoch(nodes: Nodes, index: int) -> dict[tuple[int, int], list[int]]:
    """Return the numbers of each producer epoch in a source partition on the first broker."""
    return runs_of(
        (header, [int(record.value or b"") for record in decode_records(batch, 0, header)])
        for header, batch in batches_of(nodes.cluster.nodes[0], f"{SOURCE}-{index}")
    )


def check_replicas(nodes: Nodes) -> None:
    """Wait until all replicas end at the same offset, and check that their batches are equal."""
    names = [f"{topic}-{index}" for topic in (SOURCE, TARGET) for index in range(PARTITIONS)]
    names += [f"{OFFSETS}-0", f"{TRANSACTIONS}-0"]
    settled(nodes.has_isr, "all in sync")
    settled(
        lambda: all(len({len(log) for log in logs_of(nodes, name)}) == 1 for name in names),
        "followers have all",
    )
    nodes.stop()
    for name in names:
        first, *others = logs_of(nodes, name)
        assert first, f"nothing in {name}"
        assert all(other == first for other in others), name


def logs_of(nodes: Nodes, name: str) -> list[list[tuple[int, int]]]:
    """Return base offset and checksum of every batch of a partition, for each broker.

    The checksum includes the header (a batch's own CRC omits its offset and leader epoch).
    """
    return [
        [(header.base_offset, zlib.crc32(batch)) for header, batch in batches_of(broker, name)]
        for broker in nodes.cluster.nodes
    ]


def batches_of(broker: Node, name: str) -> Iterator[tuple[BatchHeader, bytes]]:
    """Yield the batches in a broker's files of a partition."""
    for path in sorted((broker.data_dir / name).glob("*.log")):
        for _, header, batch in read_batches(OsFileSystem(), str(path), payload=True):
            if not isinstance(header, str):  # a string stands for preallocated space
                yield header, batch
