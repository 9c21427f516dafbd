"""Automatic creation of topics by the active controller: internal topics and requested ones.

At most one CreateTopics per topic is in flight. The client gets a retriable error until
the topic exists.

Source: ``DefaultAutoTopicCreationManager``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Final

import structlog
from kio.schema.errors import ErrorCode

from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.config.broker_config import ConfigSource
from fencepost.coordinator.errors import RequestTimedOutError
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.metadata.metadata import SETTINGS_OF
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.protocol.api import ApiKey
from fencepost.protocol.codec import decode_response, encode_request
from fencepost.protocol.errors import UnsupportedVersion, WireError
from fencepost.protocol.messages import RequestFactory, request_factory
from fencepost.protocol.schema import Entity

FROM_CONTROLLER: Final = -1
"""Leaves the number of partitions or replicas to the controller's default."""

_CREATED_LATER: Final = frozenset(
    {ErrorCode.topic_already_exists, ErrorCode.throttling_quota_exceeded}
)
"""Errors after which the dead-letter queue's topic may exist at the next attempt."""

_log = structlog.get_logger(__name__)


def ask_for_topic(ctx: Context, name: str) -> None:
    """Have the controller create a topic, unless a request for that is in flight.

    The broker creates an internal topic in its own name with its own settings, and any other topic
    in the client's name.
    """
    broker = ctx.broker
    controller = broker.controller
    if controller is None or name in broker.topics_coming or name == METADATA_TOPIC:
        return
    # Imported here because most brokers are standalone and never need these modules.
    from fencepost.coordinator.handlers.forwarding import LENGTH_BYTES, envelope  # noqa: PLC0415
    from fencepost.coordinator.replication.controller_connection import newest  # noqa: PLC0415

    try:
        version = newest(ApiKey.CREATE_TOPICS, controller.versions)
    except UnsupportedVersion:
        version = 7
    make = request_factory(ApiKey.CREATE_TOPICS, version)
    request = plain = _request(broker, make, name)
    if name not in SETTINGS_OF:
        chunks = encode_request(
            ApiKey.CREATE_TOPICS, version, ctx.correlation_id, ctx.client_id, request
        )
        request = envelope(ctx, b"".join(chunks)[LENGTH_BYTES:])
    broker.topics_coming.add(name)
    done = partial(_answered, broker, name, version)

    def on_envelope_answer(answer: asyncio.Future[Entity]) -> None:
        if not answer.cancelled() and isinstance(answer.exception(), UnsupportedVersion):
            # The controller does not support Envelope. This broker has checked the client's
            # permission.
            controller.send(plain).add_done_callback(done)
        else:
            done(answer)

    controller.send(request).add_done_callback(on_envelope_answer)


def ask_for_internal_topic(broker: Services, name: str) -> None:
    """Have the controller create an internal topic, as :func:`ask_for_topic` does for a client."""
    controller = broker.controller
    if controller is None or name in broker.topics_coming:
        return
    from fencepost.coordinator.replication.controller_connection import newest  # noqa: PLC0415 - most brokers are standalone

    try:
        version = newest(ApiKey.CREATE_TOPICS, controller.versions)
    except UnsupportedVersion:
        version = 7
    broker.topics_coming.add(name)
    request = _request(broker, request_factory(ApiKey.CREATE_TOPICS, version), name)
    controller.send(request).add_done_callback(partial(_answered, broker, name, version))


async def create_dead_letter_topic(broker: Services, name: str, configs: Mapping[str, str]) -> None:
    """Have the controller create the topic of a dead-letter queue, with the controller's defaults.

    Raises DeadLetterError. Source: ``ShareGroupDLQStateManager.handleCreateTopicsResponse``.
    """
    from fencepost.coordinator.replication.controller_connection import newest  # noqa: PLC0415 - most brokers have no dead-letter queue
    from fencepost.groups.share.dead_letters import DeadLetterError  # noqa: PLC0415 - the same

    controller = broker.controller
    if controller is None:
        raise DeadLetterError("there is no controller", is_final=False)
    try:
        make = request_factory(
            ApiKey.CREATE_TOPICS, newest(ApiKey.CREATE_TOPICS, controller.versions)
        )
        request = _creation(broker, make, name, FROM_CONTROLLER, FROM_CONTROLLER, configs)
        answer = await controller.send(request)
    except (RequestTimedOutError, WireError) as error:
        is_final = isinstance(error, UnsupportedVersion)
        reason = f"topic {name} was not created: {error}"
        raise DeadLetterError(reason, is_final=is_final) from None
    for topic in answer.topics:
        code = ErrorCode(topic.error_code)
        if code is not ErrorCode.none:
            reason = f"topic {name} was not created: {code.name.upper()}: {topic.error_message}"
            raise DeadLetterError(reason, is_final=code not in _CREATED_LATER)


def _request(broker: Services, make: RequestFactory, name: str) -> Entity:
    config = broker.config
    configs: Mapping[str, str] = {}
    prefix = SETTINGS_OF.get(name)
    if prefix is not None:
        partitions = config.int(f"{prefix}.num.partitions")
        replicas = config.int(f"{prefix}.replication.factor")
        configs = broker.metadata.internal_configs(name)
    else:
        partitions = _configured_value(broker, "num.partitions")
        replicas = _configured_value(broker, "default.replication.factor")
    return _creation(broker, make, name, partitions, replicas, configs)


def _creation(
    broker: Services,
    make: RequestFactory,
    name: str,
    partitions: int,
    replicas: int,
    configs: Mapping[str, str],
) -> Entity:
    return make.message(
        topics=[
            make.CreatableTopic(
                name=name,
                num_partitions=partitions,
                replication_factor=replicas,
                configs=[
                    make.CreatableTopicConfig(name=key, value=value)
                    for key, value in configs.items()
                ],
            )
        ],
        timeout_ms=broker.config.int("request.timeout.ms"),
    )


def _configured_value(broker: Services, key: str) -> int:
    """Return a setting of this broker, or FROM_CONTROLLER if it is not configured."""
    source = broker.config.settings(key)[0].source
    return FROM_CONTROLLER if source is ConfigSource.DEFAULT else broker.config.int(key)


def _answered(broker: Services, name: str, version: int, answer: asyncio.Future[Entity]) -> None:
    broker.topics_coming.discard(name)
    if answer.cancelled():
        return
    error = answer.exception()
    if error is not None:
        _log.warning("topic not created", topic=name, cause=str(error))
        return
    body = answer.result()
    if hasattr(body, "response_data"):
        if body.error_code:
            why = ErrorCode(body.error_code).name.upper()
            _log.warning("topic not created", topic=name, cause=why)
            return
        try:
            body = decode_response(ApiKey.CREATE_TOPICS, version, body.response_data or b"")[1]
        except WireError as problem:
            _log.warning("topic not created", topic=name, cause=str(problem))
            return
    for topic in body.topics:
        if topic.error_code not in (ErrorCode.none, ErrorCode.topic_already_exists):
            why = ErrorCode(topic.error_code).name.upper()
            _log.warning("topic not created", topic=name, cause=f"{why}: {topic.error_message}")
