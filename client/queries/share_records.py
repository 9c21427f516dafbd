"""Entries of the event history about the records of share groups (KIP-932)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

WHOLE: Final = frozenset(
    {"share-partition-loaded", "share-partition-failed", "share-partition-fenced"}
)
"""Events of a share partition that concern all of its records."""


def is_about_partition(detail: Mapping[str, Any], topic: str, partition: int | None) -> bool:
    """Return whether an event is about a share partition; None stands for any partition."""
    return detail.get("topic") == topic and partition in (None, detail.get("partition"))


def is_about_record(what: str, detail: Mapping[str, Any], offset: int) -> bool:
    """Return whether an event of a share partition is about the record at an offset."""
    if what in WHOLE:
        # A loaded share partition knows nothing of the records below its start offset.
        return offset >= int(detail.get("start_offset", 0))
    if "old" in detail:
        return int(detail["old"]) <= offset < int(detail["new"])
    ranges = detail.get("ranges") or [(detail.get("first", 0), detail.get("last", -1))]
    return any(first <= offset <= last for first, last in ranges)
