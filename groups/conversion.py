"""Conversion of groups that have members: from the classic to the consumer protocol, and back.

Upgrade: the first member of the consumer protocol joins a classic group. All members keep their
assignments; the generation becomes the epoch. Downgrade: the last member of the consumer protocol
leaves, and only classic ones remain. In both cases one batch holds the tombstones of the old kind's
records and the records of the new kind.

Source: Kafka's ``GroupMetadataManager`` (validateOnlineUpgrade, convertToConsumerGroup,
validateOnlineDowngrade…, convertToClassicGroup), ``ConsumerGroup.fromClassicGroup`` and
``ClassicGroup.fromConsumerGroup``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from fencepost.groups import consumer_records as cr
from fencepost.groups import records
from fencepost.groups.assignors.client.protocol import (
    decode_assignment,
    decode_subscription,
    encode_assignment,
    version_of,
)
from fencepost.groups.classic_group import CONSUMER_PROTOCOL_TYPE, ClassicGroup
from fencepost.groups.classic_members import (
    ClassicMember,
    select_protocol,
)
from fencepost.groups.classic_rebalance import arm_session, prepare_rebalance
from fencepost.groups.classic_state import ClassicState
from fencepost.groups.consumer_commands import ConsumerSettings, Environment, TopicsImage
from fencepost.groups.consumer_group import ConsumerGroup, by_topic, write_current
from fencepost.groups.consumer_records import ConsumerRecordType as Kind
from fencepost.groups.consumer_target import metadata_hash
from fencepost.groups.errors import (
    GroupIdNotFoundError,
    GroupLimitExceededError,
    RebalanceInProgressError,
)
from fencepost.groups.events import EventKind
from fencepost.groups.group import ShardTotals
from fencepost.groups.reconcile import CurrentAssignment, TopicIdPartition
from fencepost.groups.shard import PendingInstall, Shard
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.machine import DecisionBuilder, Record

CUSTOM_ASSIGNOR = (
    "an unsupported custom assignor is in use. Please refer to the documentation or switch to a"
    " default assignor before re-attempting the upgrade"
)
"""Kafka's message for user data in an assignment, which would be lost."""

# --- classic to consumer -------------------------------------------------------------------------


def convert_to_consumer_group(
    shard: Shard, decision: DecisionBuilder, classic: ClassicGroup, environment: Environment
) -> ConsumerGroup:
    """Append the records that convert a classic group; return the resulting consumer group.

    ``classic`` does not change, because the heartbeat may still be refused. Raises
    :class:`GroupIdNotFoundError` if the group cannot be converted.
    """
    topics = environment.topics
    _require_upgradable(classic, environment.settings)
    members, assigned = _consumers(shard, classic, topics)
    generation, group_id = classic.generation_id, classic.group_id
    for record in classic.tombstones():
        decision.append(record)
    # A preview of the group after the replay; its memory is not counted.
    group = ConsumerGroup(group_id, ShardTotals())
    preview = partial(_append_and_preview, decision, group)
    for name, value in members.items():
        preview(cr.member, Kind.MEMBER_METADATA, value, name)
    epoch = cr.GroupEpochValue(generation, metadata_hash(topics, group.subscribed_topics()))
    preview(cr.group_epoch, Kind.GROUP_METADATA, epoch)
    for name, partitions in assigned.items():
        target = cr.TargetAssignmentValue(by_topic(partitions))
        preview(cr.target_assignment, Kind.TARGET_ASSIGNMENT_MEMBER, target, name)
    target_epoch = cr.AssignmentEpochValue(generation)
    preview(cr.assignment_epoch, Kind.TARGET_ASSIGNMENT_METADATA, target_epoch)
    for name, partitions in assigned.items():
        current = write_current(
            CurrentAssignment(
                generation, generation, assigned=dict.fromkeys(partitions, generation)
            )
        )
        preview(cr.current_assignment, Kind.CURRENT_MEMBER_ASSIGNMENT, current, name)
    decision.event(
        EventKind.GROUP_UPGRADED,
        classic.group_id,
        generation=generation,
        members=len(members),
        reason="a member of the consumer protocol joined",
    )
    return group


def _append_and_preview(
    decision: DecisionBuilder,
    group: ConsumerGroup,
    record: Callable[..., Record],
    kind: Kind,
    value: cr.ConsumerValue,
    *member_id: str,
) -> None:
    """Append a record to the decision, and replay it into ``group``, the preview."""
    decision.append(record(group.group_id, *member_id, value))
    group.replay(cr.ConsumerKey(kind, group.group_id, *member_id), value)


def _require_upgradable(classic: ClassicGroup, settings: ConsumerSettings) -> None:
    reason = None
    if not settings.migration_policy.allows_upgrade:
        reason = f"group.consumer.migration.policy is {settings.migration_policy}"
    elif classic.protocol_type != CONSUMER_PROTOCOL_TYPE:
        reason = f"its members are of type {classic.protocol_type!r}"
    elif len(classic.members) > settings.max_size:
        reason = f"it has more members than group.consumer.max.size={settings.max_size}"
    if reason is not None:
        raise _stays_classic(classic, reason)


def _stays_classic(classic: ClassicGroup, reason: str) -> GroupIdNotFoundError:
    return GroupIdNotFoundError(
        f"Cannot upgrade classic group {classic.group_id} to consumer group because {reason}."
    )


def _consumers(
    shard: Shard, classic: ClassicGroup, topics: TopicsImage
) -> tuple[dict[str, cr.ConsumerMemberValue], dict[str, list[TopicIdPartition]]]:
    """Return each member in the form of the consumer protocol, and its partitions."""
    all_members = list(classic.members.values())
    protocol_name = classic.protocol_name or ""
    # During a join phase, the group still has the last generation's protocol, and a member that has
    # joined since might not offer it. Select one that all members offer. If all members have left
    # and the join timer has not fired yet, there is nothing to select from.
    if all_members and classic.state is ClassicState.PREPARING_REBALANCE:
        protocol_name = select_protocol(all_members)
    members: dict[str, cr.ConsumerMemberValue] = {}
    assigned: dict[str, list[TopicIdPartition]] = {}
    owners: dict[TopicIdPartition, str] = {}
    claims: list[tuple[str, Iterable[TopicIdPartition]]] = []
    # A failed rebalance has cleared the assignments, and members that read during a rebalance (the
    # cooperative protocol) continue with the last assignment that was sent.
    saved = () if classic.saved is None else classic.saved.members
    handed_out = {member.member_id: member.assignment for member in saved}
    for member in all_members:
        try:
            subscription = decode_subscription(member.metadata(protocol_name))
            had = member.assignment or handed_out.get(member.member_id, b"")
            partitions, user_data = decode_assignment(had)
            shard.require_small_subscription(subscription.topics, subscription.rack_id)
        except (CorruptRecordError, GroupLimitExceededError) as error:
            raise _stays_classic(classic, f"of {member.member_id!r}: {error}") from error
        if user_data:
            raise _stays_classic(classic, CUSTOM_ASSIGNOR)
        members[member.member_id] = cr.ConsumerMemberValue(
            instance_id=member.group_instance_id,
            rack_id=subscription.rack_id,
            client_id=member.client_id,
            client_host=member.client_host,
            subscribed_topic_names=tuple(sorted(set(subscription.topics))),
            subscribed_topic_regex="",
            rebalance_timeout_ms=member.rebalance_timeout_ms,
            server_assignor=None,
            classic=cr.ClassicMemberMetadata(member.session_timeout_ms, member.protocols),
        )
        owned = assigned[member.member_id] = list(ids_of(partitions, topics))
        for partition in owned:
            if owners.setdefault(partition, member.member_id) != member.member_id:
                raise _stays_classic(classic, "a partition has two owners")
        if classic.is_sync_pending(member.member_id):
            claims.append((member.member_id, ids_of(subscription.owned, topics)))
    # A member that has not received the last assignment may still read the partitions that it
    # reported as owned.
    for member_id, claimed in claims:
        for partition in claimed:
            if partition not in owners:
                owners[partition] = member_id
                assigned[member_id].append(partition)
    return members, assigned


def finish_upgrade(shard: Shard, decision: DecisionBuilder, classic: ClassicGroup) -> None:
    """Cancel the timers of a converted group; waiting members get REBALANCE_IN_PROGRESS."""
    error = RebalanceInProgressError("the group became one of the consumer protocol; rejoin")
    decision.disarm(classic.timer("join"))
    decision.disarm(classic.timer("sync"))
    for member_id in classic.pending_members:
        shard.reserve_member_id(classic.group_id, member_id)
    classic.on_removed(decision)
    for member in classic.members.values():
        for token in (classic.take_join(member), member.sync_token):
            if token is not None:
                decision.reply(token, error)
        member.sync_token = None
        arm_session(decision, classic, member)


# --- consumer to classic -------------------------------------------------------------------------


def may_downgrade(
    shard: Shard, group: ConsumerGroup, leaving: Collection[str], joining: int = 0
) -> bool:
    """Whether the group becomes classic when members leave and ``joining`` others join."""
    size = len(group.members) - len(leaving) + joining
    return (
        0 < size <= shard.limits.max_group_size
        and shard.environment(group.group_id).settings.migration_policy.allows_downgrade
        and group.is_all_classic_without(leaving)
    )


def convert_to_classic_group(
    shard: Shard,
    decision: DecisionBuilder,
    group: ConsumerGroup,
    leaving: Collection[str],
    joining: tuple[str, cr.ConsumerMemberValue, str] | None = None,
    rebalance_reason: str | None = None,
) -> bool:
    """Convert a consumer group to a classic one; return False, and change nothing, if impossible.

    ``joining`` describes a static member that replaces another one: its member id, its record, and
    the replaced member id. With a ``rebalance_reason`` the classic group starts with a rebalance.
    """
    now_ms, group_id = decision.now_ms, group.group_id
    topics = shard.environment(group_id).topics
    values = {name: value for name, value in group.members.items() if name not in leaving}
    targets = dict(group.targets)
    names = {name: name for name in group.members}
    if joining is not None:
        member_id, value, replaced = joining
        del values[replaced]
        values[member_id] = value
        targets[member_id] = targets.pop(replaced, frozenset())
        names[replaced] = member_id
    classic = ClassicGroup.from_consumer_group(
        group_id, shard.totals, group.epoch, _classics(values), now_ms
    )
    for member in classic.members.values():
        version = version_of(member.metadata(classic.protocol_name))
        partitions = named(targets.get(member.member_id, ()), topics)
        member.assignment = encode_assignment(partitions, version=version)
    saved = classic.metadata_value(classic.members.values(), classic.leader_id)
    record = records.group_metadata(group_id, saved)
    if shard.too_large("the group", [record]):
        classic.discard()
        return False
    for tombstone in group.tombstones(names):
        decision.append(tombstone)
    decision.append(record)
    for member_id in group.members:
        group.stop_timers(decision, member_id)
    group.stop_upkeep(decision)
    shard.pending_install = PendingInstall(classic)
    for member in classic.members.values():
        arm_session(decision, classic, member)
    decision.event(
        EventKind.GROUP_DOWNGRADED,
        group_id,
        epoch=group.epoch,
        members=len(values),
        reason="only members of the classic protocol are left",
    )
    if rebalance_reason is not None:
        prepare_rebalance(shard, decision, classic, rebalance_reason, None)
    return True


def _classics(values: dict[str, cr.ConsumerMemberValue]) -> Iterator[ClassicMember]:
    for member_id, value in values.items():
        if value.classic is None:
            raise TypeError(f"{member_id!r} does not speak the classic protocol")
        yield ClassicMember(
            member_id=member_id,
            group_instance_id=value.instance_id,
            client_id=value.client_id,
            client_host=value.client_host,
            session_timeout_ms=value.classic.session_timeout_ms,
            rebalance_timeout_ms=value.rebalance_timeout_ms,
            protocols=value.classic.protocols,
        )


# --- names and ids of topics ---------------------------------------------------------------------


def ids_of(
    partitions: Iterable[tuple[str, int]], topics: TopicsImage
) -> Iterator[TopicIdPartition]:
    """Yield (topic id, partition); skip topics that do not exist."""
    for name, index in partitions:
        topic = topics.topics.get(name)
        if topic is not None:
            yield topic[0], index


def named(partitions: Iterable[TopicIdPartition], topics: TopicsImage) -> Iterator[tuple[str, int]]:
    """Yield partitions with the names of their topics, in order; skip deleted topics."""
    names = topics.names()
    return ((names[topic_id], at) for topic_id, at in sorted(partitions) if topic_id in names)
