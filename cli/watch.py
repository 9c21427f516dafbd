"""Repeated display of a command's output (``--watch``)."""

from __future__ import annotations

import datetime as dt
import sys
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import click

from fencepost.cli.options import duration
from fencepost.cli.output import utc
from fencepost.cli.printing import is_terminal, print_lines

P = ParamSpec("P")
R = TypeVar("R")

MOST_SECONDS = 86_400


def watch_option(function: Callable[P, R]) -> Callable[P, R]:
    """Add ``--watch SECONDS``, the interval of :func:`watch`."""
    return click.option(
        "--watch",
        "every_s",
        callback=duration("s", 0.1, MOST_SECONDS),
        metavar="SECONDS",
        help="Repeat the output at this interval (such as 5, 500ms or 1m) until Ctrl-C.",
    )(function)


def watch(draw: Callable[[], None], every_s: float | None) -> None:
    """Draw once, or every ``every_s`` seconds until Ctrl-C, which is not an error.

    On a terminal each output replaces the previous one. Elsewhere the outputs follow one another,
    each below a line with its time. An error of the first output is raised; a later one, such as
    during a restart of the broker, is printed in place of the output.
    """
    from fencepost.protocol.errors import WireError

    if every_s is None:
        draw()
        return
    has_drawn = False
    try:
        while True:
            started = time.monotonic()
            click.clear()  # no effect without a terminal
            print_lines(f"{utc(int(dt.datetime.now(dt.UTC).timestamp() * 1000))}")
            try:
                draw()
            except WireError as error:
                if not has_drawn:
                    raise
                print_lines(f"Error: {error}", err=True)
            has_drawn = True
            if not is_terminal():
                print_lines()
            sys.stdout.flush()
            time.sleep(max(0.0, started + every_s - time.monotonic()))
    except KeyboardInterrupt:
        print_lines()
