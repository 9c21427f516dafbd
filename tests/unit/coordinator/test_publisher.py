"""What an image changes on a broker: the order of the steps, and who is elected and resigns."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import LocalChanges, MetadataImage, TopicImage
from fencepost.cluster.records import (
    MetadataRecord,
    PartitionChangeRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from fencepost.coordinator.replication.publisher import Publisher

ME, OTHER = 7, 8
TOPIC, TOPIC_ID = "__consumer_offsets", UUID(int=99)


class Broker:
    """Everybody who hears of images, in one list."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.fails: set[str] = set()
        self.leaving = False
        self.image = MetadataImage()
        self.publisher = Publisher(
            ME,
            self,
            self,
            {TOPIC: self},
            deleted=self._deleted,
            is_leaving=lambda: self.leaving,
            stop_fetching=lambda which: self._tell("stop fetching", *which),
        )

    def _tell(self, *what: object) -> None:
        self.told.append(what)
        if what[0] in self.fails:
            raise RuntimeError(f"{what[0]} fails")

    def install(self, image: MetadataImage) -> None:
        self._tell("install", image.offset)

    def apply(self, changes: LocalChanges, image: MetadataImage) -> None:
        rows = (changes.deletes, changes.leaders, changes.followers)
        self._tell("apply", *(len(one) for one in rows))

    def elected(self, index: int, leader_epoch: int) -> None:
        self._tell("elected", index, leader_epoch)

    def resigned(self, index: int, leader_epoch: int | None) -> None:
        self._tell("resigned", index, leader_epoch)

    def _deleted(self, topics: Sequence[TopicImage]) -> None:
        self._tell("deleted", *(one.name for one in topics))

    def publish(self, *records: MetadataRecord) -> list[tuple[object, ...]]:
        delta = MetadataDelta(self.image)
        for record in records:
            delta.replay(record)
        self.image = delta.apply(self.image.offset + max(1, len(records)), 1)
        self.told = []
        self.publisher.publish(self.image)
        return self.told


def created(leader: int = ME) -> tuple[MetadataRecord, ...]:
    rows = (ME, OTHER)
    return (
        TopicRecord(TOPIC, TOPIC_ID),
        PartitionRecord(TOPIC_ID, rows, rows, (), (), 0, leader, 0, 5, 0),
    )


def changed(**values: object) -> PartitionChangeRecord:
    return PartitionChangeRecord(TOPIC_ID, 0, **values)  # type: ignore[arg-type]


def test_everybody_is_told_in_order() -> None:
    assert Broker().publish(*created()) == [
        ("install", 1),
        ("apply", 0, 1, 0),
        ("elected", 0, 5),
    ]


def test_a_change_of_the_isr_is_no_election() -> None:
    """KAFKA-15468: a coordinator does not load anew for that."""
    broker = Broker()
    broker.publish(*created())
    assert broker.publish(changed(isr=(ME,))) == [("install", 2), ("apply", 0, 1, 0)]


def test_a_leader_that_is_elected_again_is_elected() -> None:
    broker = Broker()
    broker.publish(*created())
    assert broker.publish(changed(leader=ME))[-1] == ("elected", 0, 6)


def test_a_leader_that_becomes_follower_resigns_in_the_epoch_of_the_other() -> None:
    broker = Broker()
    broker.publish(*created())
    assert broker.publish(changed(leader=OTHER))[1:] == [("apply", 0, 0, 1), ("resigned", 0, 6)]


def test_a_replica_that_goes_resigns_without_an_epoch() -> None:
    broker = Broker()
    broker.publish(*created())
    gone = changed(replicas=(OTHER,), isr=(OTHER,), leader=OTHER)
    assert broker.publish(gone)[1:] == [("apply", 1, 0, 0), ("resigned", 0, None)]


def test_a_topic_that_is_deleted_resigns_and_is_forgotten() -> None:
    """KAFKA-19274: without an epoch, or the unloading would be ignored."""
    broker = Broker()
    broker.publish(*created())
    assert broker.publish(RemoveTopicRecord(TOPIC_ID))[1:] == [
        ("apply", 1, 0, 0),
        ("resigned", 0, None),
        ("deleted", TOPIC),
    ]


def test_a_step_that_fails_does_not_keep_the_others_from_being_taken() -> None:
    broker = Broker()
    broker.fails = {"install", "apply"}
    assert broker.publish(*created()) == [("install", 1), ("apply", 0, 1, 0), ("elected", 0, 5)]


def test_a_shard_that_can_not_begin_keeps_no_other_from_it() -> None:
    broker = Broker()
    broker.fails = {"elected"}
    second = PartitionRecord(TOPIC_ID, (ME,), (ME,), (), (), 1, ME, 0, 3, 0)
    told = broker.publish(*created(), second)
    assert told[2:] == [("elected", 0, 5), ("elected", 1, 3)]


def test_a_broker_that_leaves_does_not_come_back_into_the_isr() -> None:
    """KAFKA-14296: it steps down, and fetches no more where it is not in sync or nobody leads."""
    broker = Broker()
    broker.publish(*created())
    broker.leaving = True
    told = broker.publish(changed(leader=OTHER, isr=(OTHER,)))
    assert told[1:] == [
        ("apply", 0, 0, 1),
        ("stop fetching", (TOPIC_ID, 0)),
        ("resigned", 0, 6),
    ]


def test_a_broker_that_leaves_follows_on_where_it_is_in_sync() -> None:
    broker = Broker()
    broker.publish(*created())
    broker.leaving = True
    assert broker.publish(changed(leader=OTHER))[1:] == [("apply", 0, 0, 1), ("resigned", 0, 6)]
