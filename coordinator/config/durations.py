"""Durations as people write them: 500ms, 90s, 1h, 7d, 1h30m.

On a command line a duration may replace a number of milliseconds, seconds, minutes or hours: in
options, and in KEY=VALUE settings whose keys end in such a unit. Files have plain numbers, as
Kafka's do.
"""

from __future__ import annotations

import re

UNITS_MS = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}

PARTS = r"(?:\d{1,9}(?:ms|[smhdw]))+"
"""A regular expression for one duration."""

_PART = re.compile(r"(\d+)(ms|[smhdw])")
_LIKE_DURATION = re.compile(r"[\d.]+ *[a-zA-Z]+")
_UNIT_OF_KEY = re.compile(r"[._](ms|seconds|secs|minutes|hours)$")
_KEY_UNITS_MS = {"ms": 1, "seconds": 1_000, "secs": 1_000, "minutes": 60_000, "hours": 3_600_000}


def duration_ms(text: str) -> int | None:
    """Return the duration ``text`` in milliseconds; None for any other text."""
    if not re.fullmatch(PARTS, text):
        return None
    return sum(int(count) * UNITS_MS[unit] for count, unit in _PART.findall(text))


def setting_value(key: str, value: str) -> str:
    """Return ``value``; convert a duration to the unit that the name of ``key`` ends with.

    Raises ValueError for a duration that is not a whole number of this unit, or has unknown units.
    """
    unit, spent = _UNIT_OF_KEY.search(key), duration_ms(value.strip())
    if unit is not None and spent is None and _LIKE_DURATION.fullmatch(value.strip()):
        raise ValueError(f"{value} is not a duration such as 500ms, 90s, 1h30m, 7d")
    if unit is None or spent is None:
        return value
    count, rest = divmod(spent, _KEY_UNITS_MS[unit[1]])
    if rest:
        raise ValueError(f"{value} is not a whole number of {unit[1]}")
    return str(count)
