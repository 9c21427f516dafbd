"""What the handlers of the coordinators share: futures into responses, errors into codes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from kio.schema.errors import ErrorCode

from coordinator.errors import error_code
from coordinator.wire import Entity
from logcore.machine import DomainError

Future = asyncio.Future[object]
Build = Callable[[Any], Entity]
Refuse = Callable[[ErrorCode], Entity]


def answer(future: Future, build: Build, refuse: Refuse) -> Entity | Awaitable[Entity]:
    """Make a response of a result or of a domain error's code.

    At once where the shard has answered in its own turn, which most requests are: no task, no
    further round of the event loop.
    """
    if future.done():
        return _finish(future, build, refuse)
    return _later(future, build, refuse)


async def _later(future: Future, build: Build, refuse: Refuse) -> Entity:
    await asyncio.wait((future,))
    return _finish(future, build, refuse)


def _finish(future: Future, build: Build, refuse: Refuse) -> Entity:
    error = future.exception()
    if error is None:
        return build(future.result())
    if isinstance(error, DomainError):
        return refuse(error_code(error))
    raise error


async def outcome(future: Future) -> Any | DomainError:
    """The result, or the domain error as a value: for requests that ask for many things."""
    try:
        return await future
    except DomainError as error:
        return error


def code_of(error: DomainError | None) -> ErrorCode:
    """The code of a per-item error; NONE for None."""
    return ErrorCode.none if error is None else error_code(error)


def grouped(
    items: Iterable[tuple[str, int, ErrorCode]],
) -> dict[str, list[tuple[int, ErrorCode]]]:
    """(topic, partition, code) by topic, in the order of first appearance."""
    topics: dict[str, list[tuple[int, ErrorCode]]] = {}
    for topic, partition, code in items:
        topics.setdefault(topic, []).append((partition, code))
    return topics


def before_producer_fenced(code: ErrorCode, *, known: bool) -> ErrorCode:
    """INVALID_PRODUCER_EPOCH for clients whose version does not know PRODUCER_FENCED (KIP-588)."""
    if code is ErrorCode.producer_fenced and not known:
        return ErrorCode.invalid_producer_epoch
    return code
