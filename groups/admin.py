"""DescribeGroups, ConsumerGroupDescribe, ListGroups and DeleteGroups.

Source: the methods for these requests in Kafka's ``GroupMetadataManager`` and
``GroupCoordinatorShard``.
"""

from __future__ import annotations

from collections.abc import Iterable

from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.classic_state import ClassicState
from fencepost.groups.commands import (
    DeleteGroup,
    DeleteGroupResult,
    DescribedMember,
    DescribeGroup,
    DescribeGroupResult,
    ListGroups,
    ListGroupsResult,
)
from fencepost.groups.consumer_commands import (
    DescribeConsumerGroup,
    DescribeConsumerGroupResult,
    DescribedConsumer,
    NamedPartitions,
)
from fencepost.groups.consumer_group import ConsumerGroup, by_topic
from fencepost.groups.consumer_target import preferred_assignor
from fencepost.groups.errors import InvalidGroupIdError, NonEmptyGroupError
from fencepost.groups.foreign_group import ForeignGroup
from fencepost.groups.group import not_found
from fencepost.groups.offsets import delete_all_offsets, tombstone_group
from fencepost.groups.reconcile import TopicIdPartition
from fencepost.groups.shard import Shard
from fencepost.logcore.machine import DecisionBuilder, Token


def describe_group(
    shard: Shard, decision: DecisionBuilder, token: Token, command: DescribeGroup
) -> None:
    """Describe a classic group.

    Metadata and protocol are returned only for a Stable group. Assignments are returned in every
    state, as in Kafka: during a rebalance they are the assignments of the previous generation.
    """
    group = shard.groups.get(command.group_id)
    if not isinstance(group, ClassicGroup):
        raise not_found(group, command.group_id, "classic")
    stable = group.state is ClassicState.STABLE
    described = DescribeGroupResult(
        group_id=group.group_id,
        state=group.state_name,
        protocol_type=group.protocol_type or "",
        protocol_name=(group.protocol_name or "") if stable else "",
        members=tuple(
            DescribedMember(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                metadata=member.metadata(group.protocol_name) if stable else b"",
                assignment=member.assignment,
            )
            for member in group.members.values()
        ),
    )
    decision.reply(token, described)


def describe_consumer_group(
    shard: Shard, decision: DecisionBuilder, token: Token, command: DescribeConsumerGroup
) -> None:
    """Describe a consumer group; assignments omit topics without a known name."""
    if not command.group_id:
        raise InvalidGroupIdError("the group id is empty")
    group = shard.groups.get(command.group_id)
    if not isinstance(group, ConsumerGroup):
        raise not_found(group, command.group_id, "consumer")
    environment = shard.environment(command.group_id)
    names = environment.topics.names()

    def named(partitions: Iterable[TopicIdPartition]) -> tuple[NamedPartitions, ...]:
        return tuple(
            NamedPartitions(topic_id, names[topic_id], indexes)
            for topic_id, indexes in by_topic(partitions)
            if topic_id in names
        )

    described = DescribeConsumerGroupResult(
        group_id=group.group_id,
        state=group.state_name,
        group_epoch=group.epoch,
        assignment_epoch=group.assignment_epoch,
        assignor_name=preferred_assignor(group.members, environment.settings).name,
        members=tuple(
            DescribedConsumer(
                member_id,
                member,
                group.current(member_id).member_epoch,
                assignment=named(group.current(member_id).held),
                target_assignment=named(group.targets.get(member_id, ())),
            )
            for member_id, member in sorted(group.members.items(), key=lambda item: item[0])
        ),
    )
    decision.reply(token, described)


def list_groups(shard: Shard, decision: DecisionBuilder, token: Token, command: ListGroups) -> None:
    """List groups of all types; filters ignore case, and an empty filter matches all groups."""
    states = {state.lower() for state in command.states}
    types = {name.lower() for name in command.types}
    listed = (group.as_listed_group() for group in shard.groups.values())
    groups = (
        item
        for item in listed
        if (not states or item.state.lower() in states)
        and (not types or item.group_type.lower() in types)
    )
    in_order = sorted(groups, key=lambda item: item.group_id)
    decision.reply(token, ListGroupsResult(tuple(in_order)))


def delete_group(
    shard: Shard, decision: DecisionBuilder, token: Token, command: DeleteGroup
) -> None:
    """Delete an empty group with all its offsets, pending ones included."""
    group = shard.groups.get(command.group_id)
    if group is None:
        raise not_found(group, command.group_id)
    if not group.is_empty:
        raise NonEmptyGroupError(f"group {command.group_id!r} has members")
    if isinstance(group, ForeignGroup):
        raise group.not_served()
    delete_all_offsets(shard, decision, command.group_id)
    tombstone_group(decision, group, "DeleteGroups")
    decision.reply(token, DeleteGroupResult())
