"""CreateTopics (19). Version 5 answers counts and settings, 7 the topic id.

Source: ``ReplicationControlManager.createTopics``.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.coordinator.config.broker_config import ConfigError, shown_topic_keys
from fencepost.coordinator.config.key import text_of
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import InvalidReplicaAssignmentError
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import by_name, forced
from fencepost.coordinator.metadata.image import Topic
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.machine import DomainError


@handles(ApiKey.CREATE_TOPICS, versions=(2, 7), permission="CREATE Cluster or Topic")
def run(ctx: Context) -> Work[Entity]:
    """Create, or only check, each topic by itself; a name that stands there twice is refused."""
    topics = yield from forced(ctx, _created(ctx))
    return ctx.respond.CreateTopicsResponse(throttle_time_ms=0, topics=tuple(topics))


def _created(ctx: Context) -> Steps[list[Entity]]:
    named = yield from by_name(ctx.body.topics)
    topics = []
    for name, topic in named.items():
        yield
        if topic is None:
            code = ErrorCode.invalid_request
            topics.append(_refused(ctx, name, code, "Duplicate topic name."))
            continue
        with ctx.broker.metadata.unforced():
            topics.append(_create(ctx, topic))
    return topics


def _create(ctx: Context, topic: Any) -> Entity:
    try:
        configs = _configs(topic)
        ctx.broker.topics.check_request_size(len(topic.assignments))
        assignment = _assignment(topic)
        made = ctx.broker.topics.create(
            topic.name,
            partitions=topic.num_partitions,
            replication_factor=topic.replication_factor,
            assignment=assignment,
            configs=configs,
            validate_only=ctx.body.validate_only,
        )
    except DomainError as error:
        return _refused(ctx, topic.name, error_code(error), str(error))
    partitions, topic_id = made, None
    if isinstance(made, Topic):
        partitions, topic_id = made.partitions, made.topic_id
    return ctx.respond.CreatableTopicResult(
        name=topic.name,
        topic_id=topic_id,
        error_code=ErrorCode.none,
        error_message=None,
        num_partitions=partitions,
        replication_factor=1,
        configs=_described(ctx, configs),
    )


def _configs(topic: Any) -> dict[str, str]:
    configs: dict[str, str] = {}
    for entry in topic.configs:
        if entry.value is None:
            raise ConfigError(entry.name, None, "a topic is created without null values")
        configs[entry.name] = entry.value
    return configs


def _assignment(topic: Any) -> dict[int, list[int]]:
    assignment = {entry.partition_index: list(entry.broker_ids) for entry in topic.assignments}
    if len(assignment) != len(topic.assignments):
        raise InvalidReplicaAssignmentError("a partition is assigned twice")
    return assignment


def _described(ctx: Context, overrides: dict[str, str]) -> tuple[Entity, ...]:
    config = ctx.broker.config
    return tuple(
        ctx.respond.CreatableTopicConfigs(
            name=key.name,
            value=text_of(config.topic_value(key.name, overrides)),
            read_only=False,
            config_source=config.topic_source(key.name, overrides),
            is_sensitive=False,
        )
        for key in shown_topic_keys(overrides)
    )


def _refused(ctx: Context, name: str, code: ErrorCode, message: str) -> Entity:
    return ctx.respond.CreatableTopicResult(
        name=name,
        topic_id=None,
        error_code=code,
        error_message=message,
        num_partitions=-1,
        replication_factor=-1,
        configs=(),
    )
