"""Events in the history about the outcomes of deliveries: causes, owners and number of events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fencepost.coordinator.history.causes import SHARE_CAUSES
from fencepost.groups.share.commands import IsolationLevel
from fencepost.groups.share.errors import ShareCoordinatorUnavailableError
from fencepost.groups.share.outcomes import AT_LIMIT, RANGES_PER_EVENT
from fencepost.groups.share.states import Cause
from tests.unit.groups.share.driver import SETTINGS, Driver, log
from tests.unit.groups.share.test_acquire import ABORTED, TRANSACTIONS

ACCEPT, RELEASE = 1, 2


def told(driver: Driver, kind: str) -> list[Any]:
    return [event.detail for event in driver.events if event.kind == kind]


def test_alternating_releases_are_grouped_into_few_events() -> None:
    driver, pairs = Driver(), 120
    driver.fetch("m1", log((0, 2 * pairs - 1)))
    driver.acknowledge("m1", (0, 2 * pairs - 1, (ACCEPT, RELEASE) * pairs))
    driver.settle()
    events = told(driver, "share-records-returned")
    assert [len(event["ranges"]) for event in events] == [50, 50, 20]
    assert RANGES_PER_EVENT == 50
    offsets = [
        offset for event in events for first, last in event["ranges"] for offset in (first, last)
    ]
    assert offsets == [offset for odd in range(1, 2 * pairs, 2) for offset in (odd, odd)]
    assert (events[0]["first"], events[0]["last"]) == (1, 99)


def test_accepted_records_produce_no_event() -> None:
    driver = Driver()
    driver.fetch("m1", log((0, 9)))
    events = len(driver.events)
    driver.acknowledge("m1", (0, 9, ACCEPT))
    driver.settle()
    assert len(driver.events) == events


def test_failed_write_event_has_its_offsets_and_error() -> None:
    driver = Driver()
    driver.fetch("m1", log((0, 9)))
    driver.acknowledge("m1", (0, 4, ACCEPT))
    driver.complete(error=ShareCoordinatorUnavailableError("no coordinator"))
    (event,) = told(driver, "share-state-not-written")
    assert (event["first"], event["last"], event["error"]) == (0, 4, "no coordinator")


def test_compacted_records_produce_an_event_with_their_cause() -> None:
    driver = Driver()
    driver.fetch("m1", log((0, 9), (10, 19)), batch_size=5)
    driver.acknowledge("m1", (0, 4, RELEASE), (5, 9, ACCEPT), (10, 19, RELEASE))
    driver.settle()
    driver.fetch("m1", log((10, 19)))
    (event,) = told(driver, "share-records-given-up")
    assert (event["first"], event["last"]) == (0, 4)
    assert event["cause"] == "no record at the offset"


def test_aborted_records_produce_an_event_with_their_cause() -> None:
    driver = Driver(replace(SETTINGS, isolation_level=IsolationLevel.READ_COMMITTED))
    driver.fetch("m1", TRANSACTIONS, aborted=ABORTED)
    (event,) = told(driver, "share-records-given-up")
    assert (event["first"], event["last"], event["cause"]) == (4, 7, "transaction aborted")


def test_every_reported_cause_has_a_metric_label() -> None:
    told_causes = {Cause.NO_RECORD, Cause.TRANSACTION_ABORTED, Cause.REJECTED, *AT_LIMIT}
    assert set(SHARE_CAUSES) == {cause.value for cause in told_causes}
