"""Leader elections that a client requests, and periodic elections by the controller.

Source: ``ReplicationControlManager.electLeaders``/``maybeBalancePartitionLeaders``/
``maybeElectUncleanLeaders``; KIP-460.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from uuid import UUID

from fencepost.cluster.controller.errors import (
    ElectionNotNeededError,
    EligibleLeadersNotAvailableError,
    PreferredLeaderNotAvailableError,
    UnknownTopicOrPartitionError,
)
from fencepost.cluster.controller.outcome import ControllerResult, PartitionChange, events_of
from fencepost.cluster.controller.partition_change import Election
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.image import NEVER_LED, PartitionRegistration
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback

Partition = tuple[str, int]
"""A topic's name and an index."""


def elect_leaders(
    view: ControllerView, election: Election, partitions: Sequence[Partition] | None
) -> ControllerResult[list[tuple[Partition, DomainError | None]]]:
    """Hold the election, PREFERRED or UNCLEAN, for each partition; None means all.

    If ``partitions`` is None, the answer omits partitions that need no election.
    """
    requested = (
        [(topic.name, index) for topic, index, _ in view.partitions()]
        if partitions is None
        else partitions
    )
    answers: list[tuple[Partition, DomainError | None]] = []
    changes: list[PartitionChange] = []
    for topic, index in requested:
        try:
            changes += _elect(view, topic, index, election, "ElectLeaders")
        except ElectionNotNeededError as error:
            if partitions is not None:
                answers.append(((topic, index), without_traceback(error)))
        except DomainError as error:
            answers.append(((topic, index), without_traceback(error)))
        else:
            answers.append(((topic, index), None))
    return ControllerResult(
        answers, tuple(change.record for change in changes), events=tuple(events_of(changes))
    )


def _elect(
    view: ControllerView, name: str, index: int, election: Election, cause: str
) -> list[PartitionChange]:
    topic = view.image.topics.get(name)
    if topic is None or not 0 <= index < len(topic.partitions):
        # The message omits the name: it may be long, and a request may name thousands of
        # partitions.
        raise UnknownTopicOrPartitionError(f"there is no partition {index} of this topic")
    partition = topic.partitions[index]
    is_preferred = election is Election.PREFERRED
    if _has_preferred_leader(partition) if is_preferred else partition.leader >= 0:
        raise ElectionNotNeededError("Leader election not needed for topic partition.")
    change = view.change(topic, index)
    change.election = election
    changes = view.changed(topic, change, cause)
    if not changes:
        if is_preferred:
            raise PreferredLeaderNotAvailableError("The preferred leader was not available.")
        raise EligibleLeadersNotAvailableError(
            "Eligible topic partition leaders are not available."
        )
    return changes


def _has_preferred_leader(partition: PartitionRegistration) -> bool:
    return partition.leader == partition.replicas[0]


def balance_leaders(view: ControllerView) -> ControllerResult[bool]:
    """Elect the preferred leader of each partition that it does not lead at present.

    With ``leader_imbalance_percentage``, the partitions that have the same preferred leader are
    skipped if the broker already leads all but at most this percentage of them. The answer says
    whether elections may remain.

    Source: ``KafkaController.checkAndTriggerAutoLeaderRebalance``.
    """
    balanced = _balanced_brokers(view)
    return _elected_in_turn(
        view,
        (
            (topic.name, index)
            for topic, index, partition in view.partitions()
            if not _has_preferred_leader(partition) and partition.replicas[0] not in balanced
        ),
        Election.PREFERRED,
        "the preferred leader was not leading",
    )


def _balanced_brokers(view: ControllerView) -> set[int]:
    """Return the brokers that lead enough of the partitions whose preferred leaders they are."""
    percentage = view.settings.leader_imbalance_percentage
    if percentage is None:
        return set()
    preferred, led_by_others = Counter[int](), Counter[int]()
    for _, _, partition in view.partitions():
        preferred[partition.replicas[0]] += 1
        led_by_others[partition.replicas[0]] += not _has_preferred_leader(partition)
    return {
        broker
        for broker, count in preferred.items()
        if led_by_others[broker] * 100 <= percentage * count
    }


def elect_unclean_leaders(view: ControllerView) -> ControllerResult[bool]:
    """Elect leaders for leaderless partitions whose topics allow an unclean election.

    The answer says whether elections may remain.
    """
    return _elected_in_turn(
        view,
        (
            (topic.name, index)
            for topic, index, partition in view.partitions()
            if partition.leader < 0 and view.allows_unclean_election(topic.name)
        ),
        Election.UNCLEAN,
        "the partition had no leader, and the topic allows an unclean election",
    )


def elect_first_leaders(view: ControllerView, topic_id: UUID) -> ControllerResult[bool]:
    """Elect the first leaders of partitions that another program has assigned (ZooKeeper).

    Partitions without an active replica are left without a leader. The answer says whether
    elections may remain.

    Source: ``PartitionStateMachine.initializeLeaderAndIsrForPartitions``.
    """
    topic, most = view.image.topics_by_id.get(topic_id), view.settings.max_elections
    if topic is None:
        return ControllerResult(False)
    partitions = enumerate(topic.partitions)
    waiting = (
        (topic, index) for index, partition in partitions if partition.partition_epoch == NEVER_LED
    )
    cause = "another program has assigned the partition"
    changes = view.leader_and_isr_updates(waiting, cause, at_most=most)
    return _result_of(changes, is_more=len(changes) == most)


def elect_restarted_leaders(
    view: ControllerView, partitions: Sequence[Partition]
) -> ControllerResult[bool]:
    """Hold an election for partitions whose leaders have restarted unnoticed (ZooKeeper).

    The same broker may win, but in a new leader epoch. The broker may have lost records that its
    followers still have. If it wrote other records at the same offsets in the former leader epoch,
    no replica would notice the difference.
    """
    changes: list[PartitionChange] = []
    for name, index in partitions:
        topic = view.image.topics.get(name)
        if topic is None:
            continue
        change = view.change(topic, index)
        change.always_writes = True
        changes += view.changed(topic, change, "the leader restarted while there was no controller")
    return _result_of(changes, is_more=False)


def _elected_in_turn(
    view: ControllerView, partitions: Iterator[Partition], election: Election, cause: str
) -> ControllerResult[bool]:
    changes: list[PartitionChange] = []
    for topic, index in partitions:
        if len(changes) >= view.settings.max_elections:
            break
        try:
            changes += _elect(view, topic, index, election, cause)
        except DomainError:
            continue
    return _result_of(changes, is_more=len(changes) >= view.settings.max_elections)


def _result_of(changes: Sequence[PartitionChange], *, is_more: bool) -> ControllerResult[bool]:
    records = tuple(change.record for change in changes)
    return ControllerResult(is_more, records, events=tuple(events_of(changes)))
