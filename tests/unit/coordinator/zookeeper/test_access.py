"""Users, quotas and ACLs of a cluster on ZooKeeper, as a broker reads and changes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import MetadataRecord
from fencepost.coordinator.zookeeper import access_znodes as formats
from fencepost.coordinator.zookeeper.access import LONG_BYTES, MAX_RECORDS, Access
from fencepost.coordinator.zookeeper.access_znodes import AccessRecord
from tests.support.clock import ManualClock
from tests.support.waits import DEADLINE_S, until_true
from tests.unit.coordinator.zookeeper.kept_znodes import TOPICS, Znodes


class Broker:
    """The access of a broker, and its image."""

    def __init__(self) -> None:
        self.session = Znodes()
        self.image = MetadataImage()
        self.is_full = False
        self.access = Access(self.session, ManualClock(0), self._take, has_rules=True)

    def _take(self, records: Sequence[MetadataRecord]) -> None:
        if self.is_full:
            raise MemoryError
        delta = MetadataDelta(self.image)
        for record in records:
            delta.replay(record)
        self.image = delta.apply(0, 0)

    @property
    def denied(self) -> set[tuple[str, str]]:
        """The topics and users of all ACLs in the image."""
        acls = self.image.acls.values()
        return {(one.resource_name, one.principal.removeprefix("User:")) for one in acls}


@pytest.fixture
async def broker() -> Broker:
    return Broker()


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_after_the_first_piece(broker: Broker, paths: Sequence[str]) -> None:
    before = broker.image
    task = asyncio.create_task(broker.access.reread(paths))
    await until_true(lambda: broker.image is not before, "the first piece is taken", poll_s=0)
    await cancel(task)


async def test_cancelled_reread_leaves_the_rest_to_the_next_one(broker: Broker) -> None:
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


async def test_reread_that_is_cancelled_while_a_thread_reads_takes_all_the_next_time(
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


async def test_records_that_the_image_did_not_take_are_tried_again(broker: Broker) -> None:
    broker.session.deny("t", "a")
    broker.is_full = True
    with pytest.raises(MemoryError):
        await broker.access.reread([f"{TOPICS}/t"])
    broker.is_full = False
    await broker.access.reread([f"{TOPICS}/t"])
    assert broker.denied == {("t", "a")}


async def test_znode_that_is_named_twice_is_taken_once(broker: Broker) -> None:
    path = f"{TOPICS}/t"
    broker.session.deny("t", "a")
    await broker.access.reread([path, path])
    del broker.session.data[path]
    await broker.access.reread([path, path])
    assert not broker.denied
