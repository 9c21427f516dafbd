from __future__ import annotations

import struct
from pathlib import Path

import pytest

from fencepost.logcore.batch import LogRecord, encode_batch, parse_header
from fencepost.logcore.config import LogConfig
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.segment import Segment
from fencepost.logcore.timestamps import first_in
from fencepost.protocol.steps import finish

FS = OsFileSystem()


def make(path: Path, base: int = 0, *, fresh: bool = True, interval: int = 4096) -> Segment:
    return Segment(
        FS,
        str(path),
        base,
        LogConfig(index_interval_bytes=interval, segment_index_bytes=1 << 16),
        created_ms=0,
        fresh=fresh,
    )


def fill(segment: Segment, sizes: list[int], *, times: list[int] | None = None) -> list[bytes]:
    """Append batches of two records with the given value sizes, at consecutive offsets."""
    offset, result = segment.next_offset(), []
    for at, size in enumerate(sizes):
        timestamp = times[at] if times else 1000 + at
        data = encode_batch(
            [
                LogRecord(offset, timestamp, None, b"v" * size),
                LogRecord(offset + 1, timestamp, None, b""),
            ]
        )
        segment.append((data,), len(data), offset, offset + 1, parse_header(data).max_timestamp)
        result.append(data)
        offset += 2
    return result


def test_index_entry_is_added_after_more_than_the_interval(tmp_path: Path) -> None:
    segment = make(tmp_path, base=10)
    batches = fill(segment, [3000, 3000, 100, 5000, 1], times=[1000, 3000, 2000, 2500, 4000])
    segment.seal()
    starts = [sum(map(len, batches[:at])) for at in range(5)]
    # The third batch, after 6 kB, adds the first entry; its key is the batch's last offset.
    entries = (15 - 10, starts[2], 19 - 10, starts[4])
    assert Path(segment.offset_index.path).read_bytes() == struct.pack(">4i", *entries)
    # A time entry has the largest timestamp so far and its batch's last offset. Sealing the segment
    # adds an entry.
    times = (3000, 13 - 10, 4000, 19 - 10)
    assert Path(segment.time_index.path).read_bytes() == struct.pack(">qiqi", *times)


def test_small_segment_has_a_final_time_entry_only(tmp_path: Path) -> None:
    segment = make(tmp_path)
    fill(segment, [10], times=[1234])
    segment.seal()
    assert Path(segment.offset_index.path).read_bytes() == b""
    assert Path(segment.time_index.path).read_bytes() == struct.pack(">qi", 1234, 1)


def test_segment_has_only_its_log_file_before_the_first_append(tmp_path: Path) -> None:
    segment = make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{0:020d}.log"]
    fill(segment, [10])
    assert {path.suffix for path in tmp_path.iterdir()} == {".log", ".index", ".timeindex"}


def test_locate_finds_the_batch_of_every_offset(tmp_path: Path) -> None:
    segment = make(tmp_path, interval=500)
    batches = fill(segment, [100] * 60)
    again = make(tmp_path, fresh=False, interval=500)
    for opened in (segment, again):
        for at in range(60):
            start = sum(map(len, batches[:at]))
            assert opened.locate(2 * at) == start
            assert opened.locate(2 * at + 1) == start
        assert opened.locate(120) is None
        assert opened.next_offset() == 120


@pytest.mark.parametrize("damage", ["missing", "garbage", "zeros", "beyond", "one off", "stale"])
def test_index_that_does_not_match_the_log_is_rebuilt(tmp_path: Path, damage: str) -> None:
    segment = make(tmp_path, interval=500)
    fill(segment, [100] * 30)
    segment.seal()
    path = Path(segment.offset_index.path)
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "garbage":
        path.write_bytes(b"\x7f" * 80)
    elif damage == "zeros":
        path.write_bytes(b"\x00" * 800)
    elif damage == "beyond":
        path.write_bytes(good + struct.pack(">ii", 1000, 1 << 20))
    elif damage == "one off":
        path.write_bytes(good[:-8] + struct.pack(">ii", 59, segment.size - 50))
    else:
        path.write_bytes(b"")
    again = make(tmp_path, fresh=False, interval=500)
    assert [again.locate(at) for at in range(61)] == [segment.locate(at) for at in range(61)]
    again.seal()
    assert path.read_bytes() == good


def test_boundary_takes_whole_batches(tmp_path: Path) -> None:
    segment = make(tmp_path)
    sizes = [len(batch) for batch in fill(segment, [100, 200, 300])]
    assert segment.boundary(0, sizes[0] - 1, segment.size) == (0, 0)
    assert segment.boundary(0, sizes[0], segment.size) == (sizes[0], 2)
    assert segment.boundary(0, sizes[0] + sizes[1], segment.size) == (sizes[0] + sizes[1], 4)
    assert segment.boundary(0, 1 << 30, segment.size) == (segment.size, None)
    assert segment.boundary(0, 1 << 30, sizes[0]) == (sizes[0], None)
    assert segment.batch_size(sizes[0]) == sizes[1]


def test_batches_larger_than_the_read_ahead_are_read(tmp_path: Path) -> None:
    segment = make(tmp_path)
    written = fill(segment, [10, 3 << 20, 10, 1 << 20, 9000, 9000])
    read = list(segment.batches())
    assert [bytes(batch) for _, _, batch in read] == written
    headers = list(segment.batches(with_payload=False))
    assert [header for _, header, _ in headers] == [header for _, header, _ in read]
    assert segment.locate(9) == sum(map(len, written[:4]))


def test_timestamp_lookup_finds_the_first_record_at_or_after_it(tmp_path: Path) -> None:
    segment = make(tmp_path, interval=200)
    times = [1000, 5000, 2000, 2000, 6000]
    fill(segment, [100] * 5, times=times)
    for target in range(500, 7000, 250):
        for start in range(10):
            expected = next(
                (
                    (2 * at + two, times[at])
                    for at in range(5)
                    for two in (0, 1)
                    if times[at] >= target and 2 * at + two >= start
                ),
                None,
            )
            found = finish(first_in(segment, target, start))
            assert (found and (found.offset, found.timestamp_ms)) == expected, (target, start)
    assert segment.max_timestamp == 6000


def test_max_timestamp_is_restored_when_a_segment_is_reopened(tmp_path: Path) -> None:
    segment = make(tmp_path, interval=200)
    fill(segment, [100] * 5, times=[1000, 5000, 2000, 2000, 3000])
    unsealed = make(tmp_path, fresh=False, interval=200)
    assert unsealed.max_timestamp == 5000
    segment.seal()
    assert make(tmp_path, fresh=False, interval=200).max_timestamp == 5000


def test_truncation_removes_timestamps_and_index_entries(tmp_path: Path) -> None:
    segment = make(tmp_path, interval=200)
    batches = fill(segment, [100] * 6, times=[1000, 2000, 3000, 9000, 4000, 5000])
    segment.truncate_to(7)
    assert segment.size == sum(map(len, batches[:3]))
    assert segment.max_timestamp == 3000
    assert segment.next_offset() == 6
    fill(segment, [100], times=[3500])
    assert segment.max_timestamp == 3500
    assert segment.locate(7) == sum(map(len, batches[:3]))
    segment.truncate_to(0)
    assert (segment.size, segment.max_timestamp, segment.first_batch_timestamp) == (0, -1, None)


def test_segment_age_is_measured_from_the_first_batch(tmp_path: Path) -> None:
    segment = make(tmp_path)
    assert segment.age_ms(5000, now_ms=70) == 70
    fill(segment, [10, 10], times=[1000, 900])
    assert segment.age_ms(5000, now_ms=70) == 4000
    assert make(tmp_path, fresh=False).age_ms(5000, now_ms=70) == 4000


def test_segment_without_timestamps_uses_its_modification_time(tmp_path: Path) -> None:
    segment = make(tmp_path, interval=100)
    fill(segment, [100] * 4, times=[-1] * 4)
    assert segment.max_timestamp == -1
    assert segment.age_ms(-1, now_ms=70) == 70
    assert finish(first_in(segment, 0, 0)) is None
    assert segment.largest_timestamp_ms == FS.modified_ms(segment.stem + ".log")
    segment.seal()
    assert Path(segment.time_index.path).read_bytes() == b""


def test_torn_log_file_is_corrupt(tmp_path: Path) -> None:
    segment = make(tmp_path)
    fill(segment, [100, 100])
    path = Path(segment.stem + ".log")
    path.write_bytes(path.read_bytes()[:-1])
    again = make(tmp_path, fresh=False)
    with pytest.raises(CorruptRecordError):
        list(again.batches())
    with pytest.raises(CorruptRecordError):
        again.next_offset()


def test_truncation_invalidates_cached_read_positions(tmp_path: Path) -> None:
    segment = make(tmp_path)
    fill(segment, [100, 100, 100])
    assert segment.locate(4) is not None
    segment.truncate_to(2)
    first, second = fill(segment, [300, 10])
    assert segment.locate(4) == segment.size - len(second)
    assert segment.locate(2) == segment.size - len(second) - len(first)
