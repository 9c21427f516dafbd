"""A broker that a test owns: killed and started again in the process of the test."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from fencepost.logcore.checkpoints import CLEAN_SHUTDOWN
from fencepost.testing.broker import OwnBroker
from tests.support.raw import RawClient
from tests.support.waits import until


def produce(bootstrap: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
    for value in values:
        producer.produce("t", value)
    assert producer.flush(30) == 0


def values_of(bootstrap: str, isolation: str = "read_uncommitted") -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition("t", 0, 0)])
    values = []
    while (message := consumer.poll(30)) is not None and message.error() is None:
        values.append(message.value())
    consumer.close()
    return values


def test_a_crash_keeps_what_was_acknowledged_and_leaves_no_mark(tmp_path: Path) -> None:
    with OwnBroker(tmp_path) as broker:
        address = broker.address
        produce(broker.bootstrap, b"1", b"2")
        with RawClient(broker.bootstrap) as client:
            client.call("api_versions", 0)
            broker.crash()
            with pytest.raises(ConnectionResetError):
                client.call("api_versions", 0)
        assert not broker.is_running
        assert not (tmp_path / CLEAN_SHUTDOWN).exists()
        broker.restart()
        assert broker.address == address
        assert values_of(broker.bootstrap) == [b"1", b"2"]
        produce(broker.bootstrap, b"3")
        broker.restart()
        assert broker.address == address
        assert values_of(broker.bootstrap) == [b"1", b"2", b"3"]
    assert (tmp_path / CLEAN_SHUTDOWN).exists()


def test_nothing_changes_the_files_after_a_crash(tmp_path: Path) -> None:
    broker = OwnBroker(tmp_path).start()
    produce(broker.bootstrap, b"1")

    async def look(running: object) -> dict[str, bytes]:
        broker._files.die()
        return contents(tmp_path)

    at_death = broker.call(look)
    broker.crash()
    assert contents(tmp_path) == at_death


def contents(directory: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in directory.rglob("*") if one.is_file()}


def test_a_transaction_goes_on_over_a_crash(tmp_path: Path) -> None:
    with OwnBroker(tmp_path) as broker:
        producer = Producer(
            {"bootstrap.servers": broker.bootstrap, "transactional.id": "tx", "log_level": 0}
        )
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce("t", b"1")
        assert producer.flush(30) == 0
        broker.crash()
        broker.restart()
        assert values_of(broker.bootstrap, "read_committed") == []
        producer.produce("t", b"2")
        producer.commit_transaction(60)
        until(
            lambda: values_of(broker.bootstrap, "read_committed") == [b"1", b"2"],
            "the transaction that a crash fell into is whole",
        )


def test_a_crash_and_a_stop_may_be_called_at_any_time(tmp_path: Path) -> None:
    broker = OwnBroker(tmp_path)
    broker.crash()
    broker.stop()
    broker.start()
    broker.start()
    broker.crash()
    broker.crash()
    broker.stop()
    with pytest.raises(RuntimeError, match="does not run"):
        broker.call(None)
