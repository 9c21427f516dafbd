"""Creating, growing, configuring and deleting topics: what a broker adds to the controller's rules.

The rules themselves are the controller machine's, in :mod:`fencepost.cluster.controller`; they are
loaded when they are first needed. Every check is made before anything is written, so
``validate_only`` is the same code without the last step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from fencepost.cluster import topic_names
from fencepost.cluster.image import BROKER_RESOURCE, TOPIC_RESOURCE, TopicImage
from fencepost.cluster.record_codec import Template
from fencepost.cluster.records import MetadataRecord, TopicRecord
from fencepost.cluster.topic_names import MAX_NAME_CHARACTERS, Take, unlimited
from fencepost.coordinator.config.broker_config import TOPIC_KEYS, BrokerConfig, check_topic_configs
from fencepost.coordinator.errors import (
    InvalidRequestError,
    InvalidTopicError,
    TopicDeletionDisabledError,
    TopicLimitExceededError,
)
from fencepost.coordinator.metadata.changes import new_settings
from fencepost.coordinator.metadata.log import new_topic_id
from fencepost.coordinator.metadata.names import HISTORY_TOPIC, METADATA_TOPIC, is_internal
from fencepost.coordinator.metadata.observed import AnyMetadata
from fencepost.coordinator.metadata.state_topics import check_state_topic

if TYPE_CHECKING:
    from fencepost.cluster.controller.view import View

__all__ = ["FROM_BROKER", "MAX_NAME_CHARACTERS", "Take", "TopicAdmin", "check_name", "unlimited"]

_log = structlog.get_logger(__name__)

FROM_BROKER = -1
"""A number that the request leaves to the broker's configuration."""


def check_name(name: str) -> None:
    """Raise InvalidTopicError unless ``name`` may name a topic of a client."""
    topic_names.check_name(name)
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

    def __init__(self, metadata: AnyMetadata, config: BrokerConfig, node_id: int) -> None:
        self._metadata = metadata
        self._config = config
        self._node_id = node_id
        self._draw = random.SystemRandom()
        self.learned: Callable[[Sequence[MetadataRecord]], None] | None = None
        """A controller's, which new settings may allow to elect somebody."""

    @property
    def view(self) -> View:
        """What the controller's rules look at now."""
        from fencepost.coordinator.metadata.controller_settings import view_of  # noqa: PLC0415 - no start needs it

        return view_of(self._metadata, self._config, self._node_id)

    def create(
        self,
        name: str,
        *,
        partitions: int = FROM_BROKER,
        replication_factor: int = FROM_BROKER,
        assignment: Sequence[tuple[int, Sequence[int]]] = (),
        configs: Mapping[str, str] | None = None,
        validate_only: bool = False,
        take: Take = unlimited,
    ) -> TopicImage | tuple[int, int]:
        """Create a topic; returns it, or with ``validate_only`` how many partitions and replicas.

        ``assignment`` lists broker ids by partition; both numbers must then be −1. ``take`` counts
        what is only checked as well, as in Kafka. Raises ConfigError, TopicLimitExceededError, and
        what :func:`fencepost.cluster.controller.topics.plan_topic` does.
        """
        from fencepost.cluster.controller import topics as rules  # noqa: PLC0415 - no start needs it

        topic_names.check_name(name) if self._is_asked_for_by_brokers(name) else check_name(name)
        if name == METADATA_TOPIC:
            raise InvalidRequestError(f"Creation of internal topic {name} is prohibited.")
        configs, view = configs or {}, self.view
        wanted = rules.NewTopic(name, partitions, replication_factor, assignment, configs)
        replicas = rules.plan_topic(
            view, wanted, draw=self._draw, check_configs=self._check_configs, take=take
        )
        self._metadata.check_room(1, len(replicas))
        if validate_only:
            return len(replicas), len(replicas[0])
        _warn_without_effect(name, configs)
        topic_id = new_topic_id()
        self._metadata.append(
            [
                TopicRecord(name, topic_id),
                *new_settings(TOPIC_RESOURCE, name, {}, configs),
                *self._partitions(view, TopicImage(name, topic_id, ()), replicas),
            ]
        )
        _log.info("topic created", topic=name, partitions=len(replicas), topic_id=str(topic_id))
        return self._metadata.known(name)

    def own_configs(self, name: str, configs: Mapping[str, str]) -> dict[str, str]:
        """Return a new topic's settings: those asked for, before those that a state topic needs."""
        fixed = self._metadata.internal_configs(name) if is_internal(name) else {}
        return {**fixed, **configs}

    def _check_configs(
        self, _kind: int, name: str, configs: Mapping[str, str], _before: Mapping[str, str]
    ) -> None:
        check_topic_configs(self._config, configs)
        check_state_topic(name, configs)

    def _partitions(
        self, view: View, topic: TopicImage, replicas: Sequence[tuple[int, ...]]
    ) -> list[bytes]:
        """The values of records of new partitions: one form for all with the same replicas."""
        from fencepost.cluster.controller.topics import partition_record  # noqa: PLC0415 - no start needs it

        forms: dict[tuple[int, ...], Template] = {}
        values: list[bytes] = []
        for index, one in enumerate(replicas, len(topic.partitions)):
            form = forms.get(one)
            if form is None:
                form = forms[one] = Template(partition_record(view, topic.topic_id, index, one))
            values += form.at(topic.topic_id, (index,))
        return values

    def check_request_size(self, partitions: int) -> None:
        """Raise TopicLimitExceededError if that is more than one request may create."""
        limit = self._metadata.limits.max_partitions_per_request
        if partitions > limit:
            raise TopicLimitExceededError(
                f"one request may create {limit} partitions (max_partitions_per_request)"
            )

    def _is_asked_for_by_brokers(self, name: str) -> bool:
        """Whether it is the history's topic in a cluster: each broker has a partition of it."""
        config = self._config
        is_cluster = config.items("controller.listener.names") or config.text("zookeeper.connect")
        return name == HISTORY_TOPIC and bool(is_cluster)

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

        Raises InvalidTopicError for internal topics, whose partition count places groups and
        transactions, TopicLimitExceededError, and what
        :func:`fencepost.cluster.controller.topics.plan_partitions` does.
        """
        from fencepost.cluster.controller import topics as rules  # noqa: PLC0415 - no start needs it

        topic, view = self._metadata.known(name), self.view
        if is_internal(name) and not self._is_asked_for_by_brokers(name):
            raise InvalidTopicError(f"the number of partitions of {name} is fixed")

        def counted(partitions: int) -> None:
            self._metadata.check_room(0, partitions)
            take(partitions)

        replicas = rules.plan_partitions(
            view, name, count, assignments=assignments, draw=self._draw, take=counted
        )
        if not validate_only:
            self._metadata.append(self._partitions(view, topic, replicas))

    def configure(
        self, name: str, configs: Mapping[str, str], *, validate_only: bool = False
    ) -> None:
        """Replace the topic's own settings; its open logs follow at once.

        Raises ConfigError, UnknownTopicOrPartitionError.
        """
        from fencepost.cluster.controller.configs import legacy_alter_configs  # noqa: PLC0415 - no start needs it

        check_topic_configs(self._config, configs)
        self._metadata.known(name)
        outcome = legacy_alter_configs(
            self.view, (TOPIC_RESOURCE, name), configs, check_configs=self._check_configs
        )
        if not validate_only:
            _warn_without_effect(name, configs)
            self._append(outcome.records)

    def configure_brokers(
        self, name: str, configs: Mapping[str, str], *, validate_only: bool = False
    ) -> None:
        """Replace the dynamic settings of a broker, or of all brokers with the name "".

        The caller has checked them. Raises InvalidConfigError for what eligible leader replicas
        do not allow.
        """
        from fencepost.cluster.controller.configs import legacy_alter_configs  # noqa: PLC0415 - no start needs it

        outcome = legacy_alter_configs(
            self.view, (BROKER_RESOURCE, name), configs, check_configs=_anything
        )
        if not validate_only:
            self._append(outcome.records)

    def _append(self, records: Sequence[MetadataRecord]) -> None:
        if records:
            self._metadata.append(records)
            if self.learned is not None:
                self.learned(records)

    def delete(self, name: str, take: Take = unlimited) -> TopicImage:
        """Remove a topic.

        Raises TopicDeletionDisabledError, UnknownTopicOrPartitionError, InvalidTopicError for
        internal topics: the coordinators' state is in them.
        """
        from fencepost.cluster.controller.topics import delete_topic  # noqa: PLC0415 - no start needs it

        if not self._config.bool("delete.topic.enable"):
            raise TopicDeletionDisabledError("delete.topic.enable is off")
        known = self._metadata.known(name)
        if is_internal(name):
            raise InvalidTopicError(f"{name} holds the coordinators' state")
        self._metadata.append(delete_topic(self.view, known.topic_id, take).records)
        _log.info("topic deleted", topic=name, topic_id=str(known.topic_id))
        return known


def _anything(
    _kind: int, _name: str, _configs: Mapping[str, str], _before: Mapping[str, str]
) -> None:
    """The caller has looked at the settings."""
