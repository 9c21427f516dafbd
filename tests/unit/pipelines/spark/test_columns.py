"""Conversions between Arrow columns and record batches, compared with the record codec."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from fencepost.client import partitioner as one_key  # noqa: E402
from fencepost.logcore.batch import (  # noqa: E402
    BatchHeader,
    Codec,
    LogRecord,
    batch_of_payload,
    decode_records,
    encode_batch,
    parse_header,
    record_bytes,
    verify_crc,
)
from fencepost.logcore.errors import InvalidRecordError  # noqa: E402
from fencepost.pipelines.spark import spool  # noqa: E402
from fencepost.pipelines.spark.columns import (  # noqa: E402
    HEADERS,
    Piece,
    Rows,
    decode,
    encode_headers,
    encode_rows,
)
from fencepost.pipelines.spark.errors import SparkPipelineError  # noqa: E402
from fencepost.pipelines.spark.options import sink_options  # noqa: E402
from fencepost.pipelines.spark.partitioner import murmur2, partitions_of  # noqa: E402
from fencepost.pipelines.spark.spool import Spool  # noqa: E402
from fencepost.pipelines.spark.tally import RowTally  # noqa: E402

blobs = st.none() | st.binary(max_size=200)
headers = st.lists(st.tuples(st.text(max_size=5), blobs), max_size=3)
times = st.integers(-(1 << 40), 1 << 44)
records = st.lists(st.tuples(blobs, blobs, times, headers), min_size=1, max_size=60)


def sealed(rows: Rows, max_bytes: int, first: int | None = None) -> list[bytes]:
    return [
        batch_of_payload(
            piece.payload,
            piece.records,
            codec=Codec.NONE,
            base_timestamp_ms=piece.base_timestamp_ms,
            max_timestamp_ms=piece.max_timestamp_ms,
            producer_id=7,
            producer_epoch=1,
            base_sequence=0,
            transactional=True,
        )
        for piece in encode_rows("t", 0, rows, max_bytes, first)
    ]


@pytest.mark.slow
@given(records, st.integers(1, 5_000), st.none() | st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_record_codec_reads_encoded_columns(
    rows: list[tuple[bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]],
    max_bytes: int,
    first: int | None,
) -> None:
    keys, values, stamps, tails = zip(*rows, strict=True)
    heads = [[{"key": k, "value": v} for k, v in tail] or None for tail in tails]
    batches = sealed(
        Rows(
            pa.array(keys, pa.binary()),
            pa.array(values, pa.binary()),
            np.array(stamps, np.int64),
            pa.array(heads, HEADERS),
        ),
        max_bytes,
        first,
    )
    found = []
    for batch in batches:
        header = parse_header(batch)
        verify_crc(batch, 0, header)
        assert header.is_transactional
        assert header.producer_id == 7
        read = decode_records(batch, 0, header)
        assert header.max_timestamp == max(record.timestamp_ms for record in read)
        assert len(read) == 1 or header.size <= max_bytes + 100
        found += read
    assert [(r.timestamp_ms, r.key, r.value, list(r.headers)) for r in found] == [
        (stamp, key, value, tail) for key, value, stamp, tail in rows
    ]
    if first is not None:
        assert parse_header(batches[0]).record_count <= first


def groups(*batches: bytes) -> list[tuple[BatchHeader, bytes]]:
    return [(parse_header(batch), record_bytes(batch, 0, parse_header(batch))) for batch in batches]


@pytest.mark.slow
@given(records, st.integers(0, 1 << 40), st.booleans(), st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_decoded_columns_equal_the_records_of_the_record_codec(
    rows: list[tuple[bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]],
    base: int,
    append_time: bool,
    gap: int,
) -> None:
    log = [
        LogRecord(base + gap * at, stamp, key, value, tuple(tail))
        for at, (key, value, stamp, tail) in enumerate(rows)
    ]
    half = max(1, len(log) // 2)
    parts = [part for part in (log[:half], log[half:]) if part]
    batches = [encode_batch(part, log_append_time=append_time) for part in parts]
    found = decode(groups(*batches), with_headers=True)
    expected = [record for batch in batches for record in decode_records(batch)]
    assert found.offsets.tolist() == [record.offset for record in expected]
    assert found.timestamps_ms.tolist() == [record.timestamp_ms for record in expected]
    assert found.keys.to_pylist() == [record.key for record in expected]
    assert found.values.to_pylist() == [record.value for record in expected]
    assert [
        [(head["key"], head["value"]) for head in row or ()] for row in found.headers.to_pylist()
    ] == [list(record.headers) for record in expected]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_damaged_records_are_read_or_refused(data: st.DataObject) -> None:
    batch = encode_batch([LogRecord(at, 5, b"key", b"v" * 70, ()) for at in range(4)])
    ((header, payload),) = groups(batch)
    at = data.draw(st.integers(0, len(payload) - 1))
    broken = bytearray(payload)
    broken[at] ^= data.draw(st.integers(1, 255))
    cut = bytes(broken[: data.draw(st.integers(0, len(broken)))])
    try:
        found = decode([(header, cut)], with_headers=True)
    except InvalidRecordError:
        return
    assert len(found.offsets) == header.record_count


def test_murmur2_matches_kafkas_test_vectors() -> None:
    # Source: UtilsTest.testMurmur2 of Kafka's clients.
    vectors = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    found = murmur2(pa.array(list(vectors), pa.binary())).astype(np.int32)
    assert found.tolist() == list(vectors.values())


@given(st.lists(st.none() | st.binary(max_size=40), max_size=50), st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_array_partitioner_agrees_with_the_scalar_partitioner(
    keys: list[bytes | None], count: int
) -> None:
    padded = pa.array([b"x", *keys], pa.binary()).slice(1)
    assert partitions_of(padded, count, count).tolist() == [
        count if key is None else one_key.partition_for(key, count) for key in keys
    ]


def written(columns: dict[str, object], topic: str | None = "t") -> dict[tuple[str, int], int]:
    pytest.importorskip("pyspark", reason="PySpark is not installed; `make spark` brings it")
    from fencepost.pipelines.spark.rows import RowWriter

    options = {"kafka.bootstrap.servers": "h:1", **({"topic": topic} if topic else {})}
    checked = sink_options(options, streaming=False)
    writer = RowWriter(checked, lambda _: 4, RowTally(is_exact=False))
    batch = pa.RecordBatch.from_pydict(columns)
    found: dict[tuple[str, int], int] = {}
    for piece in writer.pieces(batch):
        part = piece.topic, piece.partition
        found[part] = found.get(part, 0) + piece.records
    assert writer.tally.rows == batch.num_rows
    return found


def test_row_partition_comes_from_its_column_or_else_from_its_key() -> None:
    keys = [b"a", b"b", b"c", b"d"]
    by_key = [one_key.partition_for(key, 4) for key in keys]
    found = written(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(["1", "2", "3", "4"]),
            "partition": pa.array([3, None, None, 0], pa.int32()),
        }
    )
    wanted = [3, by_key[1], by_key[2], 0]
    assert found == {("t", part): wanted.count(part) for part in set(wanted)}


def test_row_topic_comes_from_its_column_without_the_topic_option() -> None:
    columns = {"value": pa.array([b"1", b"2", b"3"]), "topic": pa.array(["x", "y", "x"])}
    found = written(columns, topic=None)
    assert {topic: count for (topic, _), count in found.items()} == {"x": 2, "y": 1}
    # The option takes precedence over the column, as in the stock connector.
    assert {topic for topic, _ in written(columns)} == {"t"}


@pytest.mark.parametrize("partition", [-1, 4])
def test_row_with_unknown_partition_is_refused(partition: int) -> None:
    columns = {"value": pa.array([b"1"]), "partition": pa.array([partition], pa.int32())}
    if partition < 0:
        # A partition number must not be negative.
        with pytest.raises(Exception, match="partition"):
            written(columns)
    else:
        with pytest.raises(Exception, match="which has 4"):
            written(columns)


def pieces(count: int) -> list[Piece]:
    return [Piece("t", at, at + 1, 5, 6, b"x" * at) for at in range(count)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Yield the temporary folder of a machine."""
    monkeypatch.setattr(spool.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def new_spool(subject: str = "query") -> Spool:
    made = Spool.new(subject)
    assert made is not None
    return made


def test_spooled_pieces_are_read_back_until_the_sweep(machine: Path) -> None:
    made, other = new_spool(), new_spool("another")
    assert made.is_shared()
    path = made.write(pieces(5))
    assert list(spool.read(path)) == pieces(5)
    spool.sweep("query")
    assert [entry.name for entry in machine.iterdir()] == [Path(other.folder).name]


def test_new_spool_removes_files_of_a_crashed_attempt(machine: Path) -> None:
    path = new_spool().write(pieces(1))
    new_spool()
    with pytest.raises(FileNotFoundError):
        list(spool.read(path))


def test_spool_that_others_can_write_to_is_refused(machine: Path) -> None:
    made = new_spool()
    path = made.write(pieces(1))
    Path(made.folder).chmod(0o777)
    assert not made.is_shared()
    with pytest.raises(SparkPipelineError, match="others can write"):
        list(spool.read(path))


def test_spool_left_on_another_machine_is_not_shared(
    machine: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_spool()
    # The driver has moved to another machine; the task runs on the former driver's machine.
    monkeypatch.setattr(spool.tempfile, "tempdir", str(tmp_path_factory.mktemp("driver")))
    made = new_spool()
    here = Path(machine, Path(made.folder).name)
    assert not here.exists()
    monkeypatch.setattr(spool.tempfile, "tempdir", str(machine))
    assert not Spool(str(here), made.mark).is_shared()


def test_spool_is_not_created_without_a_temporary_folder(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool.tempfile, "tempdir", str(machine / "missing"))
    assert Spool.new("query") is None


@pytest.mark.parametrize(
    ("header", "told"),
    [({"key": None, "value": b"v"}, "the key of a header is null"), (None, "a header is null")],
)
def test_header_without_a_key_is_refused(header: dict[str, object] | None, told: str) -> None:
    good = {"key": "", "value": None}
    with pytest.raises(SparkPipelineError, match=told):
        encode_headers(pa.array([[good], None, [good, header]], HEADERS))
    assert encode_headers(pa.array([[good], None], HEADERS)).to_pylist() == [
        b"\x02\x00\x01",
        b"\x00",
    ]
