"""The checksum of a batch is equal for the same rows in any order, and different for other rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from fencepost.pipelines.spark import tally  # noqa: E402
from fencepost.pipelines.spark.columns import HEADERS  # noqa: E402
from fencepost.pipelines.spark.progress import Progress  # noqa: E402
from fencepost.pipelines.spark.tally import RowTally  # noqa: E402

blobs = st.none() | st.binary(max_size=40) | st.binary(min_size=60, max_size=90)
heads = st.none() | st.lists(
    st.fixed_dictionaries({"key": st.text(max_size=3), "value": blobs}), max_size=2
)
records = st.lists(st.tuples(blobs, blobs, heads, st.none() | st.integers(0, 5)), max_size=30)
Row = tuple[Any, ...]
NAMES = ("key", "value", "headers", "partition")
TYPES = (pa.binary(), pa.binary(), HEADERS, pa.int32())


def counted(*parts: list[Row]) -> tuple[int, str]:
    """Return the tally of rows in several Arrow batches of several tasks."""
    rows, checksums = 0, 0
    for part in parts:
        found = RowTally(is_exact=True)
        columns = zip(*part, strict=True) if part else ((),) * len(NAMES)
        arrays = [pa.array(c, kind) for c, kind in zip(columns, TYPES, strict=True)]
        found.add(dict(zip(NAMES, arrays, strict=True)), len(part))
        rows, checksums = rows + found.rows, checksums + found.checksum
    return rows, Progress(0, "", "").counted(rows, checksums).checksum


@given(records, st.randoms(use_true_random=False), st.integers(0, 30))
def test_checksum_does_not_depend_on_order_or_tasks(
    rows: list[Row], chance: random.Random, cut: int
) -> None:
    mixed = chance.sample(rows, len(rows))
    assert counted(mixed[:cut], mixed[cut:]) == counted(rows)


@given(records, records)
def test_different_rows_have_different_checksums(rows: list[Row], others: list[Row]) -> None:
    def known(row: Row) -> str:
        return repr((row[0], row[1], row[2] or [], row[3]))

    same = sorted(map(known, rows)) == sorted(map(known, others))
    assert (counted(rows) == counted(others)) is same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([b"ab", b"cd"], [b"ac", b"bd"]),
        ([b"12345678" + b"abcdefgh"], [b"abcdefgh" + b"12345678"]),
        ([b"\0" * 8], [b"\0" * 16]),
        ([b"\0" * 7], [b"\0" * 8]),
        ([None], [b""]),
        ([b"v%d" % n for n in range(100)], [b"v%d" % n for n in range(100, 200)]),
    ],
)
def test_similar_rows_have_different_checksums(one: list[bytes], other: list[bytes]) -> None:
    assert counted([(None, v, None, 0) for v in one]) != counted(
        [(None, v, None, 0) for v in other]
    )
    # The same bytes as a key and as a value give different checksums.
    assert counted([(v, b"", None, 0) for v in one]) != counted([(b"", v, None, 0) for v in one])


def test_checksum_does_not_depend_on_the_chunk_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [(None, bytes([at]) * at, None, at) for at in range(200)]
    expected = counted(rows)
    monkeypatch.setattr(tally, "_CHUNK_WORDS", 3)
    assert counted(rows) == expected


def test_checksum_of_a_slice_has_only_its_rows() -> None:
    column = pa.array([b"", b"12345678x", None, b"abc", b"x" * 31])
    whole, part = RowTally(is_exact=True), RowTally(is_exact=True)
    whole.add({"value": pa.array([None, b"abc", b"x" * 31])}, 3)
    part.add({"value": column.slice(2, 3)}, 3)
    assert (part.rows, part.checksum) == (whole.rows, whole.checksum)


def test_inexact_tally_counts_rows_without_a_checksum() -> None:
    found = RowTally(is_exact=False)
    found.add({"value": pa.array([b"x"])}, 1)
    assert (found.rows, found.checksum) == (1, 0)
