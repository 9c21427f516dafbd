"""``kafka_cluster`` has the methods of ``kafka``, and can wait for changes of a cluster."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from fencepost.coordinator.daemon.broker import Broker
from fencepost.testing import Cluster
from fencepost.testing.plugin import kafka_cluster

__all__ = ["kafka_cluster"]

pytestmark = pytest.mark.timeout(180)


@contextmanager
def member(cluster: Cluster, group: str = "shop", **settings: object) -> Iterator[Consumer]:
    """Run a consumer that polls in a thread."""
    told = {
        "bootstrap.servers": cluster.bootstrap,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "auto.commit.interval.ms": 50,
        "log_level": 0,
    }
    consumer = Consumer({**told, **settings})
    consumer.subscribe(["orders"])
    ends = threading.Event()

    def poll() -> None:
        while not ends.is_set():
            consumer.poll(0.05)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield consumer
    finally:
        ends.set()
        thread.join()
        consumer.close()


@pytest.mark.kafka(topics={"orders": 2})
def test_cluster_has_records_groups_transactions_and_history(kafka_cluster: Cluster) -> None:
    written = kafka_cluster.produce("orders", "tea", ("alice", "coffee"))
    assert sorted(kafka_cluster.records("orders")) == sorted(written)
    with member(kafka_cluster):
        kafka_cluster.wait_for_group("shop", members=1, lag=0)
    kafka_cluster.wait_for_group("shop", members=0)
    assert sum(kafka_cluster.committed("shop").values()) == 2
    told = {"bootstrap.servers": kafka_cluster.bootstrap, "transactional.id": "till"}
    producer = Producer(told)
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("orders", b"cocoa")
    producer.flush(30)
    assert [transaction.transactional_id for transaction in kafka_cluster.transactions()] == [
        "till"
    ]
    assert len(kafka_cluster.records("orders", isolation="read_committed")) == 2
    producer.abort_transaction(30)
    entries = kafka_cluster.history("till")
    assert "InitProducerId" in {entry.why for entry in entries}
    assert kafka_cluster.history("shop")


@pytest.mark.kafka(topics=["orders"])
def test_cluster_faults_apply_to_any_broker_or_to_one(kafka_cluster: Cluster) -> None:
    leader = kafka_cluster.leader("orders")
    lost = kafka_cluster.faults.add(api="Produce", close="after", match={"broker": leader})
    seen = kafka_cluster.brokers[leader].faults.observe(api="Produce")
    fetched = kafka_cluster.faults.observe(api="Fetch")
    followed = kafka_cluster.brokers[leader].faults.observe(api="Fetch")
    producer = Producer({"bootstrap.servers": kafka_cluster.bootstrap, "log_level": 0})
    producer.produce("orders", b"tea")
    assert producer.flush(30) == 0
    assert (lost.hits, seen.hits) == (1, 2)
    followed.wait(30)
    assert fetched.hits == 0, "followers' fetches are none of a client's requests"
    kafka_cluster.faults.clear()
    kafka_cluster.faults.add(api="Produce", error="NOT_LEADER_OR_FOLLOWER", times=2)
    producer.produce("orders", b"coffee")
    assert producer.flush(30) == 0
    assert kafka_cluster.faults.all == []


@pytest.mark.kafka(topics=["orders"])
def test_clear_releases_requests_held_by_any_broker(kafka_cluster: Cluster) -> None:
    held = kafka_cluster.faults.add(api="Produce", drop="request")
    settings = {"bootstrap.servers": kafka_cluster.bootstrap, "log_level": 0}
    producer = Producer({**settings, "request.timeout.ms": 60_000})
    producer.produce("orders", b"tea")
    producer.poll(0)
    held.wait(30)
    kafka_cluster.faults.clear()
    assert producer.flush(30) == 0
    assert len(kafka_cluster.records("orders")) == 1


@pytest.mark.kafka(topics=["orders"], config={"replica.lag.time.max.ms": 60_000})
def test_advanced_cluster_clock_fences_no_broker(kafka_cluster: Cluster) -> None:
    settings = {"transactional.id": "till", "transaction.timeout.ms": 60_000}
    producer = Producer({"bootstrap.servers": kafka_cluster.bootstrap, **settings})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("orders", b"tea")
    producer.flush(30)
    before = kafka_cluster.partition("orders")
    fired = kafka_cluster.clock.advance(seconds=120)
    assert ("transaction", "till") in [(deadline.what, deadline.who) for deadline in fired]
    # The follower lags for some seconds of real time; an advanced clock must not shrink the ISR.
    followers = [broker for broker in kafka_cluster.brokers if broker != before.leader]
    kafka_cluster.partition_network(followers[:1], [before.leader])
    behind = Producer({"bootstrap.servers": kafka_cluster.bootstrap, "acks": 1})
    behind.produce("orders", b"coffee")
    assert behind.flush(30) == 0
    kafka_cluster.clock.advance(seconds=3_600)
    kafka_cluster.brokers[before.leader].call(_check_isr)
    kafka_cluster.topic("later")  # when it exists, the controller has processed earlier changes
    assert kafka_cluster.partition("orders") == before, "no broker was fenced, no ISR shrank"
    kafka_cluster.heal()
    # The clock does not wait for a paused broker.
    kafka_cluster.pause(followers[1])
    kafka_cluster.clock.advance(seconds=120)
    kafka_cluster.resume(followers[1])
    assert len(kafka_cluster.records("orders", isolation="read_committed", at_least=1)) == 1


async def _check_isr(broker: Broker) -> None:
    broker.services.replicas.check_isr()


@pytest.mark.kafka(
    topics=["orders"],
    users={"alice": "secret", "bob": "other"},
    tls=True,
    acls=["alice WRITE topic:orders"],
    brokers=2,
)
def test_cluster_checks_users_certificates_and_rules(kafka_cluster: Cluster) -> None:
    told = []
    for user in ("alice", "bob"):
        producer = Producer(kafka_cluster.client_config(user))
        producer.produce("orders", b"mine", on_delivery=lambda error, _: told.append(error))
        assert producer.flush(30) == 0
    assert told[0] is None
    assert "authorization failed" in told[1].str()
    assert len(kafka_cluster.records("orders")) == 1
    anonymous = AdminClient({"bootstrap.servers": kafka_cluster.bootstrap, "log_level": 0})
    with pytest.raises(KafkaException):
        anonymous.list_topics(timeout=2)
    kafka_cluster.acl("bob WRITE topic:orders")
    kafka_cluster.kill(kafka_cluster.leader("orders"))
    kafka_cluster.wait_for(lambda: kafka_cluster.partition("orders").leader > 0, "a new leader")
    assert len(kafka_cluster.records("orders", at_least=1)) == 1


@pytest.mark.kafka(topics=["orders"])
def test_waits_continue_during_leader_and_coordinator_elections(kafka_cluster: Cluster) -> None:
    kafka_cluster.produce("orders", "tea")
    with member(kafka_cluster):
        kafka_cluster.wait_for_group("shop", members=1, lag=0)
        for broker in kafka_cluster.brokers:
            kafka_cluster.kill(broker)
            kafka_cluster.wait_for_group("shop", members=1, lag=0)
            assert len(kafka_cluster.records("orders", at_least=1)) == 1
            kafka_cluster.assert_committed("shop", {"orders": {0: 1}}, timeout=30)
            assert kafka_cluster.transactions() == []
            kafka_cluster.history()
            kafka_cluster.restart(broker)
            kafka_cluster.wait_for_isr("orders")


def test_produce_creates_a_topic_and_waits_for_its_leader(kafka_cluster: Cluster) -> None:
    assert kafka_cluster.produce("made", "tea") == kafka_cluster.records("made")


def test_failed_cluster_wait_describes_the_partition(kafka_cluster: Cluster) -> None:
    kafka_cluster.topic("orders")
    with pytest.raises(AssertionError, match=r"its leader is \d, its replicas .* down: none"):
        kafka_cluster.wait_for_isr("orders", size=2, timeout=0)
    with pytest.raises(AssertionError, match="no topic 'ordrs'; did you mean orders"):
        kafka_cluster.leader("ordrs", timeout=0)


async def test_cluster_aio_methods_work(kafka_cluster: Cluster) -> None:
    assert await kafka_cluster.aio.topic("orders") == "orders"
    await kafka_cluster.aio.produce("orders", "tea")
    await kafka_cluster.aio.kill(await kafka_cluster.aio.leader("orders"))
    assert len(await kafka_cluster.aio.records("orders", at_least=1)) == 1


@pytest.mark.slow
def test_cluster_logs_nothing_about_expected_failures() -> None:
    script = (
        "from fencepost.testing import Cluster\n"
        "with Cluster() as cluster:\n"
        "    cluster.topic('orders')\n"
        "    leader = cluster.leader('orders')\n"
        "    cluster.kill(leader)\n"
        "    cluster.leader('orders')\n"
        "    cluster.restart(leader)\n"
        "    cluster.wait_for_isr('orders')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
