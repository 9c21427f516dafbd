"""``fencepost clients``: the metrics that clients push (KIP-714)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fencepost.cli.output import CommandGroup, emit, moment, table_options
from fencepost.cli.printing import print_lines

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

COLUMNS = (
    *("client_id", "host", "software", "group", "last_push", "pushes"),
    *("idle", "poll_max", "commit_max", "rebalances"),
)
SERIES_COLUMNS = ("client_id", "instance", "metric", "labels", "value", "unit")


@click.group("clients", cls=CommandGroup)
def command() -> None:
    """Show the metrics that clients push to the brokers.

    Clients push what a subscription asks for: `fencepost configs set client-metrics NAME
    metrics=org.apache.kafka.consumer. interval.ms=1m --execute`.
    """


@command.command("telemetry")
@click.option("--client-id", metavar="ID", help="All values of the clients with this client id.")
@table_options
def telemetry(session: ClusterSession, form: str, client_id: str | None) -> None:
    """List the clients that push metrics, with the values that tell how a consumer is doing.

    IDLE is the part of its time that a consumer waits in poll; a consumer with IDLE near 0 cannot
    keep up. POLL_MAX is the longest time between two polls in the last minute, COMMIT_MAX the
    longest latency of a commit. With --client-id, list every value of these clients. A client that
    has asked for its subscription and pushed nothing has no LAST_PUSH.

    Brokers accept metrics if fencepost.client.telemetry.enable is true. Apache Kafka passes them on
    to a plugin, and keeps none.
    """
    from fencepost.client.queries.telemetry import instances

    clients, silent = instances(session, client_id)
    if client_id is None:
        emit(
            [_row(client) for client in clients],
            COLUMNS,
            form,
            "no clients have asked for subscriptions",
        )
    else:
        rows = [row for client in clients for row in _series_rows(client)]
        emit(rows, SERIES_COLUMNS, form, f"no metrics of clients with the client id {client_id!r}")
    if silent and form == "table":
        named = ", ".join(map(str, silent))
        print_lines(
            f"note: brokers that keep no metrics of clients: {named}"
            " (fencepost.client.telemetry.enable=true makes a broker keep them)",
            err=True,
        )


def _row(instance: dict[str, Any]) -> dict[str, Any]:
    values, resource = instance["values"], instance["resource"]
    return {
        **instance,
        "host": instance["client_host"],
        "group": resource.get("group_id"),
        "last_push": moment(instance["pushed_ms"]),
        "idle": _rounded(values.get("poll_idle_ratio")),
        "poll_max": _milliseconds(values.get("time_between_polls_max_ms")),
        "commit_max": _milliseconds(values.get("commit_latency_max_ms")),
        "rebalances": _rounded(values.get("rebalances")),
    }


def _series_rows(instance: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "client_id": instance["client_id"],
            "instance": instance["client_instance_id"],
            "metric": name,
            "labels": [f"{key}={text}" for key, text in labels.items()],
            "value": value,
            "unit": unit,
            "time": moment(time_ms),
        }
        for name, labels, value, unit, time_ms in instance["series"]
    ]


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.6g}"


def _milliseconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f} ms"
