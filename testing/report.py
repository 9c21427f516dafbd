"""The report on a broker after a failed test: events of groups and transactions, with causes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fencepost.cli.history_view import row_of
from fencepost.cli.output import text_of
from fencepost.coordinator.history.entries import CLIENT
from fencepost.logcore.printable import printable
from fencepost.testing.waiting import BrokerDownError

if TYPE_CHECKING:
    from fencepost.coordinator.history.entries import Entry
    from fencepost.testing.under_test import KafkaUnderTest

MAX_ENTRIES = 60
"""The maximum number of history entries in a report; a report shows the last ones."""

PATIENCE_S = 3.0
"""How long the report waits for a broker that the test has broken."""

NOTHING = text_of(None)
"""The text of an empty cell."""

EFFECTS = ("error", "drop", "close", "delay_ms")
"""The arguments that make a fault; an observer has none of them."""

COLUMNS = ("time", "subject", "what", "change", "why", "trigger", "who", "client")


def report_of(kafka: KafkaUnderTest, began_ms: int) -> str:
    """Return a report: events since ``began_ms`` (broker's clock), open transactions, and faults.

    The text is empty if there is nothing to report. Never raises: a broker that a test has broken
    must not hide the test's own failure. Entries of the scope ``client``, which the doctor reads,
    are left out: they describe requests, not decisions.
    """
    lines = [kafka.trouble] if kafka.trouble else []
    kafka.patience_s = PATIENCE_S
    try:
        lines += _fault_lines(kafka)
        entries = [
            entry for entry in kafka.history() if entry.at_ms >= began_ms and entry.scope != CLIENT
        ]
        history = history_lines(entries) + _open_lines(kafka, kafka.clock.now_ms() - began_ms)
        lines = history + lines
    except BrokerDownError as error:
        if not kafka.trouble:
            lines.append(str(error))
    except Exception as error:  # noqa: BLE001 - must not hide the test's own failure
        lines.append(f"no history: {type(error).__name__}: {error}")
    finally:
        del kafka.patience_s
    if lines:
        lines.append(f"data directory: {kafka.data_dir}")
    return "\n".join(map(printable, lines))


def history_lines(entries: Sequence[Entry]) -> list[str]:
    """Return the entries as a table, oldest first; empty columns are left out."""
    shown = entries[-MAX_ENTRIES:]
    rows = [{name: text_of(row[name]) for name in COLUMNS} for row in map(row_of, shown)]
    for row in rows:
        row["time"] = row["time"][11:23]
    used = [name for name in COLUMNS if any(row[name] != NOTHING for row in rows)]
    widths = {name: max(len(row[name]) for row in [*rows, {name: name}]) for name in used}
    lines = []
    if len(entries) > len(shown):
        lines.append(f"({len(entries) - len(shown)} earlier entries are not shown)")
    head = [{name: name.upper() for name in used}] if rows else []
    return lines + [
        "  ".join(row[name].ljust(widths[name]) for name in used).rstrip() for row in head + rows
    ]


def _open_lines(kafka: KafkaUnderTest, span_ms: int) -> list[str]:
    return [
        f"{txn.transactional_id} is {txn.state} since {txn.age_ms} ms of {txn.timeout_ms} ms,"
        f" producer {txn.producer_id}:{txn.producer_epoch} of {txn.client}, on"
        f" {', '.join(f'{topic}:{index}' for topic, index in txn.partitions) or 'no partition'}"
        for txn in kafka.transactions()
        if txn.age_ms <= span_ms
    ]


def _fault_lines(kafka: KafkaUnderTest) -> list[str]:
    """Describe faults that are not used up: too few requests came, or they did not match.

    An observer is never used up, and is only described if its ``match`` has raised an exception.
    """
    lines = []
    for fault in kafka.faults.all:
        row = fault.as_json()
        is_observer = not any(row[name] for name in EFFECTS)
        if is_observer and fault.failure is None:
            continue
        kind = "an observer has failed" if is_observer else "a fault is not used up"
        values = [f"{name}={value}" for name, value in row.items() if value and name != "hits"]
        details = "; ".join(filter(None, (", ".join(values), fault.failure)))
        lines.append(f"{kind} after {fault.hits} requests: {details}")
    return lines
