"""Crashes, faults and a clock, as in users' tests."""

import pytest


def producer(kafka, **more):
    from confluent_kafka import Producer

    return Producer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "transactional.id": "payments",
            "log_level": 0,
            **more,
        }
    )


def test_crash_loses_no_acknowledged_record(kafka):
    kafka.produce("orders", "one")
    kafka.crash()
    with pytest.raises(RuntimeError, match=r"kafka\.restart"):
        kafka.records("orders")
    kafka.restart()
    assert [record.value for record in kafka.records("orders")] == [b"one"]


def test_commit_with_a_lost_response_is_applied_once(kafka):
    sender = producer(kafka)
    sender.init_transactions()
    sender.begin_transaction()
    sender.produce("orders", "once")
    lost = kafka.faults.add(api="EndTxn", close="after")
    sender.commit_transaction()
    assert lost.hits == 1
    seen = kafka.records("orders", isolation="read_committed", at_least=1)
    assert [record.value for record in seen] == [b"once"]


@pytest.mark.kafka(topics={"orders": 1})
def test_producer_retries_an_injected_error(kafka):
    fault = kafka.faults.add(api="Produce", error="NOT_LEADER_OR_FOLLOWER", times=2)
    kafka.produce("orders", "ours is spared")
    sender = producer(kafka)
    sender.init_transactions()
    sender.begin_transaction()
    sender.produce("orders", "theirs")
    sender.commit_transaction()
    assert fault.hits == 2
    assert len(kafka.records("orders", isolation="read_committed", at_least=2)) == 2


def test_stopped_clock_expires_the_transaction_only_when_advanced(kafka, kafka_clock):
    assert kafka_clock is kafka.clock
    before = kafka_clock.now_ms()
    sender = producer(kafka, **{"transaction.timeout.ms": 60_000})
    sender.init_transactions()
    sender.begin_transaction()
    sender.produce("orders", "hangs")
    sender.flush()
    assert kafka_clock.now_ms() == before
    (open_one,) = kafka.transactions()
    assert (open_one.age_ms, open_one.timeout_ms) == (0, 60_000)
    assert "transaction" not in [fired.what for fired in kafka_clock.advance(seconds=59)]
    assert [transaction.age_ms for transaction in kafka.transactions()] == [59_000]
    fired = kafka_clock.advance(seconds=2)
    assert ("transaction", "payments") in [(deadline.what, deadline.who) for deadline in fired]
    assert kafka.transactions() == []
    assert kafka.records("orders", isolation="read_committed") == []


def test_advanced_clock_applies_retention(kafka):
    topic = kafka.topic("orders", config={"retention.ms": 3_600_000, "segment.ms": 600_000})
    kafka.produce(topic, "old")
    kafka.clock.advance(seconds=1_800)
    kafka.produce(topic, "new")
    kafka.clock.advance(seconds=2_400)
    assert [record.value for record in kafka.records(topic)] == [b"new"]


def test_faults_of_a_shared_broker(kafka_session):
    kafka_session.faults.add(api="Produce", error="INVALID_RECORD", times=None)
    kafka_session.clock.auto = False
    kafka_session.crash()


def test_faults_of_a_shared_broker_end_with_their_test(kafka_session):
    assert kafka_session.faults.all == []
    assert kafka_session.clock.auto
    kafka_session.topic("orders")
