"""The command ``fencepost``: the daemon, and commands for people that speak the protocol.

Exit status: 0 done, 1 the broker refused or something is wrong, 2 the command line is wrong,
3 no broker could be reached.

One module per command group; a module is imported only when its command is used, because
``fencepost serve`` must be up in a fraction of a second.
"""

from __future__ import annotations

import importlib

import click

COMMANDS = {
    "cluster": "show brokers, features and API versions",
    "configs": "show and change settings of topics, brokers and groups",
    "consume": "read records of a topic",
    "crash-sweep": "kill the broker at every step under your own pipeline",
    "dump-log": "show the files of a data directory",
    "features": "show, raise and lower the levels of features",
    "log": "verify, repair, import and export partition directories",
    "groups": "look into consumer groups",
    "produce": "write records to a topic",
    "serve": "run the broker",
    "topics": "list, create, describe, alter, trim and delete topics",
    "txns": "look into transactions",
}


class LazyGroup(click.Group):
    """A group whose commands live in modules of this package, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name all commands."""
        del ctx
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of ``cmd_name``."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"fencepost.coordinator.cli.{cmd_name.replace('-', '_')}")
        command = module.command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any of them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fencepost", prog_name="fencepost")
def main() -> None:
    """Run and question a Kafka-protocol broker made for groups and transactions."""
