"""ConsumerGroupHeartbeat: members join, report, leave (KIP-848).

The order of checks is Kafka's (``GroupMetadataManager.consumerGroupHeartbeat`` and the methods
below it). A heartbeat goes through six steps: the member, its subscription, the group epoch, the
target, the member's reconciliation, the answer. All of them work on a :class:`Beat`, which holds
what will be true once the records that are being collected are replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from groups import consumer_records as cr
from groups.classic_group import ClassicGroup
from groups.classic_state import ClassicState
from groups.consumer_commands import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    NO_TIMEOUT,
    STATIC_LEAVE_EPOCH,
    ConsumerHeartbeat,
    ConsumerHeartbeatResult,
    ConsumerSettings,
)
from groups.consumer_group import (
    ConsumerGroup,
    by_topic,
    flat,
    metadata_bytes,
    rebalance_timer,
    session_timer,
    write_current,
)
from groups.consumer_members import remove_members
from groups.consumer_records import ConsumerRecordType as Kind
from groups.consumer_target import Working, bump_epoch, refresh_regexes, update_target
from groups.errors import (
    FencedInstanceIdError,
    FencedMemberEpochError,
    GroupDeadError,
    GroupIdNotFoundError,
    GroupLimitExceededError,
    GroupMaxSizeReachedError,
    InvalidGroupRequestError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
    UnsupportedAssignorError,
)
from groups.outcome import EventKind, Outcome
from groups.reconcile import CurrentAssignment, MemberState, TopicIdPartition, reconcile
from groups.regex import TopicRegex
from groups.shard import Shard
from logcore.machine import Token


@dataclass(slots=True)
class Beat:
    """One heartbeat on its way through the steps."""

    command: ConsumerHeartbeat
    settings: ConsumerSettings
    group: ConsumerGroup
    working: Working
    member_id: str
    old_value: cr.ConsumerMemberValue | None
    """What the member said before; None for a new one."""
    current: CurrentAssignment
    """What the member has."""
    replaced: str | None = None
    """The member whose place this one takes."""
    reasons: list[str] = field(default_factory=list)
    """Why the group epoch must be bumped."""


def heartbeat(shard: Shard, outcome: Outcome, token: Token, command: ConsumerHeartbeat) -> None:
    """Decide on a ConsumerGroupHeartbeat. Raises a GroupError before any change."""
    settings = command.settings or shard.consumer
    _validate(shard, command, settings)
    if command.member_epoch in {LEAVE_EPOCH, STATIC_LEAVE_EPOCH}:
        _leave(shard, outcome, token, command)
        return
    group = _group(shard, outcome, command)
    beat = _member(outcome, command, settings, group)
    _subscribe(shard, outcome, beat)
    refresh_regexes(shard, outcome, beat.working, beat.reasons)
    bump_epoch(outcome, beat.working, beat.reasons)
    update_target(outcome, beat.working, settings)
    before = beat.current
    _reconcile(outcome, beat)
    size = sum(len(record.key) + len(record.value or b"") for record in outcome.records)
    if size > shard.limits.max_group_record_bytes:
        limit = shard.limits.max_group_record_bytes
        raise GroupLimitExceededError(f"the group's change exceeds max_group_record_bytes={limit}")
    classic = shard.groups.get(group.group_id)
    if isinstance(classic, ClassicGroup):
        classic.removed(outcome)
    _remember(shard, beat)
    outcome.arm(session_timer(group.group_id, beat.member_id), settings.session_timeout_ms)
    outcome.reply(token, _answer(beat, before))


def _remember(shard: Shard, beat: Beat) -> None:
    """Note which topics were looked at: soft, and only once nothing can be refused any more."""
    shard.image = beat.group.image = beat.command.topics
    beat.group.checked_image = beat.working.checked_image
    beat.group.regexes_image = beat.working.regexes_image
    beat.group.regexes_checked_ms = beat.working.regexes_checked_ms


def _answer(beat: Beat, before: CurrentAssignment) -> ConsumerHeartbeatResult:
    command, current = beat.command, beat.current
    subscribes = command.subscribed_topic_names is not None or command.subscribed_topic_regex
    is_full = command.member_epoch == JOIN_EPOCH or (
        command.rebalance_timeout_ms != NO_TIMEOUT
        and subscribes is not None
        and command.owned is not None
    )
    changed = before.assigned.keys() != current.assigned.keys()
    return ConsumerHeartbeatResult(
        beat.member_id,
        current.member_epoch,
        beat.settings.heartbeat_interval_ms,
        by_topic(current.assigned) if is_full or changed else None,
    )


# --- validation ----------------------------------------------------------------------------------


def _validate(shard: Shard, command: ConsumerHeartbeat, settings: ConsumerSettings) -> None:
    _require(bool(command.group_id), "the group id is empty")
    if command.client_makes_member_id:
        _require(bool(command.member_id), "the member id is empty")
    _require(command.instance_id != "", "the instance id is empty")
    _require(command.rack_id != "", "the rack id is empty")
    if command.member_epoch > 0 or command.member_epoch == LEAVE_EPOCH:
        _require(bool(command.member_id), "the member id is empty")
    elif command.member_epoch == JOIN_EPOCH:
        _require(command.rebalance_timeout_ms != NO_TIMEOUT, "a join needs a rebalance timeout")
        _require(command.owned == (), "a joining member owns nothing and says so")
        names, regex = command.subscribed_topic_names, command.subscribed_topic_regex
        _require(names is not None or regex is not None, "a join needs a subscription")
    elif command.member_epoch == STATIC_LEAVE_EPOCH:
        _require(bool(command.member_id), "the member id is empty")
        _require(command.instance_id is not None, "only static members leave for a while")
    else:
        _require(False, "no such member epoch")
    _require(command.rebalance_timeout_ms >= NO_TIMEOUT, "the rebalance timeout is negative")
    assignor = command.server_assignor
    if assignor is not None and assignor not in settings.assignors:
        known = ", ".join(settings.assignors.names)
        raise UnsupportedAssignorError(f"no assignor {assignor!r}; there are: {known}")
    names = command.subscribed_topic_names or ()
    if len(names) > shard.limits.max_subscribed_topics:
        limit = shard.limits.max_subscribed_topics
        raise GroupLimitExceededError(f"more than max_subscribed_topics={limit}")
    if sum(len(name.encode()) for name in names) > shard.limits.max_metadata_bytes:
        limit = shard.limits.max_metadata_bytes
        raise GroupLimitExceededError(f"the subscription exceeds max_metadata_bytes={limit}")
    for what, text in (
        ("member id", command.member_id),
        ("instance id", command.instance_id or ""),
        ("rack id", command.rack_id or ""),
        ("client id", command.client_id),
        ("regular expression", command.subscribed_topic_regex or ""),
    ):
        shard.require_short(what, text)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise InvalidGroupRequestError(what)


# --- step 1: the group and the member ------------------------------------------------------------


def _group(shard: Shard, outcome: Outcome, command: ConsumerHeartbeat) -> ConsumerGroup:
    """Return the group; a joining member may create one, or take over a classic one's name."""
    group = shard.groups.get(command.group_id)
    if isinstance(group, ConsumerGroup):
        return group
    if command.member_epoch != JOIN_EPOCH:
        raise GroupIdNotFoundError(f"no consumer group {command.group_id!r}")
    fresh = ConsumerGroup(command.group_id, shard.totals)
    if group is None:
        shard.require_room_for_group(command.group_id)
    elif isinstance(group, ClassicGroup):
        if group.state is ClassicState.DEAD:
            raise GroupDeadError(f"group {command.group_id!r} is being removed")
        if not group.is_empty:
            raise GroupIdNotFoundError(f"group {command.group_id!r} has classic members")
        if group.saved is not None:
            # Epochs go on where generations ended, so that no old commit looks like a new one.
            fresh.saved_epoch = cr.GroupEpochValue(group.generation_id)
            for record in group.tombstones():
                outcome.append(record)
    else:
        raise GroupIdNotFoundError(f"group {command.group_id!r} is of another type")
    outcome.event(EventKind.GROUP_CREATED, command.group_id, client_id=command.client_id)
    return fresh


def _member(
    outcome: Outcome,
    command: ConsumerHeartbeat,
    settings: ConsumerSettings,
    group: ConsumerGroup,
) -> Beat:
    """Find the member, check its epoch, or see that it may come in."""
    member_id = command.member_id or command.new_member_id
    known = group.members.get(member_id)
    is_static = command.instance_id is not None
    owner = group.static_members.get(command.instance_id or "")
    if known is None and owner is None and len(group.members) >= settings.max_size:
        raise GroupMaxSizeReachedError(f"group {group.group_id!r} is full")
    working = Working.of(group, command.topics)
    beat = Beat(command, settings, group, working, member_id, known, group.current(member_id))
    joins = command.member_epoch == JOIN_EPOCH
    if is_static and joins and owner is not None:
        _take_over(outcome, beat, owner)
    elif joins:
        if known is not None and is_static and known.instance_id != command.instance_id:
            raise InvalidGroupRequestError("a member can't change its instance id")
    else:
        if is_static:
            _require_owner(command, owner)
        elif known is None:
            raise UnknownMemberIdError(f"group {group.group_id!r} has no member {member_id!r}")
        _require_epoch(beat)
    return beat


def _require_owner(command: ConsumerHeartbeat, owner: str | None) -> None:
    if owner is None:
        raise UnknownMemberIdError(f"no member has instance id {command.instance_id!r}")
    if owner != command.member_id:
        raise FencedInstanceIdError(f"instance id {command.instance_id!r} has a new owner")


def _require_epoch(beat: Beat) -> None:
    epoch, current = beat.command.member_epoch, beat.current
    if epoch == current.member_epoch:
        return
    owned = beat.command.owned
    # The answer that told the new epoch may have been lost.
    lost = epoch < current.member_epoch and epoch == current.previous_member_epoch
    if not lost or owned is None or not flat(owned) <= current.assigned.keys():
        raise FencedMemberEpochError(
            f"epoch {epoch} is not {current.member_epoch}; drop all partitions and rejoin"
        )


def _take_over(outcome: Outcome, beat: Beat, owner: str) -> None:
    """Give a static member's place, assignment and target to its next incarnation."""
    group, member_id, command = beat.group, beat.member_id, beat.command
    if group.current(owner).member_epoch != STATIC_LEAVE_EPOCH:
        raise UnreleasedInstanceIdError(f"{owner!r} still uses {command.instance_id!r}")
    for kind in (
        Kind.CURRENT_MEMBER_ASSIGNMENT,
        Kind.TARGET_ASSIGNMENT_MEMBER,
        Kind.MEMBER_METADATA,
    ):
        outcome.append(cr.tombstone(kind, group.group_id, owner))
    working = beat.working
    beat.old_value = working.members.pop(owner)
    working.members[member_id] = beat.old_value
    # Its record goes first: whoever has an assignment is a member.
    outcome.append(cr.member(group.group_id, member_id, beat.old_value))
    target = working.targets.pop(owner, None)
    if target is not None:
        working.targets[member_id] = target
        value = cr.TargetAssignmentValue(by_topic(target))
        outcome.append(cr.target_assignment(group.group_id, member_id, value))
    beat.current = CurrentAssignment(assigned=group.current(owner).assigned)
    value_now = write_current(beat.current)
    outcome.append(cr.current_assignment(group.group_id, member_id, value_now))
    beat.replaced = owner
    if owner != member_id:
        outcome.disarm(session_timer(group.group_id, owner))
        outcome.disarm(rebalance_timer(group.group_id, owner))
    outcome.event(
        EventKind.MEMBER_FENCED,
        group.group_id,
        member=owner,
        successor=member_id,
        group_instance_id=command.instance_id,
        reason="the static member came back under a new id",
    )


# --- step 2: what the member says of itself ------------------------------------------------------


def _subscribe(shard: Shard, outcome: Outcome, beat: Beat) -> None:
    command, old, group = beat.command, beat.old_value, beat.group
    base = old or cr.ConsumerMemberValue(None, None, "", "", (), None, NO_TIMEOUT, None)
    names, regex = command.subscribed_topic_names, command.subscribed_topic_regex
    timeout_ms = command.rebalance_timeout_ms
    new = replace(
        base,
        instance_id=base.instance_id if command.instance_id is None else command.instance_id,
        rack_id=base.rack_id if command.rack_id is None else command.rack_id,
        client_id=command.client_id,
        client_host=command.client_host,
        subscribed_topic_names=(
            base.subscribed_topic_names if names is None else tuple(sorted(set(names)))
        ),
        subscribed_topic_regex=base.subscribed_topic_regex if regex is None else regex or None,
        rebalance_timeout_ms=base.rebalance_timeout_ms if timeout_ms == NO_TIMEOUT else timeout_ms,
        server_assignor=command.server_assignor or base.server_assignor,
        classic=None,
    )
    if new.subscribed_topic_regex != base.subscribed_topic_regex and new.subscribed_topic_regex:
        TopicRegex(new.subscribed_topic_regex)  # refused here, before anything is decided
    if new == old:
        return
    added_bytes = metadata_bytes(new) - (metadata_bytes(old) if old else 0)
    shard.require_room_for_members(0 if old else 1, added_bytes)
    beat.working.members[beat.member_id] = new
    outcome.append(cr.member(group.group_id, beat.member_id, new))
    if old is None:
        beat.reasons.append(f"member {beat.member_id} joined")
        outcome.event(
            EventKind.MEMBER_JOINED,
            group.group_id,
            member=beat.member_id,
            group_instance_id=new.instance_id,
            client_id=new.client_id,
            client_host=new.client_host,
        )
    elif (
        new.subscribed_topic_names != old.subscribed_topic_names
        or new.subscribed_topic_regex != old.subscribed_topic_regex
    ):
        beat.reasons.append(f"member {beat.member_id} changed its subscription")


# --- step 5: reconciliation ----------------------------------------------------------------------


def _reconcile(outcome: Outcome, beat: Beat) -> None:
    group, working, member_id = beat.group, beat.working, beat.member_id
    allowed = working.topic_ids_of(working.members[member_id])
    mine = {member_id, beat.replaced}

    def is_held_by_other(partition: TopicIdPartition) -> bool:
        owner = group.owners.get(partition)
        return owner is not None and owner not in mine

    owned = None if beat.command.owned is None else flat(beat.command.owned)
    after = reconcile(
        beat.current, working.target(member_id), is_held_by_other, owned, allowed.__contains__
    )
    if after is beat.current or after == beat.current:
        return
    outcome.append(cr.current_assignment(group.group_id, member_id, write_current(after)))
    outcome.event(
        EventKind.MEMBER_RECONCILED,
        group.group_id,
        member=member_id,
        state=after.state.name,
        old_epoch=beat.current.member_epoch,
        epoch=after.member_epoch,
        assigned=len(after.assigned),
        pending_revocation=len(after.pending_revocation),
    )
    timer = rebalance_timer(group.group_id, member_id)
    if after.state is MemberState.UNREVOKED_PARTITIONS:
        outcome.arm(timer, max(working.members[member_id].rebalance_timeout_ms, 0))
    else:
        outcome.disarm(timer)
    beat.current = after


# --- leaving -------------------------------------------------------------------------------------


def _leave(shard: Shard, outcome: Outcome, token: Token, command: ConsumerHeartbeat) -> None:
    group = shard.groups.get(command.group_id)
    if not isinstance(group, ConsumerGroup):
        raise GroupIdNotFoundError(f"no consumer group {command.group_id!r}")
    member_id = command.member_id
    if command.instance_id is not None:
        _require_owner(command, group.static_members.get(command.instance_id))
    elif member_id not in group.members:
        raise UnknownMemberIdError(f"group {command.group_id!r} has no member {member_id!r}")
    if command.member_epoch == STATIC_LEAVE_EPOCH:
        # What it was to revoke is free: its client is gone. What it was assigned waits for it.
        away = replace(
            group.current(member_id),
            member_epoch=STATIC_LEAVE_EPOCH,
            state=MemberState.STABLE,
            pending_revocation={},
        )
        outcome.append(cr.current_assignment(group.group_id, member_id, write_current(away)))
        outcome.disarm(rebalance_timer(group.group_id, member_id))
        outcome.event(
            EventKind.MEMBER_LEFT, group.group_id, member=member_id, reason="static, for a while"
        )
    else:
        remove_members(shard, outcome, group, [member_id], EventKind.MEMBER_LEFT, "left")
    outcome.reply(token, ConsumerHeartbeatResult(member_id, command.member_epoch))
