"""The end offsets that a real broker returns for partitions that it leads."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.errors import RequestTimedOutError, UnknownTopicOrPartitionError
from fencepost.coordinator.replication.end_offsets import EndOffsets
from fencepost.coordinator.replication.peers import Peers
from fencepost.tools.ports import hold_port
from tests.support.batches import batch
from tests.support.cluster import Cluster
from tests.unit.coordinator.replication.other_broker import image_of


def written(bootstrap: str) -> str:
    """Write three records to partition 1 of a new topic."""
    with Cluster(bootstrap) as client:
        topic = client.create_topic("t", 2)
        parts = [{"index": 1, "records": batch([b"a", b"b", b"c"])}]
        topics = [{"name": topic, "partition_data": parts}]
        client.call("produce", 9, acks=-1, timeout=1_000, topic_data=topics)
        return topic


async def test_leader_returns_end_offset_or_error_of_each_partition(tmp_path: Path) -> None:
    async with Broker(tmp_path, config={"node.id": "7"}) as broker:
        topic = await asyncio.to_thread(written, broker.bootstrap)
        peers = Peers(BrokerConfig(), lambda: image_of(b7=broker.address[1]), node_id=5)
        places = [(topic, 0), (topic, 1), (topic, 9), ("missing", 0)]
        told = await EndOffsets(peers).ask(7, places)
        peers.close()
    assert (told[topic, 0], told[topic, 1]) == (0, 3)
    for missing in places[2:]:
        assert isinstance(told[missing], UnknownTopicOrPartitionError)
        assert str(told[missing]) == "broker 7 answers UNKNOWN_TOPIC_OR_PARTITION"


async def test_silent_broker_is_a_timeout_of_each_partition() -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
        peers = Peers(BrokerConfig(), lambda: image_of(b7=port), node_id=5)
        told = await EndOffsets(peers).ask(7, [("t", 0), ("t", 1)])
        peers.close()
    assert {type(error) for error in told.values()} == {RequestTimedOutError}
