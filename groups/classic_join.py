"""JoinGroup: admission of members, member ids, and rebalances that a member's join starts.

The order of checks is Kafka's (``GroupMetadataManager.classicGroupJoin…``). Before the group is
looked up, the request's fields are checked against :class:`fencepost.groups.limits.GroupLimits`.
"""

from __future__ import annotations

from dataclasses import replace

from fencepost.groups import classic_in_consumer, records
from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.classic_members import ClassicMember, select_protocol
from fencepost.groups.classic_rebalance import (
    arm_session,
    current_generation,
    drop_pending,
    identity,
    maybe_complete_join,
    maybe_prepare_rebalance,
    prepare_rebalance,
)
from fencepost.groups.classic_state import ClassicState
from fencepost.groups.commands import JoinGroup, JoinGroupResult
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.groups.errors import (
    FencedInstanceIdError,
    GroupDeadError,
    GroupError,
    GroupLimitExceededError,
    GroupMaxSizeReachedError,
    InconsistentGroupProtocolError,
    InvalidGroupIdError,
    InvalidSessionTimeoutError,
    MemberIdRequiredError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from fencepost.groups.events import EventKind
from fencepost.groups.group import pending_bytes, protocols_bytes
from fencepost.groups.records import GroupMetadataValue
from fencepost.groups.shard import PendingInstall, Shard
from fencepost.logcore.machine import DecisionBuilder, InvariantViolation, Token


def join_group(shard: Shard, decision: DecisionBuilder, token: Token, command: JoinGroup) -> None:
    """Decide on a JoinGroup. Raises a ``GroupError`` before any change."""
    try:
        _join(shard, decision, token, command)
    except GroupLimitExceededError as error:
        group = shard.groups.get(command.group_id)
        if group is None or command.member_id not in group.members:
            raise
        # After any other error a cooperative consumer continues to read, even after the rebalance
        # timeout has passed and another member owns its partitions.
        raise UnknownMemberIdError(f"{command.member_id!r} must start over: {error}") from error


def _join(shard: Shard, decision: DecisionBuilder, token: Token, command: JoinGroup) -> None:
    _validate(shard, command)
    group = shard.groups.get(command.group_id)
    if group is None:
        if command.member_id:
            raise UnknownMemberIdError(f"no group {command.group_id!r}, so no such member")
        _create_group(shard, decision, token, command)
        return
    if isinstance(group, ConsumerGroup):
        if not group.is_empty:
            classic_in_consumer.join_group(shard, decision, group, token, command)
            return
        if command.member_id:
            raise UnknownMemberIdError(f"group {command.group_id!r} is empty, so no such member")
        _create_group(shard, decision, token, command, predecessor=group)
        return
    if not isinstance(group, ClassicGroup):
        kind = group.as_listed_group().group_type
        raise InconsistentGroupProtocolError(f"{command.group_id!r} is a {kind} group")
    if group.state is ClassicState.DEAD:
        raise GroupDeadError(f"group {command.group_id!r} is being removed")
    if not _accepts(shard, group, command.member_id):
        decision.reply(token, _reject(decision, group, command))
        return
    _require_support(group, command)
    if command.member_id:
        _join_known(shard, decision, group, token, command)
    else:
        _join_new(shard, decision, group, token, command)


def _validate(shard: Shard, command: JoinGroup) -> None:
    limits = shard.limits
    if not command.group_id:
        raise InvalidGroupIdError("a member needs a group id")
    shortest, longest = limits.min_session_timeout_ms, limits.max_session_timeout_ms
    if not shortest <= command.session_timeout_ms <= longest:
        raise InvalidSessionTimeoutError(
            f"session timeout of {command.session_timeout_ms} ms is not in {shortest}..{longest}"
        )
    shard.require("the member", len(command.protocols), "max_protocols")
    largest = max((len(metadata) for _, metadata in command.protocols), default=0)
    shard.require_fits_record("the member's metadata", largest)
    shard.require_short("member id", command.member_id or command.new_member_id)
    for field, text in (
        ("instance id", command.group_instance_id or ""),
        ("client id", command.client_id),
        ("client host", command.client_host),
        ("protocol type", command.protocol_type),
        *(("protocol name", name) for name, _ in command.protocols),
    ):
        shard.require_short(field, text)


def _create_group(
    shard: Shard,
    decision: DecisionBuilder,
    token: Token,
    command: JoinGroup,
    predecessor: ConsumerGroup | None = None,
) -> None:
    """Create the group for its first member, or replace an empty consumer group.

    The record makes the group's existence durable, even if its only member gets an id and never
    rejoins.
    """
    group = ClassicGroup(command.group_id, shard.totals, decision.now_ms)
    _require_support(group, command)
    if predecessor is None:
        shard.require_room_for_group(command.group_id)
    if predecessor is not None:
        for record in predecessor.tombstones():
            decision.append(record)
    empty = GroupMetadataValue("", 0, None, None, decision.now_ms, ())
    decision.append(records.group_metadata(command.group_id, empty))
    decision.event(EventKind.GROUP_CREATED, command.group_id, client_id=command.client_id)
    _join_new(shard, decision, group, token, command)
    shard.pending_install = PendingInstall(group)


def _accepts(shard: Shard, group: ClassicGroup, member_id: str) -> bool:
    """Whether the group's size allows this member.

    In the join phase only members that have rejoined count: if the limit was lowered, a group that
    is too large thus loses the members that rejoin last.
    """
    member = group.members.get(member_id)
    match group.state:
        case ClassicState.PREPARING_REBALANCE:
            waits = member is not None and member.join_token is not None
            return waits or group.waiting_joins < shard.limits.max_group_size
        case ClassicState.COMPLETING_REBALANCE | ClassicState.STABLE:
            return member is not None or len(group.members) < shard.limits.max_group_size
        case _:
            return True


def _reject(decision: DecisionBuilder, group: ClassicGroup, command: JoinGroup) -> GroupError:
    """Remove a member, or a pending id, and return the error."""
    member_id = command.member_id
    refusal: GroupError = GroupMaxSizeReachedError(f"group {command.group_id!r} is full")
    if member_id in group.pending_members:
        group.forget_pending(member_id)
    elif member_id in group.members:
        group.remove(member_id)
        # After GROUP_MAX_SIZE_REACHED a cooperative consumer would continue to read. The consumer
        # gets that error when it rejoins.
        refusal = UnknownMemberIdError(f"{member_id!r} was removed: {refusal}")
    else:
        return refusal
    decision.disarm(group.timer("session", member_id))
    decision.event(
        EventKind.MEMBER_EXPIRED,
        group.group_id,
        member=member_id,
        client_id=command.client_id,
        client_host=command.client_host,
        reason="the group is full",
    )
    return refusal


def _require_support(group: ClassicGroup, command: JoinGroup) -> None:
    if not group.supports(command.protocol_type, command.protocols):
        raise InconsistentGroupProtocolError(
            f"no protocol of type {command.protocol_type!r} suits group {command.group_id!r}"
        )


# --- members without an id -----------------------------------------------------------------------


def _join_new(
    shard: Shard, decision: DecisionBuilder, group: ClassicGroup, token: Token, command: JoinGroup
) -> None:
    member_id = command.new_member_id
    if not member_id or member_id in group.members or member_id in group.pending_members:
        raise InvariantViolation(f"{member_id!r} is not a newly issued member id")
    if command.group_instance_id is not None:
        old_member_id = group.static_members.get(command.group_instance_id)
        if old_member_id is None:
            _add_member(shard, decision, group, token, command)
        else:
            _replace_static(shard, decision, group, token, command, group.members[old_member_id])
    elif command.require_known_member_id:
        _assign_member_id(shard, decision, group, token, command)
    else:
        _add_member(shard, decision, group, token, command)


def _assign_member_id(
    shard: Shard, decision: DecisionBuilder, group: ClassicGroup, token: Token, command: JoinGroup
) -> None:
    """Answer MEMBER_ID_REQUIRED; the member takes part once it rejoins with the id (KIP-394)."""
    member_id = command.new_member_id
    shard.require_memory(group.group_id, pending_bytes(group.group_id, member_id))
    group.add_pending(member_id)
    decision.arm(group.timer("session", member_id), command.session_timeout_ms)
    decision.reply(token, MemberIdRequiredError(member_id))
    if len(group.pending_members) > shard.limits.max_pending_members:
        _evict(decision, group, next(iter(group.pending_members)))
    elif len(shard.totals.pending) > shard.limits.max_shard_pending_members:
        oldest_group_id, oldest_member_id = next(iter(shard.totals.pending))
        oldest_group = shard.groups.get(oldest_group_id)
        if isinstance(oldest_group, ClassicGroup):
            _evict(decision, oldest_group, oldest_member_id)


def _evict(decision: DecisionBuilder, group: ClassicGroup, member_id: str) -> None:
    decision.event(EventKind.PENDING_MEMBER_EVICTED, group.group_id, member=member_id)
    drop_pending(decision, group, member_id)


def _add_member(
    shard: Shard, decision: DecisionBuilder, group: ClassicGroup, token: Token, command: JoinGroup
) -> None:
    member_id = command.member_id or command.new_member_id
    member = ClassicMember(
        member_id=member_id,
        group_instance_id=command.group_instance_id,
        client_id=command.client_id,
        client_host=command.client_host,
        session_timeout_ms=command.session_timeout_ms,
        rebalance_timeout_ms=_rebalance_timeout_ms(command),
        protocols=command.protocols,
        is_new=True,
        join_token=token,
    )
    group_id, waits = group.group_id, member_id in group.pending_members
    freed_bytes = pending_bytes(group_id, member_id) if waits else 0
    shard.require_memory(group_id, member.memory_bytes - freed_bytes)
    if not group.members:
        group.protocol_type = command.protocol_type
    if group.initial_delay is not None:
        group.new_member_added = True
    group.add(member)
    # A new member sends no heartbeats before its JoinGroup is answered, and the broker does not
    # notice that a client with a parked request is gone. So the JoinGroup itself has a timeout.
    decision.arm(group.timer("session", member_id), shard.limits.new_member_join_timeout_ms)
    decision.event(
        EventKind.MEMBER_JOINED,
        group.group_id,
        reason=command.reason[: shard.limits.max_reason_chars],
        **identity(member),
    )
    reason = f"new member {member_id}{_client_reason(command)}"
    maybe_prepare_rebalance(shard, decision, group, reason, member)


# --- static members that come back without an id (KIP-345) ---------------------------------------


def _replace_static(
    shard: Shard,
    decision: DecisionBuilder,
    group: ClassicGroup,
    token: Token,
    command: JoinGroup,
    old: ClassicMember,
) -> None:
    """Replace ``old`` by a new member with its instance id, and fence ``old``."""
    # As in Kafka, client id and host remain those of the member that joined first.
    successor = replace(
        old,
        member_id=command.new_member_id,
        protocols=command.protocols,
        session_timeout_ms=command.session_timeout_ms,
        rebalance_timeout_ms=_rebalance_timeout_ms(command),
        is_new=False,
        join_token=None,
        sync_token=None,
    )
    shard.require_memory(group.group_id, successor.memory_bytes - old.memory_bytes)
    if group.state is ClassicState.STABLE:
        staying = [member for member in group.members.values() if member is not old]
        if select_protocol([*staying, successor]) == group.protocol_name:
            _persist_successor(shard, decision, group, token, command, old, successor)
            return
    group.replace_static(old.member_id, successor)
    group.park_join(successor, token)
    _fence(decision, group, old, successor)
    arm_session(decision, group, successor)
    if group.state is ClassicState.PREPARING_REBALANCE:
        maybe_complete_join(decision, group)
    else:
        # In CompletingRebalance the leader may be computing an assignment with the old id.
        reason = f"static member {command.group_instance_id} came back{_client_reason(command)}"
        prepare_rebalance(shard, decision, group, reason, successor)


def _persist_successor(
    shard: Shard,
    decision: DecisionBuilder,
    group: ClassicGroup,
    token: Token,
    command: JoinGroup,
    old: ClassicMember,
    successor: ClassicMember,
) -> None:
    """Replace ``old`` without a rebalance: append a record with the new id and the old assignment.

    A leader that is replaced in this way must not compute an assignment. From v9 the response says
    so (KIP-814); for an older client it names the *old* id as the leader, so that the client acts
    as a follower.
    """
    members = [*(member for member in group.members.values() if member is not old), successor]
    is_leader = group.leader_id == old.member_id
    leader = successor.member_id if is_leader else group.leader_id
    value = group.metadata_value(members, leader)
    record = records.group_metadata(group.group_id, value)
    shard.require_batch("the group", [record])
    shard.pending_install = PendingInstall(group, successor)
    decision.append(record)
    _fence(decision, group, old, successor)
    arm_session(decision, group, successor)
    skips = command.supports_skip_assignment
    decision.reply(
        token,
        JoinGroupResult(
            member_id=successor.member_id,
            generation_id=group.generation_id,
            protocol_type=group.protocol_type,
            protocol_name=group.protocol_name,
            leader=(leader if skips else group.leader_id) or "",
            skip_assignment=skips and is_leader,
            members=group.join_members(members) if skips and is_leader else (),
        ),
    )


def _fence(
    decision: DecisionBuilder, group: ClassicGroup, old: ClassicMember, successor: ClassicMember
) -> None:
    decision.disarm(group.timer("session", old.member_id))
    decision.event(
        EventKind.MEMBER_FENCED,
        group.group_id,
        successor=successor.member_id,
        **identity(old),
        reason="another member joined with its instance id",
        generation=group.generation_id,
    )
    for token in (old.join_token, old.sync_token):
        if token is not None:
            decision.reply(
                token, FencedInstanceIdError(f"{successor.member_id!r} took the instance id over")
            )


# --- members with an id --------------------------------------------------------------------------


def _join_known(
    shard: Shard, decision: DecisionBuilder, group: ClassicGroup, token: Token, command: JoinGroup
) -> None:
    member_id = command.member_id
    if member_id in group.pending_members:
        if command.group_instance_id is not None:
            # Only dynamic members get an id in advance; Kafka fails on this request.
            raise UnknownMemberIdError(f"{member_id!r} is pending and can't become static")
        _add_member(shard, decision, group, token, command)
        return
    member = group.validate_member(member_id, command.group_instance_id)
    matches = member.protocols == command.protocols
    match group.state:
        case ClassicState.PREPARING_REBALANCE:
            reason = f"member {member_id} joins"
        case ClassicState.COMPLETING_REBALANCE if not matches:
            reason = f"member {member_id} changed its metadata before the assignment"
        case ClassicState.STABLE if group.leader_id == member_id:
            # A leader cannot report changed topic metadata in any other way.
            reason = f"leader {member_id} rejoins"
        case ClassicState.STABLE if not matches:
            reason = f"member {member_id} changed its metadata"
        case _:
            decision.reply(token, current_generation(group, member))
            return
    added_bytes = protocols_bytes(command.protocols) - protocols_bytes(member.protocols)
    shard.require_memory(group.group_id, added_bytes)
    group.update(
        member, command.protocols, command.session_timeout_ms, _rebalance_timeout_ms(command)
    )
    superseded = group.park_join(member, token)
    if superseded is not None:
        decision.reply(superseded, RebalanceInProgressError("a newer JoinGroup took its place"))
    maybe_prepare_rebalance(shard, decision, group, f"{reason}{_client_reason(command)}", member)


def _client_reason(command: JoinGroup) -> str:
    return f"; client reason: {command.reason}" if command.reason else ""


def _rebalance_timeout_ms(command: JoinGroup) -> int:
    # JoinGroup v0 has no rebalance timeout: the session timeout serves as both.
    negative = command.rebalance_timeout_ms < 0
    return command.session_timeout_ms if negative else command.rebalance_timeout_ms
