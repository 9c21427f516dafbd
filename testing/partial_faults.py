"""Errors in some of the partitions of a request.

The partitions with the fault get an error. The other partitions are handled as a separate request.
One response has both results. A Fetch is handled as a whole, because its session keeps all
partitions; then the results of the partitions with the fault are replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import CloseConnection, Context, Handler
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol.api import ApiKey
from fencepost.testing.arguments import integer, name_of
from fencepost.testing.error_answers import partition_errors
from fencepost.testing.requests import fetched_partitions, finished, index_of, topic_name

if TYPE_CHECKING:
    from fencepost.testing.views import Partition

_TOPICS: Final = ("topics", "partitions")

SPLIT: Final[Mapping[ApiKey, tuple[str, str, str, str]]] = {
    ApiKey.PRODUCE: ("topic_data", "partition_data", "responses", "partition_responses"),
    ApiKey.FETCH: (*_TOPICS, "responses", "partitions"),
    ApiKey.LIST_OFFSETS: (*_TOPICS, *_TOPICS),
    ApiKey.OFFSET_COMMIT: (*_TOPICS, *_TOPICS),
    ApiKey.TXN_OFFSET_COMMIT: (*_TOPICS, *_TOPICS),
    ApiKey.DELETE_RECORDS: (*_TOPICS, *_TOPICS),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: (*_TOPICS, *_TOPICS),
}
"""The APIs whose partitions succeed and fail one by one, with the fields of topics and partitions
in the request and in the response."""


def places_of(only: Mapping[str, int | Iterable[int]]) -> frozenset[Partition]:
    """Return the argument ``only`` of a fault as partitions. Raises TypeError, ValueError."""
    if not isinstance(only, Mapping):
        raise TypeError(f"only has partitions by topic, {{'orders': [0, 1]}}, not {only!r}")
    places = set()
    for topic, indexes in only.items():
        name_of("a topic of only", topic)
        if isinstance(indexes, (str, bytes)) or not isinstance(indexes, (int, Iterable)):
            raise TypeError(f"only[{topic!r}] is a partition or a list of them, not {indexes!r}")
        listed = [indexes] if isinstance(indexes, int) else list(indexes)
        places |= {(topic, integer("a partition of only", index, 0)) for index in listed}
    if not places:
        raise ValueError("only has no partition")
    return frozenset(places)


def answer_in_part(
    ctx: Context, handler: Handler, code: ErrorCode, places: Collection[Partition]
) -> Work[Any]:
    """Handle a request of an API in :data:`SPLIT`, with ``code`` for the partitions ``places``."""
    topics, partitions, answered, results = SPLIT[ApiKey(ctx.api_key)]
    if ctx.api_key == ApiKey.FETCH:
        wrong = [
            fetched_partition
            for fetched_partition in fetched_partitions(ctx)
            if fetched_partition[1] in places
        ]
        # As in Kafka, a Fetch does not wait for records if one of its partitions has an error.
        rest = replace(ctx.body, min_bytes=0)
    else:
        wrong = [
            partition for partition in _named(ctx, topics, partitions) if partition[1] in places
        ]
        rest = _without(ctx, ctx.body, topics, partitions, places)
    errors = partition_errors(ctx, code, ((key, place[1]) for key, place in wrong))
    if ctx.api_key != ApiKey.FETCH and not getattr(rest, topics):
        real = errors
    else:
        real = yield from finished(handler.run(replace(ctx, body=rest)))
    if real is None or (ctx.api_key == ApiKey.PRODUCE and ctx.body.acks == 0):
        raise CloseConnection("a fault: the request has no response that could contain an error")
    if real is errors:
        return errors
    kept = _without(ctx, real, answered, results, places)
    return replace(kept, **{answered: _joined(kept, errors, answered, results)})


def _named(ctx: Context, topics: str, partitions: str) -> Iterator[tuple[object, Partition]]:
    """Yield each partition of a request, with its topic's key: its name or its id."""
    for topic in getattr(ctx.body, topics):
        key, name = topic_name(ctx, topic)
        yield from ((key, (name, index_of(part))) for part in getattr(topic, partitions))


def _without(
    ctx: Context, body: Any, topics: str, partitions: str, places: Collection[Partition]
) -> Any:
    """Return a request or a response without ``places``, and without topics left empty by that."""
    left = []
    for topic in getattr(body, topics):
        name = topic_name(ctx, topic)[1]
        kept = tuple(
            partition
            for partition in getattr(topic, partitions)
            if (name, index_of(partition)) not in places
        )
        if kept:
            left.append(replace(topic, **{partitions: kept}))
    return replace(body, **{topics: tuple(left)})


def _joined(real: Any, errors: Any, topics: str, partitions: str) -> tuple[Any, ...]:
    """Merge the topics of two responses; a topic in both gets the partitions of both."""
    merged: dict[object, Any] = {}
    for topic in (*getattr(real, topics), *getattr(errors, topics)):
        key = getattr(topic, "topic_id", None) or getattr(topic, "name", None) or topic.topic
        former = merged.get(key)
        parts = getattr(topic, partitions)
        merged[key] = (
            topic
            if former is None
            else replace(former, **{partitions: (*getattr(former, partitions), *parts)})
        )
    return tuple(merged.values())
