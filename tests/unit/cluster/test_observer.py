"""The observer against a model of the active controller: epochs, snapshots, committed records.

Tests with Kafka's names are cases of ``MetadataLoaderTest``, ``MetadataBatchLoaderTest`` and
``KafkaRaftClientTest``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from uuid import UUID

import pytest

from fencepost.cluster import observer as rules
from fencepost.cluster.image import MetadataImage, local_changes
from fencepost.cluster.observer import (
    FetchMetadata,
    FetchSnapshot,
    LeaderHint,
    MetadataBatch,
    MetadataDivergedError,
    MetadataFetched,
    Observer,
    OffsetAndEpoch,
    SnapshotFetched,
)
from fencepost.cluster.record_codec import encode
from fencepost.cluster.records import (
    AbortTransactionRecord,
    BeginTransactionRecord,
    EndTransactionRecord,
    MetadataRecord,
    NoOpRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from fencepost.logcore.errors import CorruptRecordError

A, B, C = ("a", 1), ("b", 2), ("c", 3)
ADDRESSES = {1: A, 2: B, 3: C}


@dataclass
class Wire:
    """A stand-in for encoding: each batch is one byte, its index in ``batches``."""

    batches: list[MetadataBatch] = field(default_factory=list)

    def read(self, data: bytes) -> Iterator[MetadataBatch]:
        return (self.batches[number] for number in data)

    def written(self, *batches: MetadataBatch) -> bytes:
        known = len(self.batches)
        self.batches += batches
        return bytes(range(known, known + len(batches)))


def batch(base: int, *records: MetadataRecord, epoch: int = 1) -> MetadataBatch:
    return MetadataBatch(base, base + len(records) - 1, epoch, tuple(map(encode, records)))


def topic(number: int) -> tuple[TopicRecord, PartitionRecord]:
    topic_id = UUID(int=100 + number)
    row = PartitionRecord(topic_id, (7,), (7,), (), (), 0, 7, 0, 0, 0)
    return TopicRecord(f"t{number}", topic_id), row


class Following:
    """An observer of three controllers that knows the leader: controller 1, with epoch 1."""

    def __init__(self, *, bootstrap: Iterable[rules.Address] = (A, B, C)) -> None:
        self.wire, self.now, self.turn = Wire(), 0.0, 0
        self.observer = Observer(list(bootstrap), self.wire.read, choose=self._choose)
        self.images: list[MetadataImage] = []

    def _choose(self, count: int) -> int:
        self.turn += 1
        return (self.turn - 1) % count

    def request(self) -> FetchMetadata:
        found = self.observer.next_request(self.now)
        if isinstance(found, float):
            self.now = found
            found = self.observer.next_request(self.now)
        assert isinstance(found, FetchMetadata), found
        return found

    def found(self, leader: int = 1, epoch: int = 1) -> Following:
        hint = LeaderHint(leader, epoch, {leader: ADDRESSES[leader]})
        self.answer(error=rules.FENCED_LEADER_EPOCH, hint=hint)
        return self

    def answer(self, *batches: MetadataBatch, hw: int = -1, **more: object) -> list[MetadataImage]:
        self.request()
        data = self.wire.written(*batches)
        fetched = MetadataFetched(records=data, high_watermark=hw, **more)  # type: ignore[arg-type]
        images = self.observer.on_fetched(fetched, self.now)
        self.images += images
        return images

    def snapshot(
        self, end: OffsetAndEpoch, *batches: MetadataBatch, cut: int = 1
    ) -> list[MetadataImage]:
        """Deliver a snapshot in chunks of ``cut`` bytes."""
        self.answer(snapshot=end, hw=end.offset)
        data = self.wire.written(*batches)
        images: list[MetadataImage] = []
        for position in range(0, len(data), cut):
            asked = self.observer.next_request(self.now)
            assert asked == FetchSnapshot(A, end, position, self.observer.epoch)
            piece = data[position : position + cut]
            answer = SnapshotFetched(size=len(data), position=position, chunk=piece)
            images += self.observer.on_snapshot_fetched(answer, self.now)
        self.images += images
        return images


# --- the leader ---


def test_fetch_goes_to_leader_and_epoch_of_the_first_response() -> None:
    following = Following(bootstrap=[B])
    assert following.request() == FetchMetadata(B, 0, 0, 0, -1)
    following.found(leader=3, epoch=9)
    assert following.request() == FetchMetadata(C, 0, 0, 9, -1)
    assert following.observer.leader == C


def test_not_leader_response_redirects_fetch_to_its_leader() -> None:
    following = Following().found()
    hint = LeaderHint(2, 1, {2: B})
    following.answer(error=rules.NOT_LEADER_OR_FOLLOWER, hint=hint)
    assert following.request().to == B


def test_unknown_leader_epoch_response_changes_node_and_keeps_epoch() -> None:
    following = Following().found(epoch=5)
    following.answer(error=rules.UNKNOWN_LEADER_EPOCH, hint=LeaderHint(2, 3, {2: B}))
    assert following.observer.leader is None
    request = following.request()
    assert (request.to, request.current_leader_epoch) != (A, 3)
    assert request.current_leader_epoch == 5


def test_leader_of_an_older_epoch_is_ignored() -> None:
    following = Following().found(leader=1, epoch=5)
    following.answer(hint=LeaderHint(2, 4, {2: B}))
    assert following.observer.leader == A


def test_newer_epoch_without_leader_forgets_the_former_leader() -> None:
    following = Following().found(leader=1, epoch=5)
    following.answer(error=rules.FENCED_LEADER_EPOCH, hint=LeaderHint(-1, 6))
    assert (following.observer.leader, following.observer.epoch) == (None, 6)


def test_leader_without_endpoint_is_found_among_the_voters() -> None:
    wire = Wire()
    observer = Observer([A], wire.read, voters=ADDRESSES)
    observer.next_request(0)
    hint = LeaderHint(3, 1)
    observer.on_fetched(MetadataFetched(error=rules.FENCED_LEADER_EPOCH, hint=hint), 0)
    assert observer.leader == C


def test_voter_endpoints_are_read_from_the_log() -> None:
    following = Following().found()
    moved = ("a", 11)
    voters = MetadataBatch(0, 0, 1, voters={1: moved})
    following.answer(voters, hw=1)
    assert following.request().to == moved


def test_failed_fetch_goes_to_another_node_after_backoff() -> None:
    following = Following().found()
    following.request()
    following.observer.on_failure(following.now)
    assert following.observer.next_request(following.now) == following.now + rules.RETRY_BACKOFF_MS
    asked = {following.request().to}
    following.observer.on_failure(following.now)
    asked.add(following.request().to)
    assert len(asked) == 2


def test_leader_without_successful_fetch_is_forgotten_after_fetch_timeout() -> None:
    following = Following().found()
    following.answer(hw=0)
    following.now += rules.FETCH_TIMEOUT_MS - 1
    assert following.request().to == A
    assert following.observer.leader == A
    following.now += 1
    following.request()
    assert following.observer.leader is None


def test_controllers_of_another_cluster_stop_the_broker() -> None:
    with pytest.raises(MetadataDivergedError, match="another cluster"):
        Following().answer(error=rules.INCONSISTENT_CLUSTER_ID)


# --- committed records ---


def test_records_above_the_high_watermark_are_not_applied() -> None:
    following = Following().found()
    following.answer(batch(0, NoOpRecord()), hw=1)
    assert following.answer(batch(1, *topic(1)), batch(3, *topic(2)), hw=3)[-1].topics.keys() == {
        "t1"
    }
    assert following.observer.applied_offset == 2
    assert following.request().offset == 5
    assert following.answer(hw=5)[-1].topics.keys() == {"t1", "t2"}


def test_observer_high_watermark_never_falls_or_passes_the_log_end() -> None:
    following = Following().found()
    following.answer(batch(0, *topic(1)), hw=90)
    assert following.observer.high_watermark == 2
    following.answer(batch(2, NoOpRecord()), hw=1)
    assert following.observer.high_watermark == 2


def test_fetch_contains_the_known_high_watermark() -> None:
    following = Following().found()
    assert following.request().high_watermark == -1
    following.answer(batch(0, NoOpRecord()), hw=1)
    assert following.request().high_watermark == 1
    following.answer(hw=1)
    assert following.request() == FetchMetadata(A, 1, 1, 1, 1)


def test_diverging_records_are_truncated_and_were_never_applied() -> None:
    """After a controller failover, uncommitted records of the former controller are truncated."""
    following = Following().found()
    following.answer(batch(0, *topic(1)), hw=2)
    following.answer(batch(2, *topic(2)), batch(4, *topic(3)), hw=2)
    following.found(leader=2, epoch=2)
    assert following.request() == FetchMetadata(B, 6, 1, 2, 2)
    following.answer(diverging=OffsetAndEpoch(4, 1), hw=9)
    assert following.observer.high_watermark == 2
    assert following.request().offset == 4
    after = following.answer(batch(4, *topic(4), epoch=2), hw=6)[-1]
    assert after.topics.keys() == {"t1", "t2", "t4"}
    assert (after.offset, after.epoch) == (5, 2)


def test_records_of_epoch_unknown_to_the_leader_are_truncated() -> None:
    following = Following().found()
    following.answer(batch(0, NoOpRecord()), hw=1)
    following.observer.epoch = 3
    following.answer(batch(1, NoOpRecord()), batch(2, NoOpRecord(), epoch=3), hw=1)
    following.answer(diverging=OffsetAndEpoch(9, 1))
    assert (following.observer.log_end) == (2, 1)


def test_divergence_below_a_committed_offset_stops_the_broker() -> None:
    following = Following().found()
    following.answer(batch(0, *topic(1)), hw=2)
    with pytest.raises(MetadataDivergedError, match="2 in epoch 1 was committed"):
        following.answer(diverging=OffsetAndEpoch(1, 1))


def test_unknown_metadata_record_is_corrupt() -> None:
    following = Following().found()
    following.answer(batch(0, NoOpRecord()), hw=1)
    unknown = MetadataBatch(1, 1, 1, (b"\x01\x7f\x00\x00",))
    with pytest.raises(CorruptRecordError):
        following.answer(unknown, hw=2)


def test_fetch_after_unusable_response_continues_at_the_last_valid_offset() -> None:
    following = Following().found()
    following.answer(batch(0, *topic(1)), hw=2)
    following.answer(batch(2, NoOpRecord()), hw=2)
    with pytest.raises(CorruptRecordError):
        following.answer(batch(3, *topic(1)), hw=5)
    following.observer.on_unusable_response(following.now)
    waits = following.observer.next_request(following.now)
    assert waits == following.now + rules.UNUSABLE_RESPONSE_BACKOFF_MS
    following.now = waits
    following.found()
    assert following.request().offset == 3
    (image,) = following.answer(batch(3, *topic(2)), hw=5)
    assert image.topics.keys() == {"t1", "t2"}


@pytest.mark.parametrize("wrong", [batch(7, NoOpRecord()), batch(1, NoOpRecord(), epoch=9)])
def test_batch_with_unexpected_offset_or_epoch_is_corrupt(wrong: MetadataBatch) -> None:
    following = Following().found()
    following.answer(batch(0, NoOpRecord()), hw=1)
    with pytest.raises(CorruptRecordError):
        following.answer(wrong, hw=1)


def test_snapshot_older_than_the_applied_offset_is_corrupt() -> None:
    following = Following().found()
    following.answer(batch(0, *topic(1)), hw=2)
    with pytest.raises(CorruptRecordError, match="but offset 1 is already applied"):
        following.answer(snapshot=OffsetAndEpoch(1, 1), hw=2)


def test_invalid_first_high_watermark_does_not_delay_publication() -> None:
    following = Following().found()
    assert following.answer(batch(0, NoOpRecord()), hw=1 << 40) == []
    assert len(following.answer(batch(1, NoOpRecord()), hw=2)) == 1


def test_epoch_unknown_to_every_node_is_given_up() -> None:
    """Only one response contained the epoch, and every fetch in this epoch fails."""
    following = Following().found()
    following.answer(batch(0, NoOpRecord()), hw=1)
    known = following.observer.epoch
    following.answer(hint=LeaderHint(1, 1 << 30), hw=1)
    assert following.observer.epoch == 1 << 30
    for _ in range(3):
        following.observer.on_fetched(
            MetadataFetched(error=rules.UNKNOWN_LEADER_EPOCH), following.now
        )
        following.now += rules.FETCH_TIMEOUT_MS
    assert following.observer.epoch == known


def test_batch_fetched_twice_is_corrupt() -> None:
    following = Following().found()
    following.answer(batch(0, *topic(1)), hw=2)
    with pytest.raises(CorruptRecordError, match="expected is 2"):
        following.answer(batch(1, *topic(2)), hw=3)


# --- publishing ---


def test_catching_up_state() -> None:
    """All records up to the first high watermark are published together, and none earlier."""
    following = Following().found()
    assert following.answer(batch(0, *topic(1)), hw=6) == []
    assert following.answer(batch(2, *topic(2)), hw=6) == []
    (first,) = following.answer(batch(4, *topic(3)), hw=8)
    assert first.topics.keys() == {"t1", "t2", "t3"}
    assert [image.offset for image in following.answer(batch(6, *topic(4)), hw=8)] == [7]


def test_no_image_is_published_without_a_record() -> None:
    following = Following().found()
    assert following.answer(hw=0) == []
    assert [image.offset for image in following.answer(batch(0, NoOpRecord()), hw=1)] == [0]


def test_one_image_is_published_per_batch() -> None:
    following = Following().found()
    following.answer(batch(0, NoOpRecord()), hw=1)
    images = following.answer(batch(1, *topic(1)), batch(3, *topic(2)), hw=5)
    assert [(image.offset, len(image.topics)) for image in images] == [(2, 1), (4, 2)]


def test_aligned_transaction_batches() -> None:
    following = Following().found()
    following.answer(batch(0, NoOpRecord()), hw=1)
    assert following.answer(batch(1, BeginTransactionRecord("x"), *topic(1)), hw=4) == []
    assert following.answer(batch(4, *topic(2)), hw=6) == []
    assert following.observer.applied_offset == 0
    (image,) = following.answer(batch(6, EndTransactionRecord()), hw=7)
    assert (image.offset, image.topics.keys()) == (6, {"t1", "t2"})


def test_one_transaction_in_one_batch() -> None:
    following = Following().found()
    following.answer(batch(0, NoOpRecord()), hw=1)
    records = (*topic(1), BeginTransactionRecord(), *topic(2), EndTransactionRecord(), *topic(3))
    (after,) = following.answer(batch(1, *records), hw=9)
    assert (after.offset, after.topics.keys()) == (8, {"t1", "t2", "t3"})


def test_multiple_transactions_in_one_batch() -> None:
    following = Following().found()
    following.answer(batch(0, NoOpRecord()), hw=1)
    begin, end = BeginTransactionRecord(), EndTransactionRecord()
    records = (begin, *topic(1), end, begin, *topic(2), end)
    (after,) = following.answer(batch(1, *records), hw=9)
    assert (after.offset, after.topics.keys()) == (8, {"t1", "t2"})


def test_abort_transaction() -> None:
    following = Following().found()
    following.answer(batch(0, NoOpRecord()), hw=1)
    begin, abort = BeginTransactionRecord(), AbortTransactionRecord("no")
    images = following.answer(
        batch(1, *topic(1), begin, *topic(2)), batch(6, *topic(3), abort, *topic(4)), hw=11
    )
    assert [(image.offset, sorted(image.topics)) for image in images] == [(10, ["t1", "t4"])]


@pytest.mark.parametrize("record", [EndTransactionRecord(), AbortTransactionRecord()])
def test_unexpected_end_transaction(record: MetadataRecord) -> None:
    following = Following().found()
    with pytest.raises(CorruptRecordError, match="never began"):
        following.answer(batch(0, record), hw=1)


def test_unexpected_begin_transaction() -> None:
    following = Following().found()
    with pytest.raises(CorruptRecordError, match="inside of another"):
        following.answer(batch(0, BeginTransactionRecord(), BeginTransactionRecord()), hw=2)


# --- snapshots ---


def test_snapshot_is_fetched_in_chunks_and_fetch_continues_at_its_end() -> None:
    following = Following().found()
    batches = [batch(0, *topic(1)), batch(2, *topic(2)), batch(4, *topic(3))]
    (image,) = following.snapshot(OffsetAndEpoch(50, 1), *batches)
    assert (image.offset, image.epoch, len(image.topics)) == (49, 1, 3)
    assert following.request() == FetchMetadata(A, 50, 1, 1, 50)


def test_topic_missing_from_snapshot_is_deleted() -> None:
    """The topic was deleted while the broker was down: its directories must be removed."""
    following = Following().found()
    following.answer(batch(0, *topic(1), *topic(2)), hw=4)
    before = following.images[-1]
    (after,) = following.snapshot(OffsetAndEpoch(50, 1), batch(0, *topic(2), *topic(3)))
    changes = local_changes(before, after, 7)
    assert [place.topic for place in changes.deletes] == ["t1"]
    assert [place.topic for place in changes.leaders] == ["t3"]


def test_fetch_starts_again_if_the_snapshot_is_not_found() -> None:
    following = Following().found()
    following.answer(snapshot=OffsetAndEpoch(50, 1), hw=60)
    assert isinstance(following.observer.next_request(following.now), FetchSnapshot)
    following.observer.on_snapshot_fetched(SnapshotFetched(error=98), following.now)
    assert following.request().offset == 0


def test_snapshot_fetch_continues_at_the_new_leader() -> None:
    following = Following().found()
    following.answer(snapshot=OffsetAndEpoch(50, 1), hw=60)
    hint = LeaderHint(2, 2, {2: B})
    fenced = SnapshotFetched(error=rules.FENCED_LEADER_EPOCH, hint=hint)
    assert following.observer.on_snapshot_fetched(fenced, following.now) == []
    asked = following.observer.next_request(following.now)
    assert asked == FetchSnapshot(B, OffsetAndEpoch(50, 1), 0, 2)


def test_snapshot_chunk_at_wrong_position_starts_fetch_again() -> None:
    following = Following().found()
    following.answer(snapshot=OffsetAndEpoch(50, 1), hw=60)
    wrong = SnapshotFetched(size=9, position=3, chunk=b"x")
    following.observer.on_snapshot_fetched(wrong, following.now)
    assert following.request().offset == 0


@pytest.mark.parametrize("too_much", [0, 1])
def test_snapshot_above_the_size_limit_is_corrupt(too_much: int) -> None:
    following = Following().found()
    following.answer(snapshot=OffsetAndEpoch(50, 1), hw=60)
    answer = SnapshotFetched(size=rules.MAX_SNAPSHOT_BYTES + too_much, chunk=b"x")
    if too_much:
        with pytest.raises(CorruptRecordError, match="the limit is"):
            following.observer.on_snapshot_fetched(answer, following.now)
    else:
        assert following.observer.on_snapshot_fetched(answer, following.now) == []


def test_snapshot_during_transaction() -> None:
    following = Following().found()
    following.answer(batch(0, NoOpRecord()), hw=1)
    following.answer(batch(1, BeginTransactionRecord(), *topic(1)), hw=4)
    (image,) = following.snapshot(OffsetAndEpoch(50, 1), batch(0, *topic(2)))
    assert image.topics.keys() == {"t2"}
    (after,) = following.answer(batch(50, RemoveTopicRecord(topic(2)[0].topic_id)), hw=51)
    assert after.topics == {}
