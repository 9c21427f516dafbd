"""Creating, growing, configuring and deleting topics: the rules, and the order of the steps.

Every check is made before anything is written, so ``validate_only`` is the same code without the
last step.

Source: ``ReplicationControlManager.createTopics``/``createPartitions``/``deleteTopics``,
``ConfigurationControlManager``, ``Topic.validate``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import structlog

from fencepost.coordinator.config.broker_config import TOPIC_KEYS, BrokerConfig, check_topic_configs
from fencepost.coordinator.errors import (
    InvalidPartitionsError,
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    InvalidRequestError,
    InvalidTopicError,
    TopicAlreadyExistsError,
    TopicDeletionDisabledError,
    TopicLimitExceededError,
)
from fencepost.coordinator.metadata.image import Topic
from fencepost.coordinator.metadata.log import MetadataLog
from fencepost.coordinator.metadata.names import HISTORY_TOPIC, METADATA_TOPIC

_log = structlog.get_logger(__name__)

MAX_NAME_CHARACTERS = 249
"""Characters of a topic name: with partition number and suffix it still fits a file name of 255."""

_NAME = re.compile(r"[a-zA-Z0-9._-]+")

Take = Callable[[int], None]
"""Counts partitions that are about to be created or deleted; raises where they may not be."""


def unlimited(_partitions: int) -> None:
    """Nobody counts."""


FROM_BROKER = -1
"""A number that the request leaves to the broker's configuration."""


def check_name(name: str) -> None:
    """Raise InvalidTopicError unless ``name`` may name a topic."""
    if not name:
        raise InvalidTopicError("the topic name is empty")
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidTopicError(f"the topic name is longer than {MAX_NAME_CHARACTERS} characters")
    if name in {".", ".."} or not _NAME.fullmatch(name):
        raise InvalidTopicError(
            f"the topic name {name!r} is not made of letters, digits, '.', '_' and '-' alone"
        )
    if name == HISTORY_TOPIC:
        raise InvalidTopicError(f"{name} is the broker's own")


def _warn_without_effect(topic: str, configs: Mapping[str, str]) -> None:
    for name in configs:
        if TOPIC_KEYS[name].inert:
            _log.warning(
                "setting has no effect", topic=topic, key=name, reason=TOPIC_KEYS[name].inert
            )


class TopicAdmin:
    """``broker.topics``."""

    def __init__(self, metadata: MetadataLog, config: BrokerConfig, node_id: int) -> None:
        self._metadata = metadata
        self._config = config
        self._node_id = node_id

    def create(
        self,
        name: str,
        *,
        partitions: int = FROM_BROKER,
        replication_factor: int = FROM_BROKER,
        assignment: Mapping[int, Sequence[int]] | None = None,
        configs: Mapping[str, str] | None = None,
        validate_only: bool = False,
        take: Take = unlimited,
    ) -> Topic | int:
        """Create a topic; returns it, or with ``validate_only`` the partitions it would have.

        ``assignment`` lists broker ids by partition; both numbers must then be −1. ``take`` counts
        what is only checked as well, as in Kafka. Raises what it does, InvalidTopicError,
        TopicAlreadyExistsError, InvalidPartitionsError, InvalidReplicationFactorError,
        InvalidReplicaAssignmentError, InvalidRequestError, ConfigError, TopicLimitExceededError.
        """
        check_name(name)
        if name == METADATA_TOPIC:
            raise InvalidRequestError(f"Creation of internal topic {name} is prohibited.")
        existing = self._metadata.colliding(name)
        if existing == name:
            raise TopicAlreadyExistsError(f"Topic '{name}' already exists.")
        if existing is not None:
            raise InvalidTopicError(f"Topic '{name}' collides with existing topic: {existing}")
        if assignment:
            if partitions != FROM_BROKER or replication_factor != FROM_BROKER:
                raise InvalidRequestError(
                    "with replica assignments the numbers of partitions and replicas must be -1"
                )
            self._check_assignment(assignment)
            partitions = len(assignment)
        else:
            partitions = self._partition_count(partitions)
            self._check_replication_factor(replication_factor)
        check_topic_configs(self._config, configs or {})
        self.check_request_size(partitions)
        take(partitions)
        if validate_only:
            self._metadata.check_room(1, partitions)
            return partitions
        _warn_without_effect(name, configs or {})
        topic = self._metadata.create_topic(name, partitions, configs or {})
        _log.info("topic created", topic=name, partitions=partitions, topic_id=str(topic.topic_id))
        return topic

    def _partition_count(self, asked: int) -> int:
        if asked == FROM_BROKER:
            return self._config.int("num.partitions")
        if asked <= 0:
            raise InvalidPartitionsError("the number of partitions must be above 0, or -1")
        return asked

    def _check_replication_factor(self, asked: int) -> None:
        factor = self._config.int("default.replication.factor") if asked == FROM_BROKER else asked
        if factor <= 0:
            raise InvalidReplicationFactorError("the replication factor must be above 0, or -1")
        if factor > 1:
            raise InvalidReplicationFactorError(
                f"the replication factor {factor} can not be met: there is 1 broker"
            )

    def _check_assignment(self, assignment: Mapping[int, Sequence[int]]) -> None:
        if sorted(assignment) != list(range(len(assignment))):
            raise InvalidReplicaAssignmentError("partitions must be numbered from 0 without a gap")
        for index, replicas in assignment.items():
            self.check_replicas(index, replicas)

    def check_replicas(self, index: int, replicas: Sequence[int]) -> None:
        """Raise InvalidReplicaAssignmentError unless a partition can have just these replicas."""
        if not replicas:
            raise InvalidReplicaAssignmentError(f"partition {index} has no replica")
        if len(set(replicas)) != len(replicas):
            raise InvalidReplicaAssignmentError(f"partition {index} names a broker twice")
        unknown = [broker for broker in replicas if broker != self._node_id]
        if unknown:
            raise InvalidReplicaAssignmentError(f"there is no broker {unknown[0]}")

    def check_request_size(self, partitions: int) -> None:
        """Raise TopicLimitExceededError if that is more than one request may add to a topic."""
        limit = self._metadata.limits.max_partitions_per_request
        if partitions > limit:
            raise TopicLimitExceededError(
                f"one request may create {limit} partitions of a topic (max_partitions_per_request)"
            )

    def grow(
        self,
        name: str,
        count: int,
        *,
        assignments: Sequence[Sequence[int]] | None = None,
        validate_only: bool = False,
        take: Take = unlimited,
    ) -> None:
        """Raise the number of partitions to ``count``.

        Raises UnknownTopicOrPartitionError, InvalidPartitionsError, InvalidReplicaAssignmentError,
        InvalidTopicError for internal topics, whose partition count places groups and
        transactions, and TopicLimitExceededError.
        """
        topic = self._metadata.known(name)
        if topic.is_internal:
            raise InvalidTopicError(f"the number of partitions of {name} is fixed")
        if count == topic.partitions:
            raise InvalidPartitionsError(f"Topic already has {count} partition(s).")
        if count < topic.partitions:
            raise InvalidPartitionsError(
                f"The topic {name} currently has {topic.partitions} partition(s); "
                f"{count} would not be an increase."
            )
        added = count - topic.partitions
        if assignments is not None:
            if len(assignments) != added:
                raise InvalidReplicaAssignmentError(
                    f"{len(assignments)} assignments do not fit {added} new partitions"
                )
            for index, replicas in enumerate(assignments, topic.partitions):
                self.check_replicas(index, replicas)
        self.check_request_size(added)
        self._metadata.check_room(0, added)
        take(added)
        if not validate_only:
            self._metadata.set_partitions(name, count)

    def configure(
        self, name: str, configs: Mapping[str, str], *, validate_only: bool = False
    ) -> None:
        """Replace the topic's own settings; its open logs follow at once.

        Raises ConfigError, UnknownTopicOrPartitionError.
        """
        check_topic_configs(self._config, configs)
        self._metadata.known(name)
        if not validate_only:
            _warn_without_effect(name, configs)
            self._metadata.set_topic_configs(name, configs)

    def delete(self, name: str, take: Take = unlimited) -> Topic:
        """Remove a topic's record; ``Services.drop_topics`` has to remove the rest afterwards.

        Raises TopicDeletionDisabledError, UnknownTopicOrPartitionError, InvalidTopicError for
        internal topics: the coordinators' state is in them.
        """
        if not self._config.bool("delete.topic.enable"):
            raise TopicDeletionDisabledError("delete.topic.enable is off")
        known = self._metadata.known(name)
        if known.is_internal:
            raise InvalidTopicError(f"{name} holds the coordinators' state")
        take(known.partitions)
        topic = self._metadata.delete_topic(name)
        _log.info("topic deleted", topic=name, topic_id=str(topic.topic_id))
        return topic
