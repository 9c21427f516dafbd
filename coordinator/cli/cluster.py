"""``fencepost cluster``: who serves, and what they can do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from fencepost.coordinator.cli.features import COLUMNS as FEATURE_COLUMNS
from fencepost.coordinator.cli.features import feature_levels
from fencepost.coordinator.cli.output import CommandGroup, counted, emit, table_options, text_of

if TYPE_CHECKING:
    from fencepost.coordinator.cli.queries.session import Session

BROKER_COLUMNS = ("broker", "host", "port", "rack", "controller", "apis")
API_COLUMNS = ("broker", "key", "api", "lowest", "highest")
METADATA_VERSION = "metadata.version"
_LEVELS = "7=3.3 8=3.4 11=3.5 14=3.6 19=3.7 20=3.8 21=3.9 25=4.0 27=4.1 29=4.2 30=4.3"
RELEASES = {int(level): release for level, release in (pair.split("=") for pair in _LEVELS.split())}
"""The level of metadata.version that each release of Kafka ends with (``MetadataVersion``)."""


@click.group("cluster", cls=CommandGroup)
def command() -> None:
    """Look at a cluster as a whole."""


@command.command("info")
@click.option("--apis", "with_apis", is_flag=True, help="Show the versions of each API as well.")
@table_options
def info(session: Session, form: str, *, with_apis: bool) -> None:
    """Show a cluster's id, its brokers, who of them is the controller, and its features.

    VERSION is the release of Apache Kafka whose metadata the cluster keeps, where it tells.
    """
    cluster = session.client.metadata(refresh=True)
    versions = {node: session.client.versions(to_node=node) for node in sorted(cluster.brokers)}
    features = feature_levels(session)
    brokers = [
        {
            "broker": node,
            "host": broker.host,
            "port": broker.port,
            "rack": broker.rack,
            "controller": node == cluster.controller_id,
            "apis": len(versions[node]),
        }
        for node, broker in sorted(cluster.brokers.items())
    ]
    apis = _apis(versions) if with_apis else []
    version = _release({str(row["feature"]): row["finalized"] for row in features})
    if form == "json":
        told: dict[str, object] = {
            "cluster_id": cluster.cluster_id,
            "controller": cluster.controller_id,
            "version": version,
            "brokers": brokers,
            "features": features,
        }
        click.echo(json.dumps(told | ({"apis": apis} if with_apis else {}), ensure_ascii=False))
        return
    head = f"cluster {text_of(cluster.cluster_id)}, {counted(len(brokers), 'broker')}"
    click.echo(head + ("" if version is None else f", version {version}"))
    emit(brokers, BROKER_COLUMNS, form)
    click.echo()
    emit(features, FEATURE_COLUMNS, form)
    if with_apis:
        click.echo()
        emit(apis, API_COLUMNS, form)


def _release(features: dict[str, object]) -> str | None:
    """The first release that has the cluster's metadata.version; None if it has none."""
    level = features.get(METADATA_VERSION)
    if not isinstance(level, int) or level < 1:
        return None
    newest = max(RELEASES)
    if level > newest:
        return f"after {RELEASES[newest]}"
    return next(release for last, release in sorted(RELEASES.items()) if level <= last)


def _apis(versions: dict[int, dict[int, tuple[int, int]]]) -> list[dict[str, object]]:
    from kio.schema.index import api_key_map

    return [
        {
            "broker": node,
            "key": key,
            "api": api_key_map.get(key, "unknown").title().replace("_", ""),
            "lowest": low,
            "highest": high,
        }
        for node, known in versions.items()
        for key, (low, high) in sorted(known.items())
    ]
