"""Images built from records, their changes for one broker, and random sequences of records.

The cases come from Kafka's TopicsImageTest, ClusterDeltaTest, PartitionRegistrationTest and
MetadataBatchLoaderTest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

import pytest

from fencepost.cluster.controller.activation import new_leader_epoch
from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import (
    MIGRATING,
    TOPIC_RESOURCE,
    MetadataImage,
    PartitionRegistration,
    changed_acls,
    changed_configs,
    local_changes,
    racks_changed,
    racks_of,
    topics_resized,
)
from fencepost.cluster.image_loader import ImageLoader
from fencepost.cluster.image_records import count_of, image_values
from fencepost.cluster.record_codec import encode
from fencepost.cluster.records import (
    AbortTransactionRecord,
    AccessControlEntryRecord,
    BeginTransactionRecord,
    BrokerRegistrationChangeRecord,
    ClearElrRecord,
    ClientQuotaRecord,
    ConfigRecord,
    EndTransactionRecord,
    EntityData,
    FeatureLevelRecord,
    FenceBrokerRecord,
    MetadataRecord,
    NoOpRecord,
    PartitionChangeRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    RegisterControllerRecord,
    RemoveAccessControlEntryRecord,
    RemoveTopicRecord,
    RemoveUserScramCredentialRecord,
    TopicRecord,
    UnfenceBrokerRecord,
    UnregisterBrokerRecord,
    UnregisterControllerRecord,
    UserScramCredentialRecord,
)
from fencepost.logcore.errors import CorruptRecordError
from tests.support.images import image_after
from tests.support.quick import seeds

ME = 1
A, B, C = (UUID(int=number) for number in (100, 101, 102))
DISKS = {broker: UUID(int=200 + broker) for broker in range(5)}


def topic(name: str, topic_id: UUID) -> TopicRecord:
    return TopicRecord(name, topic_id)


def partition(topic_id: UUID, index: int, *replicas: int, leader: int = ME) -> PartitionRecord:
    return PartitionRecord(
        topic_id=topic_id,
        partition_id=index,
        replicas=replicas,
        isr=replicas,
        removing_replicas=(),
        adding_replicas=(),
        leader=leader,
        leader_epoch=0,
        partition_epoch=0,
        directories=tuple(DISKS[replica] for replica in replicas),
    )


START = image_after(
    MetadataImage(),
    topic("a", A),
    partition(A, 0, 1, 2),
    partition(A, 1, 2, 1, leader=2),
    partition(A, 2, 2, 3, leader=2),
    topic("b", B),
    partition(B, 0, 1),
    ConfigRecord(TOPIC_RESOURCE, "a", "retention.ms", "1"),
    RegisterBrokerRecord(2, UUID(int=7), 8, (), (), log_dirs=(DISKS[2],)),
)


def changed(old: MetadataImage, new: MetadataImage) -> dict[str, list[tuple[str, int]]]:
    found = local_changes(old, new, ME)
    lists = {
        "deletes": found.deletes,
        "leaders": found.leaders,
        "elected": found.elected,
        "followers": found.followers,
    }
    return {
        name: sorted((part.topic, part.index) for part in parts)
        for name, parts in lists.items()
        if parts
    }


def snapshot(old: MetadataImage, new: MetadataImage) -> MetadataImage:
    """Return the image ``new`` as a broker with the image ``old`` loads it from a snapshot."""
    loader = ImageLoader(old)
    loader.begin_snapshot()
    loader.replay(image_values(new), 0, 0)
    return loader.end_snapshot(new.offset + 1, new.epoch)


# --- partitions ---


def test_change_bumps_partition_epoch_and_leader_change_bumps_leader_epoch() -> None:
    first = START.topics["a"].partitions[0]
    same = first.merge(PartitionChangeRecord(A, 0, leader=1))
    assert same == replace(first, leader_epoch=1, partition_epoch=1)
    fewer = same.merge(PartitionChangeRecord(A, 0, isr=(1,)))
    assert fewer == replace(same, isr=(1,), partition_epoch=2)
    gone = fewer.merge(
        PartitionChangeRecord(A, 0, isr=(), leader=-1, eligible_leader_replicas=(1,))
    )
    assert (gone.leader, gone.leader_epoch, gone.isr, gone.elr) == (-1, 2, (), (1,))
    unclean = gone.merge(PartitionChangeRecord(A, 0, leader=2, leader_recovery_state=1))
    assert unclean.leader_recovery_state == 1
    assert unclean.merge(PartitionChangeRecord(A, 0, isr=(2,))).leader_recovery_state == 1
    assert unclean.merge(PartitionChangeRecord(A, 0, leader_recovery_state=0)).elr == (1,)


def test_changed_replicas_keep_their_known_directories() -> None:
    first = START.topics["a"].partitions[0]
    moved = first.merge(PartitionChangeRecord(A, 0, replicas=(3, 1)))
    assert moved.directories == (MIGRATING, DISKS[1])
    assert moved.directory_of(1) == DISKS[1]
    told = moved.merge(PartitionChangeRecord(A, 0, directories=(DISKS[3], DISKS[1])))
    assert told.directory_of(3) == DISKS[3]


# --- topics ---


def test_recreated_topic_has_none_of_the_deleted_partitions_or_configs() -> None:
    new = image_after(
        START,
        RemoveTopicRecord(A),
        topic("a", C),
        partition(C, 0, 1),
    )
    assert new.topics["a"].topic_id == C
    assert A not in new.topics_by_id
    assert new.topic_configs("a") == {}
    assert new.partition_count == 2
    assert changed(START, new) == {
        "deletes": [("a", 0), ("a", 1)],
        "leaders": [("a", 0)],
        "elected": [("a", 0)],
    }
    assert snapshot(START, new) == new
    gone = image_after(
        new, RemoveTopicRecord(C), topic("a", A), partition(A, 0, 1), RemoveTopicRecord(A)
    )
    assert (
        set(gone.topics)
        == {"b"}
        == {topic_image.name for topic_image in gone.topics_by_id.values()}
    )


def test_snapshot_removes_topics_and_brokers_that_it_lacks() -> None:
    new = image_after(START, RemoveTopicRecord(A), UnregisterBrokerRecord(2, 8))
    by_snapshot = snapshot(START, new)
    assert by_snapshot == new
    assert changed(START, by_snapshot) == {"deletes": [("a", 0), ("a", 1)]}
    assert by_snapshot.brokers == by_snapshot.configs == {}
    assert changed(START, snapshot(START, START)) == {}


def test_local_changes_list_deleted_led_elected_and_followed_partitions() -> None:
    new = image_after(
        START,
        PartitionChangeRecord(A, 0, leader=2),
        PartitionChangeRecord(A, 1, leader=1),
        PartitionChangeRecord(A, 2, replicas=(2, 3, 1)),
        PartitionChangeRecord(B, 0, isr=(1,)),
        partition(B, 1, 1, 2),
    )
    assert changed(START, new) == {
        "leaders": [("a", 1), ("b", 0), ("b", 1)],
        "elected": [("a", 1), ("b", 1)],
        "followers": [("a", 0), ("a", 2)],
    }
    left = image_after(new, PartitionChangeRecord(A, 0, replicas=(2,), isr=(2,)))
    assert changed(new, left) == {"deletes": [("a", 0)]}
    assert changed(new, image_after(new, NoOpRecord())) == {}


def test_new_replica_follows_even_without_new_partition_epoch() -> None:
    """With ZooKeeper, a broker may read replicas from before a reassignment and a later state."""
    before = image_after(MetadataImage(), topic("a", A), partition(A, 0, 2, 3, leader=2))
    now = image_after(MetadataImage(), topic("a", A), partition(A, 0, 2, 3, ME, leader=2))
    assert changed(before, now) == {"followers": [("a", 0)]}
    assert changed(now, image_after(now, partition(A, 0, 2, 3, ME, leader=2))) == {}


def test_deleted_topic_with_only_sole_replicas_is_one_change() -> None:
    """There may be 100,000 such partitions, most of which were never opened."""
    old = image_after(
        START, partition(B, 1, 1), topic("c", C), partition(C, 0, 1), partition(C, 1, 1, 2)
    )
    new = image_after(old, *(RemoveTopicRecord(topic_id) for topic_id in (A, B, C)))
    found = local_changes(old, new, ME, sole_replicas=False)
    assert found.deleted_sole_replicas == (old.topics["b"],)
    deletes = sorted((place.topic, place.index) for place in found.deletes)
    assert deletes == [("a", 0), ("a", 1), ("c", 0), ("c", 1)]
    assert local_changes(old, new, ME).deleted_sole_replicas == ()


@pytest.mark.parametrize(
    "records",
    [
        [topic("a", C)],
        [topic("c", C), topic("c", UUID(int=9))],
        [topic("c", C), partition(C, 1, 1)],
        [partition(C, 0, 1)],
        [PartitionChangeRecord(C, 0, leader=1)],
        [PartitionChangeRecord(A, 3, leader=1)],
        [RemoveTopicRecord(C)],
        [RemoveTopicRecord(A), PartitionChangeRecord(A, 0, leader=1)],
        [RemoveTopicRecord(A), RemoveTopicRecord(A)],
        [ClearElrRecord("c")],
        [BrokerRegistrationChangeRecord(2, 7, fenced=1)],
        [BrokerRegistrationChangeRecord(3, 8, fenced=1)],
        [UnregisterBrokerRecord(2, 7)],
        [FenceBrokerRecord(2, 9)],
        [UnregisterBrokerRecord(2, 8), UnfenceBrokerRecord(2, 8)],
        [RemoveAccessControlEntryRecord(C)],
        [EndTransactionRecord()],
        [AbortTransactionRecord()],
        [BeginTransactionRecord(), BeginTransactionRecord()],
    ],
    ids=str,
)
def test_records_that_contradict_the_image_are_corrupt(records: list[MetadataRecord]) -> None:
    loader = ImageLoader(START)

    def load() -> None:
        loader.replay(map(encode, records), START.offset + len(records), 1)
        loader.publish()

    with pytest.raises(CorruptRecordError):
        load()
    loader.forget(START)
    assert loader.publish() == START


def test_image_with_new_leader_epochs_equals_replay_of_their_records() -> None:
    """The image that a starting broker builds directly equals the image from the records."""
    many = UUID(int=990)
    old = image_after(
        START,
        topic("c", many),
        *(partition(many, at, *((1, 2) if at % 7 == 3 else (1,))) for at in range(40)),
        topic("none", UUID(int=991)),
        partition(UUID(int=991), 0, 2, leader=2),
    )
    loader, plain = ImageLoader(old), ImageLoader(old)
    values = loader.change_all(new_leader_epoch(ME), (ME,))
    loader.replay([encode(topic("new", UUID(int=992)))], old.offset + 60, 2)
    image = loader.publish()
    plain.replay([*values, encode(topic("new", UUID(int=992)))], old.offset + 60, 2)
    assert image == plain.publish()
    alone = [state for state in image.topics["c"].partitions if state.replicas == (ME,)]
    assert len(values) == 1 + len(alone)
    assert {state.leader_epoch for state in alone} == {1}
    assert image.topics["none"] is old.topics["none"]
    assert image.topics["a"] is old.topics["a"]
    # Equal partitions share one object; changing one of the partitions does not change the others.
    loader.replay([encode(PartitionChangeRecord(many, 0, leader=ME))], image.offset + 1, 2)
    assert [state.leader_epoch for state in loader.publish().topics["c"].partitions[:3]] == [
        2,
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("records", "is_resized"),
    [
        ([], False),
        ([ConfigRecord(TOPIC_RESOURCE, "a", "retention.ms", "2")], False),
        ([PartitionChangeRecord(A, 0, leader=2)], False),
        ([partition(A, 3, 1)], True),
        ([topic("c", UUID(int=990)), partition(UUID(int=990), 0, 1)], True),
        ([RemoveTopicRecord(B)], True),
        ([RemoveTopicRecord(B), topic("b", UUID(int=990)), partition(UUID(int=990), 0, 1)], True),
    ],
    ids=str,
)
def test_topics_are_resized_by_added_removed_or_recreated_partitions(
    records: list[MetadataRecord], is_resized: bool
) -> None:
    image = image_after(START, *records)
    assert topics_resized(START, image) is is_resized
    # The result is the same if neither image was built from the other.
    assert topics_resized(START, replace(image, step=None)) is is_resized


def test_racks_change_with_moved_replicas_or_broker_racks() -> None:
    def broker(broker_id: int, rack: str | None) -> RegisterBrokerRecord:
        return RegisterBrokerRecord(broker_id, UUID(int=7), 8, (), (), rack=rack)

    moved = PartitionChangeRecord(A, 0, replicas=(3, 1))
    assert not racks_changed(START, image_after(START, moved)), "no broker has a rack"
    assert racks_of(START, "a") == ()
    after = image_after(START, broker(2, "z"), broker(3, "x"))
    assert racks_changed(START, after)
    assert racks_of(after, "a") == (("z",), ("z",), ("x", "z"))
    assert racks_of(after, "gone") == ()
    assert racks_of(image_after(after, moved), "a")[0] == ("x",)
    assert racks_changed(after, image_after(after, moved))
    assert racks_changed(after, image_after(after, broker(2, None)))
    for record in (
        broker(2, "z"),
        PartitionChangeRecord(A, 0, leader=2),
        RemoveTopicRecord(B),
        ConfigRecord(TOPIC_RESOURCE, "a", "retention.ms", "2"),
    ):
        assert not racks_changed(after, image_after(after, record)), record


def test_clear_elr_record_clears_elr_of_one_or_all_topics() -> None:
    elr = PartitionChangeRecord(A, 0, eligible_leader_replicas=(2,), last_known_elr=(1,))
    known = image_after(START, elr, replace(elr, topic_id=B))
    cleared = image_after(known, ClearElrRecord("a"))
    assert [part.partition_epoch for part in cleared.topics["a"].partitions] == [2, 0, 0]
    assert (
        cleared.topics["a"].partitions[0].elr
        == cleared.topics["a"].partitions[0].last_known_elr
        == ()
    )
    assert cleared.topics["b"].partitions[0].elr == (2,)
    every = image_after(known, ClearElrRecord(""), ClearElrRecord(""))
    assert {part.elr for each in every.topics.values() for part in each.partitions} == {()}
    assert every.topics["b"].partitions[0].partition_epoch == 2
    assert image_after(START, RemoveTopicRecord(A), ClearElrRecord("")).topics.keys() == {"b"}


# --- brokers, settings ---


def test_broker_registration_is_updated_by_change_records() -> None:
    image = image_after(
        START, BrokerRegistrationChangeRecord(2, 8, fenced=-1, log_dirs=(DISKS[3],))
    )
    assert image.brokers[2].is_active
    assert image.brokers[2].directories == (DISKS[3],)
    assert not image.brokers[2].has_online(DISKS[2])
    leaving = image_after(image, BrokerRegistrationChangeRecord(2, 8, in_controlled_shutdown=1))
    assert not leaving.brokers[2].is_active
    assert leaving.brokers[2].fenced is False
    again = image_after(leaving, RegisterBrokerRecord(2, UUID(int=8), 30, (), ()))
    assert again.brokers[2].fenced
    assert not again.brokers[2].in_controlled_shutdown
    assert again.brokers[2].epoch == 30


def test_changed_configs_list_changed_and_removed_configs() -> None:
    new = image_after(
        START,
        ConfigRecord(TOPIC_RESOURCE, "a", "retention.ms", None),
        ConfigRecord(TOPIC_RESOURCE, "b", "retention.ms", "2"),
    )
    assert set(changed_configs(START, new)) == {(TOPIC_RESOURCE, "a"), (TOPIC_RESOURCE, "b")}
    assert list(changed_configs(new, image_after(new, NoOpRecord()))) == []


def test_changed_acls_list_added_changed_and_removed_acls() -> None:
    ids = [UUID(int=number) for number in range(5)]
    kept, other, gone, new, passing = (
        AccessControlEntryRecord(acl_id, 2, "t", 3, "User:a", "*", 3, 3) for acl_id in ids
    )
    first = image_after(START, kept, other, gone)
    assert set(changed_acls(START, first)) == {*ids[:3]}
    second = image_after(
        first, replace(other, resource_name="u"), RemoveAccessControlEntryRecord(ids[2])
    )
    third = image_after(second, new, passing)
    last = image_after(third, RemoveAccessControlEntryRecord(ids[4]))
    assert set(changed_acls(first, second)) == {*ids[1:3]}
    assert set(changed_acls(first, last)) == {*ids[1:4]}, "more than one step"
    assert list(changed_acls(last, image_after(last, NoOpRecord()))) == []
    delta = MetadataDelta(last)
    delta.begin_snapshot()
    delta.replay(replace(kept))
    assert set(changed_acls(last, delta.apply(9, 9))) == {ids[1], ids[3]}


# --- images from batches of records ---


def test_open_metadata_transaction_is_not_published() -> None:
    loader = ImageLoader(START)
    before = [encode(topic("c", C)), encode(BeginTransactionRecord("x"))]
    loader.replay([*before, encode(RemoveTopicRecord(B))], 20, 1)
    assert loader.in_transaction
    assert loader.publish().topics.keys() == {"a", "b", "c"}
    loader.skip_control_batch(21, 2)
    loader.replay([encode(RemoveTopicRecord(A))], 22, 2)
    assert loader.publish().topics.keys() == {"a", "b", "c"}
    loader.replay([encode(AbortTransactionRecord("no")), encode(ClearElrRecord(""))], 24, 2)
    image = loader.publish()
    assert (image.topics.keys(), image.offset, image.epoch) == ({"a", "b", "c"}, 24, 2)
    loader.replay(
        [
            encode(BeginTransactionRecord()),
            encode(RemoveTopicRecord(A)),
            encode(EndTransactionRecord()),
        ],
        27,
        2,
    )
    assert loader.publish().topics.keys() == {"b", "c"}


def test_equal_partitions_share_one_object() -> None:
    records = [topic("c", C), *(partition(C, index, 1, 2) for index in range(100))]
    changes = [PartitionChangeRecord(C, index, leader=2) for index in range(100)]
    loader = ImageLoader(START)
    loader.replay(map(encode, records), 200, 1)
    loader.replay(map(encode, changes), 300, 1)
    image = loader.publish()
    assert image == replace(
        image_after(image_after(START, *records), *changes), offset=300, epoch=1
    )
    assert len({id(state) for state in image.topics["c"].partitions}) == 1


class Life:
    """Random records that are valid for the current image."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.image = MetadataImage()
        self.ids = 0

    def _new_id(self) -> UUID:
        self.ids += 1
        return UUID(int=self.draw.getrandbits(100) << 20 | self.ids)

    def _partition(self, topic_id: UUID, index: int) -> PartitionRecord:
        replicas = self.draw.sample(range(5), self.draw.choice((1, 1, 2, 3)))
        made = partition(topic_id, index, *replicas, leader=replicas[0])
        if self.draw.random() < 0.2:
            made = replace(made, eligible_leader_replicas=(4,), leader_recovery_state=1)
        return made

    def change(self) -> list[MetadataRecord]:
        draw, image = self.draw, self.image
        known = draw.choice([*image.topics.values()]) if image.topics else None
        kind = draw.randrange(12)
        if kind < 2 or known is None:
            name = draw.choice(("a.b", "a_b", "a-b", "x", f"t{draw.randrange(9)}"))
            if image.colliding(name) is not None:
                return [NoOpRecord()]
            topic_id = self._new_id()
            count = draw.choice((1, 2, 30))
            parts = [self._partition(topic_id, index) for index in range(count)]
            if draw.random() < 0.5:
                parts = [replace(parts[0], partition_id=index) for index in range(count)]
            return [topic(name, topic_id), *parts]
        if kind < 6:
            record = PartitionChangeRecord(known.topic_id, leader=draw.choice((-2, -1, 1, 2)))
            if draw.random() < 0.3:
                record = replace(record, isr=(3,), replicas=(3, 4), last_known_elr=(2,))
            some = draw.sample(range(len(known.partitions)), draw.randint(1, len(known.partitions)))
            return [replace(record, partition_id=index) for index in some]
        if kind == 6:
            return [RemoveTopicRecord(known.topic_id)]
        if kind == 7:
            return [self._partition(known.topic_id, len(known.partitions))]
        if kind == 8:
            return [ClearElrRecord(draw.choice(("", known.name)))]
        return draw.choice(
            [
                [ConfigRecord(TOPIC_RESOURCE, known.name, "k", draw.choice((None, "1", "2")))],
                [ConfigRecord(4, "", draw.choice("kl"), draw.choice((None, "1")))],
                [FeatureLevelRecord("transaction.version", draw.randrange(3))],
                [ProducerIdsRecord(1, image.next_producer_id + 1000)],
                [AccessControlEntryRecord(self._new_id(), 2, "t", 3, "User:a", "*", 3, 3)],
                [RemoveAccessControlEntryRecord(acl) for acl in image.acls],
                [UserScramCredentialRecord("u", 1, b"s", b"k", b"v", draw.randrange(9))],
                [RemoveUserScramCredentialRecord("u", 1)],
                [
                    ClientQuotaRecord(
                        (EntityData("user", draw.choice((None, "u"))),),
                        draw.choice(("producer_byte_rate", "consumer_byte_rate")),
                        float(draw.randrange(3)),
                        remove=draw.random() < 0.4,
                    )
                ],
                [RegisterBrokerRecord(2, self._new_id(), image.offset, (), ())],
                [
                    BrokerRegistrationChangeRecord(2, broker.epoch, fenced=draw.choice((-1, 0, 1)))
                    for broker in image.brokers.values()
                ],
            ]
        )

    def records(self, count: int) -> Iterator[tuple[list[MetadataRecord], MetadataImage]]:
        """Yield batches of records, each with the resulting image."""
        for _ in range(count):
            change = self.change()
            if change:
                self.image = image_after(self.image, *change)
                yield change, self.image


@pytest.mark.parametrize("seed", seeds(20))
def test_image_is_the_same_from_records_transactions_or_snapshot(seed: int) -> None:
    life, draw = Life(seed), random.Random(f"ways {seed}")
    loader = ImageLoader()
    behind = MetadataImage()
    for change, image in life.records(80):
        values: list[bytes] = [encode(record) for record in change]
        wrapped = draw.random() < 0.3
        if wrapped:
            values = [encode(BeginTransactionRecord()), *values, encode(EndTransactionRecord())]
        loader.replay(values, image.offset, 1, [None, *change, None] if wrapped else change)
        if draw.random() < 0.5:
            assert loader.publish() == image
        if draw.random() < 0.2:
            # A broker that falls behind gets the same image from a snapshot, and the same changes.
            late = snapshot(behind, image)
            assert late == image
            assert changed(behind, late) == changed(behind, image)
            behind = image
        check(image)
    assert loader.publish() == life.image
    assert loader.removed.isdisjoint(life.image.topics_by_id)


def check(image: MetadataImage) -> None:
    assert {
        topic_image.topic_id: topic_image for topic_image in image.topics.values()
    } == image.topics_by_id
    assert image.partition_count == sum(
        len(topic_image.partitions) for topic_image in image.topics.values()
    )
    odd = {name.replace(".", "_"): name for name in image.topics if "." in name or "_" in name}
    assert image.unified == odd
    assert all(image.configs.values())
    for kind, name in image.configs:
        assert kind != TOPIC_RESOURCE or name in image.topics
    assert abs(count_of(image) - len(list(image_values(image)))) < 20


def test_partition_without_directories_has_the_unassigned_directory() -> None:
    alone = PartitionRegistration((1,), (1,), 1, 0, 0)
    assert alone.directory_of(1) == alone.directory_of(9) == UUID(int=1)


def test_unregistered_controller_leaves_the_image() -> None:
    """KIP-1312. Kafka's broker logs a fault for an unknown controller, and continues."""
    registered = RegisterControllerRecord(7, UUID(int=7), False, (), ())
    known = image_after(START, registered)
    assert known.controllers == {7: registered}
    assert image_after(known, UnregisterControllerRecord(7)).controllers == {}
    assert image_after(known, UnregisterControllerRecord(8)).controllers == {7: registered}
