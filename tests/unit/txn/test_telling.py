"""``check_told``, which the drivers of all other tests call, detects missing events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fencepost.logcore.machine import Event
from fencepost.txn.epochs import ProducerIdentity
from tests.unit.txn.driver import S, check_told, metadata

OLD = metadata(S.ONGOING, identity=ProducerIdentity(1000, 3))
BUMPED = replace(OLD, producer_epoch=4)
ABORTING = replace(OLD, state=S.PREPARE_ABORT)


def told(**more: object) -> Event:
    detail = {"producer_id": 1000, "producer_epoch": 4, "former_producer_epoch": 3, "cause": "c"}
    return Event("epoch-bumped", "id", {**detail, **more})


@pytest.mark.parametrize(
    ("before", "after", "events"),
    [
        pytest.param(OLD, BUMPED, [], id="an epoch"),
        pytest.param(OLD, BUMPED, [told(producer_epoch=5)], id="the new epoch"),
        pytest.param(OLD, BUMPED, [told(former_producer_epoch=2)], id="the old epoch"),
        pytest.param(OLD, BUMPED, [told(cause="")], id="the cause"),
        pytest.param(None, OLD, [], id="the first epoch"),
        pytest.param(OLD, ABORTING, [], id="an abort"),
        pytest.param(OLD, None, [], id="an expiry"),
    ],
)
def test_missing_event_of_state_change_is_detected(before, after, events) -> None:
    with pytest.raises(AssertionError):
        check_told(
            {"id": before} if before else {},
            {"id": after} if after else {},
            events,
        )


def test_complete_events_of_state_changes_pass() -> None:
    check_told({"id": OLD}, {"id": OLD}, [])
    check_told({"id": OLD}, {"id": BUMPED}, [told()])
    check_told({"id": OLD}, {"id": ABORTING}, [Event("transaction-aborted", "id", {})])
