"""Partition operations in one call each; the broker performs them in several steps."""

from __future__ import annotations

from fencepost.logcore.batch import Buffer
from fencepost.logcore.disk_steps import run_blocking
from fencepost.logcore.file_range import FileRange
from fencepost.logcore.partition import Appended, Partition
from fencepost.logcore.reading import Isolation, LogReadInfo
from fencepost.logcore.validation import validate


def append_batch(
    partition: Partition,
    data: Buffer,
    *,
    now_ms: int,
    transaction_verified: bool = False,
    transaction_version: int = 0,
) -> Appended:
    """Check a client's batch and append it; raise the errors of both steps."""
    return partition.append_validated(
        validate(data, partition.log.config, now_ms=now_ms, min_zstd_ok=True),
        transaction_verified=transaction_verified,
        transaction_version=transaction_version,
    )


def fetch_bytes(
    partition: Partition,
    offset: int,
    max_bytes: int,
    isolation: Isolation,
    *,
    at_least_one: bool = True,
) -> LogReadInfo:
    """Fetch, and read a range of a file into memory."""
    fetched = partition.reader.fetch(offset, max_bytes, isolation, at_least_one=at_least_one)
    records = fetched.records
    if isinstance(records, FileRange):
        records = records.read(len(records))
    return fetched._replace(records=records)


def retain(partition: Partition, now_ms: int) -> int:
    """Run a whole round of retention; return the number of removed segments."""
    return run_blocking(partition.cleanup.delete_old_segments(now_ms))
