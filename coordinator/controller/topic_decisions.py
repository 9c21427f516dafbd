"""Creation and deletion of topics by the controller.

The controller's rules are deterministic. This module supplies random topic ids, random numbers for
the placement of replicas, and the checks of settings. It also logs the results.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import structlog

from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.topics import CreatedTopic, NewTopic, PreparedPartitions
from fencepost.cluster.image import TopicImage
from fencepost.cluster.topic_names import ChargeQuota, unlimited
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.controller.active import Decide
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.metadata.config_checks import check_configs
from fencepost.coordinator.metadata.log import new_topic_id
from fencepost.coordinator.metadata.metadata import SETTINGS_OF, Metadata
from fencepost.coordinator.metadata.names import METADATA_TOPIC, is_internal
from fencepost.logcore.steps import Steps

_log = structlog.get_logger(__name__)

DRAW: Final = random.SystemRandom()
"""Chooses the brokers of new replicas."""


PREPARED_FROM: Final = 500
"""A request that creates this many partitions or more is prepared in steps before the decision."""

MAX_PREPARATIONS: Final = 3
"""The maximum number of attempts to prepare partitions, if the brokers change meanwhile."""


def prepare(
    look: Callable[[], Controller],
    steps: Callable[[Controller], Steps[PreparedPartitions | None]],
) -> Steps[PreparedPartitions | None]:
    """Prepare partitions, and repeat this if the brokers have changed meanwhile."""
    for _ in range(MAX_PREPARATIONS):
        prepared = yield from steps(look())
        if prepared is None or prepared.brokers is look().image.brokers:
            break
    return prepared


def create_topic(
    decide: Decide,
    config: BrokerConfig,
    topic: NewTopic,
    *,
    take: ChargeQuota = unlimited,
    validate_only: bool = False,
    prepared: PreparedPartitions | None = None,
) -> CreatedTopic:
    """Create a topic, or with ``validate_only`` only check that it may be created.

    The topic gets the id of its ``prepared`` partitions. Raises InvalidRequestError for the
    metadata topic, ConfigError, and the errors of
    :func:`fencepost.cluster.controller.topics.create_topic`.
    """
    if topic.name == METADATA_TOPIC:
        raise InvalidRequestError(f"Creation of internal topic {topic.name} is prohibited.")
    created = decide(
        lambda controller: controller.create_topic(
            topic,
            topic_id=new_topic_id() if prepared is None else prepared.records.topic_id,
            draw=DRAW,
            check_configs=partial(check_configs, config),
            charge=take,
            validate_only=validate_only,
            prepared=prepared,
        )
    )
    if not validate_only:
        _log_created(created)
    return created


def create_internal_topic(
    decide: Decide, metadata: Metadata, config: BrokerConfig, name: str
) -> None:
    """Create an internal topic with the settings of a standalone broker, unless it exists.

    Raises PolicyViolationError.
    """
    prefix = SETTINGS_OF.get(name)
    partitions = 1 if prefix is None else config.int(f"{prefix}.num.partitions")
    topic = NewTopic(name, partitions, 1, configs=metadata.internal_configs(name))
    decide(
        lambda controller: controller.create_internal_topic(
            topic, topic_id=new_topic_id(), draw=DRAW
        )
    )


def delete_topic(decide: Decide, topic: TopicImage, take: ChargeQuota = unlimited) -> None:
    """Remove a topic from the metadata; the brokers delete its directories later.

    Raises the errors of :func:`fencepost.cluster.controller.topics.delete_topic`.
    """
    decide(lambda controller: controller.delete_topic(topic.topic_id, take))
    _log.info("topic deleted", topic=topic.name, topic_id=str(topic.topic_id))


def with_fixed_configs(
    metadata: Metadata, name: str, configs: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Return a new topic's settings; requested settings override an internal topic's defaults."""
    return {**(metadata.internal_configs(name) if is_internal(name) else {}), **configs}


def _log_created(created: CreatedTopic) -> None:
    _log.info(
        "topic created",
        topic=created.name,
        partitions=created.partitions,
        topic_id=str(created.topic_id),
    )
