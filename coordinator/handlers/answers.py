"""What the handlers of the coordinators share: futures into responses, errors into codes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS, TRANSACTION_STATE
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire import Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback

R = TypeVar("R")
T = TypeVar("T")

Future = asyncio.Future[object]
Build = Callable[[Any], Entity]
Refuse = Callable[[ErrorCode], Entity]


def answer(future: Future, build: Build, refuse: Refuse) -> Entity | Awaitable[Entity]:
    """Make a response of a result or of a domain error's code.

    At once where the shard has answered in its own turn, which most requests are: no task, no
    further round of the event loop.
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
    # The end of the connection cancels this, and so the future; the shard drops its answer then.
    try:
        result = await future
    except DomainError as error:
        return refuse(error_code(without_traceback(error)))
    return build(result)


def result_of(future: asyncio.Future[Any]) -> Work[Any]:
    """The result, or the domain error as a value: for requests that ask for many things."""
    if not future.done():
        yield future
    try:
        return future.result()
    except DomainError as error:
        return without_traceback(error)


def forced(ctx: Context, changes: Work[T]) -> Work[T]:
    """Make changes of the metadata; their result comes once they are on disk.

    Whatever becomes of the request, what it changed is forced to disk. Raises StorageError.
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
    ctx: Context, change: Callable[[Context, str, Any | None], Entity]
) -> Work[tuple[Entity, ...]]:
    """Change each topic of a request by itself; ``change`` gets None for a name with two of them.

    The answers come once the changes are on disk. Raises StorageError.
    """

    def changes() -> Steps[tuple[Entity, ...]]:
        answers = []
        for name, topic in (yield from by_name(ctx.body.topics)).items():
            yield
            answers.append(change(ctx, name, topic))
        return tuple(answers)

    return forced(ctx, changes())


def open_coordinator(ctx: Context, topic: str) -> Steps[bool]:
    """Create a coordinator's topic, if it is not there, and serve it; False for another topic.

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
    """The topics of a request by their names, in its order; None for a name that is there twice."""
    named: dict[str, Any | None] = {}
    for topic in topics:
        named[topic.name] = None if topic.name in named else topic
        yield
    return named


def each_row(asked: Iterable[R], build: Callable[[R], Entity]) -> Steps[tuple[Entity, ...]]:
    """Build a row of a response for each item of a request; other requests get their turns."""
    rows = []
    for one in asked:
        rows.append(build(one))
        yield
    return tuple(rows)


def code_of(error: DomainError | None) -> ErrorCode:
    """The code of a per-item error; NONE for None."""
    return ErrorCode.none if error is None else error_code(error)


def code_and_message(error: DomainError | None) -> tuple[ErrorCode, str | None]:
    """Return the code and the message of a per-item error; NONE and None for None."""
    return code_of(error), None if error is None else str(error)


def before_producer_fenced(code: ErrorCode, *, known: bool) -> ErrorCode:
    """INVALID_PRODUCER_EPOCH for clients whose version does not know PRODUCER_FENCED (KIP-588)."""
    if code is ErrorCode.producer_fenced and not known:
        return ErrorCode.invalid_producer_epoch
    return code
