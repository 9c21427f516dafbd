"""The convention for commands that change something: without ``--execute`` they only show it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import click

from fencepost.cli.printing import print_lines

R = TypeVar("R")

NOTHING_CHANGED = "nothing was changed; --execute makes the change"


def execute_option(function: Callable[..., R]) -> Callable[..., R]:
    """Add ``--execute``: without it the function only shows what it would do.

    The older options still work: ``--dry-run`` asks for the default, ``--yes`` is ``--execute``.
    """

    @click.option(
        "--execute", is_flag=True, help="Make the change; without it, the change is only shown."
    )
    @click.option("--dry-run", is_flag=True, hidden=True)
    @click.option("--yes", is_flag=True, hidden=True)
    @functools.wraps(function)
    def wrapped(*, execute: bool, dry_run: bool, yes: bool, **options: object) -> R:
        if dry_run and (execute or yes):
            raise click.UsageError("--dry-run contradicts --execute")
        if dry_run:
            print_lines(
                "hint: --dry-run can be left out: without --execute nothing is changed", err=True
            )
        if yes:
            print_lines("hint: --yes is now called --execute", err=True)
        return function(execute=execute or yes, **options)

    return wrapped


def show_only() -> None:
    """Say on standard error that the change was only shown."""
    print_lines(NOTHING_CHANGED, err=True)
