"""An image that makes a broker the leader of thousands of partitions does not block its loop."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from fencepost.cluster.errors import NotLeaderOrFollowerError
from fencepost.cluster.image import (
    MetadataImage,
    PartitionRegistration,
    TopicImage,
    local_changes,
)
from fencepost.coordinator.storage import due_changes
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.errors import FencedLeaderEpochError
from tests.support.metadata_changes import create_topic
from tests.support.stalls import watched_loop
from tests.support.waits import until_true
from tests.unit.coordinator.services.coordinators import storage
from tests.unit.coordinator.storage.led import Following, registration

COUNT = 600


class Many:
    """A broker, and images of a topic with many partitions."""

    def __init__(self, store: Storage) -> None:
        self.storage, self.replicas = store, store.replicas
        self.topic = create_topic(store.metadata, "t", COUNT, {})
        self.image = MetadataImage()
        self.following = self.replicas.fetchers = Following()

    def apply(self, leader: int, epoch: int, topic_id: uuid.UUID | None = None) -> None:
        partition = PartitionRegistration((1, 2), (1, 2), leader, epoch, epoch)
        topic = TopicImage("t", topic_id or self.topic.topic_id, (partition,) * COUNT)
        brokers = {at: registration(at) for at in (1, 2)}
        topics = {"t": topic} if leader else {}
        by_id = {other.topic_id: other for other in topics.values()}
        now = MetadataImage(offset=epoch, brokers=brokers, topics=topics, topics_by_id=by_id)
        changes = local_changes(self.image, now, 1)
        self.image = now
        self.replicas.apply(changes, now)

    @property
    def led(self) -> int:
        return sum(replica.machine.is_leader for replica in self.replicas)

    async def settled(self) -> None:
        await until_true(lambda: not self.replicas._due.partitions, "all is led and followed")


@pytest.fixture
async def many(tmp_path) -> AsyncIterator[Many]:
    made = Many(storage(tmp_path))
    yield made
    await made.replicas.stop()
    await made.storage.flusher.close()
    made.storage.logs.close()


async def test_becoming_leader_of_many_partitions_runs_in_slices_unobserved(many):
    with watched_loop() as watch:
        many.apply(leader=1, epoch=3)
        assert 0 < many.led < COUNT
        last = many.replicas.leader("t", COUNT - 1, 3)
        assert (last.marks.leader_epoch, last.marks.is_replicated) == (3, True)
        with pytest.raises(FencedLeaderEpochError):
            many.replicas.leader("t", COUNT - 2, 2)
        assert many.replicas.led("t", COUNT - 3) is not None
        await many.settled()
    assert many.led == COUNT
    watch.check()


async def test_pending_leader_change_is_superseded_by_a_newer_image(many):
    many.apply(leader=1, epoch=3)
    many.apply(leader=2, epoch=4)
    with pytest.raises(NotLeaderOrFollowerError):
        many.replicas.leader("t", COUNT - 1)
    await many.settled()
    assert many.led == 0
    followed = [name for what, which in many.following.log if what == "follow" for name in which]
    assert len(followed) == COUNT


async def test_pending_leader_change_of_deleted_topic_is_dropped(many):
    many.apply(leader=1, epoch=3)
    many.apply(leader=0, epoch=4)
    await many.settled()
    assert list(many.replicas) == []
    assert many.storage.logs.find_open(("t", 0)) is None


async def test_stop_following_drops_pending_follower_changes(many):
    many.apply(leader=2, epoch=3)
    many.replicas.stop_following([(many.topic.topic_id, COUNT - 1)])
    assert not many.replicas._due.partitions
    assert many.following.log[-1] == ("stop", 1)


async def test_image_that_stops_no_fetch_keeps_pending_changes(many):
    """During a controlled shutdown the broker checks every image, and most images stop no fetch."""
    many.apply(leader=2, epoch=3)
    due = len(many.replicas._due.partitions)
    assert due > 0
    many.replicas.stop_following([])
    assert len(many.replicas._due.partitions) == due
    assert ("stop", 0) not in many.following.log


async def test_image_after_stop_makes_no_leader_and_starts_no_isr_check(many):
    many.apply(leader=2, epoch=3)
    followed = many.image
    many.apply(leader=0, epoch=4)
    many.replicas.start()
    await many.replicas.stop()
    many.replicas.publish(many.image, followed)
    assert many.replicas.image is followed
    assert list(many.replicas) == []
    assert not many.replicas._due.partitions
    assert not many.replicas._isr_check.is_started


async def test_follower_change_is_retried_after_unexpected_exception(many, monkeypatch):
    """Later images do not contain the change, so it must be retried."""
    monkeypatch.setattr(due_changes, "AFTER_FAILURE_MS", 20)
    follow, failures = many.following.follow, [ValueError("odd"), ValueError("odd again")]

    def odd(partitions):
        if partitions[0].index == 7 and failures:
            raise failures.pop()
        follow(partitions)

    many.following.follow = odd
    many.apply(2, 1)
    await many.settled()
    followed = lambda: sum(kind == "follow" for kind, _ in many.following.log)  # noqa: E731
    await until_true(lambda: followed() == COUNT, "all are followed")
    many.apply(2, 1)
    assert followed() == COUNT


async def test_failed_follower_change_is_dropped_after_a_newer_image(many, monkeypatch):
    monkeypatch.setattr(due_changes, "AFTER_FAILURE_MS", 20)

    def odd(partitions):
        raise ValueError("odd")

    many.following.follow, follow = odd, many.following.follow
    many.apply(2, 1)
    many.following.follow = follow
    many.apply(1, 2)
    await many.settled()
    many.replicas._due.finish()
    await until_true(lambda: many.replicas._due._retry is None, "the time for it has come")
    assert many.led == COUNT
    assert not [kind for kind, _ in many.following.log if kind == "follow"]


async def test_exception_in_one_isr_change_does_not_stop_others(many):
    many.apply(1, 1)
    await many.settled()
    many.replicas.view.replica_lag_time_max_ms = -1
    asked = []

    def odd(change):
        asked.append(change.index)
        if change.index == 7:
            raise ValueError("odd")

    many.replicas.alter_partition = odd
    many.replicas.check_isr()
    assert sorted(asked) == list(range(COUNT))
