"""Metadata (3): describe brokers, topics and partition leaders.

Version 0 requests all topics with an empty list, later versions with null. Version 4 lets the
client disable the creation of topics. Version 8 adds the authorized operations on topics; versions
8 to 10 also have those on the cluster. Version 10 adds topic ids to the response, version 12 to
requests (versions 10 and 11 refuse a request that contains an id).

A request that causes the automatic creation of a topic gets UNKNOWN_TOPIC_OR_PARTITION for that
topic. As in Kafka, the broker does not wait for the controller, and clients retry. They get the
same error if the topic cannot be created.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import structlog
from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.cluster.image import TopicImage
from fencepost.coordinator.errors import InvalidTopicError, ThrottlingQuotaExceededError
from fencepost.coordinator.handlers import Context, authorized, handles
from fencepost.coordinator.handlers.answers import forced, open_coordinator
from fencepost.coordinator.handlers.endpoints import Endpoints
from fencepost.coordinator.handlers.rights import named_topics, refused_topics
from fencepost.coordinator.handlers.topic_creation import ask_for_topic
from fencepost.coordinator.metadata.names import METADATA_TOPIC, check_name, is_internal
from fencepost.coordinator.runtime.late_imports import NEW_TOPIC_MODULES, load
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.errors import LogError
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

FIRST_WITH_NULL_FOR_ALL = 1
FIRST_WITH_LISTENER_NOT_FOUND = 6
FIRST_BY_ID = 12

_log = structlog.get_logger(__name__)


@handles(ApiKey.METADATA, versions=(0, 13), permission="DESCRIBE Topic, CREATE Topic")
def run(ctx: Context) -> Work[Entity]:
    """Describe the requested topics, or all."""
    broker, body, make = ctx.broker, ctx.body, ctx.respond
    endpoints = Endpoints(ctx)
    requested = body.topics
    topics: list[Entity] = []
    if ctx.version < FIRST_BY_ID and requested and any(map(_is_by_id, requested)):
        return _all_refused(ctx, requested)
    if requested is None or (not requested and ctx.version < FIRST_WITH_NULL_FOR_ALL):
        everything = list(broker.metadata.topics.values())
        names = named_topics(everything)
        hidden = yield from refused_topics(ctx, Operation.DESCRIBE, names, audited=False)
        for topic in everything:
            if topic.name not in hidden:
                described = yield from _described(ctx, topic, endpoints)
                topics.append(described)
    else:
        try:
            yield from forced(ctx, _describe_topics(ctx, requested, topics, endpoints))
        except LogError as error:
            _log.warning("new topics may not be on disk", cause=str(error))
    include_cluster = getattr(body, "include_cluster_authorized_operations", False)
    return make.message(
        brokers=tuple(
            make.MetadataResponseBroker(
                node_id=broker.node_id, host=broker.host, port=broker.port, rack=broker.rack
            )
            for broker in endpoints.alive
        ),
        cluster_id=broker.cluster_id,
        controller_id=endpoints.controller_id,
        topics=tuple(topics),
        cluster_authorized_operations=(
            authorized.of_cluster(ctx) if include_cluster else authorized.NOT_ASKED
        ),
        error_code=ErrorCode.none,
    )


def _is_by_id(topic: Any) -> bool:
    return topic.name is None or getattr(topic, "topic_id", None) is not None


def _all_refused(ctx: Context, requested: Iterable[Any]) -> Entity:
    """Refuse a request of version 10 or 11 that contains a topic id."""
    return ctx.respond.message(
        topics=tuple(
            ctx.respond.MetadataResponseTopic(
                error_code=ErrorCode.invalid_request, name=topic.name or "", topic_id=topic.topic_id
            )
            for topic in requested
        )
    )


def _describe_topics(
    ctx: Context, requested: Iterable[Any], topics: list[Entity], endpoints: Endpoints
) -> Steps[None]:
    """Append one entry per distinct name or id to ``topics``, in request order."""
    metadata = ctx.broker.metadata
    seen = set()
    for topic_request in requested:
        yield
        # Java clients send an empty name with an id, so the id takes precedence.
        topic_id = getattr(topic_request, "topic_id", None)
        name = topic_request.name if topic_id is None else None
        key = name if name is not None else topic_id
        if key in seen:
            continue
        seen.add(key)
        topic = metadata.topic(name) if name is not None else metadata.topic_by_id(topic_id)
        known_name = name if topic is None else topic.name
        if known_name is not None and not ctx.may(
            Operation.DESCRIBE, ResourceType.TOPIC, known_name
        ):
            # Ids are not confidential, names are.
            topics.append(_refused(ctx, name, topic_id, ErrorCode.topic_authorization_failed))
        elif topic is not None:
            topics.append((yield from _described(ctx, topic, endpoints)))
        elif name is None:
            topics.append(_refused(ctx, None, topic_id, ErrorCode.unknown_topic_id))
        else:
            topics.append((yield from _unknown(ctx, name)))


def _unknown(ctx: Context, name: str) -> Steps[Entity]:
    """Build the response for an unknown name, and create the topic if that is allowed."""
    may_create = ctx.broker.config.bool("auto.create.topics.enable") and getattr(
        ctx.body, "allow_auto_topic_creation", True
    )
    if may_create and not (
        ctx.may_on_cluster(Operation.CREATE, audited=False)
        or ctx.may(Operation.CREATE, ResourceType.TOPIC, name)
    ):
        return _refused(ctx, name, None, ErrorCode.topic_authorization_failed)
    try:
        check_name(name)
    except InvalidTopicError:
        return _refused(ctx, name, None, ErrorCode.invalid_topic_exception)
    if may_create:
        # The reason for a failed creation (a colliding name, for example, or too many replicas) is
        # only logged: Kafka's brokers respond before the controller refuses the topic.
        try:
            yield from _create(ctx, name)
        except ThrottlingQuotaExceededError:
            if ctx.throttle is not None:
                ctx.throttle.discard_mutations()
        except DomainError as error:
            _log.warning("topic not created", topic=name, cause=str(error))
    return _refused(ctx, name, None, ErrorCode.unknown_topic_or_partition)


def _create(ctx: Context, name: str) -> Steps[None]:
    if ctx.broker.controller is not None:
        ask_for_topic(ctx, name)
        return
    if not (yield from open_coordinator(ctx, name)) and name != METADATA_TOPIC:
        yield from load(NEW_TOPIC_MODULES)
        from fencepost.cluster.controller.topics import NewTopic  # noqa: PLC0415 - few topics are created this way
        from fencepost.coordinator.controller.topic_decisions import create_topic  # noqa: PLC0415
        from fencepost.coordinator.handlers.controller_decisions import decider  # noqa: PLC0415

        take = ctx.takes_partitions(strict_since=0)
        create_topic(decider(ctx), ctx.broker.config, NewTopic(name), take=take)


def _refused(ctx: Context, name: str | None, topic_id: Any, code: ErrorCode) -> Entity:
    return ctx.respond.MetadataResponseTopic(
        error_code=code,
        name=name,
        topic_id=topic_id,
        topic_authorized_operations=(
            _operations(ctx, name)
            if name and code is not ErrorCode.topic_authorization_failed
            else authorized.NOT_ASKED
        ),
    )


def _described(ctx: Context, topic: TopicImage, endpoints: Endpoints) -> Steps[Entity]:
    name, make = topic.name, ctx.respond.MetadataResponsePartition
    partitions = []
    for index in range(len(topic.partitions)):
        state = endpoints.state(topic, index)
        error, replicas, isr = state.error, state.replicas, state.isr
        if ctx.version < FIRST_WITH_LISTENER_NOT_FOUND and error == ErrorCode.listener_not_found:
            error = ErrorCode.leader_not_available
        if not ctx.version:
            # Version 0 leaves out unavailable brokers (kafka: ``errorUnavailableEndpoints``).
            replicas, isr = (
                tuple(filter(endpoints.nodes.__contains__, replica_ids))
                for replica_ids in (replicas, isr)
            )
            if error == ErrorCode.none and (replicas, isr) != (state.replicas, state.isr):
                error = ErrorCode.replica_not_available
        partitions.append(
            make(
                error_code=error,
                partition_index=index,
                leader_id=state.leader,
                leader_epoch=state.leader_epoch,
                replica_nodes=replicas,
                isr_nodes=isr,
                offline_replicas=state.offline,
            )
        )
        yield
    return ctx.respond.MetadataResponseTopic(
        error_code=ErrorCode.none,
        name=name,
        topic_id=topic.topic_id,
        is_internal=is_internal(name),
        partitions=tuple(partitions),
        topic_authorized_operations=_operations(ctx, name),
    )


def _operations(ctx: Context, name: str) -> int:
    """Return the authorized operations on a named topic, whether or not it exists."""
    includes_operations = getattr(ctx.body, "include_topic_authorized_operations", False)
    return authorized.of_topic(ctx, name) if includes_operations else authorized.NOT_ASKED
