"""Entries of the history about the records of a share group (KIP-932)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from fencepost.client.queries.share_records import is_about_partition, is_about_record

if TYPE_CHECKING:
    from fencepost.coordinator.history.entries import Entry


def share_change(detail: Mapping[str, Any]) -> str:
    """Return the records of an event: ``orders:0 12-20, delivery 3``."""
    place = f"{detail.get('topic') or detail['topic_id']}:{detail['partition']}"
    if "old" in detail:
        return f"{place} start offset {detail['old']} → {detail['new']}"
    if "start_offset" in detail:
        return f"{place} from {detail['start_offset']}, leader epoch {detail['leader_epoch']}"
    if "first" not in detail:
        held = detail.get("acquired")
        return f"{place}, {held} acquired" if held else place
    first, last = detail["first"], detail["last"]
    text = f"{place} {first}" if first == last else f"{place} {first}-{last}"
    ranges = detail.get("ranges")
    if ranges:
        text += f" ({sum(span[1] - span[0] + 1 for span in ranges)} of them)"
    if detail.get("delivery_count"):
        text += f", delivery {detail['delivery_count']}"
    if detail.get("queue"):
        text += f", dead-letter queue {detail['queue']}"
    return f"{text}, to the dead-letter queue" if detail.get("dead_letter_queue") else text


def record_filter(
    topic: str | None, partition: int | None, offset: int | None
) -> Callable[[Entry], bool] | None:
    """Return a function that keeps the entries about a topic, a partition or a record.

    Returns None if all entries are kept. Raises click.UsageError.
    """
    if topic is None and partition is None and offset is None:
        return None
    if topic is None:
        raise click.UsageError("--partition and --offset need --topic")
    if partition is None and offset is not None:
        raise click.UsageError("--offset needs --partition")

    def keep(entry: Entry) -> bool:
        return is_about_partition(entry.detail, topic, partition) and (
            offset is None or is_about_record(entry.what, entry.detail, offset)
        )

    return keep
