"""The cause of an event, reduced to a word from a fixed set, so that causes can be counted.

The history keeps causes verbatim, with names and numbers, and some come from clients. A metric's
label must be one of a bounded set of words: those in this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fencepost.logcore.machine import Event

OTHER: Final = "other"

TRANSACTION_CAUSES: Final[Mapping[str, str]] = {
    "EndTxn": "client",
    "timeout": "timeout",
    "InitProducerId": "new-producer",
}
"""The word for each cause that the transactions' state machine reports: an EndTxn of the client,
the transaction timeout, or another producer that took over the transactional id."""

SHARE_CAUSES: Final[Mapping[str, str]] = {
    "released by its owner": "released",
    "acquisition lock expired": "lock-expired",
    "share session closed by its owner": "session-closed",
    "its owner's connection closed": "connection-closed",
    "rejected by its owner": "rejected",
    "no record at the offset": "no-record",
    "transaction aborted": "transaction-aborted",
}
"""The word for each cause that a share partition reports when records are released or archived."""

REBALANCES: Final = frozenset({"rebalance-started", "group-epoch-bumped"})
"""Events of either group protocol that make members revoke or receive partitions."""

_REBALANCE_WORDS: Final = (
    ("new member ", "member-joined"),
    ("came back", "member-returned"),
    ("JoinGroup timed out", "member-expired"),
    ("session timed out", "member-expired"),
    ("no heartbeat came", "member-expired"),
    ("did not revoke in time", "member-expired"),
    ("did not rejoin in time", "member-expired"),
    ("no SyncGroup in time", "sync-timed-out"),
    ("did not send SyncGroup in time", "sync-timed-out"),
    ("left", "member-left"),
    ("changed its", "subscription-changed"),
    ("subscribed topics changed", "topics-changed"),
    ("initialized partitions changed", "state-initialized"),
    ("topics matching", "topics-changed"),
    ("rejoins", "member-rejoined"),
    ("joined", "member-joined"),
    ("joins", "member-joined"),
    ("answered", "assignor-answered"),
)
"""Phrases in a reason, and the word for each; the first phrase that occurs counts."""

REBALANCE_CAUSES: Final = frozenset({word for _, word in _REBALANCE_WORDS} | {OTHER})

CAUSES: Final = REBALANCE_CAUSES.union(TRANSACTION_CAUSES.values(), SHARE_CAUSES.values())
"""The words that :func:`cause_word` returns."""


def cause_word(kind: str, detail: Mapping[str, object]) -> str | None:
    """Return the word for the cause in an event's detail, or None. See :data:`CAUSES`."""
    if kind in REBALANCES:
        reason = str(detail.get("reason", ""))
        return next((cause for words, cause in _REBALANCE_WORDS if words in reason), OTHER)
    cause = detail.get("cause")
    if not isinstance(cause, str):
        return None
    return TRANSACTION_CAUSES.get(cause) or SHARE_CAUSES.get(cause)


def cause_of(event: Event, trigger: str | None) -> str:
    """Return the cause of an event that ``trigger`` set off; see ``Entry.trigger``.

    If the event reports no cause, return ``trigger``, which names one of a fixed set of commands,
    or ``load`` if there is no trigger.
    """
    return cause_word(event.kind, event.detail) or trigger or "load"
