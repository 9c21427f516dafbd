"""Times that users type: the meaning of each form, and the messages about invalid times."""

from __future__ import annotations

import contextlib
import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.client.queries.times import MAX_MS, MIN_BARE_MS, TimeError, milliseconds

NOW = dt.datetime(2026, 3, 1, 14, 30, 15, 250_000, dt.UTC)


def at(*parts: int) -> int:
    return int(dt.datetime(*parts, tzinfo=dt.UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("now", at(2026, 3, 1, 14, 30, 15) + 250),
        ("02:13", at(2026, 3, 1, 2, 13)),
        ("2:13", at(2026, 3, 1, 2, 13)),
        ("14:30", at(2026, 3, 1, 14, 30)),
        # It is before 14:31 today, so yesterday's 14:31 is meant.
        ("14:31", at(2026, 2, 28, 14, 31)),
        ("02:13:05.5", at(2026, 3, 1, 2, 13, 5) + 500),
        ("-10m", at(2026, 3, 1, 14, 20, 15) + 250),
        ("-2h", at(2026, 3, 1, 12, 30, 15) + 250),
        ("-1h30m", at(2026, 3, 1, 13, 0, 15) + 250),
        ("-250ms", at(2026, 3, 1, 14, 30, 15)),
        ("-1w", at(2026, 2, 22, 14, 30, 15) + 250),
        ("-999999999w", 0),
        ("today", at(2026, 3, 1)),
        ("yesterday", at(2026, 2, 28)),
        ("yesterday 23:59", at(2026, 2, 28, 23, 59)),
        ("today 18:00", at(2026, 3, 1, 18)),
        ("2026-01-31", at(2026, 1, 31)),
        ("2026-01-31T12:00", at(2026, 1, 31, 12)),
        ("2026-01-31 12:00:01.5", at(2026, 1, 31, 12, 0, 1) + 500),
        ("2026-01-31T12:00Z", at(2026, 1, 31, 12)),
        ("2026-01-31T12:00+01:00", at(2026, 1, 31, 11)),
        ("1960-01-01", 0),
        ("@0", 0),
        ("@1769860800000", 1_769_860_800_000),
        ("1769860800000", 1_769_860_800_000),
        (str(MIN_BARE_MS), MIN_BARE_MS),
        (f"@{MAX_MS}", MAX_MS),
    ],
)
def test_time_in_each_form_is_converted_to_milliseconds(text, meant):
    assert milliseconds(text, NOW) == meant


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "soon",
            "-",
            "-10",
            "-10x",
            "10m",
            "25:00",
            "02:60",
            "2:1",
            "yesterdays",
            "today ago",
        ),
        *("1769860800", str(MIN_BARE_MS - 1), f"@{MAX_MS + 1}", "@", "@-1", "20260131x"),
        *("2026-02-30", "2026-01-31T25:00", "99999-01-01", "²:13"),
    ],
)
def test_invalid_time_is_refused_with_examples(text):
    with pytest.raises(TimeError, match=r"is not a time; a time is 02:13, -10m"):
        milliseconds(text, NOW)


@given(st.text(max_size=30) | st.from_regex(r"[-@0-9:TZ .a-z+]{1,20}", fullmatch=True))
def test_random_text_is_a_time_or_is_refused(text):
    with contextlib.suppress(TimeError):
        assert 0 <= milliseconds(text, NOW) <= MAX_MS
