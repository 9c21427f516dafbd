"""A broker reads and changes users, quotas and ACLs in ZooKeeper."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import ClientQuotaRecord, EntityData, MetadataRecord
from fencepost.coordinator.errors import RequestTimedOutError
from fencepost.coordinator.zookeeper import access_znodes as formats
from fencepost.coordinator.zookeeper.access import (
    GIVE_UP_MS,
    LONG_BYTES,
    MAX_RECORDS,
    SecurityZnodes,
)
from fencepost.coordinator.zookeeper.access_znodes import AccessRecord, SecurityChange
from fencepost.coordinator.zookeeper.errors import NotWrittenError
from tests.support.clock import ManualClock
from tests.support.images import image_after
from tests.support.waits import DEADLINE_S, until_true
from tests.unit.coordinator.zookeeper.kept_znodes import TOPICS, Znodes


class Broker:
    """A broker's :class:`SecurityZnodes`, and the image that results from the znodes it read."""

    def __init__(self) -> None:
        self.session = Znodes()
        self.clock = ManualClock(0)
        self.image = MetadataImage()
        self.is_full = False
        self.access = SecurityZnodes(self.session, self.clock, self._take, has_rules=True)

    def _take(self, records: Sequence[MetadataRecord]) -> None:
        if self.is_full:
            raise MemoryError
        self.image = image_after(self.image, *records)

    @property
    def denied(self) -> set[tuple[str, str]]:
        """(Topic, user) of all ACLs in the image."""
        acls = self.image.acls.values()
        return {(acl.resource_name, acl.principal.removeprefix("User:")) for acl in acls}


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    made = Broker()
    yield made
    made.access.stop()


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_after_the_first_piece(broker: Broker, paths: Sequence[str]) -> None:
    before = broker.image
    task = asyncio.create_task(broker.access.reread(paths))
    await until_true(lambda: broker.image is not before, "the first piece is taken", poll_s=0)
    await cancel(task)


async def test_cancelled_reread_is_completed_by_the_next_one(broker: Broker) -> None:
    topics = [f"t{index}" for index in range(MAX_RECORDS)]
    for topic in topics:
        broker.session.deny(topic, "abc")
    paths = [*broker.session.data]
    await cancel_after_the_first_piece(broker, paths)
    assert len(broker.denied) < len(topics) * 3
    await broker.access.reread(paths)
    assert broker.denied == {(topic, user) for topic in topics for user in "abc"}

    broker.session.data.clear()
    await cancel_after_the_first_piece(broker, paths)
    assert broker.denied
    await broker.access.reload()
    assert not broker.denied


async def test_reread_cancelled_during_parsing_reads_everything_the_next_time(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = [f"user-{index}" for index in range(LONG_BYTES // 50)]
    broker.session.deny("secret", ["eve"])
    broker.session.deny("with-many-users", users)
    paths = [*broker.session.data]
    begun, gate, records_of = threading.Event(), threading.Event(), formats.records_of

    def gated(path: str, data: bytes | None) -> list[AccessRecord]:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            gate.wait(DEADLINE_S)
        return records_of(path, data)

    monkeypatch.setattr(formats, "records_of", gated)
    task = asyncio.create_task(broker.access.reread(paths))
    await until_true(begun.is_set, "a thread reads")
    await cancel(task)
    gate.set()
    assert not broker.denied
    await broker.access.reread(paths)
    assert len(broker.denied) == len(users) + 1
    assert ("secret", "eve") in broker.denied


async def test_records_that_failed_to_apply_are_applied_by_the_next_reread(broker: Broker) -> None:
    broker.session.deny("t", "a")
    broker.is_full = True
    with pytest.raises(MemoryError):
        await broker.access.reread([f"{TOPICS}/t"])
    broker.is_full = False
    await broker.access.reread([f"{TOPICS}/t"])
    assert broker.denied == {("t", "a")}


async def test_znode_listed_twice_is_applied_once(broker: Broker) -> None:
    path = f"{TOPICS}/t"
    broker.session.deny("t", "a")
    await broker.access.reread([path, path])
    del broker.session.data[path]
    await broker.access.reread([path, path])
    assert not broker.denied


# --- changes ---


def quota(user: str) -> dict[str, list[SecurityChange]]:
    """Return path → data of the change that sets a user's quota."""
    entity = (EntityData("user", user),)
    record = ClientQuotaRecord(entity, "producer_byte_rate", 1024.0, remove=False)
    return {formats.path_of(record): [SecurityChange(record)]}


def with_quotas(broker: Broker) -> set[str]:
    """Return the users that have a quota in ZooKeeper."""
    folder = f"{formats.USERS}/"
    return {znode.removeprefix(folder) for znode in broker.session.data if znode.startswith(folder)}


async def test_change_that_exceeds_its_deadline_is_not_written(broker: Broker) -> None:
    overdue = broker.access.change(quota("a"))
    broker.clock.advance(GIVE_UP_MS + 1)
    in_time = broker.access.change(quota("b"))
    await broker.access.load()
    await asyncio.wait_for(in_time, 10)
    with pytest.raises(RequestTimedOutError):
        await overdue
    assert with_quotas(broker) == {"b"}


async def test_cancelled_change_is_not_written(broker: Broker) -> None:
    broker.access.change(quota("a")).cancel()
    wanted = broker.access.change(quota("b"))
    await broker.access.load()
    await asyncio.wait_for(wanted, 10)
    assert with_quotas(broker) == {"b"}


async def test_each_change_of_a_batch_has_its_own_deadline(broker: Broker) -> None:
    early = broker.access.change(quota("a"))
    broker.clock.advance(GIVE_UP_MS - 1)
    late = broker.access.change(quota("b"))
    broker.session.is_away = True
    await broker.access.load()
    await until_true(lambda: broker.session.attempts, "a write is tried")
    broker.clock.advance(2)
    with pytest.raises(RequestTimedOutError):
        await asyncio.wait_for(early, 10)
    assert not late.done()
    broker.session.is_away = False
    await asyncio.wait_for(late, 10)
    assert "b" in with_quotas(broker)


async def test_change_of_malformed_znode_fails_alone(broker: Broker) -> None:
    broker.session.data[f"{formats.USERS}/a"] = b"not JSON"
    wrong, right = broker.access.change(quota("a")), broker.access.change(quota("b"))
    await broker.access.load()
    await asyncio.wait_for(right, 10)
    with pytest.raises(NotWrittenError):
        await wrong
