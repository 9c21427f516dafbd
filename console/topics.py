"""Views of topics: a page of topics, and one topic with its partitions, producers and settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fencepost.client.cluster import TopicMetadata
from fencepost.client.queries.open_transactions import producers
from fencepost.client.queries.replicas import partition_states
from fencepost.client.queries.session import ClusterSession
from fencepost.client.requests import EARLIEST, LATEST, Partition
from fencepost.console.history import HistoryCache
from fencepost.console.paging import Params, is_on, page, required

TOPIC_RESOURCE = 2
DEFAULT_SOURCES = frozenset({5})
"""Kafka's number for the source of default settings."""


def topics_view(session: ClusterSession, params: Params, history: HistoryCache) -> dict[str, Any]:
    """Return a page of the topics, each with its partitions and offsets."""
    del history
    topics = session.client.metadata(refresh=True).topics
    rows = [topics[name] for name in sorted(topics)]
    internal = sum(row.is_internal or row.name.startswith("__") for row in rows)
    if not is_on(params, "internal"):
        rows = [row for row in rows if not (row.is_internal or row.name.startswith("__"))]
    paged = page(params, rows, lambda row: row.name)
    chosen: list[TopicMetadata] = paged["rows"]
    places = [
        (row.name, index)
        for row in chosen
        for index, part in row.partitions.items()
        if part.leader >= 0
    ]
    first, end = session.offsets(places, EARLIEST), session.offsets(places, LATEST)
    stable = session.offsets(places, LATEST, committed=True)

    def total(row: TopicMetadata, of: Callable[[Partition], int]) -> int | None:
        """Return a sum over the partitions; None if one has no leader to ask for its offsets."""
        topics = [(row.name, index) for index, part in row.partitions.items() if part.leader >= 0]
        return sum(map(of, topics)) if len(topics) == len(row.partitions) else None

    paged["rows"] = [
        {
            "topic": row.name,
            "internal": row.is_internal,
            "partitions": len(row.partitions),
            "replicas": max((len(part.replicas) for part in row.partitions.values()), default=0),
            "leaderless": sum(part.leader < 0 for part in row.partitions.values()),
            "under_replicated": sum(
                len(part.in_sync) < len(part.replicas) for part in row.partitions.values()
            ),
            "offsets": total(row, lambda p: end[p] - first[p]),
            "end": total(row, lambda p: end[p]),
            "held_back": total(row, lambda p: end[p] - stable[p]),
        }
        for row in chosen
    ]
    return {"topics": paged, "internal": internal}


def topic_view(session: ClusterSession, params: Params, history: HistoryCache) -> dict[str, Any]:
    """Return one topic: partitions with their offsets, idempotent producers, settings."""
    del history
    name = required(params, "name")
    (topic,) = session.topics([name])
    elr = {partition.partition: partition.elr for partition in partition_states(session, [name])}
    places = [(name, index) for index, part in topic.partitions.items() if part.leader >= 0]
    first, end = session.offsets(places, EARLIEST), session.offsets(places, LATEST)
    stable = session.offsets(places, LATEST, committed=True)
    partitions = []
    for index, part in sorted(topic.partitions.items()):
        place = (name, index)
        partitions.append(
            {
                "partition": index,
                "leader": part.leader,
                "replicas": list(part.replicas),
                "in_sync": list(part.in_sync),
                "elr": list(elr.get(index) or ()),
                "offline": list(part.offline),
                "first": first.get(place),
                "stable": stable.get(place),
                "end": end.get(place),
            }
        )
    return {
        "topic": name,
        "internal": topic.is_internal,
        "id": str(topic.topic_id) if topic.topic_id else None,
        "partitions": partitions,
        "producers": [
            {
                "partition": row.partition,
                "producer_id": row.producer_id,
                "epoch": row.epoch,
                "last_sequence": row.last_sequence,
                "last_ms": row.last_timestamp_ms if row.last_timestamp_ms >= 0 else None,
                "start_offset": row.start_offset if row.is_open else None,
            }
            for row in producers(session, places)
        ],
        "settings": _settings(session, name),
    }


def _settings(session: ClusterSession, name: str) -> list[dict[str, Any]]:
    """Return the topic's settings, explicitly set ones before defaults."""
    answer = session.client.call(
        "DescribeConfigs",
        check=False,
        entity=lambda f: f.message(
            resources=[
                f.DescribeConfigsResource(
                    resource_type=TOPIC_RESOURCE, resource_name=name, configuration_keys=None
                )
            ]
        ),
    )
    rows = [
        {
            "name": row.name,
            "value": None if row.is_sensitive else row.value,
            "is_default": row.config_source in DEFAULT_SOURCES,
        }
        for result in answer.results
        for row in result.configs
    ]
    return sorted(rows, key=lambda row: (row["is_default"], row["name"]))
