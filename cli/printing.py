"""The commands' only way to standard output and standard error.

Names come from clients, and a terminal obeys the control characters in them. Everything printed
here is therefore escaped; ``tests/test_tidy.py`` forbids other ways of printing in this folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from fencepost.logcore.printable import json_printable, printable

if TYPE_CHECKING:
    from rich.table import Table

TABLE_WIDTH = 100_000
"""Tables never wrap: the terminal or the pager decides, and a pipe gets whole lines."""

MIN_WIDTH = 40
"""The smallest width to wrap lines at, also on a terminal that is narrower or reports 0 columns."""

_HELP_ERRORS: tuple[type[click.ClickException], ...] = tuple(
    filter(None, [getattr(click.exceptions, "NoArgsIsHelpError", None)])
)
"""The error of a group without a command, whose message is the help; click has it since 8.2."""


class HintedError(click.ClickException):
    """An error with hints, which are printed on lines of their own."""

    def __init__(self, message: str, *hints: str) -> None:
        super().__init__(message)
        self.hints = hints


def print_lines(*lines: str, err: bool = False) -> None:
    """Print ``lines``, each on a line of its own; a line end within one is escaped."""
    click.echo("\n".join(map(printable, lines)), err=err)


def discard_unwritten() -> bool:
    """Discard buffered output that cannot be written, and return whether there was any.

    Otherwise, if the disk is full for example, the interpreter would try to write the output again
    at its exit, complain, and exit with status 120.
    """
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False


def print_json(value: object) -> None:
    """Print ``value`` as one line of JSON."""
    click.echo(json_text(value))


def print_json_array(values: Iterable[object]) -> None:
    """Print ``values`` as one JSON array on one line, each as soon as it is available.

    The array is closed even if ``values`` raises an error.
    """
    before = "["
    try:
        for value in values:
            click.echo(before + json_text(value), nl=False)
            before = ", "
    finally:
        click.echo("[]" if before == "[" else "]")


def json_text(value: object) -> str:
    """Return ``value`` as JSON on one line, without characters that a terminal would obey."""
    return json_printable(json.dumps(value, default=str, ensure_ascii=False))


def print_table(table: Table) -> None:
    """Print ``table``, whose cells are escaped already."""
    from rich.console import Console

    Console(width=TABLE_WIDTH, highlight=False, soft_wrap=True).print(table)


def write_bytes(data: bytes) -> None:
    """Print ``data`` as it is: the caller has escaped it if :func:`is_terminal`."""
    click.echo(data, nl=False)


def is_terminal() -> bool:
    """Return whether standard output is a terminal, which obeys control characters."""
    return sys.stdout.isatty()


def terminal_width() -> int | None:
    """Return the width of the terminal, in columns; None if standard output is no terminal."""
    return max(MIN_WIDTH, shutil.get_terminal_size().columns) if is_terminal() else None


def show_error(error: click.ClickException) -> None:
    """Print ``error`` as click does, with its message escaped."""
    if isinstance(error, _HELP_ERRORS):
        print_lines(*error.format_message().splitlines(), err=True)
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        help_option = f"{context.command_path} {context.help_option_names[0]}"
        usage = context.get_usage().splitlines()
        print_lines(*usage, f"Try '{help_option}' for help.", "", err=True)
    text = f"Error: {error.format_message()}"
    # click lists the choices for a missing parameter on lines of their own.
    lines = text.expandtabs().splitlines() if isinstance(error, click.MissingParameter) else [text]
    hints = error.hints if isinstance(error, HintedError) else ()
    print_lines(*lines, *hints, err=True)
