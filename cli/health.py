"""``fencepost health``: tests whether a broker answers, for a container's health check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fencepost.cli.output import shared_options
from fencepost.cli.printing import print_lines

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession


@click.command("health")
@shared_options
def command(session: ClusterSession) -> None:
    """Ask the broker at --bootstrap, and no other broker, for its topics.

    Exit status 0 if it answers, 3 if it does not.
    """
    cluster = session.client.metadata(refresh=True)
    print_lines(f"healthy: cluster {cluster.cluster_id}, {len(cluster.topics)} topics")
