"""SyncGroup, Heartbeat and LeaveGroup of the classic protocol, and sessions of loaded groups.

The order of checks is Kafka's (``GroupMetadataManager.classicGroup{Sync,Heartbeat,Leave}…``).
"""

from __future__ import annotations

from fencepost.groups import classic_in_consumer, records
from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.classic_members import ClassicMember
from fencepost.groups.classic_rebalance import (
    arm_session,
    detach,
    maybe_complete_join,
    maybe_prepare_rebalance,
    prepare_rebalance,
    refuse_syncs,
    sync_arrived,
)
from fencepost.groups.classic_state import ClassicState
from fencepost.groups.commands import (
    Heartbeat,
    HeartbeatResult,
    LeaveGroup,
    LeaveGroupResult,
    LeavingMember,
    SyncGroup,
    SyncGroupResult,
)
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.groups.errors import (
    GroupDeadError,
    GroupError,
    GroupLimitExceededError,
    IllegalGenerationError,
    InconsistentGroupProtocolError,
    InvalidGroupIdError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from fencepost.groups.events import EventKind
from fencepost.groups.shard import Shard
from fencepost.logcore.machine import DecisionBuilder, DomainError, Token
from fencepost.logcore.tracebacks import without_traceback


def _group_of_member(shard: Shard, group_id: str) -> ClassicGroup:
    if not group_id:
        raise InvalidGroupIdError("a member needs a group id")
    group = shard.groups.get(group_id)
    if not isinstance(group, ClassicGroup):
        raise UnknownMemberIdError(f"no group {group_id!r} of the classic protocol")
    if group.state is ClassicState.DEAD:
        raise GroupDeadError(f"group {group_id!r} is being removed")
    return group


def _member(shard: Shard, command: SyncGroup | Heartbeat) -> tuple[ClassicGroup, ClassicMember]:
    group = _group_of_member(shard, command.group_id)
    member = group.validate_member(command.member_id, command.group_instance_id)
    if command.generation_id != group.generation_id:
        raise IllegalGenerationError(
            f"generation {command.generation_id} is not {group.generation_id} of {group.group_id!r}"
        )
    return group, member


# --- SyncGroup -----------------------------------------------------------------------------------


def sync_group(shard: Shard, decision: DecisionBuilder, token: Token, command: SyncGroup) -> None:
    """Decide on a SyncGroup. Raises a ``GroupError`` before any change."""
    consumers = shard.groups.get(command.group_id)
    if isinstance(consumers, ConsumerGroup):
        classic_in_consumer.sync_group(shard, decision, consumers, token, command)
        return
    group, member = _member(shard, command)
    for reported, current in (
        (command.protocol_type, group.protocol_type),
        (command.protocol_name, group.protocol_name),
    ):
        if reported is not None and current is not None and reported != current:
            raise InconsistentGroupProtocolError(f"{reported!r} is not the group's {current!r}")
    if group.state is ClassicState.PREPARING_REBALANCE:
        raise RebalanceInProgressError("the group rebalances; rejoin")
    sync_arrived(decision, group, member)
    if group.state is ClassicState.STABLE:
        decision.reply(token, _assignment(group, member.assignment))
        return
    superseded, member.sync_token = member.sync_token, token
    if superseded is not None:
        decision.reply(superseded, RebalanceInProgressError("a newer SyncGroup took its place"))
    if group.leader_id == member.member_id:
        _assign(shard, decision, group, member, dict(command.assignments))


def _assign(
    shard: Shard,
    decision: DecisionBuilder,
    group: ClassicGroup,
    leader: ClassicMember,
    assignments: dict[str, bytes],
) -> None:
    """Append the leader's assignment and reply with it; the replay makes the group Stable."""
    value = group.metadata_value(group.members.values(), group.leader_id, assignments)
    record = records.group_metadata(group.group_id, value)
    why = shard.too_large("the group", [record])
    if why is not None:
        decision.event(
            EventKind.ASSIGNMENT_REFUSED, group.group_id, member=leader.member_id, reason=why
        )
        refuse_syncs(decision, group, GroupLimitExceededError(why))
        maybe_prepare_rebalance(shard, decision, group, why, leader)
        return
    decision.append(record)
    for member in group.members.values():
        token, member.sync_token = member.sync_token, None
        if token is not None:
            decision.reply(token, _assignment(group, assignments.get(member.member_id, b"")))
            # The member's session may have expired without effect while the request waited.
            arm_session(decision, group, member)


def _assignment(group: ClassicGroup, assignment: bytes) -> SyncGroupResult:
    return SyncGroupResult(group.protocol_type, group.protocol_name, assignment)


# --- Heartbeat -----------------------------------------------------------------------------------


def heartbeat(shard: Shard, decision: DecisionBuilder, token: Token, command: Heartbeat) -> None:
    """Decide on a Heartbeat. In CompletingRebalance it succeeds, as in Kafka's code."""
    consumers = shard.groups.get(command.group_id)
    if isinstance(consumers, ConsumerGroup):
        classic_in_consumer.heartbeat(shard, decision, consumers, token, command)
        return
    group, member = _member(shard, command)
    arm_session(decision, group, member)
    if group.state is ClassicState.PREPARING_REBALANCE:
        decision.reply(token, RebalanceInProgressError("the group rebalances; rejoin"))
    else:
        decision.reply(token, HeartbeatResult())


# --- LeaveGroup ----------------------------------------------------------------------------------


def leave_group(shard: Shard, decision: DecisionBuilder, token: Token, command: LeaveGroup) -> None:
    """Remove several members at once, with at most one rebalance."""
    consumers = shard.groups.get(command.group_id)
    if isinstance(consumers, ConsumerGroup):
        classic_in_consumer.leave_group(shard, decision, consumers, token, command)
        return
    try:
        group = _group_of_member(shard, command.group_id)
    except UnknownMemberIdError as error:
        unknown = without_traceback(error)
        all_members = tuple((m.member_id, m.group_instance_id, unknown) for m in command.members)
        decision.reply(token, LeaveGroupResult(all_members))
        return
    results: list[tuple[str, str | None, DomainError | None]] = []
    departed: list[ClassicMember] = []
    has_left = False
    for leaving in command.members:
        error_of_member: GroupError | None = None
        try:
            member = _leave(shard, decision, group, leaving)
        except GroupError as error:
            error_of_member = without_traceback(error)
        else:
            has_left = True
            if member is not None:
                departed.append(member)
        results.append((leaving.member_id, leaving.group_instance_id, error_of_member))
    decision.reply(token, LeaveGroupResult(tuple(results)))
    if not has_left:
        return
    if group.state is ClassicState.PREPARING_REBALANCE:
        maybe_complete_join(decision, group)
    elif group.state is not ClassicState.EMPTY:
        names = ", ".join(member.member_id for member in departed) or "a pending member"
        cause = departed[0] if len(departed) == 1 else None
        prepare_rebalance(shard, decision, group, f"{names} left", cause)


def _leave(
    shard: Shard, decision: DecisionBuilder, group: ClassicGroup, leaving: LeavingMember
) -> ClassicMember | None:
    """Remove one member and return it; return None for a pending member."""
    member_id, instance_id = leaving.member_id, leaving.group_instance_id
    if not member_id:
        owner = group.static_members.get(instance_id) if instance_id is not None else None
        if owner is None:
            raise UnknownMemberIdError(f"no member has instance id {instance_id!r}")
        member = group.members[owner]
    elif member_id in group.pending_members:
        group.forget_pending(member_id)
        decision.disarm(group.timer("session", member_id))
        return None
    else:
        member = group.validate_member(member_id, instance_id)
    reason = leaving.reason[: shard.limits.max_reason_chars] or "LeaveGroup"
    detach(decision, group, member, EventKind.MEMBER_LEFT, reason)
    return member


# --- loading -------------------------------------------------------------------------------------


def group_loaded(shard: Shard, decision: DecisionBuilder, group: ClassicGroup) -> None:
    """Begin to serve a loaded group: every session starts again."""
    for member in group.members.values():
        arm_session(decision, group, member)
    limit = shard.limits.max_group_size
    if len(group.members) > limit:
        # Members learn of the rebalance and commit; the members that rejoin last are refused.
        reason = f"{len(group.members)} members loaded, max_group_size={limit}"
        prepare_rebalance(shard, decision, group, reason, None)
