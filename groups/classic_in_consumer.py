"""Members of the classic protocol in a consumer group: JoinGroup, SyncGroup, Heartbeat, LeaveGroup.

Such a group has no leader. A JoinGroup takes the same steps as a heartbeat of the consumer
protocol. The generation in the response is the member epoch, and SyncGroup returns the broker's
assignment, encoded as a ``ConsumerProtocolAssignment``.

Source: Kafka's ``GroupMetadataManager`` (classicGroup{Join,Sync,Heartbeat,Leave}ToConsumerGroup).
"""

from __future__ import annotations

from fencepost.groups import consumer_records as cr
from fencepost.groups.assignors.client.model import Subscription
from fencepost.groups.assignors.client.protocol import (
    decode_subscription,
    encode_assignment,
    version_of,
)
from fencepost.groups.classic_group import CONSUMER_PROTOCOL_TYPE
from fencepost.groups.commands import (
    Heartbeat,
    HeartbeatResult,
    JoinGroup,
    JoinGroupResult,
    LeaveGroup,
    LeaveGroupResult,
    LeavingMember,
    SyncGroup,
    SyncGroupResult,
)
from fencepost.groups.consumer_commands import (
    JOIN_EPOCH,
    ConsumerHeartbeat,
    ConsumerSettings,
    MigrationPolicy,
)
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.groups.consumer_members import remove_members
from fencepost.groups.consumer_target import GroupDraft, is_early
from fencepost.groups.conversion import convert_to_classic_group, ids_of, may_downgrade, named
from fencepost.groups.errors import (
    GroupError,
    GroupMaxSizeReachedError,
    IllegalGenerationError,
    InconsistentGroupProtocolError,
    MemberIdRequiredError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from fencepost.groups.events import EventKind
from fencepost.groups.group import pending_bytes
from fencepost.groups.member_update import (
    MemberUpdate,
    change_group,
    move_member,
    reconcile_member,
    require_owner,
    require_small,
    save_soft_state,
    take_over,
)
from fencepost.groups.reconcile import MemberState
from fencepost.groups.shard import Shard
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.machine import DecisionBuilder, DomainError, Token
from fencepost.logcore.tracebacks import without_traceback

# --- JoinGroup -----------------------------------------------------------------------------------


def join_group(
    shard: Shard, decision: DecisionBuilder, group: ConsumerGroup, token: Token, command: JoinGroup
) -> None:
    """Decide on a JoinGroup to a consumer group with members, and answer it at once.

    Raises a :class:`fencepost.groups.errors.GroupError` before any change.
    """
    settings = shard.environment(command.group_id).settings
    if settings.migration_policy is MigrationPolicy.DISABLED:
        raise InconsistentGroupProtocolError(
            f"Cannot join the consumer group {group.group_id} with the classic protocol because the"
            " group migration is disabled."
        )
    owner = group.owner_of(command.group_instance_id)
    is_known = owner is not None or command.member_id in group.members
    if not is_known and len(group.members) >= settings.max_size:
        raise GroupMaxSizeReachedError(f"group {group.group_id!r} is full")
    names = [name for name, _ in command.protocols]
    if not group.supports_classic(command.protocol_type, names):
        raise InconsistentGroupProtocolError(f"no protocol suits group {group.group_id!r}")
    is_new, instance_id = not command.member_id, command.group_instance_id
    if is_new and instance_id is None and command.require_known_member_id:
        group_id, member_id = group.group_id, command.new_member_id
        shard.require_memory(group_id, pending_bytes(group_id, member_id))
        shard.reserve_member_id(group_id, member_id)
        decision.reply(token, MemberIdRequiredError(command.new_member_id))
        return
    update = _update_of(shard, group, command, settings)
    if instance_id is not None and not is_new:
        require_owner(instance_id, command.member_id, owner)
    elif owner is not None:
        take_over(decision, update, owner)
    change_group(shard, decision, update)
    if owner is None or not _replace_last(shard, decision, update, owner):
        move_member(shard, decision, update)
        require_small(shard, decision)
        save_soft_state(decision, update)
        timer = group.timer("session", update.member_id)
        decision.arm(timer, command.session_timeout_ms)
        group.expect_sync(decision, update.member_id, update.command.rebalance_timeout_ms)
    shard.release_member_id(group.group_id, update.member_id)
    protocol_name = command.protocols[0][0]
    decision.reply(
        token,
        JoinGroupResult(
            update.member_id,
            update.current.member_epoch,
            CONSUMER_PROTOCOL_TYPE,
            protocol_name,
            leader="",
        ),
    )


def _update_of(
    shard: Shard, group: ConsumerGroup, command: JoinGroup, settings: ConsumerSettings
) -> MemberUpdate:
    """Translate the JoinGroup to a heartbeat of the consumer protocol."""
    subscription = _subscription(command)
    topics = shard.environment(command.group_id).topics
    owned: dict[bytes, tuple[int, ...]] = {}
    for topic_id, index in ids_of(subscription.owned, topics):
        owned[topic_id] = (*owned.get(topic_id, ()), index)
    shard.require_small_subscription(subscription.topics, subscription.rack_id)
    member_id, rebalance_ms = command.member_id, command.rebalance_timeout_ms
    is_known = member_id in group.members or (group.group_id, member_id) in shard.pending_member_ids
    if member_id and subscription.owned and not is_known:
        # The member was removed while it rebalanced, and still reads partitions that others may own
        # now. (A member without partitions may be a pending member that was evicted.)
        raise UnknownMemberIdError(f"{member_id!r} was removed; what it owns is lost")
    heartbeat = ConsumerHeartbeat(
        group_id=group.group_id,
        member_id=member_id or command.new_member_id,
        member_epoch=JOIN_EPOCH,
        client_id=command.client_id,
        client_host=command.client_host,
        instance_id=command.group_instance_id,
        rack_id=subscription.rack_id,
        # JoinGroup v0 has no rebalance timeout: the session timeout serves as both.
        rebalance_timeout_ms=command.session_timeout_ms if rebalance_ms < 0 else rebalance_ms,
        subscribed_topic_names=subscription.topics,
        subscribed_topic_regex="",
        owned=tuple(owned.items()),
        visibility=command.visibility,
    )
    member, current = group.members.get(heartbeat.member_id), group.current(heartbeat.member_id)
    draft = GroupDraft.of(group, topics)
    classic = cr.ClassicMemberMetadata(command.session_timeout_ms, command.protocols)
    return MemberUpdate(
        heartbeat, settings, group, draft, heartbeat.member_id, member, current, classic
    )


def _subscription(command: JoinGroup) -> Subscription:
    """Decode the first protocol's metadata; a consumer's other protocols contain the same."""
    try:
        return decode_subscription(command.protocols[0][1])
    except CorruptRecordError as error:
        raise InconsistentGroupProtocolError(f"a subscription can't be read: {error}") from error


def _replace_last(
    shard: Shard, decision: DecisionBuilder, update: MemberUpdate, owner: str
) -> bool:
    """Convert the group if only ``owner`` speaks the consumer protocol.

    Return whether the group was converted.
    """
    group = update.group
    if group.members[owner].classic is not None or not may_downgrade(
        shard, group, [owner], joining=1
    ):
        return False
    if not update.needs_target:
        reconcile_member(decision, update)
    why = None
    # Only a rebalance gives waiting members the partitions that are free or must be revoked.
    if not _is_reconciled(update, owner):
        why = f"the group became classic; {update.member_id}: took the place of {owner}"
    require_small(shard, decision)
    value = update.draft.member(update.member_id)
    joining = (update.member_id, value, owner)
    return convert_to_classic_group(shard, decision, group, (), joining, rebalance_reason=why)


def _is_reconciled(update: MemberUpdate, replaced: str) -> bool:
    """Whether all members, and the successor of ``replaced``, have reached their newest targets."""
    group, epoch = update.group, update.draft.epoch.epoch
    currents = [group.current(name) for name in group.members if name != replaced]
    return not update.needs_target and all(
        current.is_reconciled_to(epoch) for current in (*currents, update.current)
    )


# --- SyncGroup and Heartbeat ---------------------------------------------------------------------


def sync_group(
    shard: Shard, decision: DecisionBuilder, group: ConsumerGroup, token: Token, command: SyncGroup
) -> None:
    """Return a classic member's assignment. Raises a GroupError before any change."""
    member_id = command.member_id
    classic = _classic_member(group, member_id, command.group_instance_id, command.generation_id)
    first_name, first_metadata = classic.protocols[0]
    for reported, stored in (
        (command.protocol_type, CONSUMER_PROTOCOL_TYPE),
        (command.protocol_name, first_name),
    ):
        if reported is not None and reported != stored:
            raise InconsistentGroupProtocolError(f"{reported!r} is not the member's {stored!r}")
    current = group.current(member_id)
    may_move = _may_move(shard, decision, group, member_id)
    if may_move and current.state is not MemberState.UNREVOKED_PARTITIONS:
        group.expect_join(decision, member_id)
        decision.reply(token, RebalanceInProgressError("the group rebalances; rejoin"))
        return
    group.stop_waiting(decision, member_id)
    decision.arm(group.timer("session", member_id), classic.session_timeout_ms)
    partitions = named(current.assigned, shard.environment(group.group_id).topics)
    assignment = encode_assignment(partitions, version=version_of(first_metadata))
    decision.reply(token, SyncGroupResult(command.protocol_type, command.protocol_name, assignment))


def heartbeat(
    shard: Shard, decision: DecisionBuilder, group: ConsumerGroup, token: Token, command: Heartbeat
) -> None:
    """Renew a classic member's session, and tell it to rejoin when its assignment changes.

    The member must rejoin when the group has a newer epoch, when it must revoke partitions, and
    when all partitions that it waits for are free.
    """
    member_id = command.member_id
    classic = _classic_member(group, member_id, command.group_instance_id, command.generation_id)
    decision.arm(group.timer("session", member_id), classic.session_timeout_ms)
    current = group.current(member_id)
    is_free = current.state is MemberState.UNRELEASED_PARTITIONS and not (
        group.waits_for_partitions(member_id)
    )
    is_unrevoked = current.state is MemberState.UNREVOKED_PARTITIONS
    if is_unrevoked or is_free or _may_move(shard, decision, group, member_id):
        group.expect_join(decision, member_id)
        decision.reply(token, RebalanceInProgressError("the group rebalances; rejoin"))
    else:
        decision.reply(token, HeartbeatResult())


def _may_move(
    shard: Shard, decision: DecisionBuilder, group: ConsumerGroup, member_id: str
) -> bool:
    """Whether a JoinGroup now would move the member to a newer epoch."""
    epoch, assignment = group.current(member_id).member_epoch, group.saved_assignment
    if assignment is None or epoch < assignment.epoch or epoch == group.epoch:
        return epoch < group.epoch
    # Before the next target may be computed, a client that is told to rejoin would rejoin in a
    # loop.
    settings = shard.environment(group.group_id).settings
    return not is_early(assignment, settings.assignment_interval_ms, decision.now_ms)


def _classic_member(
    group: ConsumerGroup, member_id: str, instance_id: str | None, generation_id: int
) -> cr.ClassicMemberMetadata:
    if instance_id is not None:
        require_owner(instance_id, member_id, group.static_members.get(instance_id))
    member = group.members.get(member_id)
    if member is None or member.classic is None:
        raise UnknownMemberIdError(f"{member_id!r} is not a classic member of {group.group_id!r}")
    epoch = group.current(member_id).member_epoch
    if generation_id != epoch:
        raise IllegalGenerationError(f"generation {generation_id} is not the member's {epoch}")
    return member.classic


# --- LeaveGroup ----------------------------------------------------------------------------------


def leave_group(
    shard: Shard, decision: DecisionBuilder, group: ConsumerGroup, token: Token, command: LeaveGroup
) -> None:
    """Remove members of either protocol; the group epoch is bumped once."""
    results: list[tuple[str, str | None, DomainError | None]] = []
    departed: dict[str, str] = {}
    for leaving in command.members:
        error_of_member: GroupError | None = None
        try:
            member_id = _leaving(group, leaving)
        except GroupError as error:
            error_of_member = without_traceback(error)
        else:
            reason = leaving.reason[: shard.limits.max_reason_chars] or "LeaveGroup"
            departed.setdefault(member_id, reason)
        results.append((leaving.member_id, leaving.group_instance_id, error_of_member))
    if departed:
        reasons = "; ".join(dict.fromkeys(departed.values()))[: shard.limits.max_reason_chars]
        remove_members(shard, decision, group, list(departed), EventKind.MEMBER_LEFT, reasons)
    decision.reply(token, LeaveGroupResult(tuple(results)))


def _leaving(group: ConsumerGroup, leaving: LeavingMember) -> str:
    member_id, instance_id = leaving.member_id, leaving.group_instance_id
    if instance_id is not None:
        owner = group.static_members.get(instance_id)
        require_owner(instance_id, member_id or owner or "", owner)
        return owner or ""
    if member_id not in group.members:
        raise UnknownMemberIdError(f"group {group.group_id!r} has no member {member_id!r}")
    return member_id
