"""OffsetCommit, TxnOffsetCommit, OffsetFetch, OffsetDelete, expiry, and offsets of deleted topics.

Source: Kafka's ``OffsetMetadataManager`` (without its replay methods) and
``OffsetExpirationCondition``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import groupby, islice
from operator import itemgetter
from typing import Final

from fencepost.groups import records
from fencepost.groups.commands import (
    NO_LEADER_EPOCH,
    NO_OFFSET,
    CommitOffsets,
    CommitOffsetsResult,
    DeleteOffsets,
    DeleteOffsetsResult,
    ExpireOffsets,
    FetchedOffset,
    FetchOffsets,
    FetchOffsetsResult,
    ForgottenResult,
    OffsetToCommit,
    TopicsDeleted,
    TxnCommitOffsets,
)
from fencepost.groups.errors import (
    GroupLimitExceededError,
    GroupSubscribedToTopicError,
    IllegalGenerationError,
    InvalidGroupIdError,
    OffsetMetadataTooLargeError,
    UnstableOffsetCommitError,
)
from fencepost.groups.events import EventKind
from fencepost.groups.group import not_found
from fencepost.groups.offset_store import (
    GroupOffsets,
    StoredOffset,
    TopicPartition,
    offset_bytes,
)
from fencepost.groups.records import NO_TIMESTAMP, OffsetCommitValue
from fencepost.groups.shard import Group, OffsetScanItem, Shard
from fencepost.logcore.fields import MAX_STRING_BYTES
from fencepost.logcore.machine import DecisionBuilder, DomainError, Token

_INT64_MAX: Final = 2**63 - 1
_NO_OFFSETS: Final = GroupOffsets()

MAX_OFFSETS_PER_TURN: Final = 10_000
"""The maximum number of offsets that an OffsetFetch looks up in one turn of the event loop. For a
larger fetch, the turn only copies the tables of offsets, and the offsets are looked up while the
response is encoded."""

_TopicQuery = tuple[str, Iterable[int], bytes | None]
"""A topic's name, its partitions, and its id if known."""


# --- committing ----------------------------------------------------------------------------------


def commit_offsets(
    shard: Shard, decision: DecisionBuilder, token: Token, command: CommitOffsets
) -> None:
    """Decide on an OffsetCommit. A commit without a generation creates a missing group.

    The empty group id is legal: very old clients store offsets under it.
    """
    group = _group_of_commit(shard, command, command.generation_id_or_member_epoch, in_txn=False)
    expire_timestamp_ms = NO_TIMESTAMP
    if command.retention_time_ms >= 0:
        expire_timestamp_ms = min(decision.now_ms + command.retention_time_ms, _INT64_MAX)
    _append_commits(shard, decision, command.group_id, command.offsets, expire_timestamp_ms, token)
    if group is not None:
        group.on_committed(decision, command.member_id)


def txn_commit_offsets(
    shard: Shard, decision: DecisionBuilder, token: Token, command: TxnCommitOffsets
) -> None:
    """Decide on a TxnOffsetCommit: the records are stamped with the producer."""
    decision.stamp = command.producer
    if not command.group_id:
        raise InvalidGroupIdError("a transaction commits to a group with a name")
    _group_of_commit(shard, command, command.generation_id, in_txn=True)
    _append_commits(shard, decision, command.group_id, command.offsets, NO_TIMESTAMP, token)


def _group_of_commit(
    shard: Shard, command: CommitOffsets | TxnCommitOffsets, generation_id: int, *, in_txn: bool
) -> Group | None:
    """Return the group, or None if the commit creates it as a *simple* group.

    Raises a ``GroupError`` if the sender may not commit. The check ignores offsets whose metadata
    is too large, because these offsets are refused in any case.
    """
    group = shard.groups.get(command.group_id)
    if group is not None:
        group.validate_commit(
            command.member_id,
            command.group_instance_id,
            generation_id,
            (
                item
                for item in command.offsets
                if not (item.metadata and _metadata_error(shard, item.metadata))
            ),
            in_txn=in_txn,
            knows_member_epochs=command.knows_member_epochs,
        )
    elif generation_id < 0:
        shard.require_room_for_group(command.group_id)
    elif command.knows_member_epochs:
        raise not_found(group, command.group_id)
    else:
        raise IllegalGenerationError(
            f"no group {command.group_id!r}, so no generation {generation_id}"
        )
    return group


def _append_commits(
    shard: Shard,
    decision: DecisionBuilder,
    group_id: str,
    offsets: tuple[OffsetToCommit, ...],
    expire_timestamp_ms: int,
    token: Token,
) -> None:
    """Append the valid offsets and reply with a result per partition."""
    answers: list[tuple[str, int, DomainError | None]] = []
    added_bytes = 0
    stored = shard.offsets.of_group(group_id) or _NO_OFFSETS
    committed, pending, now_ms = stored.committed, stored.pending, decision.now_ms
    added: set[TopicPartition] = set()
    for topic, index, offset, leader_epoch, metadata, topic_id in offsets:
        error = _metadata_error(shard, metadata) if metadata else None
        answers.append((topic, index, error))
        if error is not None:
            continue
        value = OffsetCommitValue(
            offset, leader_epoch, metadata, now_ms, expire_timestamp_ms, topic_id
        )
        decision.append(records.offset_commit(group_id, topic, index, value))
        partition = (topic, index)
        if partition not in committed and partition not in pending:
            added.add(partition)
        old = committed.get(partition)
        if decision.stamp is not None:
            old = pending.get(partition, {}).get(decision.stamp.producer_id)
        added_bytes += offset_bytes(metadata) - (offset_bytes(old.value.metadata) if old else 0)
    shard.require_batch("one commit", decision.records)
    if not shard.offsets.memory.has_room(added_bytes):
        raise GroupLimitExceededError(shard.offsets.memory.budget.exceeded)
    if added:
        shard.require("the group", stored.count + len(added), "max_group_offsets")
    decision.reply(token, CommitOffsetsResult(tuple(answers)))


def _metadata_error(shard: Shard, text: str) -> DomainError | None:
    limit = shard.limits.max_offset_metadata_bytes
    # Kafka counts UTF-16 units; only characters beyond U+FFFF take two.
    units = len(text) + sum(char > "\uffff" for char in text) if len(text) * 2 > limit else 0
    if units > limit:
        return OffsetMetadataTooLargeError(f"metadata of {units} characters, at most {limit}")
    if len(text) * 4 > MAX_STRING_BYTES and len(text.encode()) > MAX_STRING_BYTES:
        return OffsetMetadataTooLargeError(f"metadata exceeds {MAX_STRING_BYTES} bytes")
    return None


# --- fetching ------------------------------------------------------------------------------------


def fetch_offsets(
    shard: Shard, decision: DecisionBuilder, token: Token, command: FetchOffsets
) -> None:
    """Reply with committed offsets. A missing group has none, which is no error."""
    group = shard.groups.get(command.group_id)
    if group is not None:
        group.validate_fetch(command.member_id, command.member_epoch)
    offsets = shard.offsets.of_group(command.group_id) or _NO_OFFSETS
    stable, topics = command.require_stable, command.topics
    queries: Iterable[_TopicQuery]
    if topics is None:
        by_topic: dict[str, list[int]] = {}
        for name, index in offsets.committed:
            by_topic.setdefault(name, []).append(index)
        queries = ((name, sorted(indexes), None) for name, indexes in sorted(by_topic.items()))
        count = len(offsets.committed)
    else:
        queries = ((topic.topic, topic.partitions, topic.topic_id) for topic in topics)
        count = sum(len(topic.partitions) for topic in topics)
    if count <= MAX_OFFSETS_PER_TURN:
        rows = _rows(offsets, queries, stable)
        decision.reply(token, FetchOffsetsResult(tuple((name, tuple(of)) for name, of in rows)))
    else:
        as_of_now = GroupOffsets(dict(offsets.committed), dict(offsets.pending))
        decision.reply(token, FetchOffsetsResult(_rows(as_of_now, queries, stable)))


def _rows(
    offsets: GroupOffsets, queries: Iterable[_TopicQuery], require_stable: bool
) -> Iterator[tuple[str, Iterator[FetchedOffset]]]:
    for name, indexes, topic_id in queries:
        yield name, _of_topic(offsets, name, indexes, topic_id, require_stable)


def _of_topic(
    offsets: GroupOffsets,
    name: str,
    indexes: Iterable[int],
    topic_id: bytes | None,
    require_stable: bool,
) -> Iterator[FetchedOffset]:
    return (_fetched(offsets, (name, index), topic_id, require_stable) for index in indexes)


def _fetched(
    offsets: GroupOffsets, partition: TopicPartition, topic_id: bytes | None, require_stable: bool
) -> FetchedOffset:
    if require_stable and partition in offsets.pending:
        error = UnstableOffsetCommitError(f"a transaction on {partition} is open")
        return FetchedOffset(partition[1], NO_OFFSET, NO_LEADER_EPOCH, "", error)
    stored = offsets.committed.get(partition)
    if stored is None or not _is_of_topic(stored, topic_id):
        return FetchedOffset(partition[1], NO_OFFSET, NO_LEADER_EPOCH, "")
    value = stored.value
    return FetchedOffset(partition[1], value.offset, value.leader_epoch, value.metadata)


def _is_of_topic(stored: StoredOffset, topic_id: bytes | None) -> bool:
    """Whether an offset belongs to the topic with this id; true if one of the ids is unknown."""
    stored_id = stored.value.topic_id
    return topic_id is None or stored_id is None or stored_id == topic_id


# --- deleting ------------------------------------------------------------------------------------


def delete_offsets(
    shard: Shard, decision: DecisionBuilder, token: Token, command: DeleteOffsets
) -> None:
    """Decide on an OffsetDelete, which does not delete offsets of topics that members consume."""
    if not command.group_id:
        raise InvalidGroupIdError("offsets are deleted from a group with a name")
    group = shard.groups.get(command.group_id)
    if group is None:
        raise not_found(group, command.group_id)
    group.validate_offset_delete()
    offsets = shard.offsets.of_group(command.group_id) or _NO_OFFSETS
    answers: list[tuple[str, int, DomainError | None]] = []
    deleted: dict[TopicPartition, None] = {}
    for topic, partitions in command.topics:
        error = None
        if group.is_subscribed_to(topic):
            error = GroupSubscribedToTopicError(f"{command.group_id!r} consumes {topic!r}")
        for index in partitions:
            answers.append((topic, index, error))
            exists = (topic, index) in offsets.committed or (topic, index) in offsets.pending
            if error is None and exists:
                deleted[topic, index] = None
    for topic, index in deleted:
        decision.append(records.offset_tombstone(command.group_id, topic, index))
    decision.reply(token, DeleteOffsetsResult(tuple(answers)))


def delete_all_offsets(shard: Shard, decision: DecisionBuilder, group_id: str) -> None:
    """Append tombstones for all offsets of a group, pending ones included."""
    for topic, index in (shard.offsets.of_group(group_id) or _NO_OFFSETS).partitions():
        decision.append(records.offset_tombstone(group_id, topic, index))


def topics_deleted(
    shard: Shard, decision: DecisionBuilder, token: Token, command: TopicsDeleted
) -> None:
    """Delete the offsets of deleted topics, in every group of the shard."""
    ids = dict(command.topics)
    offsets_only = (look for look in _all_offsets(shard) if look[1] is not None)
    batch, more = _next_pass(shard, command, offsets_only)
    for group_id, partitions in batch:
        offsets = shard.offsets.of_group(group_id) or _NO_OFFSETS
        deleted = [
            partition
            for partition in partitions
            if partition is not None
            and partition[0] in ids
            and (entries := _entries(offsets, partition))
            and all(_is_of_topic(stored, ids[partition[0]]) for stored in entries)
        ]
        for topic, index in deleted:
            decision.append(records.offset_tombstone(group_id, topic, index))
        if deleted:
            decision.event(
                EventKind.OFFSETS_OF_DELETED_TOPIC,
                group_id,
                topics=sorted({topic for topic, _ in deleted}),
                offsets=len(deleted),
            )
    decision.reply(token, ForgottenResult(len(decision.records), 0, more))


def _entries(offsets: GroupOffsets, partition: TopicPartition) -> list[StoredOffset]:
    committed = offsets.committed.get(partition)
    pending = offsets.pending.get(partition, {}).values()
    return [*pending] if committed is None else [committed, *pending]


# --- expiry --------------------------------------------------------------------------------------


def expire_offsets(
    shard: Shard, decision: DecisionBuilder, token: Token, command: ExpireOffsets
) -> None:
    """Delete expired offsets, and empty groups without offsets."""
    expired_offsets = expired_groups = 0
    entries, more = _next_pass(shard, command, _all_offsets(shard))
    for group_id, partitions in entries:
        group = shard.groups.get(group_id)
        if group is None:
            continue
        offsets = shard.offsets.of_group(group_id) or _NO_OFFSETS
        expired = [
            partition
            for partition in partitions
            if partition is not None and _is_expired(shard, decision, group, offsets, partition)
        ]
        for topic, index in expired:
            decision.append(records.offset_tombstone(group_id, topic, index))
        if expired:
            decision.event(EventKind.OFFSETS_EXPIRED, group_id, offsets=len(expired))
        nothing_left = len(expired) == len(offsets.committed) and not offsets.pending
        is_complete = partitions[-1] is None
        if is_complete and nothing_left and group.is_empty and not group.is_exempt_from_expiration:
            tombstone_group(decision, group, "empty and without offsets")
            expired_groups += 1
        expired_offsets += len(expired)
    decision.reply(token, ForgottenResult(expired_offsets, expired_groups, more))


def _is_expired(
    shard: Shard,
    decision: DecisionBuilder,
    group: Group,
    offsets: GroupOffsets,
    partition: TopicPartition,
) -> bool:
    stored = offsets.committed.get(partition)
    if stored is None or partition in offsets.pending or group.is_subscribed_to(partition[0]):
        return False
    base_ms = group.expiry_base_ms(stored.value.commit_timestamp_ms)
    if base_ms is None:
        return False
    if stored.value.expire_timestamp_ms != NO_TIMESTAMP:
        return decision.now_ms >= stored.value.expire_timestamp_ms
    return decision.now_ms - base_ms >= shard.offsets_retention_ms


def tombstone_group(decision: DecisionBuilder, group: Group, reason: str) -> None:
    """Append the group's tombstones; the caller must already have deleted the group's offsets."""
    for record in group.tombstones():
        decision.append(record)
    decision.event(EventKind.GROUP_DELETED, group.group_id, reason=reason)
    group.on_removed(decision)


# --- passes over a whole shard -------------------------------------------------------------------


def _all_offsets(shard: Shard) -> Iterator[OffsetScanItem]:
    """Yield the shard's offsets; None ends each group. The shard may change between two steps."""
    for group_id in list(shard.groups):
        offsets = shard.offsets.of_group(group_id) or _NO_OFFSETS
        for partition in offsets.partitions():
            yield group_id, partition
        yield group_id, None


def _next_pass(
    shard: Shard, command: Hashable, walk: Iterator[OffsetScanItem]
) -> tuple[list[tuple[str, list[TopicPartition | None]]], bool]:
    """Take ``max_looks_per_pass`` items of the scan that an earlier pass began, or of ``walk``.

    Return the partitions by group, and whether more items may follow. The position of the scan is
    soft state: after a reload, the shard starts a new scan.
    """
    walk = shard.upkeep_passes.pop(command, walk)
    entries = list(islice(walk, shard.limits.max_looks_per_pass))
    more = len(entries) == shard.limits.max_looks_per_pass
    if more:
        shard.upkeep_passes[command] = walk
    by_group = groupby(entries, key=itemgetter(0))
    return [(group_id, [partition for _, partition in of]) for group_id, of in by_group], more
