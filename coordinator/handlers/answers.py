"""Helpers of the handlers: responses from futures, error codes from domain errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS, TRANSACTION_STATE
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol import Entity
from fencepost.protocol.steps import Steps

R = TypeVar("R")
T = TypeVar("T")

Future = asyncio.Future[object]
Build = Callable[[Any], Entity]
Refuse = Callable[[ErrorCode], Entity]


def answer(future: Future, build: Build, refuse: Refuse) -> Entity | Awaitable[Entity]:
    """Build a response from the future's result, or from its domain error's code.

    If the shard has already completed the future, as for most requests, the response is returned at
    once, without a task or another iteration of the event loop.
    """
    if not future.done():
        return _later(future, build, refuse)
    error = future.exception()
    if error is None:
        return build(future.result())
    if isinstance(error, DomainError):
        return refuse(error_code(error))
    raise error


async def _later(future: Future, build: Build, refuse: Refuse) -> Entity:
    # Closing the connection cancels this coroutine and thereby the future; the shard drops the
    # result.
    try:
        result = await future
    except DomainError as error:
        return refuse(error_code(without_traceback(error)))
    return build(result)


def result_of(future: asyncio.Future[Any]) -> Work[Any]:
    """Return the future's result, or its domain error as a value instead of an exception."""
    if not future.done():
        yield future
    try:
        return future.result()
    except DomainError as error:
        return without_traceback(error)


def forced(ctx: Context, changes: Work[T]) -> Work[T]:
    """Run ``changes`` of the metadata; return the result once the changes are on disk.

    Changes that were made before an error are flushed as well. Raises StorageError.
    """
    try:
        result = yield from changes
    finally:
        flushed = None if ctx.store is None else ctx.store.durable()
    if flushed is not None:
        yield flushed
        flushed.result()
    return result


def each_topic(
    ctx: Context, change: Callable[[Context, str, Any | None], Steps[Entity]]
) -> Work[tuple[Entity, ...]]:
    """Run ``change(ctx, name, topic)`` for each topic name in the request; return the results.

    ``topic`` is None for a name that occurs twice. The function returns once the changes are on
    disk. Raises StorageError.
    """

    def changes() -> Steps[tuple[Entity, ...]]:
        answers = []
        for name, topic in (yield from by_name(ctx.body.topics)).items():
            yield
            answers.append((yield from change(ctx, name, topic)))
        return tuple(answers)

    return forced(ctx, changes())


def open_coordinator(ctx: Context, topic: str) -> Steps[bool]:
    """Create the topic of the group or transaction coordinator, and start the coordinator.

    Return False for any other topic.

    Raises CoordinatorNotAvailableError.
    """
    if topic == CONSUMER_OFFSETS:
        yield from ctx.broker.groups.open_in_steps()
    elif topic == TRANSACTION_STATE:
        yield from ctx.broker.txns.open_in_steps()
    else:
        return False
    return True


def by_name(topics: Iterable[Any]) -> Steps[dict[str, Any | None]]:
    """Return a request's topics by name, in request order; None for a name that occurs twice."""
    named: dict[str, Any | None] = {}
    for topic in topics:
        named[topic.name] = None if topic.name in named else topic
        yield
    return named


def each_row(items: Iterable[R], build: Callable[[R], Entity]) -> Steps[tuple[Entity, ...]]:
    """Build a row of a response for each item of a request, yielding to other requests."""
    rows = []
    for item in items:
        rows.append(build(item))
        yield
    return tuple(rows)


def code_of(error: DomainError | None) -> ErrorCode:
    """Return the code of a per-item error; NONE for None."""
    return ErrorCode.none if error is None else error_code(error)


def code_and_message(error: DomainError | None) -> tuple[ErrorCode, str | None]:
    """Return the code and the message of a per-item error; NONE and None for None."""
    return code_of(error), None if error is None else str(error)


def before_producer_fenced(code: ErrorCode, *, known: bool) -> ErrorCode:
    """Replace PRODUCER_FENCED (KIP-588) by INVALID_PRODUCER_EPOCH unless the client knows it."""
    if code is ErrorCode.producer_fenced and not known:
        return ErrorCode.invalid_producer_epoch
    return code
