from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fencepost.logcore.machine import InvariantViolation, ProducerStamp
from fencepost.txn.commands import MarkersWrittenResult, WriteMarkers
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.errors import ConcurrentTransactionsError
from fencepost.txn.markers import MarkerTable
from tests.unit.txn.driver import A, B, C, Driver, S, metadata

DONE = MarkersWrittenResult(completed=True)
NOT_DONE = MarkersWrittenResult(completed=False)


def _ending(shard: Callable[..., Driver], tv: int = 2) -> tuple[Driver, WriteMarkers]:
    driver = shard(hold=True)
    identity = driver.started()
    driver.begin(identity, A, B, C, tv=tv)
    driver.ended(identity, commit=True, tv=tv)
    return driver, driver.held[-1]


def test_transaction_completes_when_all_partitions_have_markers(
    shard: Callable[..., Driver],
) -> None:
    driver, order = _ending(shard)
    assert driver.ask(order.written((B,))) == NOT_DONE
    assert driver.ask(order.written((B,))) == NOT_DONE
    assert driver.ask(order.written(())) == NOT_DONE
    assert driver.ask(order.written((C, ("not", 9)))) == NOT_DONE
    assert driver.state is S.PREPARE_COMMIT
    assert driver.ask(order.written((A, B, C))) == DONE
    assert driver.state is S.COMPLETE_COMMIT


def test_repeated_markers_written_report_changes_nothing(shard: Callable[..., Driver]) -> None:
    driver, order = _ending(shard)
    assert driver.ask(order.written()) == DONE
    length = len(driver.log)
    for partitions in (None, (A,), (A, B, C)):
        assert driver.ask(order.written(partitions)) == NOT_DONE
    assert len(driver.log) == length


def test_markers_report_of_former_tv1_transaction_is_ignored(
    shard: Callable[..., Driver],
) -> None:
    """Redpanda #1384: under TV1 producer id and epoch do not identify a transaction."""
    driver, first = _ending(shard, tv=0)
    driver.ask(first.written())
    identity = ProducerIdentity(1000, 0)
    driver.begin(identity, A, tv=0)
    driver.ended(identity, commit=False, tv=0)
    second = driver.held[-1]
    assert second.stamp == first.stamp
    assert driver.ask(first.written()) == NOT_DONE
    assert driver.state is S.PREPARE_ABORT
    assert driver.ask(second.written()) == DONE


def test_markers_report_from_before_reload_completes_its_transaction(
    shard: Callable[..., Driver],
) -> None:
    driver, order = _ending(shard)
    driver.ask(order.written((A, B)))
    driver.reload()
    resumed = driver.held[-1]
    assert resumed.partitions == (A, B, C)
    assert resumed == order
    # The reload sends the markers again; a late report about the first markers still counts.
    assert driver.ask(order.written()) == DONE
    assert driver.ask(resumed.written()) == NOT_DONE


@pytest.mark.parametrize("field", ["producer_id", "producer_epoch", "transaction_number"])
def test_markers_report_of_another_transaction_is_ignored(
    shard: Callable[..., Driver], field: str
) -> None:
    driver, order = _ending(shard)
    report = order.written()
    assert driver.ask(replace(report, **{field: getattr(report, field) + 1})) == NOT_DONE
    assert driver.ask(replace(report, transactional_id="unknown")) == NOT_DONE
    assert driver.state is S.PREPARE_COMMIT


def test_prepared_transactions_are_resumed_at_load(shard: Callable[..., Driver]) -> None:
    driver = shard(hold=True, coordinator_epoch=9)
    one = metadata(S.PREPARE_COMMIT, identity=ProducerIdentity(501, 3), partitions=(C, A))
    two = metadata(S.PREPARE_ABORT, identity=ProducerIdentity(502, 0), tv=0)
    driver.place(one, "one")
    driver.place(two, "two")
    driver.place(metadata(S.ONGOING), "three")
    driver.place(metadata(S.COMPLETE_ABORT, identity=ProducerIdentity(503, 1)), "four")
    assert driver.held == [
        WriteMarkers("one", ProducerStamp(501, 3), True, 9, 2, (A, C), 0),
        WriteMarkers("two", ProducerStamp(502, 0), False, 9, 0, (A,), 1),
    ]
    assert driver.kinds().count("transaction-resumed") >= 2
    driver.write_markers()
    assert driver.txn("one").state is S.COMPLETE_COMMIT
    assert driver.txn("two").state is S.COMPLETE_ABORT


def test_next_transaction_during_completion_is_concurrent_transactions(
    shard: Callable[..., Driver],
) -> None:
    """ydb #52731: EndTxn during the last completion must not be answered with success."""
    driver, _ = _ending(shard)
    following = ProducerIdentity(1000, 1)
    assert type(driver.add(following)) is ConcurrentTransactionsError
    assert type(driver.end(following, commit=True)) is ConcurrentTransactionsError
    assert type(driver.end(following, commit=False)) is ConcurrentTransactionsError
    driver.write_markers()
    driver.begin(following, B)
    assert driver.ended(following, commit=True) == (1000, 2)


def test_marker_table_refuses_second_completion_of_same_id() -> None:
    order = WriteMarkers("one", ProducerStamp(1, 2), True, 0, 2, (A,), 4)
    table = MarkerTable()
    table.expect(order)
    assert "one" in table
    assert "two" not in table
    assert table.requests() == (order,)
    with pytest.raises(InvariantViolation):
        table.expect(order)
    table.clear()
    assert not table.requests()


def test_replayed_marker_leaves_state_unchanged(shard: Callable[..., Driver]) -> None:
    driver = shard()
    driver.started()
    before = driver.machine.digest()
    driver.machine.replay_marker(ProducerStamp(1000, 0), 1, commit=False)
    assert driver.machine.digest() == before
