"""Pauses between polls that consumers have reported, and the events that the pauses explain."""

from __future__ import annotations

import pytest

from fencepost.cli.history_view import row_of
from fencepost.client.queries.poll_pauses import WINDOW_MS, with_poll_pauses
from fencepost.client.queries.share_blame import add_past
from fencepost.coordinator.history.entries import GROUP, POLL_PAUSE_REPORTED, Entry


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
    [(99_999, False), (100_000, True), (119_000 + WINDOW_MS, True),
     (119_001 + WINDOW_MS, False)],
)  # fmt: skip
def test_poll_pause_is_shown_if_reported_within_its_window(at_ms: int, is_shown: bool) -> None:
    gone, *_ = with_poll_pauses([departure(100_000), pause(at_ms, 19_000)])
    assert ("poll_pause_ms" in gone.detail) is is_shown


def test_events_other_than_departures_show_no_poll_pause() -> None:
    joined = departure(1_000, "member-joined")
    assert with_poll_pauses([joined, pause(20_000, 19_500)])[0] is joined


def returned(cause: str, what: str = "share-records-returned") -> Entry:
    gone = departure(1_000, what, reason=None).detail
    detail = {**gone, "cause": cause, "topic": "t", "partition": 0, "first": 5, "last": 7}
    return Entry(1_000, GROUP, "g", what, "shard", None, None, detail)


@pytest.mark.parametrize(
    ("cause", "is_absence"),
    [
        ("acquisition lock expired", True),
        ("acquisition lock expired, delivery limit 3", True),
        ("its owner's connection closed", True),
        ("released by its owner", False),
        ("rejected by its owner", False),
        ("share session closed by its owner", False),
    ],
)
@pytest.mark.parametrize("what", ["share-records-returned", "share-records-given-up"])
def test_returned_records_show_the_pause_if_their_owner_was_absent(
    cause: str, is_absence: bool, what: str
) -> None:
    event, _ = with_poll_pauses([returned(cause, what), pause(20_000, 19_500)])
    suffix = "; its client had not called poll for 19.5 s" if is_absence else ""
    assert row_of(event)["why"] == cause + suffix


def test_blame_of_a_record_includes_the_pause_of_its_last_owner() -> None:
    row = {"topic": "t", "partition": 0, "first": 6, "state": "AVAILABLE", "since_ms": None}
    add_past([row], [returned("acquisition lock expired"), pause(20_000, 19_500)])
    assert row["why"] == "acquisition lock expired; its client had not called poll for 19.5 s"
    assert (row["poll_pause_ms"], row["why_ms"]) == (19_500, 1_000)


def test_blame_of_a_released_record_shows_no_pause() -> None:
    row = {"topic": "t", "partition": 0, "first": 6, "state": "AVAILABLE", "since_ms": None}
    add_past([row], [returned("released by its owner"), pause(20_000, 19_500)])
    assert (row["why"], row["poll_pause_ms"]) == ("released by its owner", None)
