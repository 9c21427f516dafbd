"""The broker's log on standard error: key=value on a terminal, JSON lines otherwise.

Clients choose some of the values (topic names, client ids). Control characters are escaped and long
values truncated, so that no value can look like another event. An event is one line; on a terminal
an indented stack trace may follow.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

from fencepost.logcore.printable import printable

MAX_VALUE_CHARACTERS = 1_000
"""The maximum number of characters of a value; a longer value is truncated and ends in an ellipsis.
"""

MAX_TRACE_CHARACTERS = 20_000
"""The maximum number of characters of a stack trace; of a longer trace, the end is kept."""

LEVELS: Mapping[str, int] = {
    "FATAL": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARN": logging.WARNING,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
    "TRACE": logging.DEBUG,
}
"""Kafka's names for the levels, as in BROKER_LOGGER configs."""

FORMATS: Mapping[str, bool | None] = {"auto": None, "text": True, "json": False}
"""For each format, the argument ``terminal`` of :func:`configure`."""

ROOT = "root"
"""The name of the only logger in BROKER_LOGGER configs."""

Event = MutableMapping[str, Any]


class _Level:
    """The lowest level that is written; it can change at any time."""

    def __init__(self) -> None:
        self.name = "INFO"


_level = _Level()


def level() -> str:
    """Return the current level, by Kafka's name."""
    return _level.name


def set_level(name: str) -> None:
    """Write events of this level and above. Raises KeyError for a name not in :data:`LEVELS`."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(LEVELS[name]))
    _level.name = name


def configure(*, terminal: bool | None = None) -> None:
    """Set up logging of this process.

    By default, the format depends on whether standard error is a terminal.
    """
    if terminal is None:
        terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _with_trace,
            _clean,
            _as_text if terminal else _as_json,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[_level.name]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )


def configure_quietly() -> None:
    """Set up logging for a broker inside another program, unless the program has done so itself.

    structlog's own default would print to standard output.
    """
    if not structlog.is_configured():
        _level.name = "WARN"
        configure(terminal=True)


@contextmanager
def only_errors() -> Iterator[None]:
    """Suppress warnings in a block, unless the embedding program has set up logging itself."""
    configure_quietly()
    before = level()
    if before != "WARN":
        yield
        return
    set_level("ERROR")
    try:
        yield
    finally:
        set_level(before)


def _with_trace(_logger: object, _method: str, event: Event) -> Event:
    """Replace ``exc_info`` by the text of its stack trace."""
    cause = event.pop("exc_info", None)
    if cause is True:
        cause = sys.exc_info()[1]
    elif isinstance(cause, tuple):
        cause = cause[1]
    if isinstance(cause, BaseException):
        text = "".join(traceback.format_exception(cause))
        event["trace"] = text[-MAX_TRACE_CHARACTERS:]
    return event


def _clean(_logger: object, _method: str, event: Event) -> Event:
    """Convert every value to a number, a boolean or a truncated string."""
    return {key: _plain(value, key) for key, value in event.items()}


def _plain(value: object, key: str) -> object:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = value if isinstance(value, str) else str(value)
    limit = MAX_TRACE_CHARACTERS if key == "trace" else MAX_VALUE_CHARACTERS
    return text if len(text) <= limit else text[:limit] + "…"


def _as_json(_logger: object, _method: str, event: Event) -> str:
    """Return one line of JSON, which escapes control characters."""
    return json.dumps(event)


def _as_text(_logger: object, _method: str, event: Event) -> str:
    """Return ``time level event key=value …``, followed by an indented stack trace.

    An exception's message may contain lines that a client chose; the indent keeps them from looking
    like events.
    """
    head = (
        f"{event.pop('timestamp')} {event.pop('level'):<8} {printable(str(event.pop('event', '')))}"
    )
    trace: str | None = event.pop("trace", None)
    pairs = "".join(f" {key}={_quoted(value)}" for key, value in event.items())
    if trace is None:
        return head + pairs
    return head + pairs + "\n" + "\n".join(f"  {printable(line)}" for line in trace.splitlines())


def _quoted(value: object) -> str:
    text = printable(str(value))
    if '"' in text:  # a client's value must not be able to close the quotes and add keys
        return '"' + printable(str(value).replace("\\", "\\\\").replace('"', '\\"')) + '"'
    is_list = text.startswith("[") and text.endswith("]")
    return f'"{text}"' if " " in text or not text or is_list else text
