"""The control records of a quorum: leader change, voters, header and footer of a snapshot.

Source: the schemas ``LeaderChangeMessage``, ``SnapshotHeaderRecord``, ``SnapshotFooterRecord``,
``KRaftVersionRecord`` and ``VotersRecord``; ``ControlRecordType``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from fencepost.logcore.batch import ControlType, LogRecord, encode_batch, parse_control
from fencepost.logcore.checkpoints import uuid_to_text
from fencepost.logcore.fields import FieldReader, FieldWriter

_VERSION: Final = (0).to_bytes(2)
"""Version of a control record's key, and of its value."""

_KRAFT_VERSION_1: Final = (1).to_bytes(2)
"""The level of kraft.version at which voters can change and the log holds a VotersRecord."""


def _control_batch(
    kind: ControlType, value: FieldWriter, now_ms: int, base_offset: int, epoch: int
) -> bytes:
    record = _record(kind, value, now_ms, base_offset)
    return encode_batch((record,), leader_epoch=epoch, control=True)


def _record(kind: ControlType, value: FieldWriter, now_ms: int, offset: int) -> LogRecord:
    value.tags({})
    return LogRecord(offset, now_ms, _VERSION + kind.to_bytes(2), value.done())


def _value() -> FieldWriter:
    value = FieldWriter(None, flexible=True)
    value.raw(_VERSION)
    return value


def leader_change(leader_id: int, now_ms: int) -> bytes:
    """Return the batch that begins an epoch of a quorum of one."""
    value = _value()
    value.int32(leader_id)
    for _ in ("voters", "granting voters"):
        value.count(1)
        value.int32(leader_id)
        value.tags({})
    return _control_batch(ControlType.LEADER_CHANGE, value, now_ms, 0, 0)


class Voter(NamedTuple):
    """A voter of the quorum, with the only listener through which other nodes connect to it."""

    node_id: int
    directory_id: UUID
    listener: str
    host: str
    port: int


def snapshot_header(
    last_timestamp_ms: int, now_ms: int, epoch: int, voters: Sequence[Voter] = ()
) -> bytes:
    """Return the first batch of a snapshot, with the timestamp of the last record in its state.

    ``voters`` belong to a quorum whose voters can change (kraft.version 1, KIP-853). Without
    them the batch has neither a KRaftVersion nor a KRaftVoters record, and the voters are in each
    node's configuration.
    """
    value = _value()
    value.int64(last_timestamp_ms)
    records = [_record(ControlType.SNAPSHOT_HEADER, value, now_ms, 0)]
    if voters:
        version = _value()
        version.raw(_KRAFT_VERSION_1)
        records.append(_record(ControlType.KRAFT_VERSION, version, now_ms, 1))
        records.append(_record(ControlType.KRAFT_VOTERS, _voters_value(voters), now_ms, 2))
    return encode_batch(records, leader_epoch=epoch, control=True)


def _voters_value(voters: Sequence[Voter]) -> FieldWriter:
    value = _value()
    value.count(len(voters))
    for voter in voters:
        value.int32(voter.node_id)
        value.raw(voter.directory_id.bytes)
        value.count(1)
        value.string(voter.listener)
        value.string(voter.host)
        value.raw(voter.port.to_bytes(2))
        value.tags({})
        value.raw(bytes(2))
        value.raw(_KRAFT_VERSION_1)
        value.tags({})
        value.tags({})
    return value


def snapshot_footer(now_ms: int, base_offset: int, epoch: int) -> bytes:
    """Return the last batch of a snapshot."""
    return _control_batch(ControlType.SNAPSHOT_FOOTER, _value(), now_ms, base_offset, epoch)


# --- reading ---


def described_control(record: LogRecord) -> dict[str, Any] | None:
    """Return the type and fields of a quorum's control record; None for any other control record.

    Names and ids are written as by Apache Kafka's tools. Raises CorruptRecordError,
    InvalidRecordError.
    """
    kind = parse_control(record).type
    read = _READ.get(kind)
    if read is None:
        return None
    data = FieldReader(record.value or b"", flexible=True)
    version = data.int16()
    fields = {"version": version, **read(data, version)}
    data.tags()
    return {"type": kind.name, "data": fields}


def _leader_change(data: FieldReader, version: int) -> dict[str, Any]:
    def voters() -> list[dict[str, Any]]:
        described = []
        for _ in range(data.count()):
            voter: dict[str, Any] = {"voterId": data.int32()}
            if version >= 1:
                voter["voterDirectoryId"] = uuid_to_text(UUID(bytes=data.raw(16)))
            data.tags()
            described.append(voter)
        return described

    return {"leaderId": data.int32(), "voters": voters(), "grantingVoters": voters()}


def _voters(data: FieldReader, _version: int) -> dict[str, Any]:
    voters = []
    for _ in range(data.count()):
        voter: dict[str, Any] = {
            "voterId": data.int32(),
            "voterDirectoryId": uuid_to_text(UUID(bytes=data.raw(16))),
            "endpoints": [],
        }
        for _ in range(data.count()):
            name, host = data.string(), data.string()
            port = int.from_bytes(data.raw(2))
            voter["endpoints"].append({"name": name, "host": host, "port": port})
            data.tags()
        low, high = data.int16(), data.int16()
        data.tags()
        voter["kRaftVersionFeature"] = {"minSupportedVersion": low, "maxSupportedVersion": high}
        data.tags()
        voters.append(voter)
    return {"voters": voters}


_READ: Final = {
    ControlType.LEADER_CHANGE: _leader_change,
    ControlType.SNAPSHOT_HEADER: lambda data, _: {"lastContainedLogTimestamp": data.int64()},
    ControlType.SNAPSHOT_FOOTER: lambda _data, _: {},
    ControlType.KRAFT_VERSION: lambda data, _: {"kRaftVersion": data.int16()},
    ControlType.KRAFT_VOTERS: _voters,
}
