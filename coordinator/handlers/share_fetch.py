"""ShareFetch (78): acknowledge records, and acquire others for a member of a share group.

Version 2 adds the acquire mode (KIP-1206) and renewals (KIP-1222). A request belongs to the share
session of its member; epoch 0 opens a session, -1 ends it. The group coordinator is not asked: the
session alone identifies a member.

Difference from Kafka: no records are acquired for a throttled client; Kafka acquires them, and
leaves them out of the response.

Source: ``KafkaApis.handleShareFetchRequest``, ``SharePartitionManager.newContext``,
``ShareSessionContext``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles, request_ms
from fencepost.coordinator.handlers.share_requests import (
    Acknowledgement,
    Acknowledgements,
    Readable,
    acknowledge_all,
    connection_of,
    end_if_final,
    error_of,
    is_renewal,
    leader_fields,
    loaded,
    partition_of,
    refusal_of,
    requested_partitions,
    response_error,
    settled,
    share_response,
)
from fencepost.coordinator.runtime.background import call_later
from fencepost.coordinator.runtime.turns import Work
from fencepost.groups.share.commands import AcquireMode, SharePartitionKey
from fencepost.groups.share.errors import ShareSessionLimitReachedError
from fencepost.groups.share.session import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    SessionKey,
    ShareSession,
    TopicPartition,
    rotated,
)
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

if TYPE_CHECKING:
    from fencepost.coordinator.services.share_fetches import FetchedShare


class _Outcome(NamedTuple):
    """The result of a fetch from one partition."""

    fetched: FetchedShare | None
    error: DomainError | None


@handles(ApiKey.SHARE_FETCH, versions=(1, 2), permission="READ Group and Topic")
def run(ctx: Context) -> Work[Entity]:
    """Respond with acquired records, and with the results of acknowledgements."""
    body = ctx.body
    refused = refusal_of(ctx)
    if refused is None and is_renewal(ctx) and _wants_records(ctx):
        refused = ErrorCode.invalid_request
    if refused is not None:
        return ctx.respond.error(refused)
    yield from loaded(ctx)
    try:
        session = yield from session_of(ctx)
    except DomainError as error:
        if isinstance(error, ShareSessionLimitReachedError):
            # Without the pause, clients would retry at once.
            yield _pause(request_ms(body.max_wait))
        return ctx.respond.error(error_code(error))
    readable = Readable(ctx)
    acknowledged: Acknowledgements = {}
    if any(batches for _, batches in requested_partitions(ctx)):
        acknowledged = yield from acknowledge_all(ctx, readable, requested_partitions(ctx))
    outcomes = yield from _fetch(ctx, session, readable)
    ctx.broker.share_fetches.failed += any(
        outcome.error is not None for outcome in outcomes.values()
    )
    yield from settled(ctx, acknowledged.values())
    answered = yield from _response(ctx, session, outcomes, acknowledged)
    end_if_final(ctx, session)
    return answered


def _wants_records(ctx: Context) -> bool:
    body = ctx.body
    return bool(body.max_bytes or body.min_bytes or body.max_records or request_ms(body.max_wait))


def session_of(ctx: Context) -> Steps[ShareSession]:
    """Find or open the session of the request, and increment the session's epoch.

    Raises DomainError.
    """
    body = ctx.body
    additions: list[TopicPartition] = []
    has_acknowledgements = False
    for partition, batches in requested_partitions(ctx):
        additions.append(partition)
        has_acknowledgements |= bool(batches)
        yield
    forgotten: list[TopicPartition] = []
    for topic in body.forgotten_topics_data:
        for index in topic.partitions:
            forgotten.append(partition_of(topic.topic_id, index))
            yield
    session = ctx.broker.shares.sessions.fetch(
        SessionKey(body.group_id, body.member_id),
        body.share_session_epoch,
        connection_of(ctx),
        additions=additions,
        forgotten=forgotten,
        has_acknowledgements=has_acknowledgements,
    )
    if body.share_session_epoch == INITIAL_EPOCH:
        ctx.broker.shares.clients.opened(session.key, ctx.origin)
    return session


def _pause(delay_ms: int) -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    call_later(loop, delay_ms, "a refused share session", end)
    return over


def _fetch(
    ctx: Context, session: ShareSession, readable: Readable
) -> Work[dict[TopicPartition, _Outcome]]:
    """Fetch from all partitions of the session; return the result of each, in order."""
    from fencepost.coordinator.services.share_fetches import ShareFetch, bytes_of  # noqa: PLC0415 - loaded in steps

    body, throttle = ctx.body, ctx.throttle
    outcomes: dict[TopicPartition, _Outcome] = {}
    if body.share_session_epoch == FINAL_EPOCH or is_renewal(ctx):
        return outcomes
    partitions: list[tuple[SharePartitionKey, str]] = []
    for key in rotated(list(session.partitions), body.share_session_epoch):
        try:
            name = readable.topic(key)
        except DomainError as error:
            outcomes[key] = _Outcome(None, without_traceback(error))
        else:
            partitions.append((SharePartitionKey(body.group_id, *key), name))
        yield None
    fetched = yield from ctx.broker.share_fetches.run(
        ShareFetch(
            group_id=body.group_id,
            member_id=body.member_id,
            partitions=partitions,
            max_wait_ms=request_ms(body.max_wait),
            min_bytes=body.min_bytes,
            max_bytes=body.max_bytes
            if throttle is None
            else min(body.max_bytes, max(1, throttle.most_bytes)),
            max_records=body.max_records,
            batch_size=body.batch_size,
            mode=_mode(ctx),
            may_acquire=None if throttle is None else throttle.may_begin_fetch,
        )
    )
    if throttle is not None:
        throttle.fetched(bytes_of(fetched))
    for part in fetched:
        partition = TopicPartition(part.key.topic_id, part.key.partition)
        outcomes[partition] = _Outcome(part, part.error)
        yield None
    return outcomes


def _mode(ctx: Context) -> AcquireMode:
    mode = getattr(ctx.body, "share_acquire_mode", AcquireMode.BATCH_OPTIMIZED)
    return AcquireMode(mode) if mode in tuple(AcquireMode) else AcquireMode.BATCH_OPTIMIZED


def _response(
    ctx: Context,
    session: ShareSession,
    outcomes: dict[TopicPartition, _Outcome],
    acknowledged: Acknowledgements,
) -> Steps[Entity]:
    leaders = set[int]()
    is_first = ctx.body.share_session_epoch == INITIAL_EPOCH
    by_topic: dict[bytes, list[Entity]] = {}
    for partition in (
        *outcomes,
        *(partition_id for partition_id in acknowledged if partition_id not in outcomes),
    ):
        fetched, error = outcomes.get(partition, _Outcome(None, None))
        answer = acknowledged.get(partition)
        has_answer = partition in acknowledged
        is_read = fetched is not None and fetched.is_read
        is_fetched = is_read or error is not None
        if is_fetched and not is_first:
            has_records = fetched is not None and bool(fetched.acquired)
            is_fetched = session.include(
                partition, has_records=has_records, has_error=error is not None
            )
        if is_fetched or has_answer:
            parts = by_topic.setdefault(partition.topic_id, [])
            parts.append(_partition(ctx, partition, fetched, error, answer, leaders))
        yield
    return share_response(ctx, ctx.respond.ShareFetchableTopicResponse, by_topic, leaders)


def _partition(
    ctx: Context,
    partition: TopicPartition,
    fetched: FetchedShare | None,
    error: DomainError | None,
    answer: Acknowledgement | None,
    leaders: set[int],
) -> Entity:
    make = ctx.respond
    code, message = response_error(answer)
    return make.PartitionData(
        partition_index=partition.partition,
        error_code=ErrorCode.none if error is None else error_code(error),
        acknowledge_error_code=code,
        acknowledge_error_message=message,
        records=b"" if fetched is None else fetched.records,
        acquired_records=()
        if fetched is None
        else tuple(
            [
                make.AcquiredRecords(
                    first_offset=acquired.first,
                    last_offset=acquired.last,
                    delivery_count=acquired.delivery_count,
                )
                for acquired in fetched.acquired
            ]
        ),
        **leader_fields(ctx, partition, error or error_of(answer), leaders),
    )
