"""``fencepost dump-log`` and Apache Kafka's DumpLogSegments agree record by record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fencepost.groups.share_records import ShareRecordType
from tests.oracle import dumps
from tests.oracle.conftest import Written
from tests.oracle.interchange import fencepost

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools"), pytest.mark.timeout(1200)]

FILES = ("log", "index", "timeindex", "txnindex", "snapshot")
ALL_KINDS = {"batch", "record", "offset-index", "time-index", "txn-index", "producer"}
TEXT_KINDS = ALL_KINDS - {"txn-index"}
BY = pytest.mark.parametrize("written", ["by_kafka", "by_fencepost"])
DECODERS = {
    "__consumer_offsets": "--offsets-decoder",
    "__transaction_state": "--transaction-log-decoder",
    "__share_group_state": "--share-group-state-decoder",
}


@pytest.fixture
def stopped(request: pytest.FixtureRequest, written: str) -> Path:
    """Return the directory of a broker that was stopped cleanly."""
    found: Written = request.getfixturevalue(written)
    return found.images["stopped"]


def both(files: list[Path], *options: str) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return Fencepost's and Kafka's rows for each file."""
    said: dict[str, list[Any]] = {str(file): [] for file in files}
    for row in json.loads(fencepost("dump-log", "--records", "--format", "json", *files)):
        said[row["file"]].append(row)
    theirs = dumps.by_kafka(files, *options)
    return {name: (list(dumps.by_fencepost(rows)), theirs[name]) for name, rows in said.items()}


@BY
@pytest.mark.parametrize(
    ("topics", "options", "kinds"),
    [
        pytest.param("plain-*", ("--print-data-log",), TEXT_KINDS, id="text"),
        pytest.param("t[!_]*", (), ALL_KINDS, id="transactions, compaction, deletion"),
    ],
)
def test_dump_log_prints_kafkas_rows_for_every_kind_of_file(
    stopped: Path, topics: str, options: tuple[str, ...], kinds: set[str]
) -> None:
    """Only text payloads are compared, because Kafka's tool prints all bytes as text."""
    files = [file for kind in FILES for file in sorted(stopped.glob(f"{topics}-[0-9]*/*.{kind}"))]
    seen: set[str] = set()
    for name, (ours, theirs) in both(files, *options).items():
        seen |= {row["kind"] for row in theirs}
        for mine, other in zip(ours, theirs, strict=True):
            if other["kind"] == "record" and (not options or other["value_size"] < 0):
                mine["payload"] = other["payload"] = None
                if not options:
                    mine["key"] = other["key"]
            assert mine == other, name
    assert seen == kinds


@BY
@pytest.mark.parametrize("topic", DECODERS)
def test_dump_log_decodes_coordinator_records_as_kafka_does(stopped: Path, topic: str) -> None:
    files = sorted(stopped.glob(f"{topic}-[0-9]*/*.log"))
    count, kinds = 0, set[str]()
    for name, (ours, theirs) in both(files, DECODERS[topic]).items():
        for mine, other in zip(ours, theirs, strict=True):
            if mine["kind"] == "record" and mine["control"] is None:
                count += 1
                kinds.add(json.loads(other["key"])["type"])
                expected = dumps.decoded_by_kafka(other)
                assert dumps.without_defaults(mine["payload"], expected) == expected, name
            left_out = {"key", "payload"}
            assert {k: v for k, v in mine.items() if k not in left_out} == {
                k: v for k, v in other.items() if k not in left_out
            }, name
    assert count > 10 or kinds == {"0", "1"}
    assert topic != "__consumer_offsets" or kinds >= {str(kind) for kind in ShareRecordType}
