"""Compact the logs of groups with the real cleaner, and load them into a GroupMachine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fencepost.logcore.machine import ProducerStamp
from tests.support.cleaned import Step, cleaned_logs, some_ends
from tests.unit.groups.group_driver import Entry, Marker, load


def steps_of(log: Sequence[Entry]) -> list[Step]:
    steps: list[Step] = []
    epochs: dict[int, int] = {}
    for at, entry in enumerate(log):
        assert entry.offset == at
        if entry.marker is None:
            if entry.stamp is not None:
                epochs[entry.stamp.producer_id] = entry.stamp.producer_epoch
            steps.append((at, entry.record, entry.stamp, None))
        else:
            producer = entry.marker.producer_id
            stamp = ProducerStamp(producer, epochs.get(producer, 0))
            steps.append((at, None, stamp, entry.marker.commit))
    return steps


def entries_of(steps: Sequence[Step]) -> list[Entry]:
    return [
        Entry(offset, record, stamp)
        if commit is None
        else Entry(offset, None, None, Marker(stamp.producer_id if stamp else -1, commit))
        for offset, record, stamp, commit in steps
    ]


def loads_back(log: Sequence[Entry], settings: Mapping[str, Any], *, most: int = 1 << 30) -> int:
    """Load variants of the log, compacted up to at most ``most`` offsets; return their number."""
    digest = load(log, **settings).digest()
    variants = 0
    for steps in cleaned_logs(steps_of(log), some_ends(len(log), min(most, len(log)))):
        machine = load(entries_of(steps), **settings)
        machine.check()
        assert machine.digest() == digest
        variants += 1
    return variants
