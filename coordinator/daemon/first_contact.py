"""What a first client needs is imported and compiled while nobody has asked for anything yet.

Handlers and messages are loaded at their first use, so that a start is short. The first client of a
fresh daemon would pay for that: 50 ms of its first requests, and librdkafka asks again, half a
second later, for what takes longer than 50 ms. So the daemon loads them as soon as it listens, what
comes first before what comes later, a piece a turn of the event loop. Whoever comes in the middle
of that waits for one piece.
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
from fencepost.coordinator.wire import ApiKey
from fencepost.coordinator.wire.codec import prepare


class _Part(NamedTuple):
    """Modules that handlers import when they are used, and then the messages of some requests."""

    modules: Sequence[str]
    """Each a piece small enough for a turn."""
    messages: Sequence[tuple[ApiKey, int]]


_PARTS = (
    # How every client begins, and a transactional producer.
    _Part((), ((ApiKey.API_VERSIONS, 3), (ApiKey.METADATA, 13))),
    _Part(
        (*TXN_MODULES, *CONTROLLER_MODULES),
        (
            (ApiKey.FIND_COORDINATOR, 2),
            (ApiKey.INIT_PRODUCER_ID, 4),
            (ApiKey.ADD_PARTITIONS_TO_TXN, 0),
            (ApiKey.PRODUCE, 10),
            (ApiKey.END_TXN, 1),
        ),
    ),
    # How a topic is made, also one that was only asked for.
    _Part(NEW_TOPIC_MODULES, ((ApiKey.CREATE_TOPICS, 4),)),
    # How a member of a group begins.
    _Part(
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
"""The versions of librdkafka 2.16, the client that does not like to wait, in its order."""


async def prepare_first_contact(registry: Registry) -> None:
    """Load modules, handlers and :data:`MESSAGES` in their order."""
    for part in _PARTS:
        for _ in load(part.modules):
            await asyncio.sleep(0)
        for key, version in part.messages:
            await asyncio.sleep(0)
            registry.handler(key)
            for _ in prepare(key, version):
                await asyncio.sleep(0)
