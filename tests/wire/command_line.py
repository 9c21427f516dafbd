"""Runs the command line in this process, because another process would take long to start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
from click.testing import CliRunner, Result

from fencepost.cli import main


def cli(
    bootstrap: str,
    *arguments: str,
    stdin: str | bytes = "",
    status: int | None = 0,
    **env: str | None,
) -> Result:
    """Run a command with ``bootstrap`` in its environment, and check its exit status.

    With ``status`` None the caller checks the status.
    """
    told = {"FENCEPOST_BOOTSTRAP": bootstrap, "FENCEPOST_PROFILE": None, **env}
    done = CliRunner().invoke(main, arguments, input=stdin, env=told)
    assert status in {None, done.exit_code}, (arguments, done.output, done.exception)
    assert "Traceback" not in done.output
    return done


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all commands that are not groups."""
    if not isinstance(command, click.Group):
        yield path
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from leaves(found, (*path, name))


def json_lines(done: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]
