"""Expiration by a test's clock: records, offsets, producers, transactional ids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from fencepost.coordinator.daemon.broker import Broker
from fencepost.testing.broker import OwnBroker
from fencepost.testing.clock import Fired, TestClock
from fencepost.testing.deadlines import Deadlines
from tests.support.waits import until

pytestmark = pytest.mark.slow

HOUR_S, DAY_S = 3_600, 86_400


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
def broker(tmp_path: Path, clock: TestClock) -> Iterator[OwnBroker]:
    with OwnBroker(tmp_path, clock=clock) as broker:
        yield broker


def create(broker: OwnBroker, name: str, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    settings = {key.replace("_", "."): value for key, value in config.items()}
    admin.create_topics([NewTopic(name, 1, config=settings)])[name].result(30)


def produce(broker: OwnBroker, topic: str, *values: bytes, key: bytes | None = None) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0})
    for value in values:
        producer.produce(topic, value, key)
        assert producer.flush(30) == 0


def offsets_of(broker: OwnBroker, topic: str) -> tuple[int, int]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "none"})
    try:
        return consumer.get_watermark_offsets(TopicPartition(topic, 0), 30)
    finally:
        consumer.close()


def of(fired: list[Fired], what: str) -> list[Fired]:
    return [deadline for deadline in fired if deadline.what == what]


def segments_of(broker: OwnBroker, topic: str) -> int:
    return len(list(broker.data_dir.glob(f"{topic}-0/*.log")))


def test_retention_deletes_records_after_retention_ms(broker: OwnBroker, clock: TestClock) -> None:
    create(broker, "t", retention_ms=str(2 * HOUR_S * 1000), file_delete_delay_ms="60000")
    produce(broker, "t", b"old")
    assert of(clock.advance(seconds=2 * HOUR_S - 60), "retention") == []
    assert offsets_of(broker, "t") == (0, 1)
    (deleted,) = of(clock.advance(seconds=HOUR_S), "retention")
    assert (deleted.who, deleted.detail) == ("t-0", {"log_start_offset": (0, 1)})
    assert offsets_of(broker, "t") == (1, 1)


def test_auto_clock_reaches_the_next_retention_round_after_an_advance(
    tmp_path: Path,
) -> None:
    clock = TestClock(auto=True)
    config = {"log.initial.task.delay.ms": str(HOUR_S * 1000)}
    with OwnBroker(tmp_path, config=config, clock=clock) as broker:
        create(broker, "t", retention_ms="1000")
        produce(broker, "t", b"old")
        assert of(clock.advance(seconds=HOUR_S - 2), "retention") == []
        until(lambda: offsets_of(broker, "t") == (1, 1), "the round that was due in two seconds")


def test_segment_is_rolled_after_segment_ms(broker: OwnBroker, clock: TestClock) -> None:
    create(broker, "t", segment_ms=str(HOUR_S * 1000), message_timestamp_type="LogAppendTime")
    produce(broker, "t", b"1")
    clock.advance(seconds=HOUR_S - 1)
    produce(broker, "t", b"2")
    assert segments_of(broker, "t") == 1
    clock.advance(seconds=2)
    produce(broker, "t", b"3")
    assert segments_of(broker, "t") == 2


def test_compaction_waits_for_min_compaction_lag(broker: OwnBroker, clock: TestClock) -> None:
    create(
        broker,
        "t",
        cleanup_policy="compact",
        min_compaction_lag_ms=str(HOUR_S * 1000),
        min_cleanable_dirty_ratio="0.01",
        segment_ms="1000",
        # The client's own timestamps do not follow the clock.
        message_timestamp_type="LogAppendTime",
    )
    produce(broker, "t", b"1", b"2", key=b"k")
    clock.advance(seconds=2)
    produce(broker, "t", b"3", key=b"k")
    assert of(clock.advance(seconds=HOUR_S - 60), "cleaner") == []
    fired = of(clock.advance(seconds=120), "cleaner")
    assert [deadline.who for deadline in fired] == ["t-0"]
    assert fired[0].detail["cleaned_offset"][1] >= 2


def test_offsets_of_an_empty_group_expire(tmp_path: Path, clock: TestClock) -> None:
    config = {"offsets.retention.minutes": "60"}
    with OwnBroker(tmp_path, config=config, clock=clock) as broker:
        create(broker, "t")
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "g"})
        consumer.commit(offsets=[TopicPartition("t", 0, 5)], asynchronous=False)
        consumer.close()
        begun_ms = clock.now_ms()
        assert of(clock.advance(seconds=HOUR_S - 60), "offsets-expired") == []
        (expired,) = of(clock.advance(seconds=HOUR_S), "offsets-expired")
        assert expired.who == "g"
        # The expiration check runs every ten minutes.
        assert HOUR_S <= (expired.at_ms - begun_ms) / 1000 <= HOUR_S + 600
        again = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "g"})
        (kept,) = again.committed([TopicPartition("t", 0)], 30)
        again.close()
        assert kept.offset < 0


def test_producers_and_transactional_ids_expire(broker: OwnBroker, clock: TestClock) -> None:
    create(broker, "t", retention_ms="-1")
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "x"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("t", b"1")
    producer.commit_transaction(30)
    fired = clock.advance(seconds=DAY_S + HOUR_S)
    (forgotten,) = of(fired, "producer expiry")
    assert (forgotten.who, forgotten.detail) == ("t-0", {"producers": (1, 0)})
    (expired,) = of(clock.advance(seconds=8 * DAY_S), "transactional-id-expired")
    assert expired.who == "x"


def test_advance_of_a_week_runs_about_100_rounds_of_each_task(
    broker: OwnBroker, clock: TestClock
) -> None:
    create(broker, "t", retention_ms=str(DAY_S * 1000))
    produce(broker, "t", b"1")
    rounds = 0
    compare = Deadlines._compare

    def counting(self: Deadlines, *told: object) -> None:
        nonlocal rounds
        rounds += 1
        compare(self, *told)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deadlines, "_compare", counting)
        fired = clock.advance(seconds=7 * DAY_S)
    assert of(fired, "retention")
    # Retention, producers and the cleaner: a hundred rounds each, plus a final round.
    assert 3 * 99 <= rounds <= 3 * 101


# --- real clients, whose heartbeats run in real time ---


def joined(consumer: Consumer) -> list[TopicPartition]:
    def assigned() -> list[TopicPartition]:
        consumer.poll(0.05)
        return consumer.assignment()

    return until(assigned, "partitions of a group")


def members_of(broker: OwnBroker, group: str) -> int:
    """Return the number of members of a Stable group, else 0."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    told = admin.describe_consumer_groups([group], request_timeout=30)[group].result(30)
    return len(told.members) if told.state.name == "STABLE" else 0


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_live_member_expires_if_no_heartbeat_arrives_during_an_advance(
    tmp_path: Path, protocol: str
) -> None:
    # The broker's clock also measures the consumer protocol's assignment interval.
    clock = TestClock()
    config = {"group.consumer.assignment.interval.ms": "0"}
    settings = {"group.id": "g", "group.protocol": protocol}
    if protocol == "classic":
        settings |= {"session.timeout.ms": 60_000, "heartbeat.interval.ms": 500}
    else:
        config["group.consumer.session.timeout.ms"] = "60000"
        config["group.consumer.heartbeat.interval.ms"] = "500"
        config["group.consumer.min.heartbeat.interval.ms"] = "100"
    with OwnBroker(tmp_path, config=config, clock=clock) as broker:
        create(broker, "t")
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, **settings})
        consumer.subscribe(["t"])
        try:
            joined(consumer)
            api = "Heartbeat" if protocol == "classic" else "ConsumerGroupHeartbeat"
            # At 30 seconds per real second, the client sends 4 heartbeats in 62 seconds.
            assert of(clock.advance(seconds=62, speed=30), "session") == []
            # A single leap leaves no time for heartbeats, except for a heartbeat that is already in
            # flight.
            (out,) = until(lambda: of(clock.advance(seconds=61), "session"), "a leap between two")
            assert out.who == "g"
            assert "member-expired" in out.events
            # The consumer learns of its removal and rejoins.
            until(lambda: (consumer.poll(0.05), members_of(broker, "g"))[1], "a member again")
            # At any speed, the member is removed if its heartbeats are lost.
            broker.faults.add(api=api, drop="request", times=None)
            assert of(clock.advance(seconds=62, speed=90), "session")
            broker.faults.clear()
        finally:
            consumer.close()


def test_commit_of_a_timed_out_transaction_fails(broker: OwnBroker, clock: TestClock) -> None:
    create(broker, "t")
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "transactional.id": "x",
            "transaction.timeout.ms": 60_000,
        }
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("t", b"1")
    assert producer.flush(30) == 0
    (fired,) = clock.advance(seconds=61)
    assert (fired.what, fired.who) == ("transaction", "x")
    with pytest.raises(KafkaException):
        producer.commit_transaction(30)
    # The abort marker is in the log, so the transaction no longer blocks readers.
    reader = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "r",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    reader.assign([TopicPartition("t", 0, 0)])
    end = until(lambda: reader.poll(1), "the end of the partition")
    assert (end.error().name(), end.offset()) == ("_PARTITION_EOF", 2)
    reader.close()


async def test_aiokafka_clients_follow_the_clock_on_the_tests_event_loop(tmp_path: Path) -> None:
    clock = TestClock()
    async with Broker(tmp_path, clock=clock) as broker:
        producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap, transactional_id="x")
        consumer = AIOKafkaConsumer(
            "t",
            bootstrap_servers=broker.bootstrap,
            group_id="g",
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            heartbeat_interval_ms=500,
            session_timeout_ms=60_000,
        )
        await producer.start()
        async with producer.transaction():
            await producer.send_and_wait("t", b"1")
        await consumer.start()
        assert (await asyncio.wait_for(consumer.getone(), 30)).value == b"1"
        fired = await clock.advance_async(seconds=62, speed=30)
        assert of(fired, "session") == []
        leaps = 1  # more than one if a heartbeat is in flight during a leap
        while not of(await clock.advance_async(seconds=61), "session"):
            leaps += 1
            assert leaps < 20
        await producer.begin_transaction()
        await producer.send_and_wait("t", b"2")
        (timed_out,) = of(await clock.advance_async(seconds=61), "transaction")
        assert timed_out.who == "x"
        await producer.stop()
        await consumer.stop()
