"""ConsumerGroupHeartbeat: members join, report, leave (KIP-848).

The order of checks is Kafka's (``GroupMetadataManager.consumerGroupHeartbeat`` and the methods it
calls). A heartbeat takes six steps: the member, its subscription, the group epoch, the target, the
member's reconciliation, the response. All of them work on a :class:`MemberUpdate`, which has the
state that the group will have once the decision's records are replayed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fencepost.groups import consumer_records as cr
from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.classic_state import ClassicState
from fencepost.groups.consumer_commands import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    NO_TIMEOUT,
    STATIC_LEAVE_EPOCH,
    ConsumerHeartbeat,
    ConsumerHeartbeatResult,
    ConsumerSettings,
    Environment,
)
from fencepost.groups.consumer_group import (
    ConsumerGroup,
    by_topic,
    flat,
    identity,
    write_current,
)
from fencepost.groups.consumer_members import remove_members
from fencepost.groups.consumer_target import GroupDraft
from fencepost.groups.conversion import convert_to_consumer_group, finish_upgrade
from fencepost.groups.errors import (
    FencedMemberEpochError,
    GroupDeadError,
    GroupLimitExceededError,
    GroupMaxSizeReachedError,
    InvalidGroupRequestError,
    UnknownMemberIdError,
    UnsupportedAssignorError,
)
from fencepost.groups.events import EventKind
from fencepost.groups.group import not_found
from fencepost.groups.member_update import (
    MemberUpdate,
    change_group,
    move_member,
    require_owner,
    require_small,
    save_soft_state,
    take_over,
)
from fencepost.groups.reconcile import CurrentAssignment, MemberState
from fencepost.groups.shard import Shard
from fencepost.logcore.machine import DecisionBuilder, Token

_JAVA_BLANKS: Final = "".join(map(chr, range(33)))


def heartbeat(
    shard: Shard, decision: DecisionBuilder, token: Token, command: ConsumerHeartbeat
) -> None:
    """Decide on a ConsumerGroupHeartbeat. Raises a GroupError before any change.

    If a limit is exceeded, a joining member gets POLICY_VIOLATION, and a member of the group gets
    FENCED_MEMBER_EPOCH.
    """
    try:
        _heartbeat(shard, decision, token, command)
    except GroupLimitExceededError as error:
        group = shard.groups.get(command.group_id)
        has_joined = group is not None and command.member_id in group.members
        if command.member_epoch <= JOIN_EPOCH or not has_joined:
            raise
        # The client drops the member's partitions and rejoins. Until the client rejoins, or the
        # session ends, the member stays in the group.
        raise FencedMemberEpochError(f"drop all partitions and rejoin: {error}") from error


def _heartbeat(
    shard: Shard, decision: DecisionBuilder, token: Token, command: ConsumerHeartbeat
) -> None:
    environment = shard.environment(command.group_id)
    settings = environment.settings
    existing = shard.groups.get(command.group_id)
    if isinstance(existing, ConsumerGroup) and is_unchanged(existing, command, environment):
        decision.arm(existing.timer("session", command.member_id), settings.session_timeout_ms)
        result = ConsumerHeartbeatResult(
            command.member_id, command.member_epoch, settings.heartbeat_interval_ms
        )
        decision.reply(token, result)
        return
    _validate(shard, command, settings)
    if command.member_epoch in {LEAVE_EPOCH, STATIC_LEAVE_EPOCH}:
        _leave(shard, decision, token, command)
        return
    group = _group(shard, decision, command, environment)
    update = _member(decision, command, environment, group)
    if isinstance(existing, ClassicGroup) and any(map(existing.is_sync_pending, existing.members)):
        # The group needs a new target even if a static member only replaces another one: members
        # that joined since the last generation have no partitions yet.
        update.reasons.append("the classic group was rebalancing")
    change_group(shard, decision, update)
    before = update.current
    move_member(shard, decision, update)
    require_small(shard, decision)
    if isinstance(existing, ClassicGroup):
        finish_upgrade(shard, decision, existing)
    group.stop_classic_timers(decision, update.member_id)
    save_soft_state(decision, update)
    decision.arm(group.timer("session", update.member_id), settings.session_timeout_ms)
    decision.reply(token, _answer(update, before))


def is_unchanged(
    group: ConsumerGroup, command: ConsumerHeartbeat, environment: Environment
) -> bool:
    """Whether a heartbeat only renews the session, because the group and the member are unchanged.

    Nearly every heartbeat is of this kind. The six steps of :func:`heartbeat` would have the same
    result at several times the cost, and their cost grows with the group.
    """
    member = group.members.get(command.member_id)
    return (
        member is not None
        and command.member_epoch > JOIN_EPOCH
        and command.member_epoch == group.epoch == group.assignment_epoch
        and group.current(command.member_id).is_reconciled_to(command.member_epoch)
        and group.checked_version == environment.topics.version
        and not (group.regexes or group.refused_regexes or group.scan)
        and not environment.settings.assignors.has_remote
        and member.classic is None
        and (member.client_id, member.client_host) == (command.client_id, command.client_host)
        and member.instance_id == command.instance_id
        and command.rebalance_timeout_ms == NO_TIMEOUT
        and command.subscribed_topic_names is None
        and command.subscribed_topic_regex is None
        and command.server_assignor is None
        and command.rack_id is None
        and command.owned is None
    )


def _answer(update: MemberUpdate, before: CurrentAssignment) -> ConsumerHeartbeatResult:
    command, current = update.command, update.current
    subscribes = command.subscribed_topic_names is not None or command.subscribed_topic_regex
    is_full = command.member_epoch == JOIN_EPOCH or (
        command.rebalance_timeout_ms != NO_TIMEOUT
        and subscribes is not None
        and command.owned is not None
    )
    changed = before.assigned.keys() != current.assigned.keys()
    return ConsumerHeartbeatResult(
        update.member_id,
        current.member_epoch,
        update.settings.heartbeat_interval_ms,
        by_topic(current.assigned) if is_full or changed else None,
    )


# --- validation ----------------------------------------------------------------------------------


def _validate(shard: Shard, command: ConsumerHeartbeat, settings: ConsumerSettings) -> None:
    for field, text in (
        ("GroupId", command.group_id),
        ("InstanceId", command.instance_id),
        ("RackId", command.rack_id),
    ):
        require_text(field, text)
    epoch = command.member_epoch
    if command.client_makes_member_id or epoch not in {JOIN_EPOCH, STATIC_LEAVE_EPOCH}:
        require_text("MemberId", command.member_id)
    if epoch == JOIN_EPOCH:
        has_timeout = command.rebalance_timeout_ms != NO_TIMEOUT
        _require(has_timeout, "RebalanceTimeoutMs must be provided in first request.")
        _require(command.owned == (), "TopicPartitions must be empty when (re-)joining.")
        names, regex = command.subscribed_topic_names, command.subscribed_topic_regex
        _require(
            names is not None or regex is not None,
            "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when"
            " (re-)joining.",
        )
    elif epoch == STATIC_LEAVE_EPOCH:
        _require(command.instance_id is not None, "InstanceId can't be null.")
    _require(epoch >= STATIC_LEAVE_EPOCH, "MemberEpoch is invalid.")
    _require(command.rebalance_timeout_ms >= NO_TIMEOUT, "RebalanceTimeoutMs is negative.")
    assignor = command.server_assignor
    if assignor is not None and assignor not in settings.assignors:
        supported = ", ".join(settings.assignors.names)
        raise UnsupportedAssignorError(
            f"ServerAssignor {assignor} is not supported. Supported assignors: {supported}."
        )
    shard.require_small_subscription(command.subscribed_topic_names or (), command.rack_id)
    shard.require_short("member id", command.member_id)
    for field, text in (
        ("instance id", command.instance_id or ""),
        ("client id", command.client_id),
        ("client host", command.client_host),
        ("regular expression", command.subscribed_topic_regex or ""),
    ):
        shard.require_short(field, text)


def require_text(field: str, text: str | None) -> None:
    """Refuse a text that Java considers blank: only spaces and control characters."""
    _require(text is None or bool(text.strip(_JAVA_BLANKS)), f"{field} can't be empty.")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidGroupRequestError(message)


# --- step 1: the group and the member ------------------------------------------------------------


def _group(
    shard: Shard, decision: DecisionBuilder, command: ConsumerHeartbeat, environment: Environment
) -> ConsumerGroup:
    """Return the group; a joining member may create it, or convert a classic group."""
    group = shard.groups.get(command.group_id)
    if isinstance(group, ConsumerGroup):
        return group
    if command.member_epoch != JOIN_EPOCH or not isinstance(group, ClassicGroup | None):
        raise not_found(group, command.group_id, "consumer")
    if group is None:
        shard.require_room_for_group(command.group_id)
    elif group.state is ClassicState.DEAD:
        raise GroupDeadError(f"group {command.group_id!r} is being removed")
    elif group.is_empty:
        for record in group.tombstones():
            decision.append(record)
    else:
        return convert_to_consumer_group(shard, decision, group, environment)
    decision.event(EventKind.GROUP_CREATED, command.group_id, client_id=command.client_id)
    return ConsumerGroup(command.group_id, shard.totals)


def _member(
    decision: DecisionBuilder,
    command: ConsumerHeartbeat,
    environment: Environment,
    group: ConsumerGroup,
) -> MemberUpdate:
    """Find the member and check its epoch, or check that it may join."""
    member_id = command.member_id or command.new_member_id
    member = group.members.get(member_id)
    is_static = command.instance_id is not None
    owner = group.owner_of(command.instance_id)
    if member is None and owner is None and len(group.members) >= environment.settings.max_size:
        raise GroupMaxSizeReachedError(f"group {group.group_id!r} is full")
    draft = GroupDraft.of(group, environment.topics)
    update = MemberUpdate(
        command, environment.settings, group, draft, member_id, member, group.current(member_id)
    )
    joins = command.member_epoch == JOIN_EPOCH
    if is_static and joins and owner is not None:
        take_over(decision, update, owner)
    elif not joins:
        if is_static:
            require_owner(command.instance_id, command.member_id, owner)
        elif member is None:
            raise _unknown(group, member_id)
        _require_epoch(update)
    return update


def _unknown(group: ConsumerGroup, member_id: str) -> UnknownMemberIdError:
    return UnknownMemberIdError(f"Member {member_id} is not a member of group {group.group_id}.")


def _require_epoch(update: MemberUpdate) -> None:
    epoch, current = update.command.member_epoch, update.current
    if epoch == current.member_epoch:
        return
    owned = update.command.owned
    # The response with the new epoch may have been lost.
    lost = epoch < current.member_epoch and epoch == current.previous_member_epoch
    if not lost or owned is None or not flat(owned) <= current.assigned.keys():
        raise FencedMemberEpochError(
            f"epoch {epoch} is not {current.member_epoch}; drop all partitions and rejoin"
        )


# --- leaving -------------------------------------------------------------------------------------


def _leave(
    shard: Shard, decision: DecisionBuilder, token: Token, command: ConsumerHeartbeat
) -> None:
    group = shard.groups.get(command.group_id)
    if not isinstance(group, ConsumerGroup):
        raise not_found(group, command.group_id, "consumer")
    member_id = command.member_id
    if command.instance_id is not None:
        require_owner(command.instance_id, member_id, group.static_members.get(command.instance_id))
    elif member_id not in group.members:
        raise _unknown(group, member_id)
    if command.member_epoch == STATIC_LEAVE_EPOCH:
        # The client has stopped, so the partitions that it must revoke become free. Its assigned
        # partitions stay reserved for the member.
        away = replace(
            group.current(member_id),
            member_epoch=STATIC_LEAVE_EPOCH,
            state=MemberState.STABLE,
            pending_revocation={},
        )
        decision.append(cr.current_assignment(group.group_id, member_id, write_current(away)))
        decision.disarm(group.timer("rebalance", member_id))
        decision.event(
            EventKind.MEMBER_LEFT,
            group.group_id,
            **identity(member_id, group.members[member_id]),
            reason="static, for a while",
        )
    else:
        remove_members(shard, decision, group, [member_id], EventKind.MEMBER_LEFT, "left")
    decision.reply(token, ConsumerHeartbeatResult(member_id, command.member_epoch))
