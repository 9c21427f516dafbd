"""Kill -9 at random moments, while client libraries retry unacknowledged records."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest

from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.waits import until
from tests.wire.clients import aio_producer, dotted

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]

KILLS = 5
MOST_WAITING = 10_000
"""The maximum number of unacknowledged records; librdkafka would queue 100,000."""
TOPIC = "numbers"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "data").start()
    with Cluster(daemon.bootstrap) as cluster:
        cluster.create_topic(TOPIC)
    yield daemon
    assert daemon.child is not None
    daemon.child.kill()


def check(daemon: Daemon, sent: int, acknowledged: list[int]) -> None:
    """Check that every number occurs once and in order, and every acknowledged number occurs."""
    with Cluster(daemon.bootstrap) as cluster:
        found = [int(value or b"") for value in cluster.values(TOPIC)]
    assert found == sorted(set(found)), "a duplicate, or out of order"
    assert set(acknowledged) <= set(found), "an acknowledged record is lost"
    assert set(found) <= set(range(sent))


@pytest.mark.slow
def test_librdkafka_records_survive_random_kills_once_and_in_order(
    daemon: Daemon, request: pytest.FixtureRequest
) -> None:
    chance = random.Random(20_240_601)
    acknowledged: list[int] = []
    refused: list[object] = []

    def delivered(error: object, message: confluent_kafka.Message) -> None:
        (refused.append(error) if error else acknowledged.append(int(message.value())))

    producer = confluent_kafka.Producer(
        dotted(
            {
                "bootstrap_servers": daemon.bootstrap,
                "enable_idempotence": True,
                "linger_ms": 1,
                "retry_backoff_ms": 20,
                "reconnect_backoff_ms": 10,
                "reconnect_backoff_max_ms": 50,
            }
        )
    )
    sent = 0
    for _ in range(KILLS):
        goal = len(acknowledged) + chance.randrange(50, 2000)

        def push(goal: int = goal) -> bool:
            nonlocal sent
            # Limit the records in the client's queue, which a slow broker would fill.
            for _ in range(50 if sent - len(acknowledged) < MOST_WAITING else 0):
                producer.produce(TOPIC, b"%d" % sent, partition=0, on_delivery=delivered)
                sent += 1
            producer.poll(0.001)
            return len(acknowledged) >= goal

        until(push, f"{goal} acknowledged", poll_s=0)
        daemon.kill()
        daemon.start()
    assert producer.flush(60) == 0
    assert refused == []
    assert acknowledged == list(range(sent))
    check(daemon, sent, acknowledged)


@pytest.mark.slow
async def test_aiokafka_records_survive_random_kills_once_and_in_order(daemon: Daemon) -> None:
    chance = random.Random(20_240_602)
    acknowledged: list[int] = []
    sent = 0
    async with aio_producer(
        daemon.bootstrap, enable_idempotence=True, retry_backoff_ms=20
    ) as producer:
        waiting: set[asyncio.Future[object]] = set()

        async def push(goal: int) -> None:
            nonlocal sent
            while len(acknowledged) < goal:
                number, sent = sent, sent + 1
                future = await producer.send(TOPIC, b"%d" % number, partition=0)
                waiting.add(future)
                future.add_done_callback(
                    lambda done, number=number: done.exception() or acknowledged.append(number)
                )
                if number % 20 == 0:
                    await asyncio.sleep(0)

        for _ in range(KILLS):
            goal = len(acknowledged) + chance.randrange(50, 1000)
            pushing = asyncio.create_task(push(goal))
            await asyncio.wait_for(asyncio.shield(pushing), 60)
            await asyncio.to_thread(daemon.kill)
            await asyncio.to_thread(daemon.start)
        await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert acknowledged == list(range(sent))
    check(daemon, sent, acknowledged)


@pytest.mark.slow
def test_acknowledged_append_survives_a_kill_right_after_its_response(daemon: Daemon) -> None:
    """An acknowledged append survives a kill right after the response, without a retry."""
    acknowledged = 0
    for _ in range(8):
        with Cluster(daemon.bootstrap) as cluster:
            for _ in range(3):
                part = cluster.produce(TOPIC, [b"%d" % acknowledged])
                assert part["error_code"] == "none"
                assert part["base_offset"] == acknowledged
                acknowledged += 1
        daemon.kill()
        daemon.start()
        with Cluster(daemon.bootstrap) as cluster:
            assert cluster.offset(TOPIC) == acknowledged
    check(daemon, acknowledged, list(range(acknowledged)))
