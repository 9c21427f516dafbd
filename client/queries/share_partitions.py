"""In-flight records of share groups, from the leaders of their partitions.

Kafka's protocol has no API for them, and its brokers report none. A Fencepost broker reports them
in DescribeConfigs of the group, under a key for each share partition
(``coordinator/handlers/share_views.py``).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fencepost.client.queries.session import check
from fencepost.client.queries.settings import describe_request
from fencepost.client.router import ApiError

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.requests import Partition

PREFIX: Final = "fencepost.share.partition/"
NOT_REPORTED: Final = "the leader reports no in-flight records; only Fencepost does"
NOT_FETCHED: Final = "no member fetches"
NO_LEADER: Final = "the partition has no leader"


class InFlight(NamedTuple):
    """The report of a partition's leader; ``view`` is empty if there is a ``reason``."""

    view: Mapping[str, Any]
    reason: str | None


def in_flight(
    session: ClusterSession, group: str, partitions: Iterable[Partition]
) -> dict[Partition, InFlight]:
    """Ask the leaders of the partitions, each once."""
    cluster = session.client.metadata()
    by_leader: dict[int, list[Partition]] = defaultdict(list)
    reports: dict[Partition, InFlight] = {}
    for topic, index in partitions:
        leader = cluster.leader(topic, index)
        if leader is None or leader not in cluster.brokers:
            reports[topic, index] = InFlight({}, NO_LEADER)
        else:
            by_leader[leader].append((topic, index))
    for node, node_partitions in by_leader.items():
        reports.update(_leader_reports(session, group, node, node_partitions))
    return reports


def _leader_reports(
    session: ClusterSession, group: str, node: int, partitions: list[Partition]
) -> dict[Partition, InFlight]:
    keys = {f"{PREFIX}{topic}/{index}": (topic, index) for topic, index in partitions}
    build = partial(describe_request, resources=[("group", group)], keys=list(keys))
    try:
        answer = session.client.call("DescribeConfigs", check=False, to_node=node, entity=build)
        (result,) = answer.results
        check(result.error_code, "DescribeConfigs", group, result.error_message)
    except ApiError as error:
        return dict.fromkeys(partitions, InFlight({}, str(error)))
    views = {keys[entry.name]: json.loads(entry.value) for entry in result.configs}
    return {
        place: InFlight(views.get(place, {}), _missing_view_reason(views.get(place)))
        for place in partitions
    }


def _missing_view_reason(view: Mapping[str, Any] | None) -> str | None:
    if view is None:
        return NOT_REPORTED
    return None if view else NOT_FETCHED
