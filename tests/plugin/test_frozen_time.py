"""A broker in a process whose clock is frozen by freezegun or time-machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import pytest
import time_machine
from confluent_kafka import Consumer, KafkaError, Producer
from freezegun import freeze_time

from fencepost.testing import Kafka
from tests.support.quick import only

Freeze = Callable[[], AbstractContextManager[Any]]

PAST, FUTURE = datetime(2020, 1, 1, tzinfo=UTC), datetime(2031, 1, 1, tzinfo=UTC)

FREEZES: dict[str, Freeze] = {
    "freezegun": lambda: freeze_time(PAST),
    "freezegun, later": lambda: freeze_time(FUTURE),
    "freezegun, ticking": lambda: freeze_time(FUTURE, tick=True),
    "freezegun, real asyncio": lambda: freeze_time(PAST, real_asyncio=True),
    "time-machine": lambda: time_machine.travel(PAST, tick=False),
    "time-machine, later": lambda: time_machine.travel(FUTURE, tick=False),
    "time-machine, ticking": lambda: time_machine.travel(PAST, tick=True),
}

# A timeout measured by a frozen clock would never expire.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=only(FREEZES, *(name for name in FREEZES if "later" not in name)))
def freeze(request: pytest.FixtureRequest) -> Freeze:
    return FREEZES[request.param]


@pytest.fixture
def frozen(kafka: Kafka, freeze: Freeze) -> Iterator[Kafka]:
    with freeze():
        yield kafka


def test_every_wait_times_out_under_frozen_time(frozen: Kafka) -> None:
    frozen.topic("orders")
    with pytest.raises(TimeoutError, match="2 records of orders"):
        frozen.records("orders", at_least=2, timeout=0.05)
    with pytest.raises(TimeoutError, match="group shop"):
        frozen.wait_for_group("shop", members=1, timeout=0.05)
    with pytest.raises(AssertionError, match="orders:0 is None, not 2"):
        frozen.assert_committed("shop", {"orders": {0: 2}}, timeout=0.05)
    with pytest.raises(TimeoutError, match="Produce: 0 of 1 requests"):
        frozen.faults.observe(api="Produce").wait(0.05)
    frozen.clock.advance(seconds=10, speed=1_000)


def test_clients_are_served_under_frozen_time(frozen: Kafka) -> None:
    frozen.faults.add(api="Produce", delay_ms=20)
    settings = {"bootstrap.servers": frozen.bootstrap}
    producer = Producer({**settings, "transactional.id": "till", "transaction.timeout.ms": 5_000})
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce("orders", b"tea")
    producer.commit_transaction(10)
    consumer = Consumer(
        {
            **settings,
            "group.id": "shop",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    consumer.subscribe(["orders"])
    assert consumer.poll(10).value() == b"tea"
    # The last response is that of a Fetch that has waited for records.
    assert consumer.poll(10).error().code() == KafkaError._PARTITION_EOF
    frozen.wait_for_group("shop", members=1)
    producer.begin_transaction()
    producer.produce("orders", b"coffee")
    producer.flush(10)
    assert "transaction" in [fired.what for fired in frozen.clock.advance(seconds=6)]
    assert frozen.transactions() == []
    consumer.close()
    frozen.crash()
    frozen.restart()
    assert len(frozen.records("orders", isolation="read_committed")) == 1


def test_connections_survive_a_freeze(kafka: Kafka, freeze: Freeze) -> None:
    kafka.topic("orders")
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "linger.ms": 0})

    def write() -> None:
        producer.produce("orders", b"tea")
        assert producer.flush(10) == 0

    write()
    opened = kafka.faults.observe(api="ApiVersions")
    with freeze():
        write()
        # During this time the broker checks for idle connections.
        with pytest.raises(TimeoutError):
            kafka.records("orders", at_least=9, timeout=1.2)
        write()
    write()
    assert opened.hits == 0


def test_broker_keeps_the_machine_time_under_frozen_time(freeze: Freeze) -> None:
    before = time.time_ns() // 1_000_000
    with freeze(), Kafka() as kafka:
        (record,) = kafka.produce("orders", "tea")
        assert before - 10 <= record.timestamp_ms <= before + 30_000
        kafka.clock.advance(seconds=3_600)
        assert kafka.produce("orders", "tea")[0].timestamp_ms >= record.timestamp_ms + 3_600_000


def test_broker_starts_at_the_given_time() -> None:
    now_ms = int(PAST.timestamp() * 1_000)
    with freeze_time(PAST), Kafka(now_ms=now_ms) as kafka:
        (record,) = kafka.produce("orders", "tea")
        assert now_ms <= record.timestamp_ms < now_ms + 30_000
        assert now_ms <= kafka.clock.now_ms() < now_ms + 30_000


@freeze_time("2020-01-01")
def test_waits_end_in_a_decorated_function(kafka: Kafka) -> None:
    kafka.produce("orders", "tea")
    with pytest.raises(TimeoutError):
        kafka.records("orders", at_least=2, timeout=0.05)


async def test_coroutine_waits_end_on_a_frozen_loop(kafka: Kafka, freeze: Freeze) -> None:
    with freeze():
        await kafka.aio.produce("orders", "tea")
        with pytest.raises(TimeoutError):
            await kafka.aio.records("orders", at_least=2, timeout=0.05)
        observer = kafka.faults.observe(api="Produce")
        with pytest.raises(TimeoutError, match="0 of 1 requests"):
            await observer.wait_async(0.05)
        writer = asyncio.get_running_loop().run_in_executor(None, _write, kafka)
        await observer.wait_async(30)
        await writer
        await kafka.clock.advance_async(seconds=10, speed=1_000)


def _write(kafka: Kafka) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    producer.produce("orders", b"coffee")
    assert producer.flush(10) == 0


@pytest.mark.parametrize(
    "begin",
    [
        "from freezegun import freeze_time; freeze_time('2020-01-01').start()",
        pytest.param(
            "import time_machine; time_machine.travel(0, tick=False).start()",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_waits_end_if_time_was_frozen_before_the_import(begin: str) -> None:
    script = (
        f"{begin}\n"
        "from fencepost.testing import Kafka\n"
        "with Kafka() as kafka:\n"
        "    kafka.produce('orders', 'tea')\n"
        "    try: kafka.records('orders', at_least=2, timeout=0.05)\n"
        "    except TimeoutError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "2 records of orders" in done.stdout, done.stderr
