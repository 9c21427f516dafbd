"""DescribeConfigs entries that show the metrics that clients have pushed (KIP-714).

Kafka has no API to read these metrics. A Fencepost broker returns them as JSON, under keys that a
response contains only if the request names them:

* ``fencepost.client.telemetry`` of a broker: all client instances, each with the values of
  ``HIGHLIGHTS`` (``telemetry/reports.py``);
* ``fencepost.client.telemetry/CLIENT_ID`` of a broker: the instances with that client id, each with
  all its values;
* ``fencepost.client.telemetry`` of a group: the consumers of the group that have reported a long
  pause between two polls.

``fencepost clients telemetry`` asks for the first two, ``fencepost groups describe`` and ``groups
members`` for the third. Apache Kafka leaves out keys that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.handlers.share_views import view_entry
from fencepost.logcore.checkpoints import uuid_to_text
from fencepost.protocol import Entity
from fencepost.protocol.steps import Steps

if TYPE_CHECKING:
    from fencepost.coordinator.telemetry.instances import ClientInstance

KEY: Final = "fencepost.client.telemetry"

MAX_INSTANCES: Final = 2_000
"""The maximum number of instances in a list of all clients: the most recently active ones."""

MAX_DETAILED: Final = 50
"""The maximum number of instances of one client id that are shown with all their values."""

SERIES_AT_ONCE: Final = 200
"""The number of series that are encoded between two yields."""


def entries(ctx: Context, names: Iterable[str]) -> Steps[tuple[Entity, ...]]:
    """Return an entry for each named key of the broker."""
    instances: list[Entity] = []
    for name in names:
        key, slash, client_id = name.partition("/")
        if key != KEY or not ctx.broker.config.bool("fencepost.client.telemetry.enable"):
            continue
        value = yield from _instances(ctx, client_id if slash else None)
        instances.append(view_entry(ctx, name, value, "Metrics that clients have pushed, as JSON."))
    return tuple(instances)


def pause_entries(ctx: Context, group: str, names: Iterable[str]) -> Steps[tuple[Entity, ...]]:
    """Return the entry of a group's reported pauses, if it is named and may be described."""
    if (
        KEY not in names
        or not ctx.broker.config.bool("fencepost.client.telemetry.enable")
        or not ctx.may(Operation.DESCRIBE, ResourceType.GROUP, group)
    ):
        return ()
    pauses: list[str] = []
    for instance, pause in ctx.broker.telemetry.paused(group) if ctx.broker.has_telemetry else ():
        if len(pauses) >= MAX_INSTANCES:
            break
        fields = {
            "member": instance.report.member,
            "client_id": instance.client.client_id,
            "client_host": instance.client.host,
            "pause_ms": pause.pause_ms,
            "reported_ms": pause.at_ms,
        }
        pauses.append(json.dumps(fields))
        yield
    value = f"[{', '.join(pauses)}]"
    return (view_entry(ctx, KEY, value, "Pauses between polls that consumers reported, as JSON."),)


def _instances(ctx: Context, client_id: str | None) -> Steps[str]:
    """Return the instances as a JSON array, encoded in steps."""
    pieces: list[str] = []
    most = MAX_INSTANCES if client_id is None else MAX_DETAILED
    for instance in ctx.broker.telemetry if ctx.broker.has_telemetry else ():
        if len(pieces) >= most:
            break
        if client_id is None:
            pieces.append(json.dumps(_summary(instance)))
        elif (instance.client.client_id or "") == client_id:
            series = yield from _series(instance)
            pieces.append(
                f'{json.dumps(_summary(instance))[:-1]}, "series": [{", ".join(series)}]}}'
            )
        yield
    return f"[{', '.join(pieces)}]"


def _summary(instance: ClientInstance) -> dict[str, Any]:
    client, report = instance.client, instance.report
    return {
        "client_id": client.client_id,
        "client_host": client.host,
        "software": f"{client.software_name} {client.software_version}",
        "client_instance_id": uuid_to_text(instance.instance_id),
        "subscribed": instance.metrics,
        "interval_ms": instance.interval_ms,
        "pushed_ms": report.at_ms,
        "pushes": report.pushes,
        "series_count": len(report),
        "dropped": report.dropped,
        "resource": report.resource,
        "values": report.highlights,
    }


def _series(instance: ClientInstance) -> Steps[list[str]]:
    series: list[str] = []
    for name, attributes, value in instance.report.series():
        series.append(json.dumps([name, dict(attributes), value.value, value.unit, value.time_ms]))
        if not len(series) % SERIES_AT_ONCE:
            yield
    return series
