"""``max.producer.ids`` over the wire, and producers across a restart, on a separate daemon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.batches import batch
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.quick import only
from tests.support.targets import SETTINGS
from tests.wire.clients import confluent_producer, kp_producer

LIMIT = 4


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    settings = {**SETTINGS, "max.producer.ids": str(LIMIT)}
    started = Daemon(tmp_path_factory.mktemp("few-producers"), settings).start()
    yield started
    started.stop()


@pytest.fixture
def small(daemon: Daemon) -> Iterator[Cluster]:
    with Cluster(daemon.bootstrap) as connected:
        yield connected


def send(cluster: Cluster, topic: str, producer_id: int, sequence: int = 0) -> tuple[str, int]:
    data = batch(
        [b"v"],
        producer_id=producer_id,
        producer_epoch=0,
        sequence=sequence,
        # A broker that starts drops producers whose last batch has too old a timestamp.
        timestamp_ms=int(time.time() * 1000),
    )
    part = cluster.produce(topic, data)
    return part["error_code"], part["base_offset"]


def test_producer_beyond_the_limit_evicts_the_longest_idle_one(small: Cluster) -> None:
    topic = small.create_topic(unique("ids"))
    ids = [small.init_producer()[0] for _ in range(LIMIT + 1)]
    for at, producer_id in enumerate(ids[:LIMIT]):
        assert send(small, topic, producer_id) == ("none", at)
    # At the limit the broker knows each producer: a retry is a duplicate, and a gap is refused.
    for at, producer_id in enumerate(ids[:LIMIT]):
        assert send(small, topic, producer_id) == ("none", at)
        assert send(small, topic, producer_id, 5)[0] == "out_of_order_sequence_number"
    assert send(small, topic, ids[LIMIT]) == ("none", LIMIT)
    # With one producer above the limit, the second producer is still known. The first producer is
    # forgotten, so the gap in its sequence is accepted.
    assert send(small, topic, ids[1]) == ("none", 1)
    assert send(small, topic, ids[0], 5) == ("none", LIMIT + 1)


def test_open_transactions_are_not_evicted_and_a_new_producer_retries(
    daemon: Daemon, small: Cluster
) -> None:
    topic = small.create_topic(unique("open"))
    producers = []
    for at in range(LIMIT):
        producers.append(
            confluent_producer(
                daemon.bootstrap, transactional_id=unique(f"t{at}"), linger_ms=0
            ).__enter__()
        )
        producers[-1].init_transactions(60)
        producers[-1].begin_transaction()
        producers[-1].produce(topic, b"in a transaction", partition=0)
        producers[-1].flush(60)
    idle = small.init_producer()[0]
    assert send(small, topic, idle) == ("not_enough_replicas", -1)
    assert small.lso(topic) == 0
    # A real client retries until there is room. Producers with open transactions are not dropped.
    ended = threading.Timer(0.5, lambda: producers[0].commit_transaction(60))
    ended.start()
    with kp_producer(daemon.bootstrap, enable_idempotence=True) as waiting:
        future = waiting.send(topic, b"waited", partition=0)
        assert future.get(timeout=60).offset >= LIMIT
    ended.join()
    for producer in producers[1:]:
        producer.commit_transaction(60)
    assert small.values(topic).count(b"in a transaction") == LIMIT
    assert small.lso(topic) == small.offset(topic)


@pytest.mark.parametrize("clean", only((True, False), False))
def test_producer_state_survives_clean_stop_and_kill(daemon: Daemon, clean: bool) -> None:
    """After a clean stop the broker knows the last batch; after kill -9, the last five batches."""
    with Cluster(daemon.bootstrap) as cluster:
        topic = cluster.create_topic(unique("restart"))
        producer_id, _ = cluster.init_producer()
        sent = [send(cluster, topic, producer_id, sequence) for sequence in range(6)]
        assert sent == [("none", offset) for offset in range(6)]
    if clean:
        daemon.stop()
    else:
        daemon.kill()
    daemon.start()
    with Cluster(daemon.bootstrap) as cluster:
        for sequence in range(5 if clean else 1, 6):
            assert send(cluster, topic, producer_id, sequence) == ("none", sequence)
        assert send(cluster, topic, producer_id, 0)[0] == "out_of_order_sequence_number"
        assert send(cluster, topic, producer_id, 6) == ("none", 6)
