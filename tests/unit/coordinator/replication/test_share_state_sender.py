"""The state of share groups at the share coordinator of another real broker."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.replication.peers import Peers
from fencepost.coordinator.replication.share_state_sender import ShareStateSender
from fencepost.coordinator.runtime.errors import CoordinatorNotAvailableError, NotCoordinatorError
from fencepost.coordinator.services.share_persister import SharePersister
from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import SharePartitionKey, StateRead
from fencepost.groups.share.errors import (
    FencedShareLeaderEpochError,
    FencedStateEpochError,
    InvalidShareRequestError,
    UnknownSharePartitionError,
)
from fencepost.groups.share.state import (
    DeleteState,
    InitializeState,
    ReadShareState,
    ReadStateSummary,
    StateChanged,
    StateSummary,
    WriteShareState,
)
from tests.support.cluster import Cluster, unique
from tests.support.share import initialize
from tests.unit.coordinator.replication.other_broker import image_of

HERE, THERE, NOWHERE = 1, 7, 8


class Other(NamedTuple):
    """Another broker, and the id of its topic, which has ten partitions."""

    port: int
    topic: uuid.UUID

    def key(self, group: str, partition: int = 0) -> SharePartitionKey:
        return SharePartitionKey(group, self.topic.bytes, partition)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Other]:
    config = {"node.id": str(THERE), "share.coordinator.state.topic.num.partitions": "3"}
    with Broker.in_thread(tmp_path_factory.mktemp("other"), config=config) as broker:
        with Cluster(broker.bootstrap) as client:
            topic = client.topic_id(client.create_topic("queue", 10))
            initialize(client, "first", topic)  # the first request creates the topic
        yield Other(int(broker.bootstrap.rpartition(":")[2]), topic)


@pytest.fixture
async def sender(other: Other) -> AsyncIterator[ShareStateSender]:
    image = image_of(b7=other.port)
    peers = Peers(BrokerConfig({}), lambda: image, node_id=HERE)
    made = ShareStateSender(peers)
    yield made
    await made.close()
    peers.close()


async def test_each_command_is_executed_by_remote_share_coordinator(
    other: Other, sender: ShareStateSender
) -> None:
    key = other.key(unique("g"))
    assert await sender.send(THERE, ReadStateSummary(key)) == StateSummary()
    assert await sender.send(THERE, InitializeState(key, 2, 5)) == StateChanged()
    batches = (StateBatch(5, 6, 2, 1), StateBatch(8, 8, 0, 2))
    written = WriteShareState(key, 2, 3, 5, 2, batches)
    assert await sender.send(THERE, written) == StateChanged()
    assert await sender.send(THERE, ReadShareState(key, 4)) == StateRead(2, 5, batches)
    assert await sender.send(THERE, ReadStateSummary(key)) == StateSummary(5, 2, 4, 2)
    assert await sender.send(THERE, DeleteState(key)) == StateChanged()
    assert await sender.send(THERE, ReadStateSummary(key)) == StateSummary()


async def test_error_of_remote_share_coordinator_is_raised_as_the_same_class(
    other: Other, sender: ShareStateSender
) -> None:
    key = other.key(unique("g"))
    with pytest.raises(InvalidShareRequestError):
        await sender.send(THERE, ReadShareState(key, 0))
    await sender.send(THERE, InitializeState(key, 2, 5))
    await sender.send(THERE, ReadShareState(key, 4))
    with pytest.raises(FencedShareLeaderEpochError):
        await sender.send(THERE, ReadShareState(key, 3))
    with pytest.raises(FencedStateEpochError):
        await sender.send(THERE, WriteShareState(key, 1, 4, 5, 0, ()))
    unknown = SharePartitionKey("g", uuid.uuid4().bytes, 0)
    with pytest.raises(UnknownSharePartitionError):
        await sender.send(THERE, InitializeState(unknown, 0, 0))


async def test_commands_of_one_turn_are_sent_in_one_request(
    other: Other, sender: ShareStateSender
) -> None:
    group = unique("g")
    keys = [other.key(group, partition) for partition in range(10)]
    states = [InitializeState(key, 1, partition) for partition, key in enumerate(keys)]
    await asyncio.gather(*(sender.send(THERE, state) for state in states))
    peer = sender._peers._peers
    (connection,) = peer.values()
    asked, request = [], connection.newest

    async def counted(api, build, **fields):
        asked.append(api)
        return await request(api, build, **fields)

    connection.newest = counted  # type: ignore[method-assign]
    found = await asyncio.gather(*(sender.send(THERE, ReadStateSummary(key)) for key in keys))
    assert [summary.start_offset for summary in found] == list(range(10))
    assert len(asked) == 1
    # Results are identified by partition, so two commands for a share partition are two requests.
    await asyncio.gather(*(sender.send(THERE, ReadStateSummary(keys[0])) for _ in range(2)))
    assert len(asked) == 3


async def test_broker_without_address_is_not_available(sender: ShareStateSender) -> None:
    key = SharePartitionKey("g", bytes(16), 0)
    with pytest.raises(CoordinatorNotAvailableError):
        await sender.send(NOWHERE, ReadStateSummary(key))


async def test_closed_sender_refuses_commands(other: Other, sender: ShareStateSender) -> None:
    under_way = sender.send(THERE, ReadStateSummary(other.key("g")))
    await sender.close()
    for future in (under_way, sender.send(THERE, ReadStateSummary(other.key("g")))):
        with pytest.raises(NotCoordinatorError):
            await future


async def test_persister_reads_and_writes_state_at_the_other_broker(
    other: Other, sender: ShareStateSender
) -> None:
    persister = SharePersister(lambda command: sender.send(THERE, command))
    keys = {other.key(unique("g"), partition): partition for partition in range(3)}
    assert await persister.initialize(1, keys) == dict.fromkeys(keys)
    summaries = await persister.summaries(keys)
    assert {key: summary.start_offset for key, summary in summaries.items()} == keys
