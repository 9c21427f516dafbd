"""Views of transactions (open, hanging, holding back consumers) and of fenced producers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from fencepost.client.queries.blame import Blame, blame
from fencepost.client.queries.claims import CLAIMS
from fencepost.client.queries.group_view import texts
from fencepost.client.queries.open_transactions import (
    UNFINISHED,
    Transaction,
    transaction,
    transactions_of,
)
from fencepost.client.queries.session import ClusterSession, check
from fencepost.client.requests import LATEST, Partition
from fencepost.console.history import HistoryCache
from fencepost.console.paging import Params, page, required
from fencepost.coordinator.history.entries import TRANSACTION, Entry

FENCES = frozenset({"producer-fenced", "producer-refused"})
"""Entries that record a fenced producer."""

SHOWN_FENCES = 50


def held_partitions(session: ClusterSession) -> list[Partition]:
    """Return the partitions whose last stable offset is below the end."""
    places = [
        (topic.name, index)
        for topic in session.client.metadata(refresh=True).topics.values()
        for index, row in topic.partitions.items()
        if row.leader >= 0
    ]
    stable = session.offsets(places, LATEST, committed=True)
    end = session.offsets(places, LATEST)
    return sorted(place for place in places if stable[place] < end[place])


def held(session: ClusterSession) -> list[dict[str, Any]]:
    """Return the held-back partitions with their oldest transaction and the groups that wait."""
    return [row for row in map(_held_row, blame(session, held_partitions(session))) if row]


def _held_row(blame: Blame) -> dict[str, Any] | None:
    pin, transaction = blame.pin, blame.transaction
    if pin is None or blame.stable >= blame.end:
        return None
    # The start of a hanging transaction is not known; it is at or before its last write.
    since = transaction.started_ms if transaction is not None else None
    return {
        "topic": blame.topic,
        "partition": blame.partition,
        "stable": blame.stable,
        "end": blame.end,
        "behind": blame.end - blame.stable,
        "open": blame.open_count,
        "transactional_id": transaction.transactional_id if transaction else None,
        "state": transaction.state if transaction else None,
        "producer_id": pin.producer_id,
        "epoch": pin.epoch,
        "since_ms": since if since is not None else max(pin.last_timestamp_ms, 0) or None,
        "timeout_ms": transaction.timeout_ms if transaction else None,
        "hanging": blame.hanging,
        "clients": list(blame.clients),
        "groups": [dataclasses.asdict(group) for group in blame.waiting],
        "hidden_groups": list(blame.hidden_groups),
    }


def listed(session: ClusterSession) -> list[Any]:
    """Return every transactional id that a coordinator knows, with its producer id and state."""
    rows: list[Any] = []
    for answer in session.call_all_brokers("ListTransactions"):
        check(answer.error_code, "ListTransactions")
        rows += answer.transaction_states
    return sorted(rows, key=lambda row: str(row.transactional_id))


def counts(values: Iterable[str]) -> dict[str, int]:
    """Return how often each value occurs, the most frequent first."""
    counted: dict[str, int] = {}
    for value in values:
        counted[value] = counted.get(value, 0) + 1
    return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))


def plain(txn: Transaction) -> dict[str, Any]:
    """Return a transaction for JSON."""
    return {
        "transactional_id": txn.transactional_id,
        "state": txn.state,
        "producer_id": txn.producer_id,
        "epoch": txn.epoch,
        "timeout_ms": txn.timeout_ms,
        "started_ms": txn.started_ms if txn.state in UNFINISHED else None,
        "partitions": texts(txn.partitions),
    }


def transactions_view(
    session: ClusterSession, params: Params, history: HistoryCache
) -> dict[str, Any]:
    """Return a page of transactional ids, the held back partitions, and the newest fencings."""
    rows = listed(session)
    states = counts(row.transaction_state for row in rows)
    state = params.get("state")
    if state:
        rows = [row for row in rows if row.transaction_state == state]
    paged = page(params, rows, lambda row: str(row.transactional_id))
    transactions = transactions_of(session, (row.producer_id for row in paged["rows"]))
    paged["rows"] = [
        plain(transactions[row.producer_id])
        if row.producer_id in transactions
        else {
            "transactional_id": row.transactional_id,
            "state": row.transaction_state,
            "producer_id": row.producer_id,
        }
        for row in paged["rows"]
    ]
    kept = history.read_on(session)
    return {
        "transactions": paged,
        "states": states,
        "held": held(session),
        "fences": {"kept": kept, "rows": history.rows(_is_fence, SHOWN_FENCES)},
    }


def _is_fence(entry: Entry) -> bool:
    return entry.scope == TRANSACTION and entry.what in FENCES


def transaction_view(
    session: ClusterSession, params: Params, history: HistoryCache
) -> dict[str, Any]:
    """Return one transactional id: its state, the producers that claimed it, its timeline."""
    name = required(params, "id")
    timeline = history.of(session, TRANSACTION, name)
    claims = [row for row in timeline["rows"] if row["what"] in CLAIMS]
    return {
        "transaction": plain(transaction(session, name)),
        "held": [row for row in held(session) if row["transactional_id"] == name],
        "claims": claims,
        "history": timeline,
    }
