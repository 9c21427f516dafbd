"""The publication of images: the order of subscribers, elections, and a broker that stops."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from fencepost.cluster.image import BROKER_RESOURCE, MetadataImage
from fencepost.cluster.records import (
    ConfigRecord,
    MetadataRecord,
    PartitionChangeRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.daemon.cluster_broker import partitions_to_stop_fetching
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.metadata.publication import Publication, Subscriber
from fencepost.coordinator.services.elections import publish_elections
from tests.support.images import image_after

ME, OTHER = 7, 8
TOPIC, TOPIC_ID, NEXT_ID = "__consumer_offsets", UUID(int=99), UUID(int=100)

Told = list[tuple[object, ...]]


def test_subscribers_are_notified_in_a_fixed_order() -> None:
    publication, told = Publication(), list[tuple[object, ...]]()
    for subscriber in reversed(Subscriber):
        publication.subscribe(
            subscriber, lambda old, new, subscriber=subscriber: told.append((subscriber, old, new))
        )  # type: ignore[misc]
    old, new = MetadataImage(), MetadataImage(offset=1)
    publication.publish(old, new)
    assert told == [(subscriber, old, new) for subscriber in Subscriber]


def test_failing_subscriber_is_logged_and_others_are_still_notified() -> None:
    publication, told = Publication(), list[int]()

    def fail(_old: MetadataImage, _new: MetadataImage) -> None:
        raise RuntimeError("odd")

    publication.subscribe(Subscriber.REPLICAS, fail)
    publication.subscribe(Subscriber.HISTORY, lambda _, new: told.append(new.offset))
    with capture_logs() as logs:
        publication.publish(MetadataImage(), MetadataImage(offset=1))
    assert told == [1]
    assert [(log["to"], log["cause"]) for log in logs] == [("REPLICAS", "RuntimeError: odd")]


def of_broker_settings(*settings: tuple[str, str]) -> MetadataImage:
    """Return an image with cluster-wide dynamic settings, also with unknown names."""
    return image_after(
        MetadataImage(), *(ConfigRecord(BROKER_RESOURCE, "", *setting) for setting in settings)
    )


def test_failing_config_listener_is_logged_and_others_are_still_notified() -> None:
    config = BrokerConfig()
    metadata, told = Metadata(config, node_id=ME), list[object]()

    def fail() -> None:
        raise RuntimeError("odd")

    config.listen(fail)
    config.listen(lambda: told.append(config.int("message.max.bytes")))
    metadata.subscribe(Subscriber.HISTORY, lambda _, new: told.append(new.offset))
    image = of_broker_settings(("message.max.bytes", "1000"))
    with capture_logs() as logs:
        metadata.install(image)
    assert metadata.image is image
    assert told == [1000, image.offset]
    assert [(log["what"], log["cause"]) for log in logs] == [
        ("settings changed", "RuntimeError: odd")
    ]


class Unreadable(Metadata):
    """Metadata that cannot decrypt the passwords in its settings."""

    def plain_settings(self, name: str) -> Mapping[str, str]:
        raise RuntimeError(f"no key for {name}")


def test_unreadable_configs_do_not_prevent_publishing_the_image() -> None:
    metadata, told = Unreadable(BrokerConfig(), node_id=ME), list[int]()
    metadata.subscribe(Subscriber.REPLICAS, lambda _, new: told.append(new.offset))
    with capture_logs() as logs:
        metadata.install(of_broker_settings(("message.max.bytes", "1000")))
    assert told == [metadata.image.offset]
    assert [log["what"] for log in logs] == ["take over dynamic settings"]


class Coordinator:
    """A coordinator of broker 7 that records its elections."""

    def __init__(self) -> None:
        self.told: Told = []
        self.fails = False
        self.image = MetadataImage()

    def elected(self, index: int, leader_epoch: int) -> None:
        self.told.append(("elected", index, leader_epoch))
        if self.fails:
            raise RuntimeError("the shard fails")

    def resigned(self, index: int, leader_epoch: int | None) -> None:
        self.told.append(("resigned", index, leader_epoch))

    def publish(self, *records: MetadataRecord) -> Told:
        old, self.image = self.image, image_after(self.image, *records)
        self.told = []
        publish_elections(self, TOPIC, ME, old, self.image)
        return self.told


def created(
    leader: int = ME, replicas: tuple[int, ...] = (ME, OTHER), topic_id: UUID = TOPIC_ID
) -> tuple[MetadataRecord, ...]:
    return (
        TopicRecord(TOPIC, topic_id),
        PartitionRecord(topic_id, replicas, replicas, (), (), 0, leader, 0, 5, 0),
    )


def changed(**values: object) -> PartitionChangeRecord:
    return PartitionChangeRecord(TOPIC_ID, 0, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("replicas", [(ME,), (ME, OTHER)], ids=["alone", "with others"])
def test_leader_of_a_new_partition_is_elected(replicas: tuple[int, ...]) -> None:
    assert Coordinator().publish(*created(replicas=replicas)) == [("elected", 0, 5)]


def test_change_of_the_isr_is_no_election() -> None:
    """KAFKA-15468: a coordinator does not reload after an ISR change."""
    coordinator = Coordinator()
    coordinator.publish(*created())
    assert coordinator.publish(changed(isr=(ME,))) == []


def test_leader_elected_again_is_elected_in_the_next_epoch() -> None:
    coordinator = Coordinator()
    coordinator.publish(*created())
    assert coordinator.publish(changed(leader=ME)) == [("elected", 0, 6)]


def test_leader_that_becomes_follower_resigns_with_the_new_leader_epoch() -> None:
    coordinator = Coordinator()
    coordinator.publish(*created())
    assert coordinator.publish(changed(leader=OTHER)) == [("resigned", 0, 6)]


def test_replica_that_is_removed_resigns_without_an_epoch() -> None:
    coordinator = Coordinator()
    coordinator.publish(*created())
    gone = changed(replicas=(OTHER,), isr=(OTHER,), leader=OTHER)
    assert coordinator.publish(gone) == [("resigned", 0, None)]


def test_deleted_topic_resigns_without_an_epoch() -> None:
    """KAFKA-19274: a resignation with an epoch would be ignored."""
    coordinator = Coordinator()
    coordinator.publish(*created())
    assert coordinator.publish(RemoveTopicRecord(TOPIC_ID)) == [("resigned", 0, None)]


def test_topic_created_again_in_the_same_step_resigns_and_is_elected() -> None:
    coordinator = Coordinator()
    coordinator.publish(*created())
    again = created(topic_id=NEXT_ID)
    told = coordinator.publish(RemoveTopicRecord(TOPIC_ID), *again)
    assert told == [("resigned", 0, None), ("elected", 0, 5)]


def test_failing_shard_does_not_prevent_the_election_of_others() -> None:
    coordinator = Coordinator()
    coordinator.fails = True
    second = PartitionRecord(TOPIC_ID, (ME,), (ME,), (), (), 1, ME, 0, 3, 0)
    assert coordinator.publish(*created(), second) == [("elected", 0, 5), ("elected", 1, 3)]


@pytest.mark.parametrize(
    ("change", "stopped"),
    [
        (changed(leader=OTHER, isr=(OTHER,)), [(TOPIC_ID, 0)]),
        (changed(leader=-1, isr=(ME,)), [(TOPIC_ID, 0)]),
        (changed(leader=OTHER), []),
    ],
    ids=["not in sync", "without a leader", "in sync"],
)
def test_shutting_down_broker_stops_fetchers_outside_the_isr_or_without_a_leader(
    change: PartitionChangeRecord, stopped: list[tuple[UUID, int]]
) -> None:
    """KAFKA-14296."""
    old = image_after(MetadataImage(), *created())
    assert partitions_to_stop_fetching(old, image_after(old, change), ME) == stopped
