"""ShareGroupHeartbeat: members join, report, leave (KIP-932).

The order of checks is Kafka's (``GroupMetadataManager.shareGroupHeartbeat`` and the methods it
calls). A member has no reconciliation: it moves to its target at once.
"""

from __future__ import annotations

from dataclasses import replace

from fencepost.groups import share_records as sr
from fencepost.groups.consumer import require_text
from fencepost.groups.consumer_commands import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    Environment,
    ShareSettings,
)
from fencepost.groups.consumer_group import by_topic
from fencepost.groups.consumer_records import AssignmentEpochValue
from fencepost.groups.consumer_target import is_early, metadata_hash
from fencepost.groups.errors import (
    FencedMemberEpochError,
    GroupIdNotFoundError,
    GroupMaxSizeReachedError,
    InvalidGroupRequestError,
    UnknownMemberIdError,
)
from fencepost.groups.events import EventKind
from fencepost.groups.group import not_found
from fencepost.groups.shard import Group, Shard
from fencepost.groups.share_commands import (
    ShareHeartbeat,
    ShareHeartbeatResult,
)
from fencepost.groups.share_group import ShareAssignment, ShareGroup, identity
from fencepost.groups.share_records import ShareRecordType as Kind
from fencepost.groups.share_target import (
    Partitions,
    awaits_assignment,
    begin_initialization,
    compute_target,
    state_to_initialize,
    uninitialized,
)
from fencepost.logcore.machine import DecisionBuilder, Token


def heartbeat(
    shard: Shard, decision: DecisionBuilder, token: Token, command: ShareHeartbeat
) -> None:
    """Decide on a ShareGroupHeartbeat. Raises a GroupError before any change."""
    _validate(shard, command)
    if command.member_epoch == LEAVE_EPOCH:
        _leave(shard, decision, token, command)
        return
    environment = shard.environment(command.group_id)
    settings, topics = environment.share, environment.topics
    group = _group(shard, decision, command)
    _require_member(group, command, settings.max_size)
    current = fresh = group.current(command.member_id)
    to_initialize = None
    missing: Partitions = {}
    if not _is_unchanged(group, command, environment):
        names, epoch, fresh = _update_group(shard, decision, group, command, environment)
        missing = uninitialized(group, names, topics, settings, decision.now_ms)
        if missing:
            to_initialize = state_to_initialize(group, epoch, missing)
            begin_initialization(decision, group, missing)
        shard.require_batch("the heartbeat's records", decision.records)
        shard.share_rebalances += epoch != group.epoch
        group.checked_version = topics.version
        is_settled = not decision.records and not group.state.initializing
        group.settled_version = topics.version if is_settled else None
    decision.arm(group.timer("session", command.member_id), settings.session_timeout_ms)
    reports_assignment = (
        command.member_epoch == JOIN_EPOCH
        or command.subscribed_topic_names is not None
        or fresh.partitions != current.partitions
    )
    result = ShareHeartbeatResult(
        command.member_id,
        fresh.member_epoch,
        settings.heartbeat_interval_ms,
        by_topic(fresh.partitions) if reports_assignment else None,
        to_initialize,
    )
    decision.reply(token, result)


def _is_unchanged(group: ShareGroup, command: ShareHeartbeat, environment: Environment) -> bool:
    """Whether a heartbeat only renews the session, as nearly every heartbeat does."""
    member = group.members.get(command.member_id)
    return (
        member is not None
        and group.settled_version == environment.topics.version
        and command.member_epoch > JOIN_EPOCH
        and command.member_epoch == group.epoch == group.assignment_epoch
        and group.current(command.member_id).member_epoch == command.member_epoch
        and command.subscribed_topic_names is None
        and command.rack_id is None
        and (member.client_id, member.client_host) == (command.client_id, command.client_host)
    )


# --- checks --------------------------------------------------------------------------------------


def _validate(shard: Shard, command: ShareHeartbeat) -> None:
    for field, text in (
        ("MemberId", command.member_id),
        ("GroupId", command.group_id),
        ("RackId", command.rack_id),
    ):
        require_text(field, text)
    epoch = command.member_epoch
    if epoch == JOIN_EPOCH and not command.subscribed_topic_names:
        raise InvalidGroupRequestError("SubscribedTopicNames must be set in first request.")
    if epoch < LEAVE_EPOCH:
        raise InvalidGroupRequestError("MemberEpoch is invalid.")
    shard.require_small_subscription(command.subscribed_topic_names or (), command.rack_id)
    for field, text in (
        ("member id", command.member_id),
        ("client id", command.client_id),
        ("client host", command.client_host),
    ):
        shard.require_short(field, text)


def _group(shard: Shard, decision: DecisionBuilder, command: ShareHeartbeat) -> ShareGroup:
    """Return the group; a joining member may create it."""
    group = shard.groups.get(command.group_id)
    if isinstance(group, ShareGroup):
        return group
    if group is None and command.member_epoch != JOIN_EPOCH:
        raise GroupIdNotFoundError(f"Share group {command.group_id} not found.")
    if not is_replaceable(group):
        raise not_found(group, command.group_id, "share")
    if group is None:
        shard.require_room_for_group(command.group_id)
    decision.event(EventKind.GROUP_CREATED, command.group_id, client_id=command.client_id)
    return ShareGroup(command.group_id, shard.totals)


def is_replaceable(group: Group | None) -> bool:
    """Whether a share group may take the name: no other group has it.

    Unlike a consumer group, a share group does not replace an empty classic group.
    """
    return group is None


def _require_member(group: ShareGroup, command: ShareHeartbeat, max_size: int) -> None:
    """Check the member's epoch, or that it may join."""
    member_id, epoch = command.member_id, command.member_epoch
    if member_id not in group.members:
        if len(group.members) >= max_size:
            raise GroupMaxSizeReachedError(f"group {group.group_id!r} is full")
        if epoch != JOIN_EPOCH:
            raise UnknownMemberIdError(
                f"Member {member_id} is not a member of group {group.group_id}."
            )
        return
    current = group.current(member_id)
    accepted = {JOIN_EPOCH, current.member_epoch, current.previous_member_epoch}
    if epoch > current.member_epoch or epoch not in accepted:
        order, also = "greater", ""
        if epoch < current.member_epoch:
            order, also = "smaller", ", and it does not match the previous member epoch ({})"
            also = also.format(current.previous_member_epoch)
        raise FencedMemberEpochError(
            f"The share group member has a {order} member epoch ({epoch}) than the one known by the"
            f" group coordinator ({current.member_epoch}){also}. The member must abandon all its"
            " partitions and rejoin."
        )


# --- the member's new state ----------------------------------------------------------------------


def _update_group(
    shard: Shard,
    decision: DecisionBuilder,
    group: ShareGroup,
    command: ShareHeartbeat,
    environment: Environment,
) -> tuple[frozenset[str], int, ShareAssignment]:
    """Append the records of the member, the group epoch, the target and the assignment.

    Returns the group's subscribed topics and its epoch, and the member's assignment.
    """
    member_id, topics = command.member_id, environment.topics
    old = group.members.get(member_id)
    value = _merged_value(old, command)
    if value != old:
        shard.require_memory(command.group_id)
        decision.append(sr.member(group.group_id, member_id, value))
    if old is None:
        decision.event(EventKind.MEMBER_JOINED, group.group_id, **identity(member_id, value))
    names, epoch, is_bumped = _bump_epoch(decision, group, command, value, environment)
    targets, target_epoch = group.targets, group.assignment_epoch
    if target_epoch < epoch and _may_assign(group, environment.share, decision.now_ms):
        members = {**group.members, member_id: value}
        targets = compute_target(decision, group, members, topics, epoch)
        target_epoch = epoch
    subscribed = {
        topics.topics[name][0] for name in value.subscribed_topic_names if name in topics.topics
    }
    assigned = frozenset(place for place in targets.get(member_id, ()) if place[0] in subscribed)
    current = fresh = group.current(member_id)
    if target_epoch > current.member_epoch:
        fresh = ShareAssignment(target_epoch, current.member_epoch, assigned)
    elif is_bumped:
        fresh = replace(current, partitions=assigned)
    if fresh != current:
        decision.append(sr.current_assignment(group.group_id, member_id, fresh.written()))
    return names, epoch, fresh


def _merged_value(old: sr.ShareMemberValue | None, command: ShareHeartbeat) -> sr.ShareMemberValue:
    names = command.subscribed_topic_names
    return sr.ShareMemberValue(
        command.rack_id if command.rack_id is not None or old is None else old.rack_id,
        command.client_id,
        command.client_host,
        tuple(sorted(set(names)))
        if names is not None
        else (() if old is None else old.subscribed_topic_names),
    )


def _bump_epoch(
    decision: DecisionBuilder,
    group: ShareGroup,
    command: ShareHeartbeat,
    value: sr.ShareMemberValue,
    environment: Environment,
) -> tuple[frozenset[str], int, bool]:
    """Bump the group epoch if members, topics or initialized partitions require a new target.

    Returns the group's subscribed topics, its epoch, and whether the epoch was bumped.
    """
    old = group.members.get(command.member_id)
    topics = environment.topics
    names = group.subscribed_topics_with(command.member_id, value)
    reasons = []
    if old is None:
        reasons.append(f"{command.member_id} joined")
    elif old.subscribed_topic_names != value.subscribed_topic_names:
        reasons.append(f"{command.member_id} changed its subscription")
    if group.assignment_epoch >= group.epoch and awaits_assignment(group, topics):
        reasons.append("the initialized partitions changed")
    fresh_hash = group.metadata_hash
    if reasons or group.checked_version != topics.version:
        fresh_hash = metadata_hash(topics, names)
        if fresh_hash != group.metadata_hash and not reasons:
            reasons.append("subscribed topics changed")
    if reasons:
        fresh = sr.ShareGroupEpochValue(group.epoch + 1, fresh_hash)
        write_epoch(decision, group, fresh, "; ".join(reasons), member=command.member_id)
        return names, fresh.epoch, True
    return names, group.epoch, False


def _may_assign(group: ShareGroup, settings: ShareSettings, now_ms: int) -> bool:
    saved = group.saved_assignment
    return saved is None or not is_early(saved, settings.assignment_interval_ms, now_ms)


def write_epoch(
    decision: DecisionBuilder,
    group: ShareGroup,
    fresh: sr.ShareGroupEpochValue,
    reason: str,
    **cause: object,
) -> None:
    """Append the record of a new group epoch, and an event with the reason."""
    decision.append(sr.group_epoch(group.group_id, fresh))
    decision.event(
        EventKind.GROUP_EPOCH_BUMPED,
        group.group_id,
        old_epoch=group.epoch,
        epoch=fresh.epoch,
        reason=reason,
        **cause,
    )


# --- leaving -------------------------------------------------------------------------------------


def _leave(shard: Shard, decision: DecisionBuilder, token: Token, command: ShareHeartbeat) -> None:
    group = shard.groups.get(command.group_id)
    if not isinstance(group, ShareGroup):
        raise not_found(group, command.group_id, "share")
    if command.member_id not in group.members:
        raise UnknownMemberIdError(
            f"Member {command.member_id} is not a member of group {command.group_id}."
        )
    remove_member(shard, decision, group, command.member_id, EventKind.MEMBER_LEFT, "left")
    decision.reply(token, ShareHeartbeatResult(command.member_id, command.member_epoch))


def remove_member(
    shard: Shard,
    decision: DecisionBuilder,
    group: ShareGroup,
    member_id: str,
    kind: EventKind,
    reason: str,
) -> None:
    """Remove a member; the next heartbeat of any other member computes the new target.

    The leaders of the member's partitions do not learn of the removal, so records that the member
    has acquired stay locked.
    """
    group_id = group.group_id
    decision.event(kind, group_id, reason=reason, **identity(member_id, group.members[member_id]))
    for record_kind in (
        Kind.CURRENT_MEMBER_ASSIGNMENT,
        Kind.TARGET_ASSIGNMENT_MEMBER,
        Kind.MEMBER_METADATA,
    ):
        decision.append(sr.tombstone(record_kind, group_id, member_id))
    decision.disarm(group.timer("session", member_id))
    topics = shard.environment(group_id).topics
    hashed = metadata_hash(topics, group.subscribed_topics_with(member_id, None))
    fresh = sr.ShareGroupEpochValue(group.epoch + 1, hashed)
    write_epoch(decision, group, fresh, f"{member_id}: {reason}", member=member_id)
    if len(group.members) == 1:
        # The record has no timestamp, so the assignment interval does not delay the next member's
        # target.
        decision.append(sr.assignment_epoch(group_id, AssignmentEpochValue(fresh.epoch)))


def session_timer_fired(
    shard: Shard, decision: DecisionBuilder, group: ShareGroup, member_id: str
) -> None:
    """Remove a member that has sent no heartbeat in time."""
    if member_id in group.members:
        kind = EventKind.MEMBER_EXPIRED
        remove_member(shard, decision, group, member_id, kind, "no heartbeat came")


def group_loaded(shard: Shard, decision: DecisionBuilder, group: ShareGroup) -> None:
    """Begin to serve a loaded group: every session starts again."""
    timeout_ms = shard.environment(group.group_id).share.session_timeout_ms
    for member_id in group.members:
        decision.arm(group.timer("session", member_id), timeout_ms)
