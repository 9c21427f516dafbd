"""The broker methods that tests call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from fencepost.client.client import ApiError
from fencepost.coordinator.config.broker_keys import BROKER_KEYS
from fencepost.coordinator.config.key import ConfigError
from fencepost.logcore import system
from fencepost.testing import Kafka, KafkaUnderTest, Record
from fencepost.testing.broker import OwnBroker
from fencepost.testing.levels import SETTINGS
from fencepost.testing.writing import BATCH_BYTES


def values(records: list[Record]) -> list[bytes | None]:
    return [record.value for record in records]


# --- produce and records ---


def test_every_form_of_a_message(kafka: Kafka) -> None:
    topic = kafka.topic("orders", partitions=3)
    before = kafka.clock.now_ms()
    written = kafka.produce(
        topic,
        b"bytes",
        "straße",
        None,
        ("key", "value"),
        (None, b"v", {"trace": "1", "none": None}),
        ("k", "v", [("twice", b"1"), ("twice", b"2")], 2),
        ("k", None, None, 1, 1_234),
        key="usual",
        headers={"usual": b"h"},
        partition=0,
    )
    usual = (("usual", b"h"),)
    assert [record[1:2] + record[4:] for record in written] == [
        (0, b"usual", b"bytes", usual),
        (0, b"usual", "straße".encode(), usual),
        (0, b"usual", None, usual),
        (0, b"key", b"value", usual),
        (0, None, b"v", (("trace", b"1"), ("none", None))),
        (2, b"k", b"v", (("twice", b"1"), ("twice", b"2"))),
        (1, b"k", None, usual),
    ]
    assert [record.offset for record in written] == [0, 1, 2, 3, 4, 0, 0]
    assert written[-1].timestamp_ms == 1_234
    assert all(before <= record.timestamp_ms <= kafka.clock.now_ms() for record in written[:-1])
    assert kafka.records(topic) == sorted(
        written, key=lambda record: (record.partition, record.offset)
    )
    assert kafka.records(topic, partition=2) == [written[5]]
    copies = kafka.produce("copies", *written)
    assert [copy[3:] for copy in copies] == [record[3:] for record in written]
    assert kafka.produce(topic) == []


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (7, "a message is bytes, str, None or a tuple, not 7"),
        ({"key": "value"}, "a message is bytes, str, None or a tuple, not"),
        (("k", 7), "a value is bytes, str or None, not int: 7"),
        ((7, "v"), "a key is bytes, str or None, not int: 7"),
        (("v",), r"a message is \(key, value\).*this has 1 parts"),
        (("k", "v", 7), "headers are a mapping or pairs, not 7"),
        (("k", "v", "h"), "headers are a mapping or pairs, not 'h'"),
        (("k", "v", ["h"]), "a header is a pair of a str and a value, not 'h'"),
        (("k", "v", {"h": 7}), "header 'h' is bytes, str or None, not int: 7"),
        (("k", "v", None, "0"), "a partition is an int, not '0'"),
        (("k", "v", None, 1), "orders has no partition 1, but 1"),
        (("k", "v", None, -1), "orders has no partition -1, but 1"),
        (("k", "v", None, 0, "now"), "a timestamp is an int, not 'now'"),
    ],
)
def test_invalid_message_is_refused_and_nothing_is_written(
    message: object, complaint: str, own: Kafka
) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint):
        own.produce("orders", b"one", message)  # type: ignore[arg-type]
    assert own.records("orders") == []


@pytest.fixture(scope="module")
def own() -> Iterator[Kafka]:
    with Kafka() as kafka:
        kafka.topic("orders")
        yield kafka


def test_keys_get_the_partitions_of_other_clients(own: Kafka) -> None:
    from confluent_kafka import Producer

    topic = own.topic("placed", partitions=7)
    keys = [f"key {number}" for number in range(40)]
    ours = own.produce(topic, *((key, "") for key in keys))
    producer = Producer({"bootstrap.servers": own.bootstrap, "partitioner": "murmur2_random"})
    for key in keys:
        producer.produce(topic, b"theirs", key)
    producer.flush()
    theirs = {
        record.key: record.partition for record in own.records(topic) if record.value == b"theirs"
    }
    assert {record.key: record.partition for record in ours} == theirs
    assert len(set(theirs.values())) > 3


def test_large_messages_are_written_up_to_the_limit(own: Kafka) -> None:
    many = [os.urandom(BATCH_BYTES // 3) for _ in range(10)]
    assert values(own.produce(own.topic("large"), *many)) == many
    assert values(own.records("large")) == many
    with pytest.raises(ApiError, match="Produce: MESSAGE_TOO_LARGE"):
        own.produce("large", bytes(2_000_000))
    assert len(own.produce("large", bytes(1_000_000))) == 1


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_records_of_other_clients_are_read(codec: str, own: Kafka) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": own.bootstrap, "compression.type": codec})
    for _ in range(10):
        producer.produce(f"in-{codec}", b"x" * 1_000)
    producer.flush()
    assert values(own.records(f"in-{codec}")) == [b"x" * 1_000] * 10


def test_records_waits_for_records_of_other_threads(own: Kafka) -> None:
    topic = own.topic("awaited", partitions=2)
    own.produce(topic, "first")

    def write() -> None:
        own.produce(topic, "second", "third")

    timer = threading.Timer(0.05, write)
    timer.start()
    assert len(own.records(topic, at_least=3)) == 3
    timer.join()
    with pytest.raises(TimeoutError, match=r"4 records of awaited .*there were 3.*value=b'third'"):
        own.records(topic, at_least=4, timeout=0.05)


@contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Do ``work`` in a thread, shortly after the block has begun."""
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(lambda: (threading.Event().wait(0.05), work()))
        yield
        done.result()


def test_records_waits_for_a_topic_that_does_not_exist_yet(own: Kafka) -> None:
    with meanwhile(lambda: own.produce("in-a-moment", "tea")):
        assert values(own.records("in-a-moment", at_least=1)) == [b"tea"]


def test_records_waits_for_a_restarted_broker(kafka: Kafka) -> None:
    def restart() -> None:
        kafka.crash()
        kafka.restart()
        kafka.produce("orders", "coffee")

    kafka.produce("orders", "tea")
    with meanwhile(restart):
        assert values(kafka.records("orders", at_least=2)) == [b"tea", b"coffee"]


def test_records_restarts_with_a_recreated_topic(kafka: Kafka) -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})

    def make_again() -> None:
        (deleted,) = admin.delete_topics(["t"]).values()
        deleted.result(30)
        kafka.produce("t", "new", "newer", "newest")

    kafka.produce("t", "old", "older")
    with meanwhile(make_again):
        assert values(kafka.records("t", at_least=3)) == [b"new", b"newer", b"newest"]


def test_wait_error_escapes_client_ids(kafka: Kafka) -> None:
    with member(kafka, **{"client.id": "\x1b[31mred"}):
        kafka.topic("orders")
        kafka.wait_for_group("shop", members=1)
        with pytest.raises(TimeoutError) as caught:
            kafka.wait_for_group("shop", members=2, timeout=0)
    assert "red@127.0.0.1" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_missing_topic_partition_or_group_is_reported(own: Kafka) -> None:
    with pytest.raises(ApiError, match="there is no topic 'missing'"):
        own.records("missing")
    with pytest.raises(ValueError, match="orders has no partition 1, but 1"):
        own.records("orders", partition=1)
    with pytest.raises(ValueError, match="read_committed, read_uncommitted, not 'committed'"):
        own.records("orders", isolation="committed")
    with pytest.raises(ApiError, match="TOPIC_ALREADY_EXISTS"):
        own.topic("orders")
    with pytest.raises(ApiError, match="INVALID_CONFIG"):
        own.topic("unmade", config={"retention": 5})
    assert own.history("nobody") == []
    own.assert_committed("nobody", {"orders": {0: None}})


def test_produce_creates_no_topic_without_auto_creation() -> None:
    with (
        Kafka(config={"auto.create.topics.enable": False}) as kafka,
        pytest.raises(ApiError, match="there is no topic 'orders'"),
    ):
        kafka.produce("orders", "one")


def test_methods_are_thread_safe(own: Kafka) -> None:
    topic = own.topic("threads", partitions=4)

    def work(number: int) -> int:
        own.produce(topic, *(f"{number} {at}" for at in range(5)))
        return len(own.records(topic, at_least=5))

    with ThreadPoolExecutor(8) as threads:
        assert max(threads.map(work, range(32))) == 160
    assert len(set(own.records(topic))) == 160


# --- groups ---


@contextmanager
def member(kafka: KafkaUnderTest, **more: object) -> Iterator[object]:
    """Run a consumer that polls in a thread."""
    from confluent_kafka import Consumer

    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": "shop",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **({} if "group.protocol" in more else {"heartbeat.interval.ms": 100}),
            **more,
        }
    )
    consumer.subscribe(["orders"])
    ended = threading.Event()

    def poll() -> None:
        while not ended.is_set():
            message = consumer.poll(0.05)
            if message is not None and message.error() is None:
                consumer.commit(message, asynchronous=False)
        consumer.close()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield consumer
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.kafka(topics={"orders": 4})
def test_wait_for_group_waits_for_members_state_and_lag(protocol: str, kafka: Kafka) -> None:
    kafka.produce("orders", *"abcd")
    settings = {} if protocol == "classic" else {"group.protocol": protocol}
    with member(kafka, **settings, **{"client.id": "one"}):
        alone = kafka.wait_for_group("shop", members=1, lag=0)
        assert alone.kind == protocol
        assert len(alone.members[0].assigned) == 4
        kafka.assert_committed("shop", {"orders": dict.fromkeys(range(4), 1)})
        with member(kafka, **settings, **{"client.id": "two"}):
            both = kafka.wait_for_group("shop", members=2)
            assert {consumer.client_id for consumer in both.members} == {"one", "two"}
            with pytest.raises(
                TimeoutError, match="Stable with 3 members: it is Stable with 2 members"
            ):
                kafka.wait_for_group("shop", members=3, timeout=0.05)
    kafka.wait_for_group("shop", members=0)
    assert {entry.client_id for entry in kafka.history("shop")} >= {"one", "two"}
    kafka.produce("orders", "more", partition=2)
    with pytest.raises(TimeoutError, match=r"and at most 0 behind \(it is 1\): it is Empty"):
        kafka.wait_for_group("shop", state="Empty", lag=0, timeout=0.05)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.kafka(topics={"orders": 3})
def test_group_lag_counts_owned_partitions_without_a_commit(protocol: str, kafka: Kafka) -> None:
    from confluent_kafka import Consumer

    kafka.produce("orders", "tea", partition=0)
    settings = {} if protocol == "classic" else {"group.protocol": protocol}
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": "shop",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **settings,
        }
    )
    consumer.subscribe(["orders"])
    try:
        (message,) = consumer.consume(1, 30)
        with pytest.raises(TimeoutError, match=r"and at most 0 behind \(it is 1\)"):
            kafka.wait_for_group("shop", members=1, lag=0, timeout=0.05)
        consumer.commit(message, asynchronous=False)
        kafka.wait_for_group("shop", members=1, lag=0, timeout=5)  # two of the partitions are empty
        kafka.produce("orders", "a", "b", partition=1)
        with pytest.raises(TimeoutError, match=r"and at most 1 behind \(it is 2\)"):
            kafka.wait_for_group("shop", lag=1, timeout=0.05)
        kafka.wait_for_group("shop", lag=2, timeout=5)
    finally:
        consumer.close()


def test_assert_committed_lists_differing_offsets(own: Kafka) -> None:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": own.bootstrap, "group.id": "reader"})
    consumer.commit(offsets=[TopicPartition("orders", 0, 7)], asynchronous=False)
    consumer.close()
    own.assert_committed("reader", {("orders", 0): 7})
    assert own.committed("reader") == {("orders", 0): 7}
    with pytest.raises(AssertionError) as caught:
        own.assert_committed("reader", {"orders": {0: None, 3: 1}}, timeout=0)
    assert str(caught.value) == (
        "committed offsets of group reader:\n  orders:0 is 7, not None\n  orders:3 is None, not 1"
        "\n  orders has no partition 3, but 1"
    )
    with pytest.raises(TypeError, match=r"offsets are \{'orders': \{0: 5\}\}"):
        own.assert_committed("reader", {"orders": 7})  # type: ignore[dict-item]


def test_short_session_timeouts_are_allowed(kafka: Kafka) -> None:
    with member(kafka, **{"session.timeout.ms": 100, "heartbeat.interval.ms": 50}):
        kafka.topic("orders")
        kafka.wait_for_group("shop", members=1)


# --- start and stop ---


def test_documented_settings_equal_the_brokers(own: Kafka) -> None:
    """A client gets the same settings from the broker that docs/testing.md lists."""
    from confluent_kafka.admin import AdminClient, ConfigResource

    admin = AdminClient({"bootstrap.servers": own.bootstrap})
    resource = ConfigResource(ConfigResource.Type.BROKER, "1")
    (answer,) = admin.describe_configs([resource]).values()
    told = answer.result()
    assert {key: told[key].value for key in SETTINGS} == dict(SETTINGS)
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    rows = [
        f"| `{key}` | {SETTINGS[key]} | {BROKER_KEYS[key].default} |" for key in sorted(SETTINGS)
    ]
    assert "\n".join(["|---|---|---|", *rows, ""]) in page


def test_failed_start_leaves_no_files_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    threads = threading.active_count()
    for config in ({"num.partition": 1}, {"num.partitions": "many"}, {"num.partitions": [1]}):
        with pytest.raises((ConfigError, TypeError), match=r"num\.partition"):
            Kafka(config=config).start()
    with Kafka() as kafka:
        assert kafka.data_dir.parent == tmp_path
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads
    with pytest.raises(RuntimeError, match="the broker is down"):
        kafka.records("orders")
    kafka.stop()


def test_given_data_directory_is_kept(tmp_path: Path) -> None:
    with Kafka(tmp_path / "data") as kafka:
        kafka.produce("orders", "one")
    with Kafka(tmp_path / "data") as kafka:
        assert values(kafka.records("orders")) == [b"one"]


def test_broker_under_test_never_syncs_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = []
    monkeypatch.setattr(os, "fsync", forced.append)
    monkeypatch.setattr(system, "sync_data", forced.append)
    with Kafka() as kafka:
        kafka.produce(kafka.topic("orders", partitions=3), "one")
        kafka.crash()
        kafka.restart()
        assert values(kafka.records("orders")) == [b"one"]
    assert forced == []
    with OwnBroker(tmp_path):
        pass
    assert forced


def test_group_member_survives_a_restart(kafka: Kafka) -> None:
    with member(kafka):
        kafka.topic("orders")
        kafka.wait_for_group("shop", members=1)
        kafka.restart()
        kafka.wait_for_group("shop", members=1)


def test_several_brokers_in_one_process_are_independent() -> None:
    with Kafka() as kafka, Kafka() as other:
        kafka.produce("orders", "one")
        other.produce("orders", "other")
        assert values(kafka.records("orders")) == [b"one"]
        assert kafka.bootstrap != other.bootstrap


def test_testing_package_works_without_pytest() -> None:
    """Importing the package is cheap, and pytest is not required."""
    script = (
        "import sys; sys.modules['pytest'] = None\n"
        "import fencepost.testing; assert 'kio' not in sys.modules\n"
        "with fencepost.testing.Kafka() as kafka: print(kafka.produce('orders', 'one')[0].offset)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert re.fullmatch(r"0\n", done.stdout), done
