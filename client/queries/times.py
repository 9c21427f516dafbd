"""Parsing of times on the command line, for all commands.

A time without a zone is UTC, like all times that the commands print.
"""

from __future__ import annotations

import datetime as dt
import re

from fencepost.coordinator.config.durations import PARTS, duration_ms

FORMS = (
    "02:13, -10m, -2h, yesterday, 2026-01-31, 2026-01-31T12:00+01:00, or milliseconds since 1970"
    " as @1769860800000"
)
"""The forms of a time, for errors and help texts."""

MIN_BARE_MS = 10**11
"""The least number that is taken for milliseconds without an ``@``: March 1973. A smaller number is
probably seconds, a date or a typing error."""

MAX_MS = 253_402_300_799_999
"""The last millisecond of the year 9999, the last year that can be printed."""

_AGO = re.compile(f"-({PARTS})")
_CLOCK = re.compile(r"(?:(today|yesterday)(?:[ T]|$))?(\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?)?")
_DAYS = {"today": 0, "yesterday": 1}


class TimeError(ValueError):
    """A text is not a time; the message lists the valid forms."""


def milliseconds(text: str, now: dt.datetime | None = None) -> int:
    """Return the time ``text`` in milliseconds since 1970, never negative.

    A time of day means its last occurrence. ``-1h30m`` is that long before ``now``, an aware
    datetime; None means the current time. ``today`` and ``yesterday`` begin at midnight UTC and may
    be followed by a time of day. Raises :class:`TimeError`.
    """
    now = dt.datetime.now(dt.UTC) if now is None else now.astimezone(dt.UTC)
    text = text.strip()
    if text == "now":
        return _in_ms(now)
    number = re.fullmatch(r"(@?)(\d{1,15})", text)
    if number is not None:
        value_ms = int(number[2])
        if value_ms > MAX_MS or not (number[1] or value_ms >= MIN_BARE_MS):
            raise TimeError(_complaint(text))
        return value_ms
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return max(0, _in_ms(now) - (duration_ms(ago[1]) or 0))
    try:
        return min(max(0, _in_ms(_moment(text, now))), MAX_MS)
    except (ValueError, OverflowError) as error:
        raise TimeError(_complaint(text)) from error


def _moment(text: str, now: dt.datetime) -> dt.datetime:
    """Parse a day or time of day, or ISO 8601. Raises ValueError."""
    clock = _CLOCK.fullmatch(text) if text else None
    if clock is None:
        at = dt.datetime.fromisoformat(text)
        return at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC)
    day, time = clock[1], clock[2]
    at_time = dt.time.fromisoformat(time.zfill(5) if len(time) < 5 else time) if time else dt.time()
    at = dt.datetime.combine(now.date() - dt.timedelta(days=_DAYS.get(day, 0)), at_time, dt.UTC)
    return at - dt.timedelta(days=1) if day is None and at > now else at


def _in_ms(at: dt.datetime) -> int:
    return (at - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(milliseconds=1)


def _complaint(text: str) -> str:
    return f"{text!r} is not a time; a time is {FORMS}"
