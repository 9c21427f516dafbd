"""Removal of members from a consumer group: leaves, expired sessions, late revocations.

Source: Kafka's ``GroupMetadataManager`` (consumerGroupFenceMember and the timers' operations).
"""

from __future__ import annotations

from collections.abc import Sequence

from fencepost.groups import consumer_records as cr
from fencepost.groups.consumer_group import ConsumerGroup, identity
from fencepost.groups.consumer_records import ConsumerRecordType as Kind
from fencepost.groups.consumer_target import metadata_hash, write_epoch
from fencepost.groups.conversion import convert_to_classic_group, may_downgrade
from fencepost.groups.events import EventKind
from fencepost.groups.reconcile import MemberState
from fencepost.groups.shard import Shard
from fencepost.logcore.machine import DecisionBuilder, InvariantViolation


def remove_members(
    shard: Shard,
    decision: DecisionBuilder,
    group: ConsumerGroup,
    member_ids: Sequence[str],
    kind: EventKind,
    reason: str,
) -> None:
    """Remove members; the next heartbeat of any other member computes the new target.

    The group becomes classic if only classic members are left.
    """
    group_id = group.group_id
    for member_id in member_ids:
        fields = identity(member_id, group.members[member_id])
        decision.event(kind, group_id, reason=reason, **fields)
    if may_downgrade(shard, group, member_ids):
        why = f"the group became classic; {', '.join(member_ids)}: {reason}"
        if convert_to_classic_group(shard, decision, group, member_ids, rebalance_reason=why):
            return
    for member_id in member_ids:
        decision.append(cr.tombstone(Kind.CURRENT_MEMBER_ASSIGNMENT, group_id, member_id))
        decision.append(cr.tombstone(Kind.TARGET_ASSIGNMENT_MEMBER, group_id, member_id))
        decision.append(cr.tombstone(Kind.MEMBER_METADATA, group_id, member_id))
        group.stop_timers(decision, member_id)
    remaining = group.subscriptions.copy()
    for member_id in set(member_ids):
        remaining.change(group.members[member_id], None)
    for regex in group.regexes.keys() - remaining.expressions:
        decision.append(cr.tombstone(Kind.REGULAR_EXPRESSION, group_id, regex))
    epoch = group.epoch + 1
    topics = shard.environment(group_id).topics
    hashed = metadata_hash(topics, remaining.topics(group.regexes))
    why = f"{', '.join(member_ids)}: {reason}"[: shard.limits.max_reason_chars]
    member = group.members[member_ids[0]]
    write_epoch(
        decision,
        group,
        group.epoch,
        cr.GroupEpochValue(epoch, hashed),
        why,
        member=member_ids[0],
        client_id=member.client_id,
        client_host=member.client_host,
    )
    if len(group.members) == len(set(member_ids)):
        # No heartbeat will compute this target. The record has no timestamp, so the assignment
        # interval does not delay the target of the next member.
        group.stop_upkeep(decision)
        value = cr.AssignmentEpochValue(epoch)
        decision.append(cr.assignment_epoch(group_id, value))


def member_timer_fired(
    shard: Shard, decision: DecisionBuilder, group: ConsumerGroup, kind: str, member_id: str
) -> None:
    """Remove a member whose timer has expired."""
    match kind:
        case "session":
            is_late, reason = member_id in group.members, "no heartbeat came"
        case "rebalance":
            state = group.current(member_id).state
            is_late, reason = state is MemberState.UNREVOKED_PARTITIONS, "did not revoke in time"
        case "join":
            is_late, reason = member_id in group.joining, "did not rejoin in time"
        case "sync":
            is_late, reason = member_id in group.syncing, "did not send SyncGroup in time"
        case _:
            raise InvariantViolation(f"not a timer of a member: {kind!r}")
    if is_late:
        remove_members(shard, decision, group, [member_id], EventKind.MEMBER_EXPIRED, reason)


def group_loaded(shard: Shard, decision: DecisionBuilder, group: ConsumerGroup) -> None:
    """Begin to serve a loaded group: every session starts again.

    Classic members learn from their next heartbeats whether they must rejoin or sync.
    """
    settings = shard.environment(group.group_id).settings
    for member_id, member in group.members.items():
        # A classic member has chosen its session timeout itself.
        chosen = settings if member.classic is None else member.classic
        decision.arm(group.timer("session", member_id), chosen.session_timeout_ms)
        is_unrevoked = group.current(member_id).state is MemberState.UNREVOKED_PARTITIONS
        if is_unrevoked and member.classic is None:
            timer = group.timer("rebalance", member_id)
            decision.arm(timer, max(member.rebalance_timeout_ms, 0))
