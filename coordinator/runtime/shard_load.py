"""Reading a shard's state from the log of its partition.

Source: ``CoordinatorLoaderImpl``: the whole log is read, including uncommitted records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fencepost.coordinator.runtime.background import Pace
from fencepost.logcore.batch import (
    BatchHeader,
    ControlType,
    LogRecord,
    parse_control,
    record_chunks,
    verify_crc,
)
from fencepost.logcore.machine import Machine, ProducerStamp, Record
from fencepost.logcore.partition import Partition

PACE_RECORDS: Final = 128
"""How many records of a batch are replayed, in about 1 ms, between two checks of the time."""

_END_MARKERS: Final = frozenset({ControlType.ABORT, ControlType.COMMIT})


async def replay_log(
    partition: Partition, machine: Machine, pace: Pace, goes_on: Callable[[int], bool]
) -> int:
    """Replay the whole log into ``machine``; return the offset after the last batch.

    ``goes_on`` gets the offset of each batch, and returns whether to continue.
    """
    end = partition.log_end_offset
    for header, batch in partition.reader.read_all():
        if not goes_on(header.base_offset):
            return end
        verify_crc(batch, 0, header)
        stamp = (
            ProducerStamp(header.producer_id, header.producer_epoch)
            if header.is_transactional
            else None
        )
        for chunk in record_chunks(batch, 0, header):
            for record in chunk:
                _replay(machine, header, record, stamp)
                # A batch may be a megabyte of small records, which take much longer than one slice.
                if record.offset % PACE_RECORDS == 0:
                    await pace()
                    if not goes_on(header.base_offset):
                        return end
            await pace()
    return end


def _replay(
    machine: Machine, header: BatchHeader, record: LogRecord, stamp: ProducerStamp | None
) -> None:
    if header.is_control:
        control = parse_control(record)
        if stamp is not None and control.type in _END_MARKERS:
            commit = control.type is ControlType.COMMIT
            machine.replay_marker(stamp, record.offset, commit=commit)
    elif record.key is not None:
        entry = Record(record.key, record.value)
        machine.replay(entry, record.offset, record.timestamp_ms, stamp)
