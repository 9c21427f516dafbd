"""How members of a consumer group go: they leave, fall silent, or do not revoke in time.

Source: Kafka's ``GroupMetadataManager`` (consumerGroupFenceMember and the timers' operations).
"""

from __future__ import annotations

from collections.abc import Sequence

from groups import consumer_records as cr
from groups.consumer_group import (
    ConsumerGroup,
    rebalance_timer,
    session_timer,
    subscribed_topics,
)
from groups.consumer_records import ConsumerRecordType as Kind
from groups.consumer_target import metadata_hash, write_epoch
from groups.outcome import EventKind, Outcome
from groups.reconcile import MemberState
from groups.shard import Shard


def remove_members(
    shard: Shard,
    outcome: Outcome,
    group: ConsumerGroup,
    member_ids: Sequence[str],
    kind: EventKind,
    reason: str,
) -> None:
    """Remove members; the others' target follows at the next heartbeat of any of them."""
    group_id = group.group_id
    for member_id in member_ids:
        outcome.append(cr.tombstone(Kind.CURRENT_MEMBER_ASSIGNMENT, group_id, member_id))
        outcome.append(cr.tombstone(Kind.TARGET_ASSIGNMENT_MEMBER, group_id, member_id))
        outcome.append(cr.tombstone(Kind.MEMBER_METADATA, group_id, member_id))
        outcome.disarm(session_timer(group_id, member_id))
        outcome.disarm(rebalance_timer(group_id, member_id))
        member = group.members[member_id]
        outcome.event(
            kind,
            group_id,
            member=member_id,
            group_instance_id=member.instance_id,
            client_id=member.client_id,
            client_host=member.client_host,
            reason=reason,
        )
    left = [member for name, member in group.members.items() if name not in member_ids]
    used = {member.subscribed_topic_regex for member in left}
    for regex in group.regexes.keys() - used:
        outcome.append(cr.tombstone(Kind.REGULAR_EXPRESSION, group_id, regex))
    epoch = group.epoch + 1
    hashed = 0 if group.saved_epoch is None else group.saved_epoch.metadata_hash
    if shard.image is not None:
        hashed = metadata_hash(shard.image, subscribed_topics(left, group.regexes))
    write_epoch(outcome, group, epoch, hashed, f"{', '.join(member_ids)}: {reason}")
    if not left:
        # Nobody is left who could bring the target up to the epoch. Without a time, so that
        # whoever joins next need not wait.
        value = cr.AssignmentEpochValue(epoch)
        outcome.append(cr.assignment_epoch(group_id, value))


def session_timer_fired(
    shard: Shard, outcome: Outcome, group: ConsumerGroup, member_id: str
) -> None:
    """Remove a member that was silent for a whole session."""
    if member_id in group.members:
        remove_members(
            shard, outcome, group, [member_id], EventKind.MEMBER_EXPIRED, "no heartbeat came"
        )


def rebalance_timer_fired(
    shard: Shard, outcome: Outcome, group: ConsumerGroup, member_id: str
) -> None:
    """Remove a member that did not revoke in the time it had asked for itself."""
    if group.current(member_id).state is MemberState.UNREVOKED_PARTITIONS:
        remove_members(
            shard, outcome, group, [member_id], EventKind.MEMBER_EXPIRED, "did not revoke in time"
        )


def group_loaded(shard: Shard, outcome: Outcome, group: ConsumerGroup) -> None:
    """Begin to serve a group read from the log: every session starts anew."""
    for member_id, member in group.members.items():
        timer = session_timer(group.group_id, member_id)
        outcome.arm(timer, shard.consumer.session_timeout_ms)
        if group.current(member_id).state is MemberState.UNREVOKED_PARTITIONS:
            timer = rebalance_timer(group.group_id, member_id)
            outcome.arm(timer, max(member.rebalance_timeout_ms, 0))
