"""The start offsets of share groups, and the deletion of their state.

The share coordinator has the offsets. These commands only decide which partitions the share
coordinator must change, and record the pending changes, so that a failed change can be repeated.

Source: Kafka's ``GroupMetadataManager`` (alterShareGroupOffsets, initializeShareGroupState,
sharePartitionsEligibleForOffsetDeletion, completeDeleteShareGroupOffsets,
maybeCleanupShareGroupState).
"""

from __future__ import annotations

from collections.abc import Iterable

from fencepost.groups import share_records as sr
from fencepost.groups.assignors import simple
from fencepost.groups.assignors.model import TopicIdPartition
from fencepost.groups.consumer_commands import NamedPartitions
from fencepost.groups.consumer_group import by_topic
from fencepost.groups.errors import NonEmptyGroupError
from fencepost.groups.events import EventKind
from fencepost.groups.group import not_found
from fencepost.groups.records import batch_bytes
from fencepost.groups.shard import Shard
from fencepost.groups.share_commands import (
    AlterShareOffsets,
    AlterShareOffsetsResult,
    DeleteShareOffsets,
    DeleteShareState,
    DescribedShareMember,
    DescribeShareGroup,
    DescribeShareGroupResult,
    Done,
    ListShareState,
    ListShareStateResult,
    ShareStateDeleted,
    ShareStateInitialized,
    ShareTopicsDeleted,
    StateToDelete,
    StateToInitialize,
)
from fencepost.groups.share_group import ShareGroup
from fencepost.groups.share_heartbeat import is_replaceable
from fencepost.groups.share_target import (
    Partitions,
    begin_initialization,
    by_topic_id,
    state_topics,
    union,
    without,
)
from fencepost.logcore.machine import DecisionBuilder, Token


def _share_group(shard: Shard, group_id: str) -> ShareGroup:
    group = shard.groups.get(group_id)
    if not isinstance(group, ShareGroup):
        raise not_found(group, group_id, "share")
    return group


def _empty_group(shard: Shard, group_id: str) -> ShareGroup:
    group = _share_group(shard, group_id)
    _require_empty(group)
    return group


def _require_empty(group: ShareGroup) -> None:
    if not group.is_empty:
        raise NonEmptyGroupError("The group is not empty.")


def describe_share_group(
    shard: Shard, decision: DecisionBuilder, token: Token, command: DescribeShareGroup
) -> None:
    """Describe a share group; assignments omit topics without a known name."""
    group = _share_group(shard, command.group_id)
    names = shard.environment(command.group_id).topics.names()

    def named(partitions: Iterable[TopicIdPartition]) -> tuple[NamedPartitions, ...]:
        return tuple(
            NamedPartitions(topic_id, names[topic_id], indexes)
            for topic_id, indexes in by_topic(partitions)
            if topic_id in names
        )

    members = tuple(
        DescribedShareMember(
            member_id,
            member,
            group.current(member_id).member_epoch,
            named(group.current(member_id).partitions),
        )
        for member_id, member in sorted(group.members.items(), key=lambda item: item[0])
    )
    described = DescribeShareGroupResult(
        group.group_id,
        group.state_name,
        group.epoch,
        group.assignment_epoch,
        simple.NAME,
        members,
    )
    decision.reply(token, described)


def state_initialized(
    shard: Shard, decision: DecisionBuilder, token: Token, command: ShareStateInitialized
) -> None:
    """Make initialized partitions assignable; a later heartbeat retries the failed ones."""
    group = _share_group(shard, command.group_id)
    state = group.state
    initializing = by_topic_id(state.initializing)
    done = {
        topic_id: (name, frozenset(i for i in indexes if (topic_id, i) in command.initialized))
        for topic_id, (name, indexes) in initializing.items()
    }
    remaining = without(initializing, command.initialized | command.failed)
    initialized = union(by_topic_id(state.initialized), done)
    value = sr.StatePartitionsValue(
        state_topics(remaining), state_topics(initialized), state.deleting
    )
    if value != state:
        decision.append(sr.state_partitions(group.group_id, value))
        decision.event(
            EventKind.SHARE_STATE_INITIALIZED,
            group.group_id,
            topics=sorted(name for name, indexes in done.values() if indexes),
            partitions=sum(len(indexes) for _, indexes in done.values()),
            failed=len(command.failed),
        )
    decision.reply(token, Done())


def list_state(
    shard: Shard, decision: DecisionBuilder, token: Token, command: ListShareState
) -> None:
    """List the initialized partitions of existing topics."""
    group = shard.groups.get(command.group_id)
    partitions: tuple[NamedPartitions, ...] = ()
    if isinstance(group, ShareGroup):
        names = shard.environment(command.group_id).topics.names()
        partitions = tuple(
            NamedPartitions(topic.topic_id, names[topic.topic_id], topic.partitions)
            for topic in group.state.initialized
            if topic.topic_id in names
        )
    decision.reply(token, ListShareStateResult(partitions))


def alter_offsets(
    shard: Shard, decision: DecisionBuilder, token: Token, command: AlterShareOffsets
) -> None:
    """Begin to initialize partitions with given start offsets."""
    known_group, is_new = shard.groups.get(command.group_id), False
    if isinstance(known_group, ShareGroup):
        group = known_group
        _require_empty(group)
    elif is_replaceable(known_group):
        shard.require_room_for_group(command.group_id)
        group = ShareGroup(command.group_id, shard.totals)
        is_new = True
    else:
        raise not_found(known_group, command.group_id, "share")
    topics = shard.environment(command.group_id).topics.topics
    offsets: dict[TopicIdPartition, int] = {}
    indexes: dict[bytes, tuple[str, set[int]]] = {}
    unknown: set[tuple[str, int]] = set()
    for name, index, offset in command.offsets:
        topic_id, count = topics.get(name, (b"", 0))
        if 0 <= index < count:
            offsets[topic_id, index] = offset
            indexes.setdefault(topic_id, (name, set()))[1].add(index)
        else:
            unknown.add((name, index))
    partitions = {topic_id: (name, frozenset(of)) for topic_id, (name, of) in indexes.items()}
    if offsets:
        begin_initialization(decision, group, partitions)
        shard.require_batch("the group's partitions", decision.records)
        if is_new:
            decision.event(EventKind.GROUP_CREATED, command.group_id)
        decision.event(
            EventKind.SHARE_OFFSETS_ALTERED,
            command.group_id,
            topics=sorted(name for name, _ in partitions.values()),
            partitions=len(offsets),
        )
    rows = tuple((*place, offset) for place, offset in sorted(offsets.items()))
    result = AlterShareOffsetsResult(StateToInitialize(group.epoch, rows), frozenset(unknown))
    decision.reply(token, result)


def delete_offsets(
    shard: Shard, decision: DecisionBuilder, token: Token, command: DeleteShareOffsets
) -> None:
    """Begin to delete the state of topics, or try again to delete it."""
    group = _empty_group(shard, command.group_id)
    topics = shard.environment(command.group_id).topics.topics
    initialized = by_topic_id(group.state.initialized)
    deleting = dict(group.state.deleting)
    deleted: dict[bytes, tuple[str, frozenset[int]]] = {}
    unknown, without_state = [], []
    for name in dict.fromkeys(command.topics):
        topic_id, count = topics.get(name, (b"", 0))
        if name not in topics:
            unknown.append(name)
        elif topic_id in initialized:
            deleted[topic_id] = initialized.pop(topic_id)
            deleting[topic_id] = name
        elif topic_id in deleting:
            deleted[topic_id] = (name, frozenset(range(count)))
        else:
            without_state.append(name)
    _save(decision, group, by_topic_id(group.state.initializing), initialized, deleting)
    result = StateToDelete(_named(deleted), tuple(unknown), tuple(without_state))
    decision.reply(token, result)


def delete_state(
    shard: Shard, decision: DecisionBuilder, token: Token, command: DeleteShareState
) -> None:
    """Begin to delete the state of all topics, or try again to delete it."""
    group = _empty_group(shard, command.group_id)
    state = group.state
    partitions = union(by_topic_id(state.initialized), by_topic_id(state.initializing))
    topics = shard.environment(command.group_id).topics
    names = topics.names()
    for topic_id, _ in state.deleting:
        if topic_id in names:
            name = names[topic_id]
            again = {topic_id: (name, frozenset(range(topics.topics[name][1])))}
            partitions = union(partitions, again)
    _save(decision, group, {}, {}, {topic_id: name for topic_id, (name, _) in partitions.items()})
    decision.reply(token, StateToDelete(_named(partitions)))


def state_deleted(
    shard: Shard, decision: DecisionBuilder, token: Token, command: ShareStateDeleted
) -> None:
    """Forget topics whose state the share coordinator has deleted."""
    group = _share_group(shard, command.group_id)
    _forget(decision, group, command.topic_ids, is_deleting_only=True)
    decision.reply(token, Done())


def topics_deleted(
    shard: Shard, decision: DecisionBuilder, token: Token, command: ShareTopicsDeleted
) -> None:
    """Forget deleted topics in all groups; the share coordinator deletes their state itself.

    A pass ends once its records may fill half a batch. The next pass handles the remaining groups.
    """
    size, more = 0, False
    for group in shard.groups.values():
        if not isinstance(group, ShareGroup) or not _knows(group, command.topic_ids):
            continue
        if more := size > shard.max_batch_bytes() // 2:
            break
        _forget(decision, group, command.topic_ids, is_deleting_only=False)
        size += batch_bytes(decision.records[-1:])
    decision.reply(token, Done(more))


def _knows(group: ShareGroup, topic_ids: frozenset[bytes]) -> bool:
    state = group.state
    with_state = (topic.topic_id for topic in (*state.initializing, *state.initialized))
    return not topic_ids.isdisjoint(with_state) or any(
        topic_id in topic_ids for topic_id, _ in state.deleting
    )


def _forget(
    decision: DecisionBuilder,
    group: ShareGroup,
    topic_ids: frozenset[bytes],
    *,
    is_deleting_only: bool,
) -> None:
    state, removed = group.state, frozenset() if is_deleting_only else topic_ids
    names = {topic_id: name for topic_id, name in state.deleting if topic_id in topic_ids}
    names |= {
        topic.topic_id: topic.name
        for topic in (*state.initializing, *state.initialized)
        if topic.topic_id in removed
    }
    if names:
        decision.event(
            EventKind.SHARE_STATE_DELETED,
            group.group_id,
            topics=sorted(names.values()),
            reason="deleted at the share coordinator" if is_deleting_only else "topics deleted",
        )
    deleting = {topic_id: name for topic_id, name in state.deleting if topic_id not in topic_ids}
    initializing, initialized = (
        {
            topic_id: value
            for topic_id, value in by_topic_id(topics).items()
            if topic_id not in removed
        }
        for topics in (state.initializing, state.initialized)
    )
    _save(decision, group, initializing, initialized, deleting)


def _save(
    decision: DecisionBuilder,
    group: ShareGroup,
    initializing: Partitions,
    initialized: Partitions,
    deleting: dict[bytes, str],
) -> None:
    """Append the record of the partitions with state (type 15), unless it is unchanged."""
    value = sr.StatePartitionsValue(
        state_topics(initializing), state_topics(initialized), tuple(sorted(deleting.items()))
    )
    if value != group.state:
        decision.append(sr.state_partitions(group.group_id, value))


def _named(partitions: Partitions) -> tuple[NamedPartitions, ...]:
    return tuple(
        NamedPartitions(topic.topic_id, topic.name, topic.partitions)
        for topic in state_topics(partitions)
    )
