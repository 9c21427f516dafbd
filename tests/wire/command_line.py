"""The command line in this process, where it starts in no time."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from fencepost.coordinator.cli import main


def cli(
    bootstrap: str,
    *arguments: str,
    stdin: str | bytes = "",
    status: int | None = 0,
    **env: str | None,
) -> Result:
    """Run a command with ``bootstrap`` in its environment, and check its exit status.

    None is for a status that the caller checks.
    """
    told = {"FENCEPOST_BOOTSTRAP": bootstrap, "FENCEPOST_PROFILE": None, **env}
    done = CliRunner().invoke(main, arguments, input=stdin, env=told)
    assert status in {None, done.exit_code}, (arguments, done.output, done.exception)
    assert "Traceback" not in done.output
    return done


def json_lines(done: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]
