"""What brought an event about, in one of a few words: what can be counted of a cause.

The history keeps a cause as it was told, with names and numbers. A count needs a word that comes
again, and never more of them than this module has: clients give reasons, too.
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
"""By what the transaction machine says that it was: the client's own wish, a transaction that took
too long, or another producer that took over the transactional id."""

REBALANCES: Final = frozenset({"rebalance-started", "group-epoch-bumped"})
"""Events of either protocol that make members give up or get partitions."""

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
    ("topics matching", "topics-changed"),
    ("rejoins", "member-rejoined"),
    ("joined", "member-joined"),
    ("joins", "member-joined"),
    ("answered", "assignor-answered"),
)
"""Words of a reason, the first that is found counts, and what they stand for."""

REBALANCE_CAUSES: Final = frozenset({word for _, word in _REBALANCE_WORDS} | {OTHER})


def cause_of(event: Event, trigger: str | None) -> str:
    """The word for an event that ``trigger`` set off; see ``Entry.trigger``.

    Of an event of no interest it is the trigger's own, of which there are as many as commands.
    """
    if event.kind in REBALANCES:
        reason = str(event.detail.get("reason", ""))
        return next((cause for words, cause in _REBALANCE_WORDS if words in reason), OTHER)
    cause = event.detail.get("cause")
    if isinstance(cause, str) and cause in TRANSACTION_CAUSES:
        return TRANSACTION_CAUSES[cause]
    return trigger or "load"
