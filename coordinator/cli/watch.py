"""A picture that is drawn again and again."""

from __future__ import annotations

import datetime as dt
import sys
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import click

from fencepost.coordinator.cli.options import duration
from fencepost.coordinator.cli.output import utc
from fencepost.coordinator.cli.printing import is_terminal, say

P = ParamSpec("P")
R = TypeVar("R")

MOST_SECONDS = 86_400


def watch_option(function: Callable[P, R]) -> Callable[P, R]:
    """Add ``--watch SECONDS``, which is for :func:`watch`."""
    return click.option(
        "--watch",
        "every_s",
        callback=duration("s", 0.1, MOST_SECONDS),
        metavar="SECONDS",
        help="Repeat it after this time, also 500ms or 1m, until Ctrl-C.",
    )(function)


def watch(draw: Callable[[], None], every_s: float | None) -> None:
    """Draw once, or every ``every_s`` seconds until Ctrl-C, which is a good end.

    On a terminal each picture takes the place of the one before; elsewhere they follow one another
    as blocks, each under its time. What fails after the first picture, for the broker is being
    started again, is told in its place. The first one's failure is raised.
    """
    from fencepost.coordinator.wire.errors import WireError

    if every_s is None:
        draw()
        return
    has_drawn = False
    try:
        while True:
            started = time.monotonic()
            click.clear()  # nothing where there is no terminal
            say(f"{utc(int(dt.datetime.now(dt.UTC).timestamp() * 1000))}")
            try:
                draw()
            except WireError as error:
                if not has_drawn:
                    raise
                say(f"Error: {error}", err=True)
            has_drawn = True
            if not is_terminal():
                say()
            sys.stdout.flush()
            time.sleep(max(0.0, started + every_s - time.monotonic()))
    except KeyboardInterrupt:
        say()
