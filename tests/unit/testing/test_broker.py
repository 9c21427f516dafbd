"""A test's own broker, killed and restarted in the test's process."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from fencepost.logcore.checkpoints import CLEAN_SHUTDOWN
from fencepost.testing.broker import OwnBroker
from fencepost.testing.clock import TestClock
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


def test_crash_keeps_acknowledged_records_and_leaves_no_clean_shutdown_file(tmp_path: Path) -> None:
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


def test_crashed_broker_no_longer_changes_its_files(tmp_path: Path) -> None:
    broker = OwnBroker(tmp_path).start()
    produce(broker.bootstrap, b"1")

    async def look(running: object) -> dict[str, bytes]:
        broker._files.die()
        return contents(tmp_path)

    at_death = broker.call(look)
    broker.crash()
    assert contents(tmp_path) == at_death


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_transaction_continues_after_a_broker_crash(tmp_path: Path) -> None:
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


def test_stopped_brokers_leave_no_descriptors_or_threads(tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        gc.collect()  # clients of other tests may be collected meanwhile
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    def one_life(number: int) -> None:
        with OwnBroker(tmp_path / str(number), clock=TestClock()) as broker:
            broker.faults.observe()
            broker.clock.advance(seconds=3_600)
            for kill in range(number % 3):
                broker.crash()
                if kill == 0:
                    broker.restart()

    one_life(2)
    before = held()
    for number in range(3, 11):
        one_life(number)
    assert all(now <= then for now, then in zip(held(), before, strict=True))


def test_group_survives_a_crash_and_its_sessions_start_again(tmp_path: Path) -> None:
    clock = TestClock()
    with OwnBroker(tmp_path, clock=clock) as broker:
        with RawClient(broker.bootstrap) as client:
            client.call("find_coordinator", 3, key="g", key_type=0)
            member = {
                "group_id": "g",
                "session_timeout": 30_000,
                "rebalance_timeout": 30_000,
                "protocol_type": "consumer",
                "protocols": [{"name": "range", "metadata": b""}],
            }
            joined = client.call("join_group", 3, **member)
            me = {
                "group_id": "g",
                "generation_id": joined["generation_id"],
                "member_id": joined["member_id"],
            }
            told = [{"member_id": joined["member_id"], "assignment": b"mine"}]
            assert client.call("sync_group", 3, **me, assignments=told)["error_code"] == "none"
        clock.advance(seconds=20)
        broker.crash()
        clock.advance(seconds=20)
        broker.restart()
        with RawClient(broker.bootstrap) as client:
            # As in Kafka, session timeouts start again when the group is loaded.
            clock.advance(seconds=29)
            assert client.call("heartbeat", 3, **me)["error_code"] == "none"
        (fired,) = clock.advance(seconds=31)
        assert (fired.what, fired.member) == ("session", joined["member_id"])


@pytest.mark.slow
def test_crashes_under_load_lose_or_duplicate_no_acknowledged_record(
    tmp_path: Path,
) -> None:
    acknowledged: list[bytes] = []

    def delivered(error: object, message: object) -> None:
        assert error is None
        acknowledged.append(message.value())  # type: ignore[attr-defined]

    with OwnBroker(tmp_path, clock=TestClock(auto=True)) as broker:
        settings = {
            "bootstrap.servers": broker.bootstrap,
            "enable.idempotence": True,
            "linger.ms": 1,
            "reconnect.backoff.max.ms": 100,
            "log_level": 0,
        }
        producer = Producer(settings)
        sent = 0
        for _kill in range(4):
            before = len(acknowledged)
            while len(acknowledged) < before + 200:
                producer.produce("t", b"%d" % sent, on_delivery=delivered)
                sent += 1
                producer.poll(0.001)
            broker.crash()
            broker.restart()
        assert producer.flush(60) == 0
        assert acknowledged == [b"%d" % number for number in range(sent)]
        assert values_of(broker.bootstrap) == acknowledged


def test_commit_with_response_lost_in_a_crash_is_done_once(tmp_path: Path) -> None:
    with OwnBroker(tmp_path) as broker:
        settings = {"bootstrap.servers": broker.bootstrap, "transactional.id": "tx", "log_level": 0}
        producer = Producer(settings)
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce("t", b"once")
        lost = broker.faults.add(api="EndTxn", drop="answer")
        commit = threading.Thread(target=producer.commit_transaction, args=(60,))
        commit.start()
        lost.wait(30)
        broker.crash()
        broker.restart()
        commit.join(60)
        assert not commit.is_alive()
        producer.begin_transaction()
        producer.produce("t", b"twice")
        producer.commit_transaction(60)
        assert values_of(broker.bootstrap, "read_committed") == [b"once", b"twice"]


def test_crash_and_stop_can_be_called_in_any_state(tmp_path: Path) -> None:
    broker = OwnBroker(tmp_path)
    broker.crash()
    broker.stop()
    broker.start()
    broker.start()
    broker.crash()
    broker.crash()
    broker.stop()
    with pytest.raises(RuntimeError, match="the broker is down"):
        broker.call(None)
