"""A share group's epoch, its target assignment, and the state of its partitions.

A partition may be assigned once the share coordinator has initialized its state. Record 15 lists
the partitions whose state is initialized or being initialized.

Source: Kafka's ``GroupMetadataManager`` (initializedAssignmentPending,
maybeCreateInitializeShareGroupStateRequest, initializeShareGroupState and the methods near them).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from fencepost.groups import share_records as sr
from fencepost.groups.assignors import simple
from fencepost.groups.assignors.model import TopicIdPartition
from fencepost.groups.consumer_commands import ShareSettings, TopicsImage
from fencepost.groups.consumer_group import by_topic
from fencepost.groups.consumer_records import AssignmentEpochValue, TargetAssignmentValue
from fencepost.groups.events import EventKind
from fencepost.groups.share_commands import (
    START_EARLIEST,
    START_UNKNOWN,
    StateToInitialize,
)
from fencepost.groups.share_group import ShareGroup
from fencepost.logcore.machine import DecisionBuilder

Partitions = Mapping[bytes, tuple[str, frozenset[int]]]
"""Topic id → name and partitions, as in a record of type 15."""


def by_topic_id(topics: Iterable[sr.StateTopic]) -> dict[bytes, tuple[str, frozenset[int]]]:
    """Return a list of a record of type 15, by topic id."""
    return {topic.topic_id: (topic.name, frozenset(topic.partitions)) for topic in topics}


def state_topics(partitions: Partitions) -> tuple[sr.StateTopic, ...]:
    """Return a list for a record of type 15; topics without partitions are omitted."""
    return tuple(
        sr.StateTopic(topic_id, name, tuple(sorted(indexes)))
        for topic_id, (name, indexes) in sorted(partitions.items())
        if indexes
    )


def union(first: Partitions, second: Partitions) -> dict[bytes, tuple[str, frozenset[int]]]:
    """Return the partitions that are in ``first`` or in ``second``."""
    result = dict(first)
    for topic_id, (name, indexes) in second.items():
        result[topic_id] = (name, indexes | result.get(topic_id, (name, frozenset()))[1])
    return result


def without(partitions: Partitions, pairs: Collection[TopicIdPartition]) -> Partitions:
    """Return partitions that are not among ``pairs``."""
    return {
        topic_id: (name, frozenset(i for i in indexes if (topic_id, i) not in pairs))
        for topic_id, (name, indexes) in partitions.items()
    }


# --- the target ----------------------------------------------------------------------------------


def awaits_assignment(group: ShareGroup, topics: TopicsImage) -> bool:
    """Whether the target differs from the initialized partitions of subscribed topics.

    Kafka also waits for the partitions of a deleted topic, and bumps the epoch until the topic's
    state is deleted.
    """
    assigned: set[TopicIdPartition] = set().union(*group.targets.values())
    of_topic: dict[bytes, set[int]] = {}
    for topic_id, index in assigned:
        of_topic.setdefault(topic_id, set()).add(index)
    subscribed = group.subscribed_topics() & topics.topics.keys()
    topic_ids = {topics.topics[name][0] for name in subscribed}
    return bool(group.members) and any(
        topic.topic_id in topic_ids and of_topic.get(topic.topic_id, set()) != set(topic.partitions)
        for topic in group.state.initialized
    )


def compute_target(
    decision: DecisionBuilder,
    group: ShareGroup,
    members: Mapping[str, sr.ShareMemberValue],
    topics: TopicsImage,
    epoch: int,
) -> dict[str, frozenset[TopicIdPartition]]:
    """Append the target of a group epoch, and return it."""
    topics_by_name = topics.topics
    ids_by_names: dict[tuple[str, ...], frozenset[bytes]] = {}
    topic_ids: dict[str, frozenset[bytes]] = {}
    for member_id, member in members.items():
        names = member.subscribed_topic_names
        if names not in ids_by_names:
            ids_by_names[names] = frozenset(
                topics_by_name[name][0] for name in names if name in topics_by_name
            )
        topic_ids[member_id] = ids_by_names[names]
    counts = dict(topics_by_name.values())
    assignable = [place for place in group.initialized if place[1] < counts.get(place[0], 0)]
    targets = simple.assign(topic_ids, assignable, group.targets)
    for member_id, target in targets.items():
        if group.targets.get(member_id) != target:
            value = TargetAssignmentValue(by_topic(target))
            decision.append(sr.target_assignment(group.group_id, member_id, value))
    saved = AssignmentEpochValue(epoch, decision.now_ms)
    decision.append(sr.assignment_epoch(group.group_id, saved))
    decision.event(
        EventKind.TARGET_ASSIGNED,
        group.group_id,
        epoch=epoch,
        assignor=simple.NAME,
        members=len(targets),
        partitions=sum(map(len, targets.values())),
    )
    return targets


# --- the state of partitions ---------------------------------------------------------------------


def uninitialized(
    group: ShareGroup,
    names: Collection[str],
    topics: TopicsImage,
    settings: ShareSettings,
    now_ms: int,
) -> dict[bytes, tuple[str, frozenset[int]]]:
    """Return the partitions of subscribed topics whose initialization must begin, or begin again.

    Initialization begins again if the share coordinator has not answered within
    ``initialize_retry_ms``.
    """
    state = group.state
    with_state = by_topic_id(state.initialized)
    if now_ms - group.state_saved_ms < settings.initialize_retry_ms:
        with_state = union(with_state, by_topic_id(state.initializing))
    result = {}
    for name in names:
        if name in topics.topics:
            topic_id, count = topics.topics[name]
            missing = frozenset(range(count)) - with_state.get(topic_id, (name, frozenset()))[1]
            if missing:
                result[topic_id] = (name, missing)
    return result


def begin_initialization(
    decision: DecisionBuilder, group: ShareGroup, partitions: Partitions
) -> None:
    """Append the record that lists partitions as being initialized, and not as being deleted.

    A partition whose start offset is altered stays initialized: if the alteration fails, the
    partition keeps its state.
    """
    state = group.state
    initializing = union(by_topic_id(state.initializing), partitions)
    deleting = tuple(pair for pair in state.deleting if pair[0] not in initializing)
    value = sr.StatePartitionsValue(state_topics(initializing), state.initialized, deleting)
    decision.append(sr.state_partitions(group.group_id, value))


def state_to_initialize(group: ShareGroup, epoch: int, partitions: Partitions) -> StateToInitialize:
    """Return the partitions with the start offsets that the share coordinator must set."""
    state = group.state
    with_state = {topic.topic_id for topic in (*state.initializing, *state.initialized)}
    offsets = tuple(
        (topic_id, index, START_EARLIEST if topic_id in with_state else START_UNKNOWN)
        for topic_id, (_, indexes) in sorted(partitions.items())
        for index in sorted(indexes)
    )
    return StateToInitialize(epoch, offsets)
