"""Compact transaction logs with the real cleaner, and load them into a TxnMachine."""

from __future__ import annotations

from fencepost.logcore.machine import Record
from fencepost.txn.machine import TxnMachine
from tests.support.cleaned import cleaned_logs, some_ends
from tests.unit.txn.driver import Driver


def state_of(driver: Driver, log: list[tuple[int, Record]]) -> str:
    machine = TxnMachine(
        driver.limits, driver.ids, driver.coordinator_epoch, lambda: driver.transaction_version
    )
    for offset, record in log:
        machine.replay(record, offset, driver.now_ms, None)
    return machine.digest()


def loads_back(driver: Driver, *, most: int = 1 << 30) -> int:
    """Load variants of the log, compacted up to at most ``most`` offsets; return their number."""
    log = list(enumerate(driver.log))
    digest = state_of(driver, log)
    steps = [(offset, record, None, None) for offset, record in log]
    variants = 0
    for found in cleaned_logs(steps, some_ends(len(log), min(most, len(log)))):
        assert (
            state_of(driver, [(record[0], record[1]) for record in found if record[1] is not None])
            == digest
        )
        variants += 1
    return variants
