"""Creation, growth and deletion of topics.

Source: ``ReplicationControlManager.createTopics``/``createPartitions``/``deleteTopics``,
``Topic.validate``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Final
from uuid import UUID

from fencepost.cluster.controller.configs import CheckConfigs
from fencepost.cluster.controller.errors import (
    InvalidConfigError,
    InvalidPartitionsError,
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    InvalidRequestError,
    InvalidTopicError,
    PolicyViolationError,
    TopicAlreadyExistsError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.placement import RandomSource, place
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.image import TOPIC_RESOURCE, BrokerRegistration, TopicImage
from fencepost.cluster.records import (
    ConfigRecord,
    MetadataRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from fencepost.cluster.topic_names import ChargeQuota, check_name, unlimited
from fencepost.cluster.topic_records import TopicRecords
from fencepost.logcore.machine import DomainError
from fencepost.logcore.steps import Steps, finish
from fencepost.logcore.values import dataclass

FROM_CONTROLLER: Final = -1
"""Stands for the number of partitions or replicas in the controller's configuration."""


NO_TOPIC: Final = UUID(int=0)


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create; ``assignment`` excludes ``partitions`` and ``replication_factor``."""

    name: str
    partitions: int = FROM_CONTROLLER
    replication_factor: int = FROM_CONTROLLER
    assignment: Sequence[tuple[int, Sequence[int]]] = ()
    """The brokers of each partition, in the order of the request."""
    configs: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    """The name, id and size of a new topic."""

    name: str
    topic_id: UUID
    partitions: int
    replication_factor: int


@dataclass(frozen=True, slots=True)
class PreparedPartitions:
    """New partitions that were placed and encoded in steps, before the decision.

    A decision runs in one turn of the event loop. Placing and encoding 10,000 partitions on 30
    brokers in that turn would stop the loop for half a second.
    """

    brokers: Mapping[int, BrokerRegistration]
    """The brokers on which the partitions were placed."""
    assignments: Sequence[tuple[int, ...]]
    records: TopicRecords

    def can_be_added(self, view: ControllerView, topic_id: UUID, first: int) -> bool:
        """Whether the partitions can still be added to the topic, from index ``first`` on."""
        position = self.records.topic_id, self.records.first
        return view.image.brokers is self.brokers and position == (topic_id, first)


def _check_new_name(view: ControllerView, name: str) -> None:
    image = view.image
    check_name(name)
    if name in view.settings.reserved_topics:
        raise InvalidTopicError(f"{name} is the broker's own")
    if name in image.topics:
        raise TopicAlreadyExistsError(f"Topic '{name}' already exists.")
    if "." in name or "_" in name:
        # Metric names have '_' in place of '.', so a.b and a_b would share their metrics.
        unified = name.replace(".", "_")
        for existing in image.topics:
            if existing.replace(".", "_") == unified:
                raise InvalidTopicError(f"Topic '{name}' collides with existing topic: {existing}")


# --- creating ---


def create_topic(
    view: ControllerView,
    topic: NewTopic,
    *,
    topic_id: UUID,
    draw: RandomSource,
    check_configs: CheckConfigs,
    charge: ChargeQuota = unlimited,
    validate_only: bool = False,
    prepared: PreparedPartitions | None = None,
) -> ControllerResult[CreatedTopic]:
    """Create a topic, or with ``validate_only`` only check that it could be created.

    ``draw`` chooses the brokers; ``prepared`` are the partitions, if :func:`prepare_topic` has
    placed them. ``charge`` charges the partitions to the quota, even with ``validate_only``, as
    in Kafka. Raises the errors of ``check_configs`` and ``charge``, InvalidTopicError,
    TopicAlreadyExistsError, InvalidConfigError, InvalidPartitionsError,
    InvalidReplicationFactorError, InvalidReplicaAssignmentError, InvalidRequestError,
    PolicyViolationError.
    """
    _check_new_name(view, topic.name)
    nulls = [name for name, value in topic.configs.items() if value is None]
    if nulls:
        raise InvalidConfigError(f"Null value not supported for topic configs: {','.join(nulls)}")
    configs = {name: value for name, value in topic.configs.items() if value is not None}
    check_configs(TOPIC_RESOURCE, topic.name, configs, {})
    if prepared is not None and not prepared.can_be_added(view, topic_id, 0):
        prepared = None
    if prepared is None:
        assignments = finish(_assignments(view, topic, draw))
    else:
        assignments = prepared.assignments
    check_partition_limit(view, 1, len(assignments))
    charge(len(assignments))
    created = CreatedTopic(topic.name, topic_id, len(assignments), len(assignments[0]))
    if validate_only:
        return ControllerResult(created)
    if prepared is None:
        records = finish(_records(view, topic_id, 0, assignments))
    else:
        records = prepared.records
    head = topic_head(topic.name, topic_id, topic.configs)
    return ControllerResult(created, records.with_head(head))


def create_internal_topic(
    view: ControllerView, topic: NewTopic, *, topic_id: UUID, draw: RandomSource
) -> ControllerResult[CreatedTopic | None]:
    """Create an internal topic; the answer is None if it exists already.

    Its settings come from the brokers' configuration, not from a request, so they are not checked.
    Raises InvalidReplicationFactorError, PolicyViolationError.

    Source: ``AutoTopicCreationManager.creatableTopic``.
    """
    if topic.name in view.image.topics:
        return ControllerResult(None)
    assignments = finish(_place_topic(view, topic, draw))
    check_partition_limit(view, 1, len(assignments))
    created = CreatedTopic(topic.name, topic_id, len(assignments), len(assignments[0]))
    records = finish(_records(view, topic_id, 0, assignments))
    head = topic_head(topic.name, topic_id, topic.configs)
    return ControllerResult(created, records.with_head(head))


def topic_head(
    name: str, topic_id: UUID, configs: Mapping[str, str | None]
) -> list[MetadataRecord]:
    """Return the records of a new topic that come before its PartitionRecords."""
    settings = [ConfigRecord(TOPIC_RESOURCE, name, key, value) for key, value in configs.items()]
    return [TopicRecord(name, topic_id), *settings]


def check_partition_limit(view: ControllerView, topics: int, partitions: int) -> None:
    """Raise PolicyViolationError if adding so many topics and partitions exceeds a limit."""
    image, settings = view.image, view.settings
    for key, amount, most in (
        ("fencepost.max.topics", len(image.topics) + topics, settings.max_topics),
        ("fencepost.max.partitions", image.partition_count + partitions, settings.max_partitions),
    ):
        if amount > most:
            raise PolicyViolationError(f"{amount} would exceed {key}={most}")


def check_request_size(view: ControllerView, partitions: int) -> None:
    """Raise PolicyViolationError if one request may not create that many partitions."""
    if partitions > view.settings.max_partitions_per_request:
        raise PolicyViolationError("Excessively large number of partitions per request.")


def prepare_topic(
    view: ControllerView, topic: NewTopic, *, topic_id: UUID, draw: RandomSource
) -> Steps[PreparedPartitions | None]:
    """Prepare the partitions of a topic for :func:`create_topic`.

    Returns None if the partitions cannot be placed. Then :func:`create_topic` raises the error,
    after its other checks.
    """
    try:
        assignments = yield from _assignments(view, topic, draw)
    except DomainError:
        return None
    return (yield from _prepare(view, topic_id, 0, assignments))


def _prepare(
    view: ControllerView, topic_id: UUID, first: int, assignments: Sequence[tuple[int, ...]]
) -> Steps[PreparedPartitions]:
    records = yield from _records(view, topic_id, first, assignments)
    yield from records.prepare()
    return PreparedPartitions(view.image.brokers, assignments, records)


def _assignments(
    view: ControllerView, topic: NewTopic, draw: RandomSource
) -> Steps[Sequence[tuple[int, ...]]]:
    of_topic = (
        _read_assignments(view, topic) if topic.assignment else _place_topic(view, topic, draw)
    )
    return (yield from of_topic)


def _read_assignments(view: ControllerView, topic: NewTopic) -> Steps[Sequence[tuple[int, ...]]]:
    if topic.replication_factor != FROM_CONTROLLER:
        raise InvalidRequestError(
            "A manual partition assignment was specified, but replication factor was not set to -1."
        )
    if topic.partitions != FROM_CONTROLLER:
        raise InvalidRequestError(
            "A manual partition assignment was specified, but numPartitions was not set to -1."
        )
    check_request_size(view, len(topic.assignment))
    by_index: dict[int, tuple[int, ...]] = {}
    factor: int | None = None
    for index, replicas in topic.assignment:
        if index in by_index:
            raise InvalidReplicaAssignmentError(
                f"Found multiple manual partition assignments for partition {index}"
            )
        by_index[index] = tuple(replicas)
        check_assignment(view, replicas, factor)
        factor = len(replicas)
        _check_has_leader(view, index, replicas)
        yield
    if sorted(by_index) != list(range(len(by_index))):
        raise InvalidReplicaAssignmentError(
            "partitions should be a consecutive 0-based integer sequence"
        )
    return [by_index[index] for index in range(len(by_index))]


def check_assignment(
    view: ControllerView,
    replicas: Sequence[int],
    factor: int | None = None,
    *,
    may_wait: bool = False,
) -> None:
    """Raise InvalidReplicaAssignmentError unless a partition can have exactly these replicas.

    ``factor`` is the replication factor of the other partitions. With ``may_wait``, brokers that
    are not registered yet are allowed.
    """
    if not replicas:
        raise InvalidReplicaAssignmentError(
            "The manual partition assignment includes an empty replica list."
        )
    former: int | None = None
    for broker in sorted(replicas):
        if broker not in view.image.brokers and not (may_wait and broker >= 0):
            raise InvalidReplicaAssignmentError(
                f"The manual partition assignment includes broker {broker}, but no such broker "
                "is registered."
            )
        if broker == former:
            raise InvalidReplicaAssignmentError(
                f"The manual partition assignment includes the broker {broker} more than once."
            )
        former = broker
    if factor is not None and len(replicas) != factor:
        raise InvalidReplicaAssignmentError(
            f"The manual partition assignment includes a partition with {len(replicas)} "
            "replica(s), but this is not consistent with previous partitions, which have "
            f"{factor} replica(s)."
        )


def _check_has_leader(view: ControllerView, index: int, replicas: Iterable[int]) -> None:
    if not any(view.is_active(replica) for replica in replicas):
        raise InvalidReplicaAssignmentError(
            f"All brokers specified in the manual partition assignment for partition {index} are "
            "fenced or in controlled shutdown."
        )


def _place_topic(
    view: ControllerView, topic: NewTopic, draw: RandomSource
) -> Steps[Sequence[tuple[int, ...]]]:
    factor, count = topic.replication_factor, topic.partitions
    if factor < FROM_CONTROLLER or factor == 0:
        raise InvalidReplicationFactorError(
            "Replication factor must be larger than 0, or -1 to use the default value."
        )
    if count < FROM_CONTROLLER or count == 0:
        raise InvalidPartitionsError(
            "Number of partitions was set to an invalid non-positive value."
        )
    if count == FROM_CONTROLLER:
        count = view.settings.num_partitions
    if factor == FROM_CONTROLLER:
        factor = view.settings.default_replication_factor
    check_request_size(view, count)
    return (yield from _placements(view, count, factor, draw))


def _placements(
    view: ControllerView, count: int, factor: int, draw: RandomSource
) -> Steps[Sequence[tuple[int, ...]]]:
    """Place replicas, and prefix the error of an impossible placement with Kafka's text."""
    try:
        return (yield from place(view, count, factor, draw))
    except InvalidReplicationFactorError as error:
        raise InvalidReplicationFactorError(
            f"Unable to replicate the partition {factor} time(s): {error}"
        ) from None


def partition_record(
    view: ControllerView, topic_id: UUID, index: int, replicas: tuple[int, ...]
) -> PartitionRecord:
    """Return a new partition's record: active replicas are in sync, and the first one leads."""
    isr = tuple(replica for replica in replicas if view.is_active(replica))
    return PartitionRecord(
        topic_id=topic_id,
        partition_id=index,
        replicas=replicas,
        isr=isr,
        removing_replicas=(),
        adding_replicas=(),
        leader=isr[0],
        leader_epoch=0,
        partition_epoch=0,
        directories=tuple(view.default_directory(replica) for replica in replicas),
    )


def _records(
    view: ControllerView,
    topic_id: UUID,
    first: int,
    assignments: Iterable[tuple[int, ...]],
) -> Steps[TopicRecords]:
    """Return the records of new partitions; see :class:`TopicRecords` for the shared form."""
    forms: dict[tuple[int, ...], PartitionRecord] = {}
    similar_forms = []
    for replicas in assignments:
        form = forms.get(replicas)
        if form is None:
            form = forms[replicas] = partition_record(view, NO_TOPIC, 0, replicas)
        similar_forms.append(form)
        yield
    return TopicRecords((), topic_id, first, similar_forms)


# --- growing and deleting ---


def create_partitions(
    view: ControllerView,
    name: str,
    count: int,
    *,
    assignments: Sequence[Sequence[int]] | None,
    draw: RandomSource,
    charge: ChargeQuota = unlimited,
    validate_only: bool = False,
    prepared: PreparedPartitions | None = None,
) -> ControllerResult[int]:
    """Give a topic ``count`` partitions in total; the answer is the number added.

    ``prepared`` are the new partitions, if :func:`prepare_partitions` has placed them. With
    ``validate_only`` none are added. Raises the errors of ``charge``, UnknownTopicOrPartitionError,
    InvalidTopicError, InvalidPartitionsError, InvalidReplicaAssignmentError,
    InvalidReplicationFactorError, PolicyViolationError.
    """
    topic = view.image.topics.get(name)
    if topic is None:
        raise UnknownTopicOrPartitionError("This server does not host this topic-partition.")
    # A group's or transactional id's partition is its hash modulo the number of partitions.
    if name in view.settings.internal_topics - view.settings.broker_topics:
        raise InvalidTopicError(f"the number of partitions of {name} is fixed")
    current = len(topic.partitions)
    if count == current:
        raise InvalidPartitionsError(f"Topic already has {count} partition(s).")
    if count < current:
        raise InvalidPartitionsError(
            f"The topic {name} currently has {current} partition(s); {count} would not be an "
            "increase."
        )
    added = count - current
    if assignments is not None and len(assignments) != added:
        raise InvalidReplicaAssignmentError(
            f"Attempted to add {added} additional partition(s), but only {len(assignments)} "
            "assignment(s) were specified."
        )
    check_request_size(view, added)
    check_partition_limit(view, 0, added)
    charge(added)
    is_fit = prepared is not None and prepared.can_be_added(view, topic.topic_id, current)
    if prepared is None or not is_fit or len(prepared.assignments) != added:
        prepared = None
    if prepared is None:
        replicas_of_added = finish(_place_added(view, topic, added, assignments, draw))
    else:
        replicas_of_added = prepared.assignments
    if validate_only:
        return ControllerResult(added)
    if prepared is None:
        records = finish(_records(view, topic.topic_id, current, replicas_of_added))
    else:
        records = prepared.records
    return ControllerResult(added, records)


def prepare_partitions(
    view: ControllerView,
    name: str,
    count: int,
    *,
    assignments: Sequence[Sequence[int]] | None,
    draw: RandomSource,
) -> Steps[PreparedPartitions | None]:
    """Prepare the partitions for :func:`create_partitions`; None if that will raise an error."""
    topic = view.image.topics.get(name)
    current = count if topic is None else len(topic.partitions)
    added = count - current
    if topic is None or added <= 0 or len(assignments or range(added)) != added:
        return None
    try:
        check_request_size(view, added)
        replicas_of_added = yield from _place_added(view, topic, added, assignments, draw)
    except DomainError:
        return None
    return (yield from _prepare(view, topic.topic_id, current, replicas_of_added))


def _place_added(
    view: ControllerView,
    topic: TopicImage,
    added: int,
    assignments: Sequence[Sequence[int]] | None,
    draw: RandomSource,
) -> Steps[Sequence[tuple[int, ...]]]:
    """Return the replicas of the partitions that are added to a topic."""
    factor = len(topic.partitions[0].replicas)
    if assignments is None:
        return (yield from _placements(view, added, factor, draw))
    checked = []
    for index, replicas in enumerate(map(tuple, assignments), len(topic.partitions)):
        check_assignment(view, replicas, factor)
        _check_has_leader(view, index, replicas)
        checked.append(replicas)
        yield
    return checked


def delete_topic(
    view: ControllerView,
    topic_id: UUID,
    charge: ChargeQuota = unlimited,
    *,
    allows_internal: bool = False,
) -> ControllerResult[None]:
    """Delete a topic.

    Raises the errors of ``charge``, UnknownTopicIdError, and InvalidTopicError for an internal
    topic, unless ``allows_internal`` is set because ZooKeeper has a deletion marker.
    """
    topic = view.image.topics_by_id.get(topic_id)
    if topic is None:
        raise UnknownTopicIdError("This server does not host this topic ID.")
    if topic.name in view.settings.internal_topics and not allows_internal:
        raise InvalidTopicError(f"{topic.name} holds the coordinators' state")
    charge(len(topic.partitions))
    return ControllerResult(None, (RemoveTopicRecord(topic_id),))
