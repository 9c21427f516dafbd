"""``fencepost history``: the history as a stream for other systems, and its schema."""

from __future__ import annotations

import click

from fencepost.cli.history_export import export, schema_command
from fencepost.cli.output import CommandGroup


@click.group("history", cls=CommandGroup)
def command() -> None:
    """Send the history to other systems, as JSON, logs and spans.

    `fencepost groups history`, `txns history`, `topics history` and `cluster history` show it.
    """


command.add_command(export)
command.add_command(schema_command)
