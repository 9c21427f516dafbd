"""A consumer group's epoch and its target assignment: when they change, and their new values.

Source: Kafka's ``GroupMetadataManager`` (updateSubscriptionMetadata, updateTargetAssignment),
``TargetAssignmentBuilder`` and ``Utils.computeGroupHash``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fencepost.groups import consumer_records as cr
from fencepost.groups.assignors.model import (
    Assignor,
    AssignorFault,
    GroupSpec,
    MemberSpec,
    checked,
    run,
)
from fencepost.groups.assignors.remote import (
    RETRY_MS,
    ComputeTarget,
    RemoteAssignor,
    TargetComputed,
    valid_targets,
)
from fencepost.groups.commands import TopicVisibility
from fencepost.groups.consumer_commands import ConsumerSettings, TopicsImage
from fencepost.groups.consumer_group import (
    INITIAL_EPOCH,
    ConsumerGroup,
    by_topic,
    topics_of,
)
from fencepost.groups.consumer_records import ConsumerRecordType as Kind
from fencepost.groups.events import EventKind
from fencepost.groups.reconcile import Target, TopicIdPartition
from fencepost.groups.regex import RegexScan
from fencepost.groups.shard import Shard
from fencepost.groups.subscriptions import Subscriptions
from fencepost.groups.topic_hash import group_hash, topic_hash
from fencepost.logcore.machine import DecisionBuilder, Token
from fencepost.logcore.values import dataclass


@dataclass(slots=True)
class GroupDraft:
    """The state that a group will have once the decision's records are replayed.

    Members are not copied, because each join makes a draft and a group may be large.
    """

    group: ConsumerGroup
    topics: TopicsImage
    changed: dict[str, cr.ConsumerMemberValue | None]
    """Members with a changed record; None for removed ones."""
    subscriptions: Subscriptions
    targets: Mapping[str, frozenset[TopicIdPartition]]
    regexes: dict[str, cr.RegularExpressionValue]
    epoch: cr.GroupEpochValue
    assignment: cr.AssignmentEpochValue | None
    checked_version: int | None
    regexes_version: tuple[int, int] | None
    regexes_checked_ms: int | None
    refused_regexes: dict[str, str]
    scan: RegexScan | None
    visibility: TopicVisibility | None

    @classmethod
    def of(cls, group: ConsumerGroup, topics: TopicsImage) -> GroupDraft:
        """Return a draft of the group's current state."""
        return cls(
            group,
            topics,
            {},
            group.subscriptions.copy(),
            group.targets,
            dict(group.regexes),
            group.saved_epoch or cr.GroupEpochValue(INITIAL_EPOCH),
            group.saved_assignment,
            group.checked_version,
            group.regexes_version,
            group.regexes_checked_ms,
            dict(group.refused_regexes),
            group.scan,
            group.visibility,
        )

    def save_soft_state(self) -> None:
        """Update the group's soft state, once the request can no longer be refused."""
        group = self.group
        group.checked_version = self.checked_version
        group.regexes_version = self.regexes_version
        group.regexes_checked_ms = self.regexes_checked_ms
        group.refused_regexes = self.refused_regexes
        group.scan = self.scan
        group.visibility = self.visibility

    def put(self, member_id: str, value: cr.ConsumerMemberValue | None) -> None:
        """Set a member's record; None removes the member."""
        self.subscriptions.change(self._member_value(member_id), value)
        self.changed[member_id] = value

    def member(self, member_id: str) -> cr.ConsumerMemberValue:
        """Return a member's record. Raises KeyError if it does not exist."""
        value = self._member_value(member_id)
        if value is None:
            raise KeyError(member_id)
        return value

    def _member_value(self, member_id: str) -> cr.ConsumerMemberValue | None:
        members = self.group.members
        return self.changed.get(member_id, members.get(member_id))

    def members(self) -> dict[str, cr.ConsumerMemberValue]:
        """Return all members."""
        merged = {**self.group.members, **self.changed}
        return {name: value for name, value in merged.items() if value is not None}

    def topic_ids_of(self, member: cr.ConsumerMemberValue) -> frozenset[bytes]:
        """Return the ids of the existing topics that a member subscribes to."""
        topics = self.topics.topics
        names = topics_of(member, self.regexes)
        return frozenset(topics[name][0] for name in names if name in topics)

    def target(self, member_id: str) -> Target:
        """Return a member's target."""
        epoch = 0 if self.assignment is None else self.assignment.epoch
        return Target(epoch, self.targets.get(member_id, frozenset()))


# --- the group epoch -----------------------------------------------------------------------------


def metadata_hash(topics: TopicsImage, names: frozenset[str]) -> int:
    """Return Kafka's hash of the existing topics among ``names``; 0 for none."""
    topics_by_name = topics.topics
    return group_hash(
        (name, topic_hash(name, *topics_by_name[name], topics.racks_of(name)))
        for name in names & topics_by_name.keys()
    )


def bump_epoch(
    decision: DecisionBuilder, draft: GroupDraft, reasons: list[str], **cause: object
) -> None:
    """Bump the group epoch if there is a reason, or if the subscribed topics changed.

    ``cause`` has the event's fields about the member whose heartbeat bumps the epoch.
    """
    group = draft.group
    if not reasons and draft.checked_version == draft.topics.version:
        return
    fresh_hash = metadata_hash(draft.topics, draft.subscriptions.topics(draft.regexes))
    draft.checked_version = draft.topics.version
    if not reasons and fresh_hash == draft.epoch.metadata_hash:
        return
    if not reasons:
        reasons.append("subscribed topics changed")
    fresh = cr.GroupEpochValue(draft.epoch.epoch + 1, fresh_hash)
    write_epoch(decision, group, draft.epoch.epoch, fresh, "; ".join(reasons), **cause)
    draft.epoch = fresh


def write_epoch(
    decision: DecisionBuilder,
    group: ConsumerGroup,
    former: int,
    fresh: cr.GroupEpochValue,
    reason: str,
    **cause: object,
) -> None:
    """Append the record of a new group epoch, and an event with the reason."""
    if group.has_partition_metadata:
        decision.append(cr.tombstone(Kind.PARTITION_METADATA, group.group_id))
    decision.append(cr.group_epoch(group.group_id, fresh))
    decision.event(
        EventKind.GROUP_EPOCH_BUMPED,
        group.group_id,
        old_epoch=former,
        epoch=fresh.epoch,
        reason=reason,
        **cause,
    )


# --- the target ----------------------------------------------------------------------------------


def update_target(
    shard: Shard, decision: DecisionBuilder, draft: GroupDraft, settings: ConsumerSettings
) -> None:
    """Compute the target of the newest group epoch, unless the last computation is too recent."""
    assignment = draft.assignment
    if assignment is not None:
        if assignment.epoch >= draft.epoch.epoch:
            _retry_remote(shard, decision, draft, settings)
            return
        if is_early(assignment, settings.assignment_interval_ms, decision.now_ms):
            return
    members = draft.members()
    assignor = preferred_assignor(members, settings)
    spec = _spec(draft, members)
    if isinstance(assignor, RemoteAssignor):
        targets = _compute_remotely(shard, decision, draft, assignor, spec)
    else:
        targets = run(assignor, spec)
    _write_target(decision, draft, assignor.name, targets)


def is_early(assignment: cr.AssignmentEpochValue, interval_ms: int, now_ms: int) -> bool:
    """Whether the last computation is too recent for another one."""
    # A wall clock may go back; then the last computation lies in the future.
    return 0 <= now_ms - assignment.timestamp_ms < interval_ms


def _write_target(
    decision: DecisionBuilder,
    draft: GroupDraft,
    assignor: str,
    targets: dict[str, frozenset[TopicIdPartition]],
) -> None:
    """Append the target of the draft's epoch."""
    group_id = draft.group.group_id
    for member_id, target in targets.items():
        if draft.targets.get(member_id) != target:
            value = cr.TargetAssignmentValue(by_topic(target))
            decision.append(cr.target_assignment(group_id, member_id, value))
    draft.targets = targets
    draft.assignment = cr.AssignmentEpochValue(draft.epoch.epoch, decision.now_ms)
    decision.append(cr.assignment_epoch(group_id, draft.assignment))
    decision.event(
        EventKind.TARGET_ASSIGNED,
        group_id,
        epoch=draft.epoch.epoch,
        assignor=assignor,
        members=len(targets),
        partitions=sum(len(target) for target in targets.values()),
    )


# --- remote assignors ----------------------------------------------------------------------------


def _compute_remotely(
    shard: Shard,
    decision: DecisionBuilder,
    draft: GroupDraft,
    assignor: RemoteAssignor,
    spec: GroupSpec,
) -> dict[str, frozenset[TopicIdPartition]]:
    """Request a target; return the partitions that members keep until it arrives."""
    held = valid_targets(spec)
    members = {name: replace(spec.members[name], assigned=mine) for name, mine in held.items()}
    group_id = draft.group.group_id
    request = GroupSpec(members, spec.partition_counts)
    decision.effect(ComputeTarget(group_id, assignor.name, request))
    shard.note_assignor_request(group_id, assignor.name, decision.now_ms)
    decision.arm(draft.group.timer("assignor"), RETRY_MS)
    return held


def _retry_remote(
    shard: Shard, decision: DecisionBuilder, draft: GroupDraft, settings: ConsumerSettings
) -> None:
    """Repeat a request that failed, or that was lost when the shard was reloaded."""
    if not settings.assignors.has_remote:
        return
    members = draft.members()
    assignor = preferred_assignor(members, settings)
    group_id = draft.group.group_id
    if isinstance(assignor, RemoteAssignor) and shard.may_request_assignor(
        group_id, assignor.name, decision.now_ms
    ):
        _compute_remotely(shard, decision, draft, assignor, _spec(draft, members))


def assignor_timer_fired(shard: Shard, decision: DecisionBuilder, group: ConsumerGroup) -> None:
    """Repeat a request without a response, even without heartbeats."""
    # After a change of the group, the next heartbeat requests the target.
    if group.members and group.assignment_epoch >= group.epoch:
        environment = shard.environment(group.group_id)
        draft = GroupDraft.of(group, environment.topics)
        _retry_remote(shard, decision, draft, environment.settings)


def target_computed(
    shard: Shard, decision: DecisionBuilder, _token: Token, command: TargetComputed
) -> None:
    """Apply the response of a remote assignor: a new epoch with its target.

    If an assignor fails, Kafka answers UNKNOWN_SERVER_ERROR to the heartbeat that needs the target,
    and to all later heartbeats, which ends Java's consumers. Here the group keeps its target.
    """
    group, environment = shard.groups.get(command.group_id), shard.environment(command.group_id)
    settings = environment.settings
    if not isinstance(group, ConsumerGroup) or command.assignor not in settings.assignors:
        return
    targets, problem = None, command.problem
    if command.result is not None:
        try:
            targets = checked(command.assignor, command.group, command.result)
        except AssignorFault as fault:
            problem = fault.problem
    if targets is None:
        decision.event(
            EventKind.ASSIGNOR_FAILED,
            group.group_id,
            assignor=command.assignor,
            cause=problem,
            epoch=group.epoch,
        )
        return
    if not group.members:
        return
    draft = GroupDraft.of(group, environment.topics)
    members = draft.members()
    assignor = preferred_assignor(members, settings)
    if assignor.name != command.assignor or _spec(draft, members) != command.group:
        return
    if isinstance(assignor, RemoteAssignor):
        shard.mark_answered(group.group_id, assignor.name)
        decision.disarm(group.timer("assignor"))
    if targets == draft.targets:
        return
    reason = f"assignor {command.assignor!r} answered"
    fresh = cr.GroupEpochValue(draft.epoch.epoch + 1, draft.epoch.metadata_hash)
    write_epoch(decision, group, draft.epoch.epoch, fresh, reason, assignor=command.assignor)
    draft.epoch = fresh
    _write_target(decision, draft, command.assignor, targets)


def _spec(draft: GroupDraft, members: Mapping[str, cr.ConsumerMemberValue]) -> GroupSpec:
    specs: dict[str, MemberSpec] = {}
    # In a large group, most members have the same subscription.
    ids_by_subscription: dict[tuple[tuple[str, ...], str | None], frozenset[bytes]] = {}
    for member_id, member in members.items():
        subscription = member.subscribed_topic_names, member.subscribed_topic_regex
        topic_ids = ids_by_subscription.get(subscription)
        if topic_ids is None:
            topic_ids = ids_by_subscription[subscription] = draft.topic_ids_of(member)
        held = draft.targets.get(member_id, frozenset())
        specs[member_id] = MemberSpec(member.instance_id, topic_ids, held)
    subscribed = frozenset().union(*ids_by_subscription.values())
    counts = dict(draft.topics.topics.values())
    return GroupSpec(specs, {topic_id: counts[topic_id] for topic_id in subscribed})


def preferred_assignor(
    members: Mapping[str, cr.ConsumerMemberValue], settings: ConsumerSettings
) -> Assignor:
    """Return the assignor that most members name; the default on a tie, or if none is named."""
    assignors = settings.assignors
    votes = Counter(
        member.server_assignor
        for member in members.values()
        if member.server_assignor is not None and member.server_assignor in assignors
    )
    most = max(votes.values(), default=0)
    winners = [name for name, count in votes.items() if count == most]
    return assignors.get(winners[0]) if len(winners) == 1 else assignors.default
