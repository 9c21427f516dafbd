"""A broker of Fencepost and a quorum of three Apache Kafkas, of which the leader is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.wire.client.client import AsyncWireClient
from tests.support.kafka import Kafka, quorum_of_three
from tests.support.waits import until_true

FAILOVER_S = 30.0


async def created(broker: Broker, name: str) -> None:
    """Have a topic created, by whichever controller is the active one."""

    async def asked() -> int:
        async with AsyncWireClient(broker.bootstrap) as client:
            answer = await client.call(
                "CreateTopics",
                entity=lambda make: make.message(
                    topics=[make.CreatableTopic(name=name, num_partitions=3, replication_factor=1)],
                    timeout_ms=5_000,
                ),
                check=False,
                deadline_ms=FAILOVER_S * 1000,
            )
        return int(answer.topics[0].error_code)

    assert await asked() == 0
    await until_true(lambda: broker.services.metadata.topic(name) is not None, name)


@pytest.mark.slow
def test_a_broker_follows_the_quorum_from_leader_to_leader(tmp_path: Path) -> None:
    """Nothing that was committed is lost, what is asked meanwhile is done by the next leader."""
    nodes = quorum_of_three(tmp_path)
    by_address = {one.controller: one for one in nodes}
    config = {
        "process.roles": "broker",
        "node.id": "101",
        "controller.quorum.bootstrap.servers": ",".join(by_address),
        "controller.listener.names": "CONTROLLER",
    }

    async def work() -> None:
        async with Broker(tmp_path / "member", config=config) as broker:
            assert broker._member is not None
            membership = broker._member.membership

            def leader() -> Kafka | None:
                found = membership.controller
                return None if found is None else by_address[f"{found[0]}:{found[1]}"]

            await created(broker, "t0")
            for number in (1, 2):
                gone = leader()
                assert gone is not None
                gone.kill()
                await created(broker, f"t{number}")
                assert leader() not in (None, gone)
                gone.launch()
                await asyncio.to_thread(gone.wait)
            topics = set(broker.services.metadata.topics)
            assert topics >= {"t0", "t1", "t2"}
            own = broker.services.metadata.image.brokers[101]
            assert not own.fenced
            assert own.epoch == membership.broker_epoch

    try:
        asyncio.run(work())
    finally:
        for one in nodes:
            one.stop()
