"""What a first client needs is imported and compiled while nobody has asked for anything yet.

Handlers and messages are loaded at their first use, so that a start is short. The first client of a
fresh daemon would pay for that: 50 ms of its first requests, and librdkafka asks again, half a
second later, for what takes longer than 50 ms. So the daemon loads them as soon as it listens, a
piece a turn of the event loop. Whoever comes in the middle of that waits for one piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from importlib import import_module

from fencepost.coordinator.handlers import Registry
from fencepost.coordinator.wire import ApiKey
from fencepost.coordinator.wire.codec import prepare

MESSAGES: Iterable[tuple[ApiKey, int]] = (
    # How a transactional producer begins.
    (ApiKey.API_VERSIONS, 3),
    (ApiKey.METADATA, 13),
    (ApiKey.FIND_COORDINATOR, 2),
    (ApiKey.INIT_PRODUCER_ID, 4),
    (ApiKey.ADD_PARTITIONS_TO_TXN, 0),
    (ApiKey.PRODUCE, 10),
    (ApiKey.END_TXN, 1),
    # How a member of a group begins.
    (ApiKey.JOIN_GROUP, 5),
    (ApiKey.SYNC_GROUP, 3),
    (ApiKey.OFFSET_FETCH, 9),
    (ApiKey.LIST_OFFSETS, 7),
    (ApiKey.FETCH, 16),
)
"""The versions of librdkafka 2.16, the client that does not like to wait, in its order."""


MACHINES: Iterable[str] = (
    "txn.commands",
    "txn.state",
    "txn.init_producer",
    "txn.machine",
    "groups.consumer_commands",
    "groups.commands",
    "groups.consumer_records",
    "groups.consumer_group",
    "groups.classic_group",
    "groups.classic",
    "groups.consumer",
    "groups.admin",
    "groups.machine",
)
"""Modules of the two machines, each a piece small enough for a turn."""


async def prepare_first_contact(registry: Registry) -> None:
    """Load :data:`MACHINES`, and the handlers and messages of :data:`MESSAGES`."""
    for name in MACHINES:
        await asyncio.sleep(0)
        import_module(f"fencepost.{name}")
    for key, version in MESSAGES:
        await asyncio.sleep(0)
        registry.handler(key)
        await asyncio.sleep(0)
        prepare(key, version)
