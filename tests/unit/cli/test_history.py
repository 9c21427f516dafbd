"""The history on a terminal: lines fit the width, ids are short, repeated values are omitted."""

from __future__ import annotations

import random

import pytest

from fencepost.cli.history_view import COLUMNS, row_of, wrap_entry
from fencepost.cli.printing import MIN_WIDTH
from fencepost.coordinator.history.entries import GROUP, Entry
from tests.support.quick import seeds

MEMBER = "rdkafka-a55cd19a-ccfa-4fee-8e09-0a3db4ad42e8"
SEVERAL = (COLUMNS[0], "subject", *COLUMNS[1:])


def entry(what: str, trigger: str | None = None, **detail: object) -> Entry:
    return Entry(0, GROUP, "g", what, "shard", "rdkafka", "/127.0.0.1", detail, trigger)


def test_join_row_fits_the_terminal_with_short_ids_and_no_repetition() -> None:
    joined = entry(
        "rebalance-started",
        "request JoinGroup",
        old_generation=3,
        reason=f"new member {MEMBER}",
        member=MEMBER,
        client_id="rdkafka",
        client_host="/127.0.0.1",
    )
    lines = wrap_entry(row_of(joined), COLUMNS, 80)
    assert [line.strip() for line in lines] == [
        "1970-01-01T00:00:00.000Z  rebalance-started: generation 3; new member",
        "rdkafka-a55cd19a…; rdkafka@127.0.0.1; request",
        "JoinGroup",
    ]
    assert lines[1].startswith(" " * 26)


def test_member_id_of_the_consumer_protocol_is_shortened() -> None:
    event = entry("member-joined", member="b2dWQFkZQ1KEjr7nZw9mCg", epoch=1, old_epoch=0)
    text = " ".join(wrap_entry(row_of(event), COLUMNS, 200))
    assert "b2dWQFkZ…" in text
    assert "b2dWQFkZQ" not in text


def test_subject_is_shown_if_there_are_several() -> None:
    assert " g member-left" in wrap_entry(row_of(entry("member-left")), SEVERAL, 80)[0]


@pytest.mark.parametrize("seed", seeds(200))
def test_no_line_is_wider_than_the_terminal(seed: int) -> None:
    draw = random.Random(seed)

    def text() -> str:
        return "".join(draw.choices("abc -\x1b\u202eä→日", k=draw.choice((0, 1, 30, 300))))

    names = ("reason", "member", "client_id", "client_host", "cause", "error", "leader")
    event = entry(text(), text(), **{name: text() for name in draw.sample(names, 4)})
    width = draw.choice((MIN_WIDTH, 80, 200))
    for columns in (COLUMNS, SEVERAL):
        lines = wrap_entry(row_of(event), columns, width)
        assert all(len(line) <= width and line.isprintable() for line in lines), lines
