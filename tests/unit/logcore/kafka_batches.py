"""The contents of ``kafka_batches.txt``: bytes that Apache Kafka wrote, and their records."""

from __future__ import annotations

from pathlib import Path

from fencepost.logcore.batch import LogRecord

T0 = 1_700_000_000_000
APPEND_TIME = 1_800_000_000_000

BYTES = {
    name: bytes.fromhex(text)
    for name, text in (
        line.split()
        for line in Path(__file__).with_suffix(".txt").read_text().splitlines()
        if not line.startswith("#")
    )
}

RECORDS = [
    LogRecord(100, T0, b"k0", b"v0"),
    LogRecord(101, T0 + 5, None, b"x" * 300),
    LogRecord(105, T0 - 100, b"", None, (("h1", b"a"), ("hé", None), ("", b""))),
    LogRecord(106, T0 + 100_000, b"k3", b"\x00\x07"),
]
"""The records of m2-…; the buffers m0-… and m1-… lack headers, and m0-… also lacks timestamps."""


def records(name: str) -> list[LogRecord]:
    """Return the records in the buffer ``name``."""
    found = RECORDS
    if not name.startswith("m2"):
        found = [record._replace(headers=()) for record in found]
    if name.startswith("m0"):
        found = [record._replace(timestamp_ms=-1) for record in found]
    if name.endswith("-lat"):
        found = [record._replace(timestamp_ms=APPEND_TIME) for record in found]
    return found
