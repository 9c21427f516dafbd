"""The history on a terminal: lines fit its width, ids are short, repeated values are left out."""

from __future__ import annotations

import random

import pytest

from fencepost.cli.history_view import (
    COLUMNS,
    PAUSE_WINDOW_MS,
    row_of,
    with_poll_pauses,
    wrap_entry,
)
from fencepost.cli.printing import MIN_WIDTH
from fencepost.coordinator.history.entries import GROUP, POLL_PAUSE_REPORTED, Entry

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
    one = entry("member-joined", member="b2dWQFkZQ1KEjr7nZw9mCg", epoch=1, old_epoch=0)
    text = " ".join(wrap_entry(row_of(one), COLUMNS, 200))
    assert "b2dWQFkZ…" in text
    assert "b2dWQFkZQ" not in text


def test_subject_is_shown_if_there_are_several() -> None:
    assert " g member-left" in wrap_entry(row_of(entry("member-left")), SEVERAL, 80)[0]


@pytest.mark.parametrize("seed", range(200))
def test_no_line_is_wider_than_the_terminal(seed: int) -> None:
    draw = random.Random(seed)

    def text() -> str:
        return "".join(draw.choices("abc -\x1b\u202eä→日", k=draw.choice((0, 1, 30, 300))))

    names = ("reason", "member", "client_id", "client_host", "cause", "error", "leader")
    one = entry(text(), text(), **{name: text() for name in draw.sample(names, 4)})
    width = draw.choice((MIN_WIDTH, 80, 200))
    for columns in (COLUMNS, SEVERAL):
        lines = wrap_entry(row_of(one), columns, width)
        assert all(len(line) <= width and line.isprintable() for line in lines), lines


def pause(at_ms: int, pause_ms: int, member: str = "m-2", client: str = "shop") -> Entry:
    detail = {"pause_ms": pause_ms, "member": member, "reason": "reported"}
    return Entry(at_ms, GROUP, "g", POLL_PAUSE_REPORTED, "broker 1", client, "10.0.0.7", detail)


def departure(at_ms: int, what: str = "member-expired", reason: str | None = "expired") -> Entry:
    detail = {"member": "m-1", "client_id": "shop", "client_host": "/10.0.0.7", "reason": reason}
    return Entry(at_ms, GROUP, "g", what, "shard", None, None, detail)


@pytest.mark.parametrize("what", ["member-expired", "member-left", "member-fenced"])
def test_departure_shows_the_poll_pause_reported_after_it(what: str) -> None:
    gone, reported = with_poll_pauses([departure(1_000, what), pause(20_000, 19_500)])
    assert row_of(gone)["why"] == "expired; its client had not called poll for 19.5 s"
    assert row_of(reported)["why"] == "reported"


def test_departure_without_a_reason_shows_only_the_poll_pause() -> None:
    gone, _ = with_poll_pauses([departure(1_000, reason=None), pause(20_000, 19_500)])
    assert row_of(gone)["why"] == "its client had not called poll for 19.5 s"


@pytest.mark.parametrize(
    ("member", "client", "is_shown"),
    [("m-1", "other", True), ("m-2", "shop", True), ("m-2", "other", False)],
)
def test_poll_pause_is_shown_for_the_same_member_or_client(
    member: str, client: str, is_shown: bool
) -> None:
    gone, _ = with_poll_pauses([departure(1_000), pause(20_000, 19_500, member, client)])
    assert ("poll_pause_ms" in gone.detail) is is_shown


@pytest.mark.parametrize(
    ("at_ms", "is_shown"),
    [(99_999, False), (100_000, True), (119_000 + PAUSE_WINDOW_MS, True),
     (119_001 + PAUSE_WINDOW_MS, False)],
)  # fmt: skip
def test_poll_pause_is_shown_if_reported_within_its_window(at_ms: int, is_shown: bool) -> None:
    gone, *_ = with_poll_pauses([departure(100_000), pause(at_ms, 19_000)])
    assert ("poll_pause_ms" in gone.detail) is is_shown


def test_events_other_than_departures_show_no_poll_pause() -> None:
    joined = departure(1_000, "member-joined")
    assert with_poll_pauses([joined, pause(20_000, 19_500)])[0] is joined
