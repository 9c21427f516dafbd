"""The phases of a rebalance: its start, the end of its join phase, the timeout of its sync phase.

Removal of members is here too, because every removal may start a rebalance or complete one. The
order of steps is Kafka's (``GroupMetadataManager.prepareRebalance``, ``completeClassicGroupJoin``,
…).
"""

from __future__ import annotations

from fencepost.groups import records
from fencepost.groups.classic_group import ClassicGroup, InitialDelay
from fencepost.groups.classic_members import ClassicMember
from fencepost.groups.classic_state import TRANSITIONS, ClassicState
from fencepost.groups.commands import JoinGroupResult
from fencepost.groups.errors import RebalanceInProgressError, UnknownMemberIdError
from fencepost.groups.events import EventKind
from fencepost.groups.records import GroupMetadataValue
from fencepost.groups.shard import Shard
from fencepost.logcore.machine import DecisionBuilder, DomainError, Event

MAX_AWAITED_NAMES = 3
"""While at most this many members are missing, the event history records each change of the number
of missing members. While more are missing, it records the number only if that is a power of two."""


def arm_session(decision: DecisionBuilder, group: ClassicGroup, member: ClassicMember) -> None:
    """Restart the member's session timeout."""
    decision.arm(group.timer("session", member.member_id), member.session_timeout_ms)


# --- starting ------------------------------------------------------------------------------------


def maybe_prepare_rebalance(
    shard: Shard,
    decision: DecisionBuilder,
    group: ClassicGroup,
    reason: str,
    member: ClassicMember | None,
) -> None:
    """Start a rebalance, or complete the join phase of the current one if possible.

    Events name ``member`` as the cause; None if several members are the cause.
    """
    if (group.state, ClassicState.PREPARING_REBALANCE) in TRANSITIONS:
        prepare_rebalance(shard, decision, group, reason, member)
    else:
        maybe_complete_join(decision, group)


def prepare_rebalance(
    shard: Shard,
    decision: DecisionBuilder,
    group: ClassicGroup,
    reason: str,
    member: ClassicMember | None,
) -> None:
    """Enter the join phase. Members that wait for their assignment must rejoin."""
    decision.event(
        EventKind.REBALANCE_STARTED,
        group.group_id,
        reason=reason[: shard.limits.max_reason_chars],
        state=group.state_name,
        old_generation=group.generation_id,
        members=len(group.members),
        **identity(member),
    )
    if group.state is ClassicState.COMPLETING_REBALANCE:
        refuse_syncs(decision, group, RebalanceInProgressError("the group rebalances again"))
    group.pending_sync.clear()
    decision.disarm(group.timer("sync"))
    is_initial = group.state is ClassicState.EMPTY
    group.transition_to(ClassicState.PREPARING_REBALANCE, decision.now_ms)
    if is_initial:
        delay_ms = shard.initial_rebalance_delay_ms
        remaining_ms = max(group.rebalance_timeout_ms - delay_ms, 0)
        group.initial_delay = InitialDelay(delay_ms, remaining_ms)
        group.new_member_added = False
        decision.arm(group.timer("join"), delay_ms)
    elif group.everyone_joined:
        complete_join(decision, group)
    else:
        decision.arm(group.timer("join"), group.rebalance_timeout_ms)
        _record_awaited(decision, group)


def refuse_syncs(decision: DecisionBuilder, group: ClassicGroup, error: DomainError) -> None:
    """Answer every waiting SyncGroup with ``error`` and clear the assignments."""
    for member in group.members.values():
        member.assignment = b""
        token, member.sync_token = member.sync_token, None
        if token is not None:
            decision.reply(token, error)
            # The member's session may have expired without effect while the request waited.
            arm_session(decision, group, member)


# --- the end of the join phase -------------------------------------------------------------------


def maybe_complete_join(decision: DecisionBuilder, group: ClassicGroup) -> None:
    """End the join phase if no member is missing; an initial phase always waits for its timer."""
    if group.state is not ClassicState.PREPARING_REBALANCE or group.initial_delay is not None:
        return
    if group.everyone_joined:
        complete_join(decision, group)
    else:
        _record_awaited(decision, group)


def _record_awaited(decision: DecisionBuilder, group: ClassicGroup) -> None:
    """Record the members that the join phase waits for, which the protocol never shows.

    While more than :data:`MAX_AWAITED_NAMES` are missing, an event is recorded only if their number
    is a power of two: a rebalance of a thousand members has a dozen such events.
    """
    missing = len(group.members) - group.waiting_joins + len(group.pending_members)
    if missing > MAX_AWAITED_NAMES and missing.bit_count() != 1:
        return
    awaited = [member for member in group.members.values() if member.join_token is None]
    detail = {
        "generation": group.generation_id,
        "missing": missing,
        "awaited": [*(member.member_id for member in awaited), *group.pending_members],
        "clients": [
            f"{member.client_id}@{member.client_host.removeprefix('/')}" for member in awaited
        ],
    }
    decision.add_event(Event(EventKind.REBALANCE_WAITS, group.group_id, detail, quiet=True))


def join_timer_fired(shard: Shard, decision: DecisionBuilder, group: ClassicGroup) -> None:
    """End the join phase, or extend an initial phase if a member joined meanwhile."""
    if group.state is not ClassicState.PREPARING_REBALANCE:
        return
    initial = group.initial_delay
    if initial is not None and group.new_member_added and initial.remaining_ms > 0:
        group.new_member_added = False
        delay_ms = min(shard.initial_rebalance_delay_ms, initial.remaining_ms)
        group.initial_delay = InitialDelay(
            delay_ms, max(initial.remaining_ms - initial.delay_ms, 0)
        )
        decision.arm(group.timer("join"), delay_ms)
        return
    complete_join(decision, group)


def complete_join(decision: DecisionBuilder, group: ClassicGroup) -> None:
    """End the join phase with the members that joined.

    Dynamic members that did not rejoin are removed; static members that did not rejoin stay with
    their old subscription. If only such static members are left, the join phase starts again.
    """
    decision.disarm(group.timer("join"))
    for member in list(group.members.values()):
        if member.join_token is None and not member.is_static:
            expired = EventKind.MEMBER_EXPIRED
            detach(decision, group, member, expired, "did not rejoin in time")
    if not group.members:
        _become_empty(decision, group)
    elif not _elect_leader(group):
        decision.arm(group.timer("join"), group.rebalance_timeout_ms)
    else:
        _start_generation(decision, group)


def _elect_leader(group: ClassicGroup) -> bool:
    """Keep the leader if it joined, else elect the first member that joined; False if none did."""
    leader = group.members.get(group.leader_id or "")
    if leader is not None and leader.join_token is not None:
        return True
    for member in group.members.values():
        if member.join_token is not None:
            group.leader_id = member.member_id
            return True
    return False


def _become_empty(decision: DecisionBuilder, group: ClassicGroup) -> None:
    value = GroupMetadataValue(
        protocol_type=group.protocol_type or "",
        generation_id=group.generation_id + 1,
        protocol_name=None,
        leader=None,
        state_timestamp_ms=decision.now_ms,
        members=(),
    )
    decision.append(records.group_metadata(group.group_id, value))
    decision.event(
        EventKind.GENERATION_STARTED,
        group.group_id,
        old_generation=group.generation_id,
        new_generation=value.generation_id,
        members=0,
    )


def _start_generation(decision: DecisionBuilder, group: ClassicGroup) -> None:
    old_generation = group.generation_id
    group.start_generation(decision.now_ms)
    decision.event(
        EventKind.GENERATION_STARTED,
        group.group_id,
        old_generation=old_generation,
        new_generation=group.generation_id,
        members=len(group.members),
        protocol=group.protocol_name,
        leader=group.leader_id,
    )
    for member in group.members.values():
        token = group.take_join(member)
        if token is not None:
            decision.reply(token, current_generation(group, member))
        arm_session(decision, group, member)
        member.is_new = False
        group.pending_sync.add(member.member_id)
    decision.arm(group.timer("sync"), group.rebalance_timeout_ms)


def current_generation(group: ClassicGroup, member: ClassicMember) -> JoinGroupResult:
    """Return the response to a JoinGroup of ``member``; only the leader gets the members."""
    is_leader = member.member_id == group.leader_id
    return JoinGroupResult(
        member_id=member.member_id,
        generation_id=group.generation_id,
        protocol_type=group.protocol_type,
        protocol_name=group.protocol_name,
        leader=group.leader_id or "",
        members=group.join_members(group.members.values()) if is_leader else (),
    )


# --- the sync phase ------------------------------------------------------------------------------


def sync_arrived(decision: DecisionBuilder, group: ClassicGroup, member: ClassicMember) -> None:
    """Count the member's SyncGroup; disarm the sync timer once all have arrived."""
    group.pending_sync.discard(member.member_id)
    if not group.pending_sync:
        decision.disarm(group.timer("sync"))


def sync_timer_fired(shard: Shard, decision: DecisionBuilder, group: ClassicGroup) -> None:
    """Remove members that did not request their assignment, and rebalance without them."""
    generation_runs = group.state in {ClassicState.COMPLETING_REBALANCE, ClassicState.STABLE}
    if not generation_runs or not group.pending_sync:
        return
    late = [member for member in group.members.values() if member.member_id in group.pending_sync]
    for member in late:
        expired = EventKind.MEMBER_EXPIRED
        detach(decision, group, member, expired, "did not send SyncGroup in time")
    names = ", ".join(member.member_id for member in late)
    prepare_rebalance(shard, decision, group, f"no SyncGroup in time from {names}", None)


# --- removed members -----------------------------------------------------------------------------


def session_timer_fired(
    shard: Shard, decision: DecisionBuilder, group: ClassicGroup, member_id: str
) -> None:
    """Remove a silent member, or a pending member that did not rejoin with its id."""
    if member_id in group.pending_members:
        decision.event(EventKind.PENDING_MEMBER_EXPIRED, group.group_id, member=member_id)
        drop_pending(decision, group, member_id)
        return
    member = group.members.get(member_id)
    if member is None or member.counts_as_alive:
        return
    reason = "JoinGroup timed out" if member.is_new else "session timed out"
    detach(decision, group, member, EventKind.MEMBER_EXPIRED, reason)
    if group.state is ClassicState.PREPARING_REBALANCE:
        # An expired session ends even an initial join phase once no member is missing, unlike a
        # LeaveGroup.
        if group.everyone_joined:
            complete_join(decision, group)
    else:
        maybe_prepare_rebalance(shard, decision, group, f"{reason}: {member_id}", member)


def drop_pending(decision: DecisionBuilder, group: ClassicGroup, member_id: str) -> None:
    """Forget a pending member id; end the join phase if only this member was missing."""
    group.forget_pending(member_id)
    decision.disarm(group.timer("session", member_id))
    if group.state is ClassicState.PREPARING_REBALANCE and group.everyone_joined:
        complete_join(decision, group)


def detach(
    decision: DecisionBuilder,
    group: ClassicGroup,
    member: ClassicMember,
    kind: EventKind,
    reason: str,
) -> None:
    """Remove a member and fail its parked requests, so that it rejoins. The caller rebalances."""
    decision.event(
        kind, group.group_id, reason=reason, generation=group.generation_id, **identity(member)
    )
    group.remove(member.member_id)
    decision.disarm(group.timer("session", member.member_id))
    for token in (member.join_token, member.sync_token):
        if token is not None:
            decision.reply(token, UnknownMemberIdError(f"{member.member_id!r} was removed"))


def identity(member: ClassicMember | None) -> dict[str, object]:
    """Return the fields of a member in events."""
    if member is None:
        return {}
    return {
        "member": member.member_id,
        "group_instance_id": member.group_instance_id,
        "client_id": member.client_id,
        "client_host": member.client_host,
    }
