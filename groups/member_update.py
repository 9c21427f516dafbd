"""The update of a consumer group's member, in either protocol, as a sequence of steps.

The steps are: replacement of a static member, the subscription, the group epoch, the target, the
member's reconciliation. A heartbeat of the consumer protocol takes these steps, and so does a
JoinGroup to a consumer group. All steps work on a :class:`MemberUpdate`, which has the state that
the group will have once the decision's records are replayed.

Source: Kafka's ``GroupMetadataManager.consumerGroupHeartbeat`` and
``classicGroupJoinToConsumerGroup``.
"""

from __future__ import annotations

from dataclasses import field, replace

from fencepost.groups import consumer_records as cr
from fencepost.groups.consumer_commands import (
    NO_TIMEOUT,
    STATIC_LEAVE_EPOCH,
    ConsumerHeartbeat,
    ConsumerSettings,
)
from fencepost.groups.consumer_group import (
    ConsumerGroup,
    by_topic,
    flat,
    identity,
    member_bytes,
    write_current,
)
from fencepost.groups.consumer_records import ConsumerRecordType as Kind
from fencepost.groups.consumer_target import (
    GroupDraft,
    bump_epoch,
    preferred_assignor,
    update_target,
)
from fencepost.groups.errors import (
    FencedInstanceIdError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
)
from fencepost.groups.events import EventKind
from fencepost.groups.expressions import refresh_regexes
from fencepost.groups.reconcile import CurrentAssignment, MemberState, TopicIdPartition, reconcile
from fencepost.groups.shard import Shard
from fencepost.logcore.machine import DecisionBuilder, InvalidRegularExpressionError
from fencepost.logcore.values import dataclass


@dataclass(slots=True)
class MemberUpdate:
    """The update of one member. A JoinGroup is translated to a heartbeat, ``command``."""

    command: ConsumerHeartbeat
    settings: ConsumerSettings
    group: ConsumerGroup
    draft: GroupDraft
    member_id: str
    old_value: cr.ConsumerMemberValue | None
    """The member's previous record; None for a new member."""
    current: CurrentAssignment
    """The member's current assignment."""
    classic: cr.ClassicMemberMetadata | None = None
    """The metadata of a member of the classic protocol, None for the consumer protocol."""
    replaced: str | None = None
    """The member that this one replaces."""
    reasons: list[str] = field(default_factory=list)
    """Reasons to bump the group epoch."""

    @property
    def needs_target(self) -> bool:
        """Whether the group epoch was bumped since the target was computed."""
        assignment = self.draft.assignment
        return assignment is None or assignment.epoch < self.draft.epoch.epoch


def change_group(shard: Shard, decision: DecisionBuilder, update: MemberUpdate) -> None:
    """Update the member's subscription; bump the group epoch if the group needs a new target."""
    _subscribe(shard, decision, update)
    cause: dict[str, object] = {}
    if update.reasons:
        member = update.draft.member(update.member_id)
        cause["member"] = update.member_id
        cause |= {"client_id": member.client_id, "client_host": member.client_host}
    update.draft.visibility = update.command.visibility
    refresh_regexes(shard, decision, update.draft, update.reasons)
    bump_epoch(decision, update.draft, update.reasons, **cause)


def move_member(shard: Shard, decision: DecisionBuilder, update: MemberUpdate) -> None:
    """Compute the target if it is due, and move the member one step nearer to it."""
    update_target(shard, decision, update.draft, update.settings)
    reconcile_member(decision, update)


def require_small(shard: Shard, decision: DecisionBuilder) -> None:
    """Raise :class:`GroupLimitExceededError` unless the records fit one batch."""
    shard.require_batch("the group's change", decision.records)


def save_soft_state(decision: DecisionBuilder, update: MemberUpdate) -> None:
    """Update soft state, once the request can no longer be refused."""
    if update.replaced not in {None, update.member_id}:
        update.group.stop_timers(decision, update.replaced or "")
    update.draft.save_soft_state()


# --- static members ------------------------------------------------------------------------------


def require_owner(instance_id: str | None, member_id: str, owner: str | None) -> None:
    """Raise unless ``owner``, the member with the instance id, is the member itself."""
    if owner is None:
        raise UnknownMemberIdError(f"no member has instance id {instance_id!r}")
    if owner != member_id:
        raise FencedInstanceIdError(f"instance id {instance_id!r} has a new owner")


def take_over(decision: DecisionBuilder, update: MemberUpdate, owner: str) -> None:
    """Replace a static member by its successor, which inherits assignment and target."""
    group, member_id, command = update.group, update.member_id, update.command
    share_protocol = update.classic is None and group.members[owner].classic is None
    if share_protocol and group.current(owner).member_epoch != STATIC_LEAVE_EPOCH:
        raise UnreleasedInstanceIdError(f"{owner!r} still uses {command.instance_id!r}")
    for kind in (
        Kind.CURRENT_MEMBER_ASSIGNMENT,
        Kind.TARGET_ASSIGNMENT_MEMBER,
        Kind.MEMBER_METADATA,
    ):
        decision.append(cr.tombstone(kind, group.group_id, owner))
    draft = update.draft
    update.old_value = draft.member(owner)
    draft.put(owner, None)
    draft.put(member_id, update.old_value)
    # The member's record goes first: only members may have an assignment.
    decision.append(cr.member(group.group_id, member_id, update.old_value))
    targets = dict(draft.targets)
    target = targets.pop(owner, None)
    if target is not None:
        targets[member_id] = target
        draft.targets = targets
        value = cr.TargetAssignmentValue(by_topic(target))
        decision.append(cr.target_assignment(group.group_id, member_id, value))
    update.current = CurrentAssignment(assigned=group.current(owner).assigned)
    value_now = write_current(update.current)
    decision.append(cr.current_assignment(group.group_id, member_id, value_now))
    update.replaced = owner
    if member_id != owner and member_id in group.members:
        update.reasons.append(f"member {member_id} left its place for that of {owner}")
    decision.event(
        EventKind.MEMBER_FENCED,
        group.group_id,
        successor=member_id,
        **identity(owner, group.members[owner]),
        reason="the static member came back under a new id",
    )


# --- the member's subscription -----------------------------------------------------------


def _subscribe(shard: Shard, decision: DecisionBuilder, update: MemberUpdate) -> None:
    command, old, group = update.command, update.old_value, update.group
    base = old or cr.ConsumerMemberValue(None, None, "", "", (), "", NO_TIMEOUT, None)
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
        subscribed_topic_regex=base.subscribed_topic_regex if regex is None else regex,
        rebalance_timeout_ms=base.rebalance_timeout_ms if timeout_ms == NO_TIMEOUT else timeout_ms,
        server_assignor=command.server_assignor or base.server_assignor,
        classic=update.classic,
    )
    is_same_regex = new.subscribed_topic_regex == base.subscribed_topic_regex
    if command.reason_against_regex is not None and not is_same_regex:
        raise InvalidRegularExpressionError(command.reason_against_regex)
    if new == old:
        return
    draft, settings = update.draft, update.settings
    had_assignor = None
    if new.server_assignor != base.server_assignor and draft.group.members:
        had_assignor = preferred_assignor(draft.members(), settings)
    before = member_bytes(update.member_id, old) if old else 0
    shard.require_memory(group.group_id, member_bytes(update.member_id, new) - before)
    update.draft.put(update.member_id, new)
    decision.append(cr.member(group.group_id, update.member_id, new))
    if old is None:
        decision.event(
            EventKind.MEMBER_JOINED,
            group.group_id,
            **identity(update.member_id, new),
        )
    if _subscription_has_changed(update.draft, base, new):
        verb = "joined" if old is None else "changed its subscription"
        update.reasons.append(f"member {update.member_id} {verb}")
    if had_assignor is not None:
        # If the preferred assignor changes, the group needs a new target, and so a new epoch.
        assignor = preferred_assignor(draft.members(), settings)
        if assignor is not had_assignor:
            update.reasons.append(f"most members prefer the assignor {assignor.name}")


def _subscription_has_changed(
    draft: GroupDraft, old: cr.ConsumerMemberValue, new: cr.ConsumerMemberValue
) -> bool:
    """Whether the change of a member's subscription alone requires a new group epoch."""
    if new.subscribed_topic_names != old.subscribed_topic_names:
        return True
    regex = new.subscribed_topic_regex
    # The topics of an unresolved expression bump the epoch once they are known. Bumping it here as
    # well would compute the target twice.
    return regex != old.subscribed_topic_regex and (not regex or regex in draft.regexes)


# --- the member's reconciliation ---------------------------------------------------------


def reconcile_member(decision: DecisionBuilder, update: MemberUpdate) -> None:
    """Move the member one step nearer to its target."""
    group, draft, member_id = update.group, update.draft, update.member_id
    allowed = draft.topic_ids_of(draft.member(member_id))
    own_ids = {member_id, update.replaced}

    def is_held_by_other(partition: TopicIdPartition) -> bool:
        owner = group.owners.get(partition)
        return owner is not None and owner not in own_ids

    owned = None if update.command.owned is None else flat(update.command.owned)
    after = reconcile(
        update.current, draft.target(member_id), is_held_by_other, owned, allowed.__contains__
    )
    if after is update.current or after == update.current:
        return
    decision.append(cr.current_assignment(group.group_id, member_id, write_current(after)))
    decision.event(
        EventKind.MEMBER_RECONCILED,
        group.group_id,
        member=member_id,
        state=after.state.name,
        old_epoch=update.current.member_epoch,
        epoch=after.member_epoch,
        assigned=len(after.assigned),
        pending_revocation=len(after.pending_revocation),
    )
    timer = group.timer("rebalance", member_id)
    if update.classic is None and after.state is MemberState.UNREVOKED_PARTITIONS:
        decision.arm(timer, max(draft.member(member_id).rebalance_timeout_ms, 0))
    else:
        decision.disarm(timer)
    update.current = after
