"""Warm-up: import and compile the code for a client's first requests before a client connects.

Handlers and messages are loaded at their first use, which keeps the startup short. The first client
would wait 50 ms for them to be loaded, and librdkafka retries half a second later if a response
takes more than 50 ms. The daemon therefore loads the code as soon as it listens, in the order of
first use, in short steps, one per turn of the event loop. A request that arrives in the meantime
waits for one step at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from fencepost.coordinator.handlers import Registry
from fencepost.coordinator.runtime.late_imports import (
    CONTROLLER_MODULES,
    GROUP_MODULES,
    NEW_TOPIC_MODULES,
    TXN_MODULES,
    load,
)
from fencepost.protocol import ApiKey
from fencepost.protocol.codec import prepare


class _WarmUpPart(NamedTuple):
    """Modules that handlers import on demand, followed by the messages of some requests."""

    modules: Sequence[str]
    """Each module is small enough to be loaded in one turn of the event loop."""
    messages: Sequence[tuple[ApiKey, int]]


_PARTS = (
    # The first requests of every client, and of a transactional producer.
    _WarmUpPart((), ((ApiKey.API_VERSIONS, 3), (ApiKey.METADATA, 13))),
    _WarmUpPart(
        (*TXN_MODULES, *CONTROLLER_MODULES),
        (
            (ApiKey.FIND_COORDINATOR, 2),
            (ApiKey.INIT_PRODUCER_ID, 4),
            (ApiKey.ADD_PARTITIONS_TO_TXN, 0),
            (ApiKey.PRODUCE, 10),
            (ApiKey.END_TXN, 1),
        ),
    ),
    # Creating a topic, also automatically on a Metadata request.
    _WarmUpPart(NEW_TOPIC_MODULES, ((ApiKey.CREATE_TOPICS, 4),)),
    # Joining a group.
    _WarmUpPart(
        GROUP_MODULES,
        (
            (ApiKey.JOIN_GROUP, 5),
            (ApiKey.SYNC_GROUP, 3),
            (ApiKey.CONSUMER_GROUP_HEARTBEAT, 1),
            (ApiKey.OFFSET_FETCH, 9),
            (ApiKey.OFFSET_COMMIT, 9),
            (ApiKey.LIST_OFFSETS, 7),
            (ApiKey.FETCH, 16),
        ),
    ),
)

MESSAGES = tuple(message for part in _PARTS for message in part.messages)
"""All messages, in the order and the versions of librdkafka 2.16, the client that would retry."""


async def warm_up(registry: Registry) -> None:
    """Load modules, handlers and :data:`MESSAGES`, in their order."""
    for part in _PARTS:
        for _ in load(part.modules):
            await asyncio.sleep(0)
        for key, version in part.messages:
            await asyncio.sleep(0)
            registry.handler(key)
            for _ in prepare(key, version):
                await asyncio.sleep(0)
