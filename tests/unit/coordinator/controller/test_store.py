"""The rules of both metadata stores on which the active controller relies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from kazoo.exceptions import BadVersionError

from fencepost.cluster.controller.errors import NotControllerError
from fencepost.cluster.image import BROKER_RESOURCE, MetadataImage
from fencepost.cluster.records import (
    AccessControlEntryRecord,
    ConfigRecord,
    PartitionChangeRecord,
    ProducerIdsRecord,
    UserScramCredentialRecord,
)
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.controller.store import MetadataStore
from fencepost.coordinator.errors import MetadataUnavailableError
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.access import SecurityZnodes
from fencepost.coordinator.zookeeper.broker_store import BrokerStore
from fencepost.coordinator.zookeeper.connection import ZooKeeperConfig
from fencepost.coordinator.zookeeper.loading import ZkImage
from fencepost.coordinator.zookeeper.passwords import Passwords
from fencepost.coordinator.zookeeper.session import RefusedError, Set, Write, ZkSession
from fencepost.coordinator.zookeeper.store import ZkMetadataStore
from fencepost.logcore.clock import SystemClock
from fencepost.logcore.errors import LogError
from tests.support.faults import FaultyDisk
from tests.support.waits import until_true
from tests.unit.coordinator.services.coordinators import storage

SETTINGS = BrokerConfig({"zookeeper.connect": "nowhere:1"})


class GatedSession(ZkSession):
    """A session whose writes wait for ``gate``, and fail if ``is_refused`` is set."""

    def __init__(self) -> None:
        super().__init__(ZooKeeperConfig.of(SETTINGS), lambda _state: None)
        self.gate = asyncio.Event()
        self.is_refused = False
        self.done: list[Write] = []

    async def do(self, writes: Sequence[Write]) -> list[Any]:
        await self.gate.wait()
        if self.is_refused:
            raise RefusedError(0, BadVersionError(), writes[0])
        self.done += writes
        return [None for _ in writes]


class Kept:
    """A metadata store, with functions that let the store's writes complete or fail."""

    def __init__(
        self, store: MetadataStore, go_on: Callable[[], None], fail: Callable[[], None]
    ) -> None:
        self.store, self.go_on, self.fail = store, go_on, fail
        self.refusals = 0

    def write(self, name: str) -> None:
        """Append a setting of a broker without waiting for the write."""
        with self.store.unforced():
            self.store.append([ConfigRecord(BROKER_RESOURCE, name, "log.cleaner.threads", "2")])

    def has(self, name: str) -> bool:
        """Return whether the next decision would see the setting that ``write`` appended."""
        return (BROKER_RESOURCE, name) in self.store.image.configs


@asynccontextmanager
async def kept_locally(directory: Path) -> AsyncIterator[Kept]:
    disk = FaultyDisk()
    opened = storage(directory, fs=disk)
    with closing(opened.logs):

        def fail() -> None:
            disk.sync_fails = lambda _path: True
            disk.gate.set()

        disk.gate.clear()
        kept = Kept(opened.metadata_log, disk.gate.set, fail)
        try:
            yield kept
        finally:
            disk.sync_fails = lambda _path: False
            disk.gate.set()
            await opened.flusher.drain()


@asynccontextmanager
async def kept_by_zookeeper(_directory: Path) -> AsyncIterator[Kept]:
    session = GatedSession()

    def refused() -> None:
        kept.refusals += 1

    def fail() -> None:
        session.is_refused = True
        session.gate.set()

    store = ZkMetadataStore(
        SETTINGS,
        session,
        ZkImage(MetadataImage(), (), {}),
        node_id=1,
        epoch=3,
        epoch_version=0,
        on_written=lambda _before, _after: None,
        on_refused=refused,
    )
    kept = Kept(store, session.gate.set, fail)
    try:
        yield kept
    finally:
        store.close()


@pytest.fixture(params=[kept_locally, kept_by_zookeeper])
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kept]:
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(request.param(tmp_path))


async def test_change_is_visible_to_the_next_decision_before_it_is_durable(kept: Kept) -> None:
    store, offset = kept.store, kept.store.next_offset
    kept.write("1")
    assert kept.has("1")
    assert (store.image.offset, store.next_offset) == (offset, offset + 1)
    written = store.durable()
    assert written is not None
    await asyncio.sleep(0)
    assert not written.done()
    kept.go_on()
    await asyncio.wait_for(written, 10)
    assert store.durable() is None


async def test_durable_waits_for_every_change_made_before_the_call(kept: Kept) -> None:
    for name in "123":
        kept.write(name)
    written = kept.store.durable()
    assert written is not None
    kept.go_on()
    await asyncio.wait_for(written, 10)
    assert all(map(kept.has, "123"))


async def test_change_that_cannot_be_written_fails_the_wait(kept: Kept) -> None:
    kept.write("1")
    kept.write("2")
    written = kept.store.durable()
    assert written is not None
    kept.fail()
    with pytest.raises((LogError, NotControllerError)):
        await asyncio.wait_for(written, 10)
    if isinstance(kept.store, ZkMetadataStore):
        await until_true(lambda: kept.refusals == 1)
        with pytest.raises(NotControllerError):
            kept.write("3")


async def test_change_that_cannot_be_applied_leaves_the_image_unchanged(kept: Kept) -> None:
    before = kept.store.image
    with pytest.raises(LogError):
        kept.store.append([PartitionChangeRecord(UUID(int=9), 0, leader=1)])
    assert kept.store.image is before
    kept.go_on()


async def test_wait_that_begins_after_the_store_was_closed_fails() -> None:
    async with kept_by_zookeeper(Path()) as kept:
        assert isinstance(kept.store, ZkMetadataStore)
        kept.write("1")
        kept.store.close()
        written = kept.store.durable()
        assert written is not None, "the change is void"
        with pytest.raises(NotControllerError):
            await asyncio.wait_for(written, 10)


# --- changes by each broker of a cluster on ZooKeeper ---


def broker_store(session: ZkSession) -> BrokerStore:
    access = SecurityZnodes(session, SystemClock(), lambda _records: None, has_rules=False)
    passwords = Passwords(SETTINGS, node_id=1)
    return BrokerStore(SETTINGS, session, MetadataImage(), passwords, access, node_id=1)


async def test_broker_store_writes_configs_and_a_change_notification_on_durable() -> None:
    session = GatedSession()
    store = broker_store(session)
    store.append([ConfigRecord(BROKER_RESOURCE, "1", "log.cleaner.threads", "2")])
    assert store.settings("1") == {"log.cleaner.threads": "2"}
    written = store.durable()
    assert written is not None
    assert store.durable() is None, "each change is written once"
    session.gate.set()
    await asyncio.wait_for(written, 10)
    paths = [write.path for write in session.done]
    assert paths == [znodes.config_path(BROKER_RESOURCE, "1"), znodes.CONFIG_CHANGE_PREFIX]
    assert not any(isinstance(write, Set) for write in session.done), "the last writer wins"


async def test_broker_store_image_includes_pending_users_and_acls() -> None:
    store = broker_store(GatedSession())
    acl = AccessControlEntryRecord(UUID(int=7), 2, "t", 3, "User:a", "*", 3, 3)
    store.append([UserScramCredentialRecord("a", 1, b"s", b"k", b"v", 4096), acl])
    assert ("a", 1) in store.image.scram
    assert store.image.acls == {acl.id: acl}
    assert store.durable() is not None


async def test_broker_store_refuses_records_of_the_controller() -> None:
    store = broker_store(GatedSession())
    before = store.image
    with pytest.raises(MetadataUnavailableError):
        store.append([ProducerIdsRecord(1, 1000, 0)])
    assert store.image is before
    assert store.durable() is None
