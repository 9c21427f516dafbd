"""The metrics that clients have pushed to the brokers (KIP-714).

Kafka's protocol has no API for them. A Fencepost broker reports them in DescribeConfigs of the
broker, under a key of its own (``coordinator/handlers/telemetry_views.py``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from fencepost.client.queries.settings import describe_configs

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

KEY: Final = "fencepost.client.telemetry"

Row = dict[str, Any]


def instances(session: ClusterSession, client_id: str | None) -> tuple[list[Row], list[int]]:
    """Return the client instances of all brokers, and the brokers that do not support the query.

    With ``client_id``, return only the instances with that id, each with its ``series``: lists of
    name, labels, value, unit and the client's time in milliseconds. Raises ApiError.
    """
    key = KEY if client_id is None else f"{KEY}/{client_id}"
    brokers = sorted(session.client.metadata().brokers)
    entries = describe_configs(session, [("broker", str(node)) for node in brokers], [key])
    by_node = {int(entry.resource): json.loads(entry.value or "[]") for entry in entries}
    rows = [{"broker": node, **row} for node, node_rows in by_node.items() for row in node_rows]
    rows.sort(key=lambda row: (row["client_id"] or "", -(row["pushed_ms"] or 0)))
    return rows, [node for node in brokers if node not in by_node]
