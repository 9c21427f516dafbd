"""Groups that change their kind while they have members: classic to consumer, and back.

Up: the first member of the consumer protocol joins a classic group. Everybody keeps what was
assigned to it; the generation becomes the epoch. Down: the last member of the consumer protocol
goes, and only classic ones are left. Either way one batch holds the tombstones of the old kind's
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
from fencepost.groups.consumer_commands import ConsumerSettings, Environment, TopicImage
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
from fencepost.groups.shard import Handover, Shard
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.machine import DecisionBuilder, Record

CUSTOM_ASSIGNOR = (
    "an unsupported custom assignor is in use. Please refer to the documentation or switch to a"
    " default assignor before re-attempting the upgrade"
)
"""What Kafka says of user data in an assignment, which would be lost."""

# --- classic to consumer -------------------------------------------------------------------------


def upgraded(
    shard: Shard, decision: DecisionBuilder, classic: ClassicGroup, environment: Environment
) -> ConsumerGroup:
    """Return what a classic group is as a consumer group, and write the records that make it one.

    Nothing changes but ``decision``: the heartbeat that asks for it may still be refused. Raises
    :class:`GroupIdNotFoundError` where the group can't be converted.
    """
    topics = environment.topics
    _require_upgradable(classic, environment.settings)
    members, assigned = _consumers(shard, classic, topics)
    generation, group_id = classic.generation_id, classic.group_id
    for record in classic.tombstones():
        decision.append(record)
    # A picture of what the replay will make of the records; it counts for no limit.
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
    """Have a record appended, and show ``group``, a picture, what the replay will make of it."""
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
    shard: Shard, classic: ClassicGroup, topics: TopicImage
) -> tuple[dict[str, cr.ConsumerMemberValue], dict[str, list[TopicIdPartition]]]:
    """Return each member as the consumer protocol sees it, and what it is assigned."""
    everybody = list(classic.members.values())
    protocol_name = classic.protocol_name or ""
    # The join phase may have brought members that do not know the last generation's protocol. The
    # last one may also have left during it; then it still waits for its timer.
    if everybody and classic.state is ClassicState.PREPARING_REBALANCE:
        protocol_name = select_protocol(everybody)
    members: dict[str, cr.ConsumerMemberValue] = {}
    assigned: dict[str, list[TopicIdPartition]] = {}
    owners: dict[TopicIdPartition, str] = {}
    claims: list[tuple[str, Iterable[TopicIdPartition]]] = []
    # A rebalance that failed has taken the assignments, and whoever reads while it rebalances
    # (the cooperative protocol) goes on with the last one that was handed out.
    saved = () if classic.saved is None else classic.saved.members
    handed_out = {member.member_id: member.assignment for member in saved}
    for member in everybody:
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
        mine = assigned[member.member_id] = list(ids_of(partitions, topics))
        for partition in mine:
            if owners.setdefault(partition, member.member_id) != member.member_id:
                raise _stays_classic(classic, "a partition has two owners")
        if classic.awaits_sync_of(member.member_id):
            claims.append((member.member_id, ids_of(subscription.owned, topics)))
    # Whoever has not heard the last assignment may still read what it said it owns.
    for member_id, claimed in claims:
        for partition in claimed:
            if partition not in owners:
                owners[partition] = member_id
                assigned[member_id].append(partition)
    return members, assigned


def finish_upgrade(shard: Shard, decision: DecisionBuilder, classic: ClassicGroup) -> None:
    """Let go of a classic group whose tombstone is decided: who waits there must join anew."""
    error = RebalanceInProgressError("the group became one of the consumer protocol; rejoin")
    decision.disarm(classic.timer("join"))
    decision.disarm(classic.timer("sync"))
    for member_id in classic.pending_members:
        shard.give_id(classic.group_id, member_id)
    classic.removed(decision)
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
    """Whether the group is to become classic when these members go and so many come."""
    size = len(group.members) - len(leaving) + joining
    return (
        0 < size <= shard.limits.max_group_size
        and shard.environment(group.group_id).settings.migration_policy.allows_downgrade
        and group.is_all_classic_without(leaving)
    )


def downgrade(
    shard: Shard,
    decision: DecisionBuilder,
    group: ConsumerGroup,
    leaving: Collection[str],
    joining: tuple[str, cr.ConsumerMemberValue, str] | None = None,
    rebalance_reason: str | None = None,
) -> bool:
    """Turn a consumer group into a classic one; False, and nothing changed, if it can't be.

    ``joining`` is a static member with its new id and the id it replaces. With a
    ``rebalance_reason`` the classic group starts with a rebalance.
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
    classic = ClassicGroup.converted(group_id, shard.totals, group.epoch, _classics(values), now_ms)
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
    shard.handover = Handover(classic)
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


def ids_of(partitions: Iterable[tuple[str, int]], topics: TopicImage) -> Iterator[TopicIdPartition]:
    """Yield (topic id, partition); a topic that does not exist has none."""
    for name, index in partitions:
        known = topics.topics.get(name)
        if known is not None:
            yield known[0], index


def named(partitions: Iterable[TopicIdPartition], topics: TopicImage) -> Iterator[tuple[str, int]]:
    """Yield partitions by the names of their topics, in order; without those that are gone."""
    names = topics.names()
    return ((names[topic_id], at) for topic_id, at in sorted(partitions) if topic_id in names)
