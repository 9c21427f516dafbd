"""The common part of ShareFetch and ShareAcknowledge: checks, acknowledgements, error fields.

Source: ``KafkaApis.validateAcknowledgementBatches``, ``handleAcknowledgements``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.cluster.errors import NotLeaderOrFollowerError
from fencepost.coordinator.broker_services import connection_id
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import (
    TopicAuthorizationError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.handlers.leader_hints import endpoints, leader_hint
from fencepost.coordinator.handlers.share_group_heartbeat import is_member_id
from fencepost.coordinator.runtime.late_imports import SHARE_MODULES, load
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.share.commands import AcknowledgeBatch, SharePartitionKey
from fencepost.groups.share.errors import (
    InvalidShareRequestError,
    SharePartitionFencedError,
)
from fencepost.groups.share.session import FINAL_EPOCH, ShareSession, TopicPartition
from fencepost.groups.share.states import AcknowledgeType
from fencepost.logcore.errors import FencedLeaderEpochError
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol import Entity
from fencepost.protocol.steps import Steps

MAX_ACKNOWLEDGEMENTS: Final = 20_000
"""The maximum number of acknowledge types for one partition in a request. They are all applied in
one turn of the event loop. The limit is twice the maximum number of acquired offsets
(``group.share.max.partition.max.record.locks``)."""

NO_TOPIC_ID: Final = bytes(16)
"""The zero id, which kio decodes as None."""

_LED_ELSEWHERE: Final = (
    FencedLeaderEpochError,
    NotLeaderOrFollowerError,
    SharePartitionFencedError,
)
"""For these errors the response contains the current leader."""


def refusal_of(ctx: Context) -> ErrorCode | None:
    """Return the top-level error of a request before its session is looked up, or None."""
    body = ctx.body
    if not ctx.broker.groups.serves_share_groups:
        return ErrorCode.unsupported_version
    if body.group_id is None:
        return ErrorCode.invalid_request
    if not ctx.may(Operation.READ, ResourceType.GROUP, body.group_id):
        return ErrorCode.group_authorization_failed
    if not is_member_id(body.member_id):
        return ErrorCode.invalid_request
    return None


def loaded(ctx: Context) -> Steps[None]:
    """Import the modules of share partitions, one per step, unless they were imported before."""
    if not ctx.broker.has_shares:
        yield from load(SHARE_MODULES)


def partition_of(topic_id: UUID | None, index: int) -> TopicPartition:
    """Return the identity of a partition in a session."""
    return TopicPartition(NO_TOPIC_ID if topic_id is None else topic_id.bytes, index)


def uuid_of(partition: TopicPartition) -> UUID | None:
    """Return the topic id as kio encodes it."""
    return None if partition.topic_id == NO_TOPIC_ID else UUID(bytes=partition.topic_id)


def requested_partitions(ctx: Context) -> Iterator[tuple[TopicPartition, Any]]:
    """Yield the partitions that a request names, with their acknowledged ranges."""
    for topic in ctx.body.topics:
        for part in topic.partitions:
            yield partition_of(topic.topic_id, part.partition_index), part.acknowledgement_batches


def connection_of(ctx: Context) -> str:
    """Return the id of the request's connection; the session ends when the connection closes."""
    return connection_id(ctx.connection)


def is_renewal(ctx: Context) -> bool:
    """Return whether the request may extend acquisition locks (KIP-1222)."""
    return bool(getattr(ctx.body, "is_renew_ack", False))


class Readable:
    """The partitions that the client of a request may read; READ is checked once per topic."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._rights: dict[str, bool] = {}

    def has_topic(self, partition: TopicPartition) -> bool:
        """Return whether a topic has the partition's topic id."""
        return self._ctx.broker.metadata.topic_by_id(uuid_of(partition)) is not None

    def topic(self, partition: TopicPartition) -> str:
        """Return the topic's name.

        Raises UnknownTopicIdError, TopicAuthorizationError, UnknownTopicOrPartitionError, in this
        order.
        """
        ctx = self._ctx
        topic = ctx.broker.metadata.topic_by_id(uuid_of(partition))
        if topic is None:
            raise UnknownTopicIdError("no topic has this id")
        may = self._rights.get(topic.name)
        if may is None:
            may = ctx.may(Operation.READ, ResourceType.TOPIC, topic.name)
            self._rights[topic.name] = may
        if not may:
            raise TopicAuthorizationError("the client may not read the topic")
        if not 0 <= partition.partition < len(topic.partitions):
            raise UnknownTopicOrPartitionError(f"there is no partition {partition.partition}")
        return topic.name


def checked_batches(batches: Iterable[Any], *, may_renew: bool) -> tuple[AcknowledgeBatch, ...]:
    """Return the acknowledgements of a partition. Raises InvalidShareRequestError.

    A batch may begin with the last offset of the previous batch, as in Kafka. Unlike Fencepost,
    Kafka does not limit the number of acknowledgements.
    """
    highest = AcknowledgeType.RENEW if may_renew else AcknowledgeType.REJECT
    checked: list[AcknowledgeBatch] = []
    previous_end, count = -1, 0
    for batch in batches:
        first, last, types = batch.first_offset, batch.last_offset, batch.acknowledge_types
        if (
            first > last
            or first < previous_end
            or not types
            or len(types) not in (1, last - first + 1)
            or min(types) < AcknowledgeType.GAP
            or max(types) > highest
        ):
            raise InvalidShareRequestError("invalid acknowledgements")
        previous_end, count = last, count + len(types)
        if count > MAX_ACKNOWLEDGEMENTS:
            raise InvalidShareRequestError("too many acknowledgements for one partition")
        checked.append(AcknowledgeBatch(first, last, tuple(types)))
    return tuple(checked)


Acknowledgement = asyncio.Future[object] | DomainError
"""A future that is done once the acknowledgements are written, or the error that refused them."""

Acknowledgements = dict[TopicPartition, Acknowledgement | None]
"""The acknowledgements of a request; None for a partition without acknowledged ranges."""


def acknowledge_all(
    ctx: Context, readable: Readable, requested: Iterable[tuple[TopicPartition, Any]]
) -> Steps[Acknowledgements]:
    """Acknowledge the records of all partitions that a request names.

    As in Kafka, partitions without acknowledged ranges are in the result only if the leader's state
    machine checks the ranges of at least one other partition.
    """
    found: Acknowledgements = {}
    for partition, batches in requested:
        found[partition] = _acknowledge(ctx, readable, partition, batches)
        yield
    if not any(isinstance(result, asyncio.Future) for result in found.values()):
        found = {partition: result for partition, result in found.items() if result is not None}
    return found


def _acknowledge(
    ctx: Context, readable: Readable, partition: TopicPartition, batches: Iterable[Any]
) -> Acknowledgement | None:
    body = ctx.body
    try:
        checked: tuple[AcknowledgeBatch, ...] = ()
        if readable.has_topic(partition):  # otherwise the unknown id is reported first
            checked = checked_batches(batches, may_renew=is_renewal(ctx))
        readable.topic(partition)
        if not checked:
            return None
        key = SharePartitionKey(body.group_id, *partition)
        return ctx.broker.shares.acknowledge(key, body.member_id, checked)
    except DomainError as error:
        return without_traceback(error)


def settled(ctx: Context, acknowledgements: Collection[Acknowledgement | None]) -> Work[None]:
    """Wait until all acknowledgements have their results; count the request."""
    for acknowledgement in acknowledgements:
        if isinstance(acknowledgement, asyncio.Future) and not acknowledgement.done():
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            acknowledgement.add_done_callback(partial(_settle, over))
            yield over
    if acknowledgements:
        shares = ctx.broker.shares
        shares.acknowledgement_requests += 1
        shares.failed_acknowledgement_requests += any(map(error_of, acknowledgements))


def _settle(over: asyncio.Future[None], _done: asyncio.Future[object]) -> None:
    if not over.done():
        over.set_result(None)


class ResponseError(NamedTuple):
    """An error as it appears in a response."""

    code: ErrorCode
    message: str | None


NO_ERROR: Final = ResponseError(ErrorCode.none, None)


def response_error(acknowledgement: Acknowledgement | None) -> ResponseError:
    """Return the error of an acknowledgement whose future is done.

    The error messages of the state machine are Kafka's; errors of earlier checks have none.
    """
    if acknowledgement is None:
        return NO_ERROR
    if isinstance(acknowledgement, DomainError):
        return ResponseError(error_code(acknowledgement), None)
    error = acknowledgement.exception()
    if error is None:
        return NO_ERROR
    if isinstance(error, DomainError):
        return ResponseError(error_code(error), str(error) or None)
    return ResponseError(ErrorCode.unknown_server_error, None)


def leader_fields(
    ctx: Context, partition: TopicPartition, error: DomainError | None, leaders: set[int]
) -> dict[str, Entity]:
    """Return the response fields with the leader, if the error says that another broker leads."""
    if not isinstance(error, _LED_ELSEWHERE):
        return {}
    topic = ctx.broker.metadata.topic_by_id(uuid_of(partition))
    return {} if topic is None else leader_hint(ctx, topic.name, partition.partition, leaders)


def error_of(acknowledgement: Acknowledgement | None) -> DomainError | None:
    """Return the error of an acknowledgement whose future is done, or None."""
    if acknowledgement is None or isinstance(acknowledgement, DomainError):
        return acknowledgement
    error = acknowledgement.exception()
    return error if isinstance(error, DomainError) else None


def share_response(
    ctx: Context,
    make_topic: Callable[..., Entity],
    by_topic: Mapping[bytes, Iterable[Entity]],
    leaders: set[int],
) -> Entity:
    """Build the response from the entries of partitions by topic id."""
    lock_ms = ctx.broker.shares.settings.of(ctx.body.group_id).record_lock_duration_ms
    return ctx.respond.message(
        error_code=ErrorCode.none,
        acquisition_lock_timeout_ms=lock_ms,
        responses=tuple(
            make_topic(topic_id=uuid_of(TopicPartition(topic_id, 0)), partitions=tuple(parts))
            for topic_id, parts in by_topic.items()
        ),
        **(endpoints(ctx, leaders) if leaders else {}),
    )


def end_if_final(ctx: Context, session: ShareSession) -> None:
    """End the session after its final request, unless the member has a new session."""
    shares = ctx.broker.shares
    if ctx.body.share_session_epoch == FINAL_EPOCH and shares.sessions.get(session.key) is session:
        shares.end_session(session.key)
