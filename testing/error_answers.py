"""Builds the error response to a request of any API, like Kafka's ``getErrorResponse``.

The schema of the response decides where the error code goes: into the top-level field if there is
one, otherwise into each topic, partition or group that the request names. Fetch, ShareFetch and
ShareAcknowledge are the exceptions: only errors of the session or of the request as a whole go into
their top-level fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import share_acknowledge, share_fetch
from fencepost.coordinator.handlers.share_requests import uuid_of
from fencepost.logcore.machine import DomainError
from fencepost.protocol.api import ApiKey
from fencepost.protocol.schema import (
    Entity,
    FieldInfo,
    all_fields,
    default_entity,
    message_class,
)
from fencepost.protocol.steps import finish
from fencepost.testing.requests import fetched_partitions

if TYPE_CHECKING:
    from fencepost.coordinator.handlers import Context

APIS_ANSWERED_WITH_DATA: Final = frozenset({ApiKey.METADATA})
"""APIs whose response must hold valid data besides the error: no client can work without the
brokers of a Metadata response."""

_OF_SESSIONS: Final = frozenset(
    {
        ErrorCode.fetch_session_id_not_found,
        ErrorCode.invalid_fetch_session_epoch,
        ErrorCode.fetch_session_topic_id_error,
    }
)
"""Errors of the fetch session, for the top-level error code of a Fetch response."""

_OF_SHARE_REQUESTS: Final = frozenset(
    {
        ErrorCode.unsupported_version,
        ErrorCode.invalid_request,
        ErrorCode.group_authorization_failed,
        ErrorCode.share_session_not_found,
        ErrorCode.invalid_share_session_epoch,
        ErrorCode.share_session_limit_reached,
    }
)
"""Errors for the top-level error codes of ShareFetch and ShareAcknowledge responses."""

_TOP_LEVEL: Final[Mapping[int, frozenset[ErrorCode]]] = {
    ApiKey.FETCH: _OF_SESSIONS,
    ApiKey.SHARE_FETCH: _OF_SHARE_REQUESTS,
    ApiKey.SHARE_ACKNOWLEDGE: _OF_SHARE_REQUESTS,
}
"""The errors for the top-level error codes of these APIs; other errors go into the partitions."""

_ERROR_CODES: Final = ("error_code", "partition_error_code")

_ALIASES: Final = {
    "name": ("topic", "topic_name"),
    "topic": ("name", "topic_name"),
    "topic_name": ("name", "topic"),
    "partition": ("partition_index", "index"),
    "partition_index": ("partition", "index"),
    "partition_id": ("partition_index", "partition", "index"),
    "index": ("partition_index", "partition"),
}
"""By the name of a response's field: the names that the same field may have in the request."""

_NAMES: Final = frozenset({"group_id", "key", "name", "partition_index", "transactional_id"})
"""Fields of a response that hold an element of a plain list in the request, such as a group id."""

_NAMING_LISTS: Final = frozenset({"entity"})
"""Lists of structures that are part of an item's name, as in AlterClientQuotas."""

_UNKNOWN: Final = frozenset({"base_offset", "high_watermark"})
"""Fields that are -1 in Kafka's error responses, and 0 in its schemas."""


def error_answer(ctx: Context, code: ErrorCode, answer: Entity | None = None) -> Entity | None:
    """Return the response to ``ctx`` with ``code``; None if there is no response.

    ``answer`` is the broker's normal response, for the APIs in :data:`APIS_ANSWERED_WITH_DATA`.
    """
    if ctx.api_key == ApiKey.PRODUCE and ctx.body.acks == 0:
        return None
    if answer is not None:
        topics = tuple(replace(topic, error_code=code) for topic in answer.topics)
        if hasattr(answer, "error_code"):
            return replace(answer, topics=topics, error_code=ErrorCode.none if topics else code)
        return replace(answer, topics=topics)
    cls = message_class(ctx.api_key, ctx.version, "response")
    of_whole = _TOP_LEVEL.get(ctx.api_key)
    deep = of_whole is not None and code not in of_whole
    is_share = deep and ctx.api_key != ApiKey.FETCH
    request = _of_share_request(ctx) if is_share else _request_shape(ctx)
    filled = _filled(cls, request, code, is_whole=True, deep=deep)
    if deep and not filled.responses and hasattr(filled, "error_code"):
        return replace(filled, error_code=code)
    return filled


def partition_errors(ctx: Context, code: ErrorCode, places: Iterable[tuple[object, int]]) -> Entity:
    """Return a response with ``code`` for each of ``places`` (topic name or id, and index)."""
    cls = message_class(ctx.api_key, ctx.version, "response")
    return _filled(cls, _by_topic(places), code, is_whole=True, deep=True)


def _request_shape(ctx: Context) -> Any:
    """Return the request; if its structure differs from the response, an object with the latter."""
    match ctx.api_key:
        case ApiKey.FETCH if not ctx.body.topics:
            return _by_topic((key, index) for key, (_, index) in fetched_partitions(ctx))
        case ApiKey.ALTER_REPLICA_LOG_DIRS:
            topics = tuple(topic for directory in ctx.body.dirs for topic in directory.topics)
            return SimpleNamespace(topics=topics)
        case ApiKey.DESCRIBE_LOG_DIRS:
            return SimpleNamespace(directories=("",))
    return ctx.body


def _of_share_request(ctx: Context) -> Any:
    """Return the partitions of a share session, for a ShareFetch that names none.

    The session's epoch is incremented, because a client that gets no top-level error sends the next
    epoch.
    """
    body, places = ctx.body, list[tuple[object, int]]()
    with suppress(DomainError):
        if ctx.api_key == ApiKey.SHARE_ACKNOWLEDGE:
            share_acknowledge.session_of(ctx)
        else:
            session = finish(share_fetch.session_of(ctx))
            if not body.topics:
                places = [
                    (uuid_of(partition), partition.partition) for partition in session.partitions
                ]
    return _by_topic(places) if places else body


def _by_topic(places: Iterable[tuple[object, int]]) -> Any:
    """Return an object shaped like a request with these partitions of topics, by name or id."""
    partitions: dict[object, list[Any]] = {}
    for topic, index in places:
        part = SimpleNamespace(partition=index, partition_index=index, index=index)
        partitions.setdefault(topic, []).append(part)
    return SimpleNamespace(
        topics=tuple(
            SimpleNamespace(name=topic, topic=topic, topic_id=topic, partitions=tuple(parts))
            for topic, parts in partitions.items()
        )
    )


def _filled(
    cls: type, request: Any, code: ErrorCode, *, is_whole: bool = False, deep: bool = False
) -> Entity:
    """Return an instance of ``cls`` with the items of ``request``, and ``code`` where it belongs.

    ``is_whole`` is true for the response itself, false for an item in it. With ``deep`` the
    top-level error code stays 0, and the items have ``code``.
    """
    values: dict[str, object] = {}
    infos = all_fields(cls)
    error_field = next((info for info in infos if info.name in _ERROR_CODES), None)
    if error_field is not None and not deep:
        values[error_field.name] = code
    for info in infos:
        if info.is_array and info.struct is not None:
            elements: tuple[Any, ...] = ()
            if (error_field is None or deep) and _bears_error(info.struct):
                elements = _first_list(request)
            elif info.name in _NAMING_LISTS and not is_whole:
                elements = getattr(request, info.name, ())
            if elements:
                values[info.name] = tuple(
                    _filled(info.struct, element, code) for element in elements
                )
        elif info.name == "acknowledge_error_code":
            if getattr(request, "acknowledgement_batches", ()):
                values[info.name] = int(code)
        elif (
            not is_whole
            and info is not error_field
            and (value_asked := _named(info, request)) is not None
        ):
            values[info.name] = value_asked
        elif info.name in _UNKNOWN:
            values[info.name] = -1
    return replace(default_entity(cls), **values)


@cache
def _bears_error(cls: type) -> bool:
    return any(
        info.name in _ERROR_CODES
        or (info.is_array and info.struct is not None and _bears_error(info.struct))
        for info in all_fields(cls)
    )


def _first_list(request: Any) -> tuple[Any, ...]:
    """Return the elements of the first list in a request or in an item: the items to answer."""
    is_own = isinstance(request, SimpleNamespace)
    names = vars(request) if is_own else [info.name for info in all_fields(type(request))]
    values = (getattr(request, name) for name in names)
    return next((value for value in values if isinstance(value, tuple)), ())


def _named(info: FieldInfo, request: Any) -> object:
    """Return the request's value for a field of its response; None if it has none."""
    if isinstance(request, (str, int)):
        is_text = info.kafka_type == "string"
        is_name = info.name in _NAMES and is_text == isinstance(request, str)
        return request if is_name else None
    for name in (info.name, *_ALIASES.get(info.name, ())):
        if (value := getattr(request, name, None)) is not None and not isinstance(value, tuple):
            return cast("object", value)
    return None
