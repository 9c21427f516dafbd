"""The overview of a cluster, and the problems that need attention."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fencepost.client.queries.awaited import (
    REBALANCING,
    RECONCILING,
    awaited_by,
    unreconciled,
)
from fencepost.client.queries.group_view import CONSUMER, describe_group
from fencepost.client.queries.replicas import active_controller, brokers, quorum
from fencepost.client.queries.session import ClusterSession
from fencepost.client.router import ApiError
from fencepost.console.history import HistoryCache
from fencepost.console.paging import Params
from fencepost.console.transactions import FENCES, counts, held, listed
from fencepost.coordinator.history.entries import GROUP, Entry

RECENT_MS = 15 * 60_000
"""The age up to which an event may need attention."""

OLD_MS = 60_000
"""The age from which an open transaction is shown as old, because it holds back consumers."""

REBALANCES = frozenset({"rebalance-started", "group-epoch-bumped"})
"""Entries that begin a rebalance, in the classic and in the consumer protocol."""

MANY_REBALANCES = 5
"""The number of rebalances within :data:`RECENT_MS` from which on a group needs attention."""

MANY_GROUPS = 10
"""The maximum number of rebalancing groups that are listed by name."""

SHOWN = 20
"""The maximum number of listed history entries, and of listed members of a rebalancing group."""


def overview_view(session: ClusterSession, params: Params, history: HistoryCache) -> dict[str, Any]:
    """Return a summary of brokers, topics, groups and transactions, and what needs attention."""
    del params
    kept = history.read_on(session)
    held_back, held_error = _held_back(session)
    cluster, broker_rows = session.client.metadata(), brokers(session)
    topics = cluster.topics.values()
    shown = [topic for topic in topics if not topic.name.startswith("__")]
    groups, transactions = session.groups(), listed(session)
    now_ms = time.time_ns() // 1_000_000
    recent = history.rows(lambda entry: now_ms - entry.at_ms < RECENT_MS)
    return {
        "cluster": cluster.cluster_id,
        "controller": active_controller(session, quorum(session)),
        "brokers": [
            {
                "id": row.broker,
                "host": row.host,
                "port": row.port,
                "rack": row.rack,
                "fenced": bool(row.fenced),
            }
            for row in broker_rows
        ],
        "topics": len(shown),
        "internal_topics": len(topics) - len(shown),
        "partitions": sum(len(topic.partitions) for topic in shown),
        "groups": counts(getattr(group, "group_state", "") or "unknown" for group in groups),
        "group_types": counts(getattr(group, "group_type", "") or "unknown" for group in groups),
        "transactions": counts(transaction.transaction_state for transaction in transactions),
        "held": held_back,
        "attention": [
            *(
                {"kind": "down", "level": "bad", "broker": row.broker}
                for row in broker_rows
                if row.fenced
            ),
            *_partitions(list(topics)),
            *_rebalancing(session, groups, history),
            *_held_transactions(held_back),
            *([] if held_error is None else [_unknown_held(held_error)]),
            *_rebalances(recent),
            *_fences(recent),
        ],
        "history": {"kept": kept, "rows": history.rows(_is_event, SHOWN)},
    }


def _held_back(session: ClusterSession) -> tuple[list[dict[str, Any]], str | None]:
    """Return the result of :func:`held`, or its error.

    :func:`held` also asks for producers and transactions, which the principal may have no right to
    see, so it may fail although the rest of the view does not.
    """
    try:
        return held(session), None
    except ApiError as error:
        return [], str(error)


def _unknown_held(error: str) -> dict[str, Any]:
    return {"kind": "held-unknown", "level": "warn", "error": error}


def _is_event(entry: Entry) -> bool:
    return bool(entry.what)


def _partitions(topics: list[Any]) -> Iterator[dict[str, Any]]:
    for topic in topics:
        rows = topic.partitions.values()
        leaderless = sum(row.leader < 0 for row in rows)
        behind = sum(len(row.in_sync) < len(row.replicas) for row in rows)
        for count, kind, level in (
            (leaderless, "leaderless", "bad"),
            (behind, "under-replicated", "warn"),
        ):
            if count:
                yield {"kind": kind, "level": level, "topic": topic.name, "count": count}


def _held_transactions(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the transactions that hold back consumers. The page decides which of them are old."""
    for row in rows:
        stuck = sorted(group["group"] for group in row["groups"] if group["stuck"])
        level = "bad" if row["hanging"] else "warn"
        kind = "hanging" if row["hanging"] else "held-back"
        names = ("topic", "partition", "behind", "transactional_id", "producer_id", "epoch")
        more = ("since_ms", "timeout_ms", "state", "hanging", "hidden_groups")
        fields = {name: row[name] for name in (*names, *more)}
        yield {"kind": kind, "level": level, "stuck": stuck, "old_ms": OLD_MS, **fields}


def _rebalances(recent: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    rows = [row for row in recent if row["scope"] == GROUP and row["what"] in REBALANCES]
    for group, count in counts(row["subject"] for row in rows).items():
        if count >= MANY_REBALANCES:
            last = next(row for row in rows if row["subject"] == group)
            yield {
                "kind": "rebalances",
                "level": "warn",
                "group": group,
                "count": count,
                "why": last["why"],
                "at_ms": last["at_ms"],
            }


def _rebalancing(
    session: ClusterSession, listed: list[Any], history: HistoryCache
) -> Iterator[dict[str, Any]]:
    """Yield the groups in a rebalance, each with the members that it waits for."""
    states = REBALANCING | RECONCILING
    waiting = [row for row in listed if getattr(row, "group_state", "") in states]
    named = waiting[:MANY_GROUPS]
    for row in named:
        yield {
            "kind": "rebalancing",
            "level": "warn",
            "group": str(row.group_id),
            "state": row.group_state,
            **_awaited(session, str(row.group_id), history),
            "more": len(waiting) - len(named) if row is named[-1] else 0,
        }


def _awaited(session: ClusterSession, name: str, history: HistoryCache) -> dict[str, Any]:
    """Return a rebalancing group's members, and the members that it waits for.

    ``error`` is the reason if the group cannot be described: a user with DESCRIBE on the cluster
    can list all groups, but describing one needs DESCRIBE on the group.
    """
    try:
        group = describe_group(session, name)
    except ApiError as error:
        return {"awaited": None, "members": [], "count": 0, "error": str(error)}
    if group.kind == CONSUMER:
        members = unreconciled(group)
    else:
        members = awaited_by(history.entries(GROUP, name))
    return {
        "awaited": None if members is None else str(members),
        "members": [f"{member.client_id}@{member.host}" for member in group.members[:SHOWN]],
        "count": len(group.members),
        "error": None,
    }


def _fences(recent: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    rows = [row for row in recent if row["what"] in FENCES]
    for name, count in counts(row["subject"] for row in rows).items():
        last = next(row for row in rows if row["subject"] == name)
        yield {
            "kind": "fenced",
            "level": "info",
            "transactional_id": name,
            "count": count,
            "change": last["change"],
            "why": last["why"],
            "at_ms": last["at_ms"],
        }
