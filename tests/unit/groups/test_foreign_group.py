"""Groups of kinds that only other brokers can coordinate: records, names and offsets stay."""

from __future__ import annotations

import pytest

from fencepost.groups import records
from fencepost.groups import share_records as sr
from fencepost.groups.commands import (
    CommitOffsets,
    DeleteGroup,
    DeleteOffsets,
    ExpireOffsets,
    FetchOffsets,
    FetchTopic,
    ListGroups,
    OffsetToCommit,
    TopicsDeleted,
)
from fencepost.groups.errors import (
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    InconsistentGroupProtocolError,
    NonEmptyGroupError,
    UnknownMemberIdError,
    UnsupportedGroupRequestError,
)
from fencepost.groups.foreign_group import ForeignRecordType as Type
from fencepost.groups.records import OffsetCommitValue
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.fields import FieldWriter
from fencepost.logcore.machine import InvariantViolation, Record
from tests.unit.groups.consumer_driver import ConsumerDriver
from tests.unit.groups.group_driver import NOW, RETENTION, Driver, Entry, G, load

OFFSET = records.offset_commit(G, "t", 0, OffsetCommitValue(5, -1, "", NOW))


def key(kind: Type, *names: str) -> bytes:
    writer = FieldWriter(kind)
    for name in names:
        writer.string(name)
    return writer.done()


def written(kind: Type, *names: str, version: int = 0) -> Record:
    """Return a record whose value is irrelevant here."""
    return Record(key(kind, *names), version.to_bytes(2) + b"whatever")


def forgotten(kind: Type, *names: str) -> Record:
    return Record(key(kind, *names), None)


def log_of(*found: Record) -> list[Entry]:
    return [Entry(offset, record, None) for offset, record in enumerate(found)]


STREAMS = (
    written(Type.STREAMS_METADATA, G),
    written(Type.STREAMS_TOPOLOGY, G, version=3),
    written(Type.STREAMS_MEMBER_METADATA, G, "m"),
    written(Type.STREAMS_CURRENT_MEMBER_ASSIGNMENT, G, "m"),
)
WITHOUT_MEMBERS = (written(Type.STREAMS_METADATA, G), written(Type.STREAMS_TOPOLOGY, G))


def listed(driver: Driver) -> list[tuple[str, str, str]]:
    found = driver.ask(ListGroups()).groups
    return [(group.group_id, group.group_type, group.state) for group in found]


def test_streams_group_is_listed_with_its_type_and_state() -> None:
    assert listed(Driver(log=log_of(*STREAMS))) == [(G, "streams", "Unknown")]
    assert listed(Driver(log=log_of(*WITHOUT_MEMBERS))) == [(G, "streams", "Empty")]


@pytest.mark.parametrize("has_members", [True, False])
def test_streams_group_refuses_other_members_and_its_deletion(has_members: bool) -> None:
    found = STREAMS if has_members else WITHOUT_MEMBERS
    driver = ConsumerDriver(log=log_of(*found))
    size = len(driver.log)
    with pytest.raises(InconsistentGroupProtocolError):
        driver.answer(Driver.join(driver))
    with pytest.raises(GroupIdNotFoundError):
        driver.join("stranger")
    with pytest.raises(GroupIdNotFoundError):
        driver.beat("stranger", 3)
    with pytest.raises(NonEmptyGroupError if has_members else UnsupportedGroupRequestError):
        driver.ask(DeleteGroup(G))
    assert len(driver.log) == size


def commit(driver: Driver, generation: int = -1, member_id: str = "") -> None:
    driver.ask(
        CommitOffsets(
            group_id=G,
            generation_id_or_member_epoch=generation,
            member_id=member_id,
            group_instance_id=None,
            offsets=(OffsetToCommit("t", 0, 7, -1, "", None),),
        )
    )


def test_streams_group_keeps_its_offsets() -> None:
    """The offsets do not expire, because this broker does not know the group's active members."""
    driver = Driver(log=log_of(OFFSET, *STREAMS))
    size = len(driver.log)
    driver.advance(2 * RETENTION)
    driver.ask(ExpireOffsets())
    deleted = driver.ask(DeleteOffsets(G, (("t", (0,)),)))
    assert isinstance(deleted.partitions[0][2], GroupSubscribedToTopicError)
    ((_, rows),) = driver.ask(FetchOffsets(G, (FetchTopic("t", (0,)),))).topics
    assert [row.offset for row in rows] == [5]
    assert len(driver.log) == size
    with pytest.raises(UnknownMemberIdError):
        commit(driver)
    with pytest.raises(UnknownMemberIdError):
        commit(driver, 3, "stranger")
    with pytest.raises(UnsupportedGroupRequestError):
        commit(driver, 3, "m")
    driver.ask(TopicsDeleted((("t", None),)))
    assert len(driver.log) == size + 1, "what is gone for all is gone here"


def test_empty_streams_group_accepts_commits_and_is_not_removed() -> None:
    driver = Driver(log=log_of(*WITHOUT_MEMBERS))
    commit(driver)
    driver.ask(DeleteOffsets(G, (("t", (0,)),)))
    size = len(driver.log)
    driver.advance(2 * RETENTION)
    driver.ask(ExpireOffsets())
    assert len(driver.log) == size
    assert listed(driver) == [(G, "streams", "Empty")]
    driver.reload()


def test_streams_group_ends_with_its_last_record_and_its_offsets_stay() -> None:
    gone = [Record(record.key, None) for record in STREAMS]
    for at in range(len(gone)):
        assert listed(Driver(log=log_of(OFFSET, *STREAMS, *gone[:at]))) != [(G, "classic", "Empty")]
    assert listed(Driver(log=log_of(OFFSET, *STREAMS, *gone))) == [(G, "classic", "Empty")]
    assert listed(Driver(log=log_of(*STREAMS, *gone))) == []


def test_newest_record_value_determines_the_group_type() -> None:
    """A compacted log may have an old tombstone after the records of the next group type."""
    classic = records.group_metadata(
        G, records.GroupMetadataValue("consumer", 0, None, None, NOW, ())
    )
    old = records.group_tombstone(G)
    share = sr.group_epoch(G, sr.ShareGroupEpochValue(3))
    assert listed(Driver(log=log_of(classic, old, *STREAMS, old))) == [(G, "streams", "Unknown")]
    ended = forgotten(Type.STREAMS_METADATA, G)
    assert listed(Driver(log=log_of(*STREAMS, classic, ended))) == [(G, "classic", "Empty")]
    assert listed(Driver(log=log_of(*STREAMS, share, ended))) == [(G, "share", "Empty")]
    ended = Record(share.key, None)
    assert listed(Driver(log=log_of(share, *STREAMS, ended))) == [(G, "streams", "Unknown")]


def test_malformed_streams_key_is_corrupt_and_unknown_types_are_skipped() -> None:
    with pytest.raises(CorruptRecordError):
        load(log_of(Record(key(Type.STREAMS_MEMBER_METADATA, G), b"\0\0")))
    driver = Driver(log=log_of(Record(b"\0\x63", b"\0\0")))
    assert driver.kinds() == ["records-skipped"]
    with pytest.raises(InvariantViolation, match="streams group"):
        driver.machine.replay(STREAMS[0], 1, NOW, None)
