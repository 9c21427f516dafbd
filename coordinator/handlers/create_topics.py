"""CreateTopics (19): create topics.

Version 5 returns the partition count, replication factor and settings, version 6 refuses a request
that exceeds the client's quota, version 7 returns the topic id.

Source: ``ReplicationControlManager.createTopics``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.cluster.controller.topics import NewTopic, check_request_size
from fencepost.coordinator.config.broker_config import shown_topic_keys
from fencepost.coordinator.config.key import text_of
from fencepost.coordinator.controller.topic_decisions import (
    DRAW,
    PREPARED_FROM,
    create_topic,
    prepare,
    with_fixed_configs,
)
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import (
    InvalidRequestError,
    TopicAuthorizationError,
)
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import each_row, each_topic, open_coordinator
from fencepost.coordinator.handlers.controller_decisions import decider
from fencepost.coordinator.metadata.log import new_topic_id
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.runtime.late_imports import NEW_TOPIC_MODULES, load
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

STRICT_QUOTA_SINCE = 6

FROM_BROKER = -1
"""A partition count that stands for the broker's ``num.partitions``."""
NOT_SHOWN = -1
"""Replaces a number that the client may not see."""


def refused(ctx: Context, code: int, message: str | None) -> Steps[Entity]:
    """Refuse each topic for the same reason."""
    topics = yield from each_row(
        ctx.body.topics, lambda topic: _refused(ctx, topic.name, code, message)
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
    """Create, or only validate, each topic; refuse a name that occurs twice."""
    yield from load(NEW_TOPIC_MODULES)
    total = yield from _partitions(ctx)
    topics = yield from each_topic(ctx, partial(_create, total=total))
    for topic in topics:
        if topic.error_code is ErrorCode.none and not ctx.body.validate_only:
            # Open the coordinator of a new internal topic: clients may skip FindCoordinator.
            with suppress(DomainError):  # the topic was created all the same
                yield from open_coordinator(ctx, topic.name)
    return ctx.respond.CreateTopicsResponse(topics=topics)


def _partitions(ctx: Context) -> Steps[int]:
    """Count the partitions that a request creates.

    Source: ``ReplicationControlManager.validateTotalNumberOfPartitions``.
    """
    total, default = 0, ctx.broker.config.int("num.partitions")
    for topic in ctx.body.topics:
        count = default if topic.num_partitions == FROM_BROKER else topic.num_partitions
        total += len(topic.assignments) or max(count, 0)
        yield
    return total


def _create(ctx: Context, name: str, topic: Any | None, *, total: int) -> Steps[Entity]:
    try:
        if topic is None:
            raise InvalidRequestError("Duplicate topic name.")
        if name != METADATA_TOPIC and not _may_create(ctx, name):
            raise TopicAuthorizationError("Authorization failed.")
        check_request_size(ctx.controller.current_machine().view, total)
        configs = with_fixed_configs(
            ctx.metadata, name, {entry.name: entry.value for entry in topic.configs}
        )
        new_topic = NewTopic(
            name,
            topic.num_partitions,
            topic.replication_factor,
            [
                (assignment.partition_index, assignment.broker_ids)
                for assignment in topic.assignments
            ],
            configs,
        )
        prepared = None
        if total >= PREPARED_FROM and ctx.metadata.topic(name) is None:
            topic_id = new_topic_id()
            prepared = yield from prepare(
                ctx.controller.current_machine,
                lambda controller: controller.prepare_topic(
                    new_topic, topic_id=topic_id, draw=DRAW
                ),
            )
        created = create_topic(
            decider(ctx),
            ctx.broker.config,
            new_topic,
            take=ctx.takes_partitions(strict_since=STRICT_QUOTA_SINCE),
            validate_only=ctx.body.validate_only,
            prepared=prepared,
        )
    except DomainError as error:
        return _refused(ctx, name, error_code(error), str(error))
    # The defaults of partition count, replication factor and settings are the broker's, so showing
    # any of them needs DESCRIBE_CONFIGS. Like Kafka's controllers, a KRaft controller returns an id
    # for a topic that is only validated, and a ZooKeeper controller returns none.
    is_unkept = ctx.body.validate_only and ctx.zookeeper_controller is not None
    shows = ctx.may(Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, name, audited=False)
    return ctx.respond.CreatableTopicResult(
        name=name,
        topic_id=None if is_unkept else created.topic_id,
        error_code=ErrorCode.none,
        error_message=None,
        topic_config_error_code=ErrorCode.none if shows else ErrorCode.topic_authorization_failed,
        num_partitions=created.partitions if shows else NOT_SHOWN,
        replication_factor=created.replication_factor if shows else NOT_SHOWN,
        configs=_described(ctx, configs) if shows else (),
    )


def _may_create(ctx: Context, name: str) -> bool:
    return ctx.may_on_cluster(Operation.CREATE, audited=False) or ctx.may(
        Operation.CREATE, ResourceType.TOPIC, name
    )


def _described(ctx: Context, configs: Mapping[str, str | None]) -> tuple[Entity, ...]:
    config = ctx.broker.config
    overrides = {key: value for key, value in configs.items() if value is not None}
    return tuple(
        ctx.respond.CreatableTopicConfigs(
            name=key.name,
            value=text_of(config.topic_value(key.name, overrides)),
            config_source=config.topic_source(key.name, overrides),
        )
        for key in shown_topic_keys(overrides)
    )
