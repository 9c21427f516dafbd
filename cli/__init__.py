"""The command ``fencepost``: the daemon, and client commands, which use the Kafka protocol.

:data:`fencepost.cli.output.EXIT_CODES` lists the exit statuses.

Each command and command group has its module, which is imported only when the command is used:
``fencepost serve`` must start in a fraction of a second.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from fencepost.cli.options import ConnectionGroup
from fencepost.cli.printing import discard_unwritten, print_lines, show_error

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "acls": "list, add and remove access rules (ACLs), and say which rule decides",
    "backup": "create, verify and restore backups of a data directory",
    "clients": "show the metrics that clients push",
    "cluster": "show brokers, features and API versions; turn a broker into a cluster",
    "configs": "show and change settings of topics, brokers, groups and client metrics",
    "completion": "print the completion script of a shell",
    "console": "show a cluster in a browser",
    "consume": "read records of a topic",
    "crash-sweep": "run your own pipeline while the broker is killed at each of its steps",
    "doctor": "tell which rule of exactly-once the cluster's clients break",
    "dump-log": "show the files of a data directory",
    "features": "show, raise and lower the levels of features",
    "log": "verify, repair, import and export partition directories",
    "groups": "inspect consumer groups, and reset or delete their offsets",
    "health": "check whether a broker answers",
    "history": "send the history to webhooks or OpenTelemetry, print its schema",
    "produce": "write records to a topic",
    "profile": "create, choose, show and delete connection profiles",
    "quotas": "show and change the quotas of users, clients and addresses",
    "record": "record an incident of groups or transactions for a test",
    "serve": "run the broker",
    "topics": "list, create, describe, alter, trim and delete topics",
    "txns": "inspect transactions, and end those that hang",
    "users": "list, add and remove users with passwords, and change passwords",
}


class LazyGroup(ConnectionGroup):
    """A group whose commands live in modules of this package, imported on first use."""

    shows_connection = True

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command as every group does, but escape the text of errors."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.ClickException as error:
            show_error(error)
            discard_unwritten()
            status = error.exit_code
        except OSError as error:
            if not discard_unwritten():
                raise
            show_error(click.ClickException(str(error)))
            status = 1
        except click.Abort:
            print_lines("Aborted!", err=True)
            status = 1
        sys.exit(status if isinstance(status, int) else 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        del ctx
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of ``cmd_name``."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"fencepost.cli.{cmd_name.replace('-', '_')}")
        command = module.command
        return command if isinstance(command, click.Command) else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands without importing any of them."""
        from click.shell_completion import CompletionItem

        completions = [
            CompletionItem(name, help=text)
            for name, text in sorted(COMMANDS.items())
            if name.startswith(incomplete)
        ]
        # Not the group's own completion, which would import all commands.
        return [*completions, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any of them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))
        from fencepost.cli.output import EXIT_CODES

        with formatter.section("Exit status"):
            formatter.write_dl([(str(code), text) for code, text in EXIT_CODES.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fencepost", prog_name="fencepost")
def main() -> None:
    """Run and inspect a Kafka-protocol broker made for groups and transactions.

    Every command that connects to a broker works with Apache Kafka as well. The broker's address
    comes from --bootstrap, before or after the command, else from $FENCEPOST_BOOTSTRAP, else from
    the profile that --profile or $FENCEPOST_PROFILE names in ~/.config/fencepost/profiles.toml
    ($FENCEPOST_PROFILES is another file), else from the profile that `profile use` chose.
    Encryption and login come from the profile, or from the file with Kafka's own keys that
    --command-config or $FENCEPOST_COMMAND_CONFIG names.
    """
