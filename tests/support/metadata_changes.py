"""Changes of a broker's metadata by the controller, without a request and its checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.topics import FROM_CONTROLLER, NewTopic
from fencepost.cluster.image import BROKER_RESOURCE, GROUP_RESOURCE, TOPIC_RESOURCE, TopicImage
from fencepost.coordinator.controller.topic_decisions import DRAW, create_internal_topic
from fencepost.coordinator.metadata.controller_settings import controller_settings
from fencepost.coordinator.metadata.log import MetadataLog, new_topic_id
from fencepost.coordinator.metadata.metadata import Metadata

T = TypeVar("T")

UNGUARDED: Final[Mapping[str, frozenset[str]]] = {
    "internal_topics": frozenset(),
    "reserved_topics": frozenset(),
}
"""Controller settings without the protection of internal topics."""


def decide(metadata: Metadata, decision: Callable[[Controller], ControllerResult[T]]) -> T:
    """Call ``decision`` with a controller, append the records, and return the response."""
    assert isinstance(metadata, MetadataLog)
    settings = controller_settings(metadata._config, node_id=metadata._node_id)
    outcome = decision(Controller(replace(settings, **UNGUARDED), metadata.image, 0))
    if outcome.records:
        metadata.append(outcome.records)
    return outcome.answer


def anything(_kind: int, _name: str, _after: Mapping[str, str], _before: Mapping[str, str]) -> None:
    """Accept every value of every setting."""


def create_topic(
    metadata: Metadata,
    name: str,
    partitions: int = FROM_CONTROLLER,
    configs: Mapping[str, str] | None = None,
) -> TopicImage:
    topic = NewTopic(name, partitions, configs={**(configs or {})})
    decide(
        metadata,
        lambda controller: controller.create_topic(
            topic, topic_id=new_topic_id(), draw=DRAW, check_configs=anything
        ),
    )
    return metadata.known(name)


def internal_topic(metadata: Metadata, name: str) -> TopicImage:
    """Return an internal topic, created if necessary, as ``Services.internal_topic`` does."""
    create_internal_topic(
        lambda decision: decide(metadata, decision), metadata, metadata._config, name
    )
    return metadata.known(name)


def create_partitions(metadata: Metadata, name: str, count: int) -> None:
    """Increase a topic's partitions to ``count``."""
    decide(
        metadata,
        lambda controller: controller.create_partitions(name, count, assignments=None, draw=DRAW),
    )


def delete_topic(metadata: Metadata, name: str) -> TopicImage:
    topic = metadata.known(name)
    decide(metadata, lambda controller: controller.delete_topic(topic.topic_id))
    return topic


def set_topic_configs(metadata: Metadata, name: str, configs: Mapping[str, str]) -> None:
    """Replace a topic's own settings."""
    _set_configs(metadata, TOPIC_RESOURCE, name, configs)


def set_broker_configs(metadata: Metadata, name: str, configs: Mapping[str, str]) -> None:
    """Replace the dynamic settings of a node id, or of all brokers with the name ""."""
    _set_configs(metadata, BROKER_RESOURCE, name, configs)


def set_group_configs(metadata: Metadata, name: str, configs: Mapping[str, str]) -> None:
    """Replace a group's own settings."""
    _set_configs(metadata, GROUP_RESOURCE, name, configs)


def _set_configs(metadata: Metadata, kind: int, name: str, configs: Mapping[str, str]) -> None:
    decide(
        metadata,
        lambda controller: controller.legacy_alter_configs(
            (kind, name), configs, check_configs=anything
        ),
    )
