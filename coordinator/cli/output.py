"""What every command shares: the options, tables or JSON, and errors as exit codes."""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import click

P = ParamSpec("P")
R = TypeVar("R")

Row = Mapping[str, object]

EXIT_REFUSED = 1
EXIT_UNREACHABLE = 3
TABLE_WIDTH = 100_000
"""Columns never wrap: the terminal or the pager decides, and a pipe gets whole lines."""


class Unreachable(click.ClickException):
    """No broker answered."""

    exit_code = EXIT_UNREACHABLE


def shared_options(function: Callable[..., R]) -> Callable[..., R]:
    """Add ``--bootstrap`` and ``--timeout``: the function gets a session with that cluster.

    The client's errors become exit codes.
    """

    @click.option(
        "--bootstrap",
        "-b",
        default="127.0.0.1:9092",
        envvar="FENCEPOST_BOOTSTRAP",
        show_default=True,
        show_envvar=True,
        metavar="HOST:PORT",
        help="A broker to begin with; several are separated by commas.",
    )
    @click.option(
        "--timeout",
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        type=click.FloatRange(min=0.1),
        help="Give up after so long.",
    )
    @functools.wraps(function)
    def wrapped(bootstrap: str, timeout: float, **options: object) -> R:
        # First: it keeps what no command uses out of the start.
        from fencepost.coordinator.cli.queries.session import Session
        from fencepost.coordinator.wire.client.client import BrokerUnreachable
        from fencepost.coordinator.wire.errors import WireError

        try:
            with Session(bootstrap, timeout) as session:
                return function(session, **options)
        except BrokerUnreachable as error:
            raise Unreachable(str(error)) from error
        except (WireError, ValueError) as error:
            raise click.ClickException(str(error)) from error

    return wrapped


def format_option(function: Callable[P, R]) -> Callable[P, R]:
    """Add ``--format table|json``."""
    return click.option(
        "--format",
        "form",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="An aligned table, or one JSON array.",
    )(function)


def table_options(function: Callable[..., R]) -> Callable[..., R]:
    """Add ``--format`` and all of :func:`shared_options`."""
    return format_option(shared_options(function))


def key_values(pairs: Sequence[str], option: str) -> list[tuple[str, str]]:
    """The KEY=VALUE ``pairs`` that ``option`` was given, in order; click.BadParameter else."""
    found = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint=option)
        found.append((key, value))
    return found


def emit(rows: Sequence[Row], columns: Sequence[str], form: str) -> None:
    """Print ``rows``: the ``columns`` as a table, or everything in them as JSON."""
    if form == "json":
        click.echo(json.dumps([dict(row) for row in rows], default=str, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        numeric = all(isinstance(row.get(column), int) for row in rows) and bool(rows)
        table.add_column(column.upper(), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(text_of(row.get(column))) for column in columns))
    Console(width=TABLE_WIDTH, highlight=False, soft_wrap=True).print(table)


def utc(timestamp_ms: int) -> str:
    """A time of the wire as text."""
    when = dt.datetime.fromtimestamp(timestamp_ms / 1000, dt.UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(timestamp_ms: int | None) -> str | None:
    """A time of the wire as text, or None where there is none."""
    return None if timestamp_ms is None or timestamp_ms < 0 else utc(timestamp_ms)


def text_of(value: object) -> str:
    """One cell: nothing is a dash, control characters of a peer never reach the terminal."""
    if value is None or value == "":
        return "-"
    if isinstance(value, (list, tuple)):
        value = ",".join(str(item) for item in value) or "-"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value))
