"""CreateTopics (19). Version 5 answers counts and settings, 6 waits, 7 the topic id.

Source: ``ReplicationControlManager.createTopics``.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.cluster.image import TopicImage
from fencepost.coordinator.config.broker_config import ConfigError, shown_topic_keys
from fencepost.coordinator.config.key import text_of
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import (
    InvalidRequestError,
    TopicAuthorizationError,
)
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import each_row, each_topic, open_coordinator
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.runtime.late_imports import NEW_TOPIC_MODULES, load
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.machine import DomainError

FIRST_TO_WAIT = 6

FROM_BROKER = -1
"""A number of partitions that the broker's ``num.partitions`` decides."""
NOT_SHOWN = -1
"""A number that the client may not see."""


def refused(ctx: Context, code: int, message: str | None) -> Steps[Entity]:
    """Refuse each topic for the same reason."""
    topics = yield from each_row(
        ctx.body.topics, lambda one: _refused(ctx, one.name, code, message)
    )
    return ctx.respond.CreateTopicsResponse(topics=topics)


def _refused(ctx: Context, name: str, code: int, message: str | None) -> Entity:
    return ctx.respond.CreatableTopicResult(name=name, error_code=code, error_message=message)


@handles(
    ApiKey.CREATE_TOPICS,
    versions=(2, 7),
    permission="CREATE Cluster or Topic",
    refused=refused,
)
def run(ctx: Context) -> Work[Entity]:
    """Create, or only check, each topic by itself; a name that stands there twice is refused."""
    yield from load(NEW_TOPIC_MODULES)
    total = yield from _partitions(ctx)
    topics = yield from each_topic(ctx, partial(_create, total=total))
    for topic in topics:
        if topic.error_code is ErrorCode.none and not ctx.body.validate_only:
            # Whoever knows this broker may ask its coordinators without a FindCoordinator.
            with suppress(DomainError):  # the topic is there all the same
                yield from open_coordinator(ctx, topic.name)
    return ctx.respond.CreateTopicsResponse(topics=topics)


def _partitions(ctx: Context) -> Steps[int]:
    """Count the partitions that a request asks for.

    Source: ``ReplicationControlManager.validateTotalNumberOfPartitions``.
    """
    total, default = 0, ctx.broker.config.int("num.partitions")
    for topic in ctx.body.topics:
        count = default if topic.num_partitions == FROM_BROKER else topic.num_partitions
        total += len(topic.assignments) or max(count, 0)
        yield
    return total


def _create(ctx: Context, name: str, topic: Any | None, *, total: int) -> Entity:
    try:
        if topic is None:
            raise InvalidRequestError("Duplicate topic name.")
        if name != METADATA_TOPIC and not _may_create(ctx, name):
            raise TopicAuthorizationError("Authorization failed.")
        ctx.topics.check_request_size(total)
        configs = ctx.topics.own_configs(name, _configs(topic))
        made = ctx.topics.create(
            name,
            partitions=topic.num_partitions,
            replication_factor=topic.replication_factor,
            assignment=[(one.partition_index, one.broker_ids) for one in topic.assignments],
            configs=configs,
            validate_only=ctx.body.validate_only,
            take=ctx.takes_partitions(strict_since=FIRST_TO_WAIT),
        )
    except DomainError as error:
        return _refused(ctx, name, error_code(error), str(error))
    topic_id = None
    if isinstance(made, TopicImage):
        topic_id, made = made.topic_id, (len(made.partitions), len(made.partitions[0].replicas))
    partitions, replicas = made
    # Partitions and replicas may come from the broker's settings, as the topic's own ones do.
    shows = ctx.may(Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, name, audited=False)
    return ctx.respond.CreatableTopicResult(
        name=name,
        topic_id=topic_id,
        error_code=ErrorCode.none,
        error_message=None,
        topic_config_error_code=ErrorCode.none if shows else ErrorCode.topic_authorization_failed,
        num_partitions=partitions if shows else NOT_SHOWN,
        replication_factor=replicas if shows else NOT_SHOWN,
        configs=_described(ctx, configs) if shows else (),
    )


def _may_create(ctx: Context, name: str) -> bool:
    return ctx.may_on_cluster(Operation.CREATE, audited=False) or ctx.may(
        Operation.CREATE, ResourceType.TOPIC, name
    )


def _configs(topic: Any) -> dict[str, str]:
    configs: dict[str, str] = {}
    for entry in topic.configs:
        if entry.value is None:
            raise ConfigError(entry.name, None, "a topic is created without null values")
        configs[entry.name] = entry.value
    return configs


def _described(ctx: Context, overrides: dict[str, str]) -> tuple[Entity, ...]:
    config = ctx.broker.config
    return tuple(
        ctx.respond.CreatableTopicConfigs(
            name=key.name,
            value=text_of(config.topic_value(key.name, overrides)),
            config_source=config.topic_source(key.name, overrides),
        )
        for key in shown_topic_keys(overrides)
    )
