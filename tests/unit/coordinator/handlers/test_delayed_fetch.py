"""Fetches that wait, and the requests that end their wait, over several connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from tests.support.batches import batches
from tests.support.cluster import READ_COMMITTED, READ_UNCOMMITTED, Cluster, unique
from tests.support.stalls import watched_loop
from tests.support.waits import until
from tests.unit.coordinator.handlers.asking import txn_batch

LONG_MS = 60_000
"""Longer than the client's timeout of 20 s: the test fails if the broker waits this long."""


class Waiting:
    """A broker, and clients whose fetches wait."""

    def __init__(self, bootstrap: str, count: Callable[[], int]) -> None:
        self.bootstrap, self.count = bootstrap, count
        self._clients = contextlib.ExitStack()
        self.client = self.connect()

    def connect(self) -> Cluster:
        return self._clients.enter_context(Cluster(self.bootstrap))

    def fetch(self, topic: str, *, client: Cluster | None = None, **how: int) -> Cluster:
        """Send a Fetch, by default on a new connection, and return the connection."""
        client = self.connect() if client is None else client
        part = {
            "partition": how.pop("partition", 0),
            "fetch_offset": how.pop("offset", 0),
            "partition_max_bytes": 1 << 20,
            "current_leader_epoch": -1,
        }
        body = {"replica_id": -1, "max_wait": LONG_MS, "min_bytes": 1, "max_bytes": 1 << 20}
        topics = [{"topic": topic, "partitions": [part]}]
        client.send("fetch", 11, session_epoch=-1, topics=topics, **(body | how))
        return client

    def wait(self, count: int) -> None:
        """Return once this number of fetches wait."""
        until(lambda: self.count() == count, f"{count} fetches wait")

    def close(self) -> None:
        self._clients.close()
        self.wait(0)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Callable[[], int]]]:
    config = {"transaction.state.log.num.partitions": "2", "fencepost.history.enable": "false"}
    served = Broker(tmp_path_factory.mktemp("data"), config=config)

    async def count() -> int:
        return len(served.services.fetches.delayed)

    with BrokerThread(lambda: served) as thread:
        yield thread.bootstrap, lambda: thread.call(count)


@pytest.fixture
def waiting(broker: tuple[str, Callable[[], int]]) -> Iterator[Waiting]:
    waiting = Waiting(*broker)
    yield waiting
    waiting.close()


@pytest.fixture
def topic(waiting: Waiting) -> str:
    return waiting.client.create_topic(unique("t"), 1)


def values(client: Cluster) -> list[bytes | None]:
    """Receive the response to a Fetch, and return the values of its records."""
    answer = client.receive()
    (part,) = answer["responses"][0]["partitions"]
    assert (answer["error_code"], part["error_code"]) == ("none", "none")
    return [value for batch in batches(part["records"]) for value in batch.values]


def test_append_completes_all_delayed_fetches_of_the_partition(
    waiting: Waiting, topic: str
) -> None:
    readers = [waiting.fetch(topic) for _ in range(40)]
    waiting.wait(40)
    assert waiting.client.produce(topic, [b"a"])["error_code"] == "none"
    assert [values(reader) for reader in readers] == [[b"a"]] * 40


def test_append_that_completes_2000_delayed_fetches_does_not_block_the_loop(
    waiting: Waiting, topic: str
) -> None:
    readers = [waiting.fetch(topic) for _ in range(2_000)]
    waiting.wait(2_000)
    with watched_loop() as watch:
        assert waiting.client.produce(topic, [b"a"])["error_code"] == "none"
        assert [values(reader) for reader in readers] == [[b"a"]] * 2_000
        waiting.wait(0)  # the last turn is over, and measured
    watch.check()


def test_delayed_fetch_stays_until_appends_reach_min_bytes(waiting: Waiting, topic: str) -> None:
    reader = waiting.fetch(topic, min_bytes=600)
    waiting.wait(1)
    for _ in range(3):
        waiting.client.produce(topic, [b"a"])
    assert waiting.count() == 1
    waiting.client.produce(topic, [b"b" * 500])
    assert values(reader) == [b"a"] * 3 + [b"b" * 500]


def test_end_of_a_transaction_completes_delayed_read_committed_fetch(
    waiting: Waiting, topic: str
) -> None:
    tid, producer = unique("tx"), waiting.connect()
    pid, epoch = producer.init_producer(tid)
    committed = waiting.fetch(topic, isolation_level=READ_COMMITTED)
    uncommitted = waiting.fetch(topic, isolation_level=READ_UNCOMMITTED)
    waiting.wait(2)
    producer.produce(topic, txn_batch(pid, epoch), version=12, transactional_id=tid)
    assert values(uncommitted) == [b"x"]
    assert waiting.count() == 1
    ended = producer.call(
        "end_txn", 5, transactional_id=tid, producer_id=pid, producer_epoch=epoch, committed=True
    )
    assert ended["error_code"] == "none"
    assert values(committed)[0] == b"x"


def test_responses_behind_a_delayed_fetch_keep_the_order_of_their_requests(
    waiting: Waiting, topic: str
) -> None:
    reader = waiting.fetch(topic)
    for number in range(40):  # ``receive`` compares the correlation ids
        reader.begin_produce(topic, [b"%d" % number])
    waiting.fetch(topic, client=reader, offset=1)
    waiting.wait(1)
    waiting.client.produce(topic, [b"first"])
    assert values(reader) == [b"first"]
    for number in range(40):
        (part,) = reader.receive()["responses"][0]["partition_responses"]
        assert (part["error_code"], part["base_offset"]) == ("none", number + 1)
    assert values(reader) == [b"%d" % number for number in range(40)]


def test_chain_of_fetches_that_complete_each_other_is_answered(waiting: Waiting) -> None:
    """Behind each Fetch waits a Produce to the next topic. No call is nested in another one."""
    count = 300
    name = waiting.client.create_topic(unique("t"), count)
    chain = []
    for index in range(count - 1):
        client = waiting.fetch(name, partition=index)
        client.begin_produce(name, [b"%d" % (index + 1)], partition=index + 1)
        chain.append(client)
    waiting.wait(count - 1)
    waiting.client.produce(name, [b"0"])
    for index, client in enumerate(chain):
        assert values(client) == [b"%d" % index]
        (part,) = client.receive()["responses"][0]["partition_responses"]
        assert (part["error_code"], part["base_offset"]) == ("none", 0)


def test_append_after_a_waiting_client_has_left_completes_the_other_fetches(
    waiting: Waiting, topic: str
) -> None:
    readers = [waiting.fetch(topic) for _ in range(3)]
    waiting.wait(3)
    readers[1].close()
    waiting.client.produce(topic, [b"a"])
    assert values(readers[0]) == values(readers[2]) == [b"a"]
    waiting.wait(0)


def test_records_appended_when_max_wait_expires_are_returned_once(
    waiting: Waiting, topic: str
) -> None:
    reader, seen, rounds = waiting.connect(), list[bytes | None](), 200
    for number in range(rounds):
        waiting.fetch(topic, client=reader, offset=len(seen), max_wait=1 + number % 3)
        waiting.client.produce(topic, [b"%d" % number])
        seen += values(reader)
    waiting.fetch(topic, client=reader, offset=len(seen), min_bytes=0)
    seen += values(reader)
    assert seen == [b"%d" % number for number in range(rounds)]


def test_fetch_with_a_shorter_wait_is_completed_before_one_that_came_first(
    waiting: Waiting, topic: str
) -> None:
    first = waiting.fetch(topic)
    waiting.wait(1)
    for max_wait in (200, 100, 1):  # each deadline is earlier than the one before
        assert values(waiting.fetch(topic, max_wait=max_wait)) == []
    assert waiting.count() == 1
    waiting.client.produce(topic, [b"a"])
    assert values(first) == [b"a"]
