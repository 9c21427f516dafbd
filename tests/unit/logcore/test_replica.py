"""A follower's log: the leader's bytes, the leader's high watermark, and truncation."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from fencepost.logcore.batch import LogRecord, decode_records, encode_batch, end_marker
from fencepost.logcore.compression import Codec
from fencepost.logcore.errors import CorruptRecordError, UnexpectedAppendOffsetError
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.support.old_formats import encode_message_set
from tests.support.quick import seeds
from tests.unit.logcore.partition_driver import (
    T0,
    LateFlusher,
    append,
    client_batch,
    config,
    crash_image,
    fetch_bytes,
    last_offset,
    marker,
    open_partition,
    read_log,
    state_of,
)

Step = Callable[[Partition, random.Random], object]
KEPT = {".log", ".index", ".timeindex", ".txnindex", ".snapshot"}
SMALL = config(segment_bytes=2_000, segment_index_bytes=240, index_interval_bytes=100)


def leader_of(root: Path, **options: object) -> Partition:
    return open_partition(root / "leader", **options)


def follower_of(root: Path, **options: object) -> Partition:
    options = {"is_replica": True, "is_replicated": True, "leader_epoch": 9, **options}
    return open_partition(root / "follower", **options)


@pytest.fixture(autouse=True)
def _roots(tmp_path: Path) -> None:
    for name in ("leader", "follower", "image"):
        (tmp_path / name).mkdir()


def fetch(leader: Partition, follower: Partition, max_bytes: int = 1 << 20) -> bool:
    """Replicate one fetch; return whether it had records."""
    data = fetch_bytes(
        leader, follower.log_end_offset, max_bytes, Isolation.READ_UNCOMMITTED
    ).records
    follower.append_as_follower(data, leader.marks.leader_epoch)
    follower.replica.move_high_watermark(leader.high_watermark)
    return bool(data)


def catch_up(leader: Partition, follower: Partition, max_bytes: int = 1 << 20) -> None:
    while fetch(leader, follower, max_bytes):
        pass


def at(offset: int, count: int = 1, **fields: object) -> bytes:
    """Return a batch of a leader at this offset."""
    records = [LogRecord(offset + delta, T0 + delta, b"k", b"v") for delta in range(count)]
    return encode_batch(records, **fields)


# --- appended bytes are unchanged ---


def files(partition: Partition, suffixes: set[str]) -> dict[str, bytes]:
    """Return the files of a closed log by name."""
    return {
        path.name: path.read_bytes()
        for path in Path(partition.log.directory).iterdir()
        if path.suffix in suffixes
    }


class Leading:
    """Random actions of a leader."""

    def __init__(self, leader: Partition, draw: random.Random) -> None:
        self.leader, self.draw = leader, draw
        self.sequences: dict[int, int] = {}
        self.open: set[int] = set()

    def step(self) -> None:
        draw, leader = self.draw, self.leader
        match draw.randrange(6):
            case 0:
                leader.replica.lead(leader.marks.leader_epoch + draw.randrange(1, 3))
            case 1 if self.open:
                producer = draw.choice(sorted(self.open))
                self.open.remove(producer)
                marker(leader, producer, commit=draw.random() < 0.5)
            case 2 | 3:
                producer = draw.randrange(4)
                count = draw.randrange(1, 5)
                append(
                    leader,
                    count,
                    producer_id=producer,
                    sequence=self.sequences.get(producer, 0),
                    transactional=producer > 0,
                    size=draw.randrange(200),
                    codec=draw.choice(list(Codec)),
                )
                self.sequences[producer] = self.sequences.get(producer, 0) + count
                if producer:
                    self.open.add(producer)
            case _:
                append(leader, draw.randrange(1, 9), timestamp_ms=T0 + draw.randrange(1000))


@pytest.mark.parametrize("seed", seeds(12))
def test_follower_log_equals_the_leaders_byte_for_byte(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    leader = leader_of(tmp_path, config=SMALL)
    follower = follower_of(tmp_path, config=SMALL)
    leading = Leading(leader, draw)
    for _ in range(150):
        leading.step()
        if draw.random() < 0.3:
            fetch(leader, follower, draw.choice([1, 500, 1_500, 5_000]))
        if seed % 2 and draw.random() < 0.03:
            follower.close()
            follower = follower_of(tmp_path, config=SMALL, high_watermark=follower.high_watermark)
        if seed % 2 and draw.random() < 0.03:
            mark = follower.high_watermark
            follower.close()
            follower = follower_of(tmp_path, config=SMALL, high_watermark=mark, clean=False)
            assert follower.recovery is not None
            assert not follower.recovery.reason
    catch_up(leader, follower, draw.choice([700, 1 << 20]))
    # The leader's last epoch may have no record yet, so the follower cannot have it.
    leader._epochs.truncate_from_end(leader.log_end_offset)
    assert state_of(follower) == state_of(leader)
    leader.close()
    follower.close()
    # Opening the log resets the distance to the next index entry, and closing writes a snapshot.
    suffixes = {".log", ".txnindex"} if seed % 2 else KEPT
    assert files(follower, suffixes) == files(leader, suffixes)


def test_offset_gaps_of_a_compacted_leader_are_kept(tmp_path: Path) -> None:
    follower = follower_of(tmp_path)
    data = at(3, 2) + at(10) + at(100_000, 5, last_offset_delta=70)
    arrived = follower.append_as_follower(data, 0)
    assert (arrived.first_offset, arrived.last_offset, arrived.last_epoch) == (3, 100_070, 0)
    assert follower.log_end_offset == 100_071
    follower.append_as_follower(at(200_000), 0)
    again = follower_of(crash_root(follower, tmp_path), clean=False)
    assert read_log(again) == read_log(follower)
    assert again.log_end_offset == 200_001


def test_offset_gap_too_wide_for_a_segment_rolls_it(tmp_path: Path) -> None:
    """The gap between two batches exceeds the 32 bits of an index entry's relative offset."""
    follower = follower_of(tmp_path)
    far = 5_000_000_000
    follower.append_as_follower(at(3) + at(far) + at(far + 1) + at(3 * far, leader_epoch=1), 1)
    assert [segment.base_offset for segment in follower.log.segments] == [0, far, 3 * far]
    point = follower.recovery_point
    assert point == 3 * far + 1
    follower.append_as_follower(at(3 * far + 7, leader_epoch=1), 1)
    again = follower_of(crash_root(follower, tmp_path), clean=False, recovery_point=point)
    assert read_log(again) == read_log(follower)
    empty = follower_of(tmp_path, name="other")
    empty.append_as_follower(at(far), 0)
    assert [segment.base_offset for segment in empty.log.segments] == [far]


def test_truncation_in_a_gap_or_batch_ends_the_log_after_a_batch(tmp_path: Path) -> None:
    """The log ends after a batch, and the segment has a hole before the next fetched batch."""
    for offset in (5, 6, 8):
        follower = follower_of(tmp_path, name=f"cut{offset}")
        follower.append_as_follower(at(0, 3) + at(4, 3) + at(9, 3), 0)
        follower.truncate_to(offset)
        assert follower.log_end_offset == (7 if offset == 8 else 3)
        follower.append_as_follower(at(8, 2, leader_epoch=1), 1)
        again = follower_of(
            crash_root(follower, tmp_path), name=f"cut{offset}", clean=False, leader_epoch=1
        )
        assert read_log(again) == read_log(follower)


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP, Codec.LZ4])
def test_follower_keeps_messages_of_old_formats_unchanged(
    tmp_path: Path, magic: int, codec: Codec
) -> None:
    """An upgraded leader sends old batches unchanged from its files."""
    follower = follower_of(tmp_path)
    old = [LogRecord(offset, T0 + offset, b"k%d" % offset, b"v") for offset in range(6)]
    data = encode_message_set(old[:4], magic, codec=codec)
    data += encode_message_set(old[4:], magic, codec=codec)
    arrived = follower.append_as_follower(data + data[:20], 0)
    assert (arrived.last_offset, arrived.last_epoch, arrived.taken) == (5, -1, len(data) + 20)
    with pytest.raises(UnexpectedAppendOffsetError):
        follower.append_as_follower(data, 0)
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    for wrong in (encode_message_set(old, magic)[:-1] + b"!", damaged):
        with pytest.raises(CorruptRecordError):
            follower_of(tmp_path, name="wrong").append_as_follower(wrong, 0)
    follower.append_as_follower(at(6, leader_epoch=2), 2)
    (segment,) = follower.log.segments
    assert Path(segment.path).read_bytes() == data + at(6, leader_epoch=2)
    again = follower_of(crash_root(follower, tmp_path), clean=False)
    assert again.log_end_offset == 7
    assert [record.key for _, batch in read_log(again) for record in decode_records(batch)] == [
        *(record.key for record in old),
        b"k",
    ]


def test_older_format_after_a_newer_one_clears_the_leader_epochs(tmp_path: Path) -> None:
    """As in Kafka, later truncations work without epochs. The old format needs a new segment."""
    follower = follower_of(tmp_path)
    follower.append_as_follower(at(0, leader_epoch=2), 2)
    old = encode_message_set([LogRecord(1, T0, b"old", b"v"), LogRecord(2, T0, b"old", b"v")], 1)
    (warning,) = follower.append_as_follower(old, 2).warnings
    assert warning == "leader epochs forgotten: a message of format 1"
    assert follower._epochs.entries == []
    assert [segment.base_offset for segment in follower.log.segments] == [0, 1]
    assert follower.reader.latest_epoch == -1
    again = follower_of(crash_root(follower, tmp_path), clean=False)
    assert again.log_end_offset == 3


def crash_root(partition: Partition, root: Path) -> Path:
    """Return a directory whose ``follower`` has the files that ``kill -9`` would leave now."""
    image = root / "image" / uuid.uuid4().hex
    (image / "follower").mkdir(parents=True)
    crash_image(partition, image / "follower")
    return image


def test_offsets_that_do_not_increase_are_refused_and_change_nothing(tmp_path: Path) -> None:
    follower = follower_of(tmp_path)
    follower.append_as_follower(at(0, 3), 0)
    for data in (at(2), at(0, 3), at(5) + at(5), at(5) + at(4)):
        with pytest.raises(UnexpectedAppendOffsetError):
            follower.append_as_follower(data, 0)
    assert follower.log_end_offset == 3
    assert len(read_log(follower)) == 1


@pytest.mark.parametrize("position", [8 + 13, 61, -1])
def test_batch_with_a_wrong_crc_is_refused_and_changes_nothing(
    tmp_path: Path, position: int
) -> None:
    follower = follower_of(tmp_path)
    bad = bytearray(at(1))
    bad[position] ^= 1
    with pytest.raises(CorruptRecordError):
        follower.append_as_follower(at(0) + bytes(bad), 0)
    assert follower.log_end_offset == 0


def test_incomplete_batch_at_the_end_of_a_fetch_is_ignored(tmp_path: Path) -> None:
    whole = at(0) + at(1)
    for cut in range(len(at(0)), len(whole), 9):
        follower = follower_of(tmp_path, name=f"cut{cut}")
        arrived = follower.append_as_follower(whole[:cut], 0)
        assert (arrived.last_offset, arrived.taken) == (0, cut)
        follower.close()
    follower = follower_of(tmp_path)
    assert follower.append_as_follower(whole[:10], 0)[:3] == (-1, -1, -1)
    assert follower.append_as_follower(b"", 0)[:3] == (-1, -1, -1)


def test_batches_of_a_later_epoch_are_skipped(tmp_path: Path) -> None:
    """KAFKA-18723: a response to an old request arrives after an election."""
    follower = follower_of(tmp_path)
    data = at(0, leader_epoch=3) + at(1, leader_epoch=4) + at(2, leader_epoch=3)
    arrived = follower.append_as_follower(data, 3)
    assert (arrived.last_offset, arrived.last_epoch, arrived.taken) == (0, 3, len(data))
    assert "leader epoch 4 is above 3" in arrived.warnings[0]
    assert follower.log_end_offset == 1


def test_follower_takes_leader_epochs_from_the_batches(tmp_path: Path) -> None:
    follower = follower_of(tmp_path)
    follower.append_as_follower(at(0, leader_epoch=1) + at(5, leader_epoch=1), 9)
    follower.append_as_follower(at(7, leader_epoch=4) + at(9, leader_epoch=8), 9)
    assert follower._epochs.entries == [(1, 0), (4, 7), (8, 9)]
    assert follower.reader.offset_for_leader_epoch(4) == (4, 9)


def test_append_as_follower_takes_at_most_the_given_number_of_batches(tmp_path: Path) -> None:
    follower = follower_of(tmp_path)
    data = b"".join(at(offset) for offset in range(7))
    taken, calls = 0, 0
    while taken < len(data):
        taken = follower.append_as_follower(data, 0, start=taken, most=3).taken
        calls += 1
    assert (calls, follower.log_end_offset) == (3, 7)


def test_empty_follower_restarts_at_the_batch_that_contains_its_log_end(tmp_path: Path) -> None:
    """The leader's records are deleted up to the middle of a batch."""
    follower = follower_of(tmp_path)
    follower.replica.restart_at(5)
    follower.append_as_follower(at(3, 4) + at(7), 0)
    assert (follower.log_start_offset, follower.log_end_offset) == (3, 8)
    follower.replica.move_high_watermark(8)
    follower.cleanup.delete_records_before(5)
    assert follower.log_start_offset == 5


def commit_at(offset: int, coordinator_epoch: int) -> bytes:
    data = bytearray(
        end_marker(
            commit=True,
            producer_id=1,
            producer_epoch=3,
            coordinator_epoch=coordinator_epoch,
            timestamp_ms=T0,
        )
    )
    data[7] = offset
    return bytes(data)


def test_follower_appends_batches_of_stale_epochs_with_a_warning(tmp_path: Path) -> None:
    follower = follower_of(tmp_path)
    producer = {"producer_id": 1, "base_sequence": 70, "producer_epoch": 3, "transactional": True}
    assert not follower.append_as_follower(at(0, **producer), 0).warnings
    assert not follower.append_as_follower(commit_at(1, 5), 0).warnings
    older = commit_at(2, 4)
    (warning,) = follower.append_as_follower(older, 0).warnings
    assert warning == "coordinator epoch 4 of the marker at offset 2 is older than 5"
    (warning,) = follower.append_as_follower(at(3, **{**producer, "producer_epoch": 2}), 0).warnings
    assert warning == "producer 1 has epoch 3, the batch at offset 3 2"
    assert follower.log_end_offset == 4


# --- marks ---


def test_follower_high_watermark_is_set_up_to_the_log_end(tmp_path: Path) -> None:
    follower = follower_of(tmp_path)
    told: list[int] = []
    follower.marks.listen(lambda: told.append(follower.high_watermark))
    follower.append_as_follower(at(0, 5), 0)
    assert follower.high_watermark == 0
    assert not follower.replica.move_high_watermark(3)
    assert follower.high_watermark == 3
    assert not follower.replica.move_high_watermark(99)
    assert follower.high_watermark == 5
    assert follower.replica.move_high_watermark(2), "it may go down"
    assert told == [0, 3, 5, 2]
    follower.replica.move_high_watermark(2)
    assert told == [0, 3, 5, 2], "nothing to tell"


def test_flush_does_not_advance_the_follower_high_watermark(tmp_path: Path) -> None:
    flusher = LateFlusher()
    follower = follower_of(tmp_path, flusher=flusher, config=config(flush_messages=1))
    follower.append_as_follower(at(0, 5), 0)
    assert follower.flushes.is_awaited
    flusher.run()
    assert not follower.flushes.is_awaited
    assert (follower.recovery_point, follower.high_watermark) == (5, 0)


def test_follower_restarts_at_the_checkpointed_high_watermark(tmp_path: Path) -> None:
    follower = follower_of(tmp_path)
    follower.append_as_follower(at(0, 5) + at(5, 5), 0)
    follower.close()
    for saved, expected in ((7, 7), (0, 0), (99, 10)):
        again = follower_of(tmp_path, high_watermark=saved)
        assert (again.high_watermark, again.log_end_offset) == (expected, 10)
        again.close()


def test_last_stable_offset_waits_for_the_marker_to_be_replicated(tmp_path: Path) -> None:
    leader = leader_of(tmp_path)
    append(leader, 2)
    append(leader, 3, producer_id=1, transactional=True)
    marker(leader, 1, commit=False)
    append(leader, 1)
    follower = follower_of(tmp_path)
    follower.append_as_follower(b"".join(batch for _, batch in read_log(leader)), 0)
    stable = []
    for mark in range(8):
        follower.replica.move_high_watermark(mark)
        stable.append(follower.last_stable_offset)
    assert stable == [0, 1, 2, 2, 2, 2, 6, 7]


def test_last_stable_offset_after_a_restart_waits_for_the_marker(tmp_path: Path) -> None:
    """Snapshots have only open transactions; this transaction ended above the high watermark."""
    leader = leader_of(tmp_path, config=SMALL)
    append(leader, 2)
    append(leader, 3, producer_id=1, transactional=True)
    marker(leader, 1, commit=True)
    append(leader, 1, size=1_800)
    append(leader, 9)
    follower = follower_of(tmp_path, config=SMALL)
    catch_up(leader, follower)
    assert follower.log.segment_count == 3
    follower.close()
    follower = follower_of(tmp_path, config=SMALL, high_watermark=4)
    follower.truncate_to(7)
    follower.replica.move_high_watermark(5)
    assert follower.last_stable_offset == 2
    follower.replica.move_high_watermark(6)
    assert follower.last_stable_offset == 6


# --- truncation ---


def test_truncation_below_the_high_watermark_lowers_it(tmp_path: Path) -> None:
    follower = follower_of(tmp_path)
    follower.append_as_follower(at(0, leader_epoch=1) + at(1, leader_epoch=2), 9)
    follower.append_as_follower(at(2, leader_epoch=3), 9)
    follower.replica.move_high_watermark(3)
    follower.flushes.run(T0)
    follower.truncate_to(1)
    assert (follower.log_end_offset, follower.high_watermark, follower.recovery_point) == (1, 1, 1)
    assert follower._epochs.entries == [(1, 0)]
    follower.append_as_follower(at(1, leader_epoch=5), 9)
    assert follower._epochs.entries == [(1, 0), (5, 1)]


def test_epoch_of_a_leader_without_records_is_removed_by_truncation(tmp_path: Path) -> None:
    follower = follower_of(tmp_path)
    follower.append_as_follower(at(0, 3, leader_epoch=1), 1)
    follower.replica.lead(4)
    assert follower.reader.offset_for_leader_epoch(1) == (1, 3)
    assert follower.reader.offset_for_leader_epoch(4) == (4, 3)
    follower.truncate_to(3)
    assert follower._epochs.entries == [(1, 0)]
    follower.replica.lead(5)
    follower.truncate_to(77)
    assert follower._epochs.entries == [(1, 0)]


def test_leader_epoch_begins_before_its_first_record_after_a_restart(tmp_path: Path) -> None:
    follower = follower_of(tmp_path)
    follower.append_as_follower(at(0, 3, leader_epoch=1), 1)
    follower.close()
    again = follower_of(tmp_path)
    again.replica.lead(10)
    assert again.reader.offset_for_leader_epoch(10) == (10, 3)
    assert again._epochs.entries == [(1, 0), (10, 3)]
    append(again)
    assert again._epochs.entries == [(1, 0), (10, 3)]


def test_restart_at_an_offset_moves_all_marks_and_clears_the_state(tmp_path: Path) -> None:
    """KAFKA-9491: log start, high watermark and log end become the leader's log start."""
    follower = follower_of(tmp_path)
    producer = {"producer_id": 1, "base_sequence": 0, "producer_epoch": 3, "transactional": True}
    follower.append_as_follower(at(0, 3, **producer) + at(3, 3), 0)
    follower.replica.move_high_watermark(6)
    follower.flushes.run(T0)
    follower.replica.restart_at(500)
    marks = follower.marks
    assert (marks.log_start_offset, marks.high_watermark, follower.log_end_offset) == (500,) * 3
    assert (follower.last_stable_offset, marks.flushed_end, marks.recovery_point) == (500, 500, 6)
    assert follower._epochs.entries == []
    assert list(follower.producers.view()) == []
    follower.append_as_follower(at(500, leader_epoch=2), 9)
    assert follower._epochs.entries == [(2, 500)]
    again = follower_of(crash_root(follower, tmp_path), clean=False, recovery_point=6)
    assert (again.log_start_offset, again.log_end_offset) == (500, 501)


def test_follower_log_start_is_moved_by_the_leader(tmp_path: Path) -> None:
    follower = follower_of(tmp_path, config=SMALL)
    for offset in range(0, 90, 3):
        follower.append_as_follower(at(offset, 3), 0)
    follower.replica.move_high_watermark(60)
    follower.cleanup.delete_records_before(50)
    assert follower.log_start_offset == 50
    assert next(base_offset for base_offset, _ in read_log(follower)) in range(48, 51)


def test_retention_keeps_records_above_the_high_watermark(tmp_path: Path) -> None:
    from tests.support.partitions import retain

    small = config(segment_bytes=200, retention_bytes=0, cleanup_policy=frozenset({"delete"}))
    follower = follower_of(tmp_path, config=small)
    for offset in range(0, 30, 3):
        follower.append_as_follower(at(offset, 3), 0)
    assert retain(follower, T0) == 0
    follower.replica.move_high_watermark(13)
    assert retain(follower, T0) > 0
    assert 0 < follower.log_start_offset <= 13


def test_compaction_keeps_records_above_the_high_watermark(tmp_path: Path) -> None:
    small = config(segment_bytes=200, cleanup_policy=frozenset({"compact"}))
    follower = follower_of(tmp_path, config=small)
    for offset in range(0, 30, 3):
        follower.append_as_follower(at(offset, 3), 0)
    ends = []
    for mark in (0, 13, 30):
        follower.replica.move_high_watermark(mark)
        ends.append(follower.cleanup.dirty_range(None, T0).end_offset)
    assert ends[0] == 0
    assert 0 < ends[1] <= 13 < ends[2] < 30, ends


def test_planned_truncation_bounds_the_recovery_point(tmp_path: Path) -> None:
    """A flush that ends after the plan must not move the recovery point above the truncation."""
    flusher = LateFlusher()
    follower = follower_of(tmp_path, flusher=flusher)
    follower.append_as_follower(at(0, 3) + at(3, 2), 0)
    follower.flushes.run(T0)
    assert follower.recovery_point == 5
    follower.append_as_follower(at(5, 5), 0)
    flush = follower.flushes.plan(T0)
    assert flush is not None
    follower.replica.plan_truncation(3)
    assert follower.recovery_point == 3
    follower.flushes.finish(flush, flush.run())
    assert follower.recovery_point == 3
    follower.truncate_to(3)
    follower.append_as_follower(at(3, 5), 0)
    follower.flushes.run(T0)
    assert follower.recovery_point == 8


def test_torn_batch_after_a_truncation_is_not_reported_as_damage(tmp_path: Path) -> None:
    """A kill tears a batch after the truncation: recovery truncates and reports no damage."""
    follower = follower_of(tmp_path)
    follower.append_as_follower(b"".join(at(offset) for offset in range(10)), 0)
    follower.flushes.run(T0)
    follower.replica.plan_truncation(4)
    saved = follower.recovery_point
    follower.truncate_to(4)
    follower.append_as_follower(at(4) + at(5) + at(6), 0)
    image = crash_root(follower, tmp_path)
    log = image / "follower" / "orders-0" / f"{0:020d}.log"
    log.write_bytes(log.read_bytes()[:-20])
    again = follower_of(image, clean=False, recovery_point=saved)
    assert again.log_end_offset == 6
    assert again.recovery is not None
    assert not again.recovery.damaged


def test_follower_rolls_segments_at_the_leaders_offsets(tmp_path: Path) -> None:
    leader = leader_of(tmp_path, config=SMALL)
    for _ in range(40):
        append(leader, 3, size=60)
    follower = follower_of(tmp_path, config=SMALL)
    catch_up(leader, follower)
    bases = [segment.base_offset for segment in leader.log.segments]
    assert len(bases) > 3
    assert [segment.base_offset for segment in follower.log.segments] == bases
    assert last_offset(client_batch(3)) == 2
