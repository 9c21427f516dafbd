"""Several brokers in one process: a broker fails in various ways, and no record is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from fencepost.testing import Cluster
from fencepost.testing.cluster import CONTROLLER_ID
from tests.support.replicas import assert_replicas_are_equal

FAST = {"bootstrap.servers": "", "log_level": 0, "socket.timeout.ms": 3000}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as found:
        found.topic("t", 1)
        yield found


class Writer:
    """An idempotent producer of numbers, with the outcome of each write."""

    def __init__(self, cluster: Cluster) -> None:
        settings = {"acks": "all", "enable.idempotence": True, "linger.ms": 1}
        self._producer = Producer({**FAST, **settings, "bootstrap.servers": cluster.bootstrap})
        self._next = 0
        self.acknowledged: list[int] = []
        self.refused: list[KafkaError] = []

    def write(self, count: int) -> None:
        """Write ``count`` numbers and wait for the responses."""
        for number in range(self._next, self._next + count):
            self._producer.produce("t", b"%d" % number, on_delivery=self._delivered)
        self._next += count
        assert self._producer.flush(30) == 0

    def _delivered(self, error: KafkaError | None, message: object) -> None:
        if error is not None:
            self.refused.append(error)
        else:
            self.acknowledged.append(int(message.value()))  # type: ignore[attr-defined]


def numbers_of(cluster: Cluster, isolation: str = "read_uncommitted") -> list[int]:
    settings = {"group.id": "reader", "enable.partition.eof": True, "isolation.level": isolation}
    consumer = Consumer({**FAST, **settings, "bootstrap.servers": cluster.bootstrap})
    consumer.assign([TopicPartition("t", 0, 0)])
    found = []
    while (message := consumer.poll(30)) is not None:
        error = message.error()
        if error is None:
            found.append(int(message.value()))
        elif error.code() == KafkaError._PARTITION_EOF:
            break
    consumer.close()
    return found


def assert_nothing_is_lost(cluster: Cluster, writer: Writer) -> None:
    """Check that all acknowledged records exist once, in order, and on every replica."""
    assert not writer.refused
    cluster.wait_for_isr("t")
    assert numbers_of(cluster) == writer.acknowledged == list(range(len(writer.acknowledged)))
    assert_replicas_are_equal(cluster)


def test_killed_and_restarted_leader_loses_no_record(cluster: Cluster) -> None:
    writer = Writer(cluster)
    writer.write(100)
    before = cluster.leader("t")
    epoch = cluster.partition("t").leader_epoch
    cluster.kill(before)
    assert cluster.leader("t") != before
    assert cluster.partition("t").leader_epoch > epoch
    assert before not in cluster.partition("t").isr
    writer.write(100)
    cluster.restart(before)
    assert_nothing_is_lost(cluster, writer)


def _stopped(cluster: Cluster, broker: int) -> Callable[[], None]:
    cluster.stop(broker)
    return lambda: cluster.restart(broker)


def _paused(cluster: Cluster, broker: int) -> Callable[[], None]:
    cluster.pause(broker)
    return lambda: cluster.resume(broker)


def _cut_off(cluster: Cluster, broker: int) -> Callable[[], None]:
    cluster.partition_network([broker], {*cluster.brokers, CONTROLLER_ID} - {broker})
    return cluster.heal


@pytest.mark.slow
@pytest.mark.parametrize("way", [_stopped, _paused, _cut_off])
def test_stopped_paused_or_isolated_leader_loses_no_record(
    cluster: Cluster, way: Callable[[Cluster, int], Callable[[], None]]
) -> None:
    writer = Writer(cluster)
    writer.write(100)
    before = cluster.leader("t")
    back = way(cluster, before)
    cluster.wait_for(lambda: cluster.partition("t").leader != before, "another leader")
    writer.write(100)
    back()
    assert_nothing_is_lost(cluster, writer)


@pytest.mark.slow
def test_follower_isolated_from_the_leader_leaves_the_isr(cluster: Cluster) -> None:
    writer = Writer(cluster)
    writer.write(10)
    leader = cluster.leader("t")
    follower = next(broker for broker in cluster.brokers if broker != leader)
    cluster.partition_network([follower], [leader])
    writer.write(10)
    cluster.wait_for(lambda: follower not in cluster.partition("t").isr, "a smaller ISR")
    assert not cluster.image.brokers[follower].fenced
    writer.write(10)
    cluster.heal()
    assert_nothing_is_lost(cluster, writer)


@pytest.mark.slow
def test_writes_with_too_few_replicas_fail_until_one_is_back(cluster: Cluster) -> None:
    writer = Writer(cluster)
    writer.write(10)
    leader = cluster.leader("t")
    others = [broker for broker in cluster.brokers if broker != leader]
    for other in others:
        cluster.kill(other)
    cluster.wait_for(lambda: cluster.partition("t").isr == (leader,), "an ISR of one")
    producer = Producer(
        {
            **FAST,
            "bootstrap.servers": cluster.bootstrap,
            "acks": "all",
            "message.timeout.ms": 1500,
        }
    )
    errors: list[KafkaError] = []
    producer.produce("t", b"-1", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(20) == 0
    assert errors[0].code() in (KafkaError._MSG_TIMED_OUT, KafkaError.NOT_ENOUGH_REPLICAS)
    cluster.restart(others[0])
    writer.write(10)
    cluster.restart(others[1])
    assert_nothing_is_lost(cluster, writer)


@pytest.mark.slow
def test_transactions_survive_the_loss_of_coordinator_and_leader(cluster: Cluster) -> None:
    producer = Producer(
        {**FAST, "bootstrap.servers": cluster.bootstrap, "transactional.id": "x", "linger.ms": 1}
    )
    producer.init_transactions(30)
    coordinator = next(
        partition.leader for partition in cluster.image.topics["__transaction_state"].partitions
    )
    committed: list[int] = []
    for number, victim in enumerate([None, coordinator, None, "leader", None]):
        producer.begin_transaction()
        producer.produce("t", b"%d" % number)
        assert producer.flush(30) == 0
        if victim is not None:
            node_id = cluster.leader("t") if victim == "leader" else int(victim)
            cluster.kill(node_id)
            producer.commit_transaction(30)
            cluster.restart(node_id)
            cluster.wait_for_isr("t")
        elif number == 2:
            producer.abort_transaction(30)
            continue
        else:
            producer.commit_transaction(30)
        committed.append(number)
    assert numbers_of(cluster, "read_committed") == committed
    assert_replicas_are_equal(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_group_continues_after_the_loss_of_its_coordinator(cluster: Cluster, protocol: str) -> None:
    writer = Writer(cluster)
    writer.write(50)
    consumer = Consumer(
        {
            **FAST,
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "g",
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe(["t"])
    seen: list[int] = []

    def read(upto: int) -> None:
        def one_more() -> bool:
            message = consumer.poll(0.2)
            if message is not None and message.error() is None:
                seen.append(int(message.value()))
            return len(seen) >= upto

        cluster.wait_for(one_more, f"{upto} records")
        consumer.commit(asynchronous=False)

    read(50)
    index = next(
        at
        for at, partition in enumerate(cluster.image.topics["__consumer_offsets"].partitions)
        if partition.leader >= 0
    )
    before = cluster.leader("__consumer_offsets", index)
    cluster.kill(before)
    writer.write(50)
    read(100)
    cluster.restart(before)
    writer.write(50)
    read(150)
    consumer.close()
    assert seen == list(range(150))
    assert_nothing_is_lost(cluster, writer)
