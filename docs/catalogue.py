"""The catalogue of causes: what can happen, and the one command that names it.

``tests/wire/test_catalogue_of_causes.py`` brings about each cause, and runs its command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from docs.settings import cell, table


@dataclass(frozen=True, slots=True)
class Cause:
    """A row of the catalogue. A line of the output contains ``says``; … stands for any text."""

    key: str
    text: str
    command: str
    says: str


_GROUP = "groups history GROUP"
_TXN = "txns history ID"
_RECORD = "groups history GROUP --topic TOPIC --partition 0 --offset 0"

CATALOGUE: Final = (
    Cause(
        "classic-joined", "A member joined a classic group", _GROUP, "rebalance-started…new member"
    ),
    Cause("classic-left", "A member left a classic group", _GROUP, "rebalance-started…MEMBER left"),
    Cause(
        "classic-silent",
        "A member of a classic group sent no heartbeat",
        _GROUP,
        "member-expired…session timed out…MEMBER",
    ),
    Cause(
        "classic-late-join",
        "A member did not rejoin within its rebalance timeout",
        _GROUP,
        "member-expired…did not rejoin in time…MEMBER",
    ),
    Cause(
        "classic-late-sync",
        "A member did not fetch its assignment",
        _GROUP,
        "member-expired…SyncGroup in time…MEMBER",
    ),
    Cause(
        "classic-unused-id",
        "A client was given a member id, and never joined with it",
        _GROUP,
        "pending-member-expired…MEMBER",
    ),
    Cause(
        "classic-rejoined",
        "The leader of a classic group joined again, as after a change of its subscription",
        _GROUP,
        "rebalance-started…leader MEMBER rejoins",
    ),
    Cause(
        "classic-replaced",
        "Another process took a static member's `group.instance.id`",
        _GROUP,
        "member-fenced…MEMBER",
    ),
    Cause(
        "consumer-joined",
        "A member joined a consumer group",
        _GROUP,
        "group-epoch-bumped…MEMBER…joined",
    ),
    Cause(
        "consumer-left", "A member left a consumer group", _GROUP, "group-epoch-bumped…MEMBER: left"
    ),
    Cause(
        "consumer-silent",
        "A member of a consumer group sent no heartbeat",
        _GROUP,
        "group-epoch-bumped…no heartbeat came…MEMBER",
    ),
    Cause(
        "consumer-resubscribed",
        "A member of a consumer group changed its subscription",
        _GROUP,
        "group-epoch-bumped…MEMBER changed its",
    ),
    Cause(
        "consumer-topic-grew",
        "A subscribed topic got more partitions",
        _GROUP,
        "group-epoch-bumped…subscribed topics changed",
    ),
    Cause(
        "consumer-late-revocation",
        "A member did not give up its partitions in time",
        _GROUP,
        "group-epoch-bumped…did not revoke in time…MEMBER",
    ),
    Cause(
        "consumer-replaced",
        "Another process took a static member's `group.instance.id` in a consumer group",
        _GROUP,
        "member-fenced…MEMBER",
    ),
    Cause(
        "group-deleted", "A client deleted the group", _GROUP, "group-deleted…request DeleteGroup"
    ),
    Cause(
        "offsets-of-deleted-topic",
        "Offsets went away because their topic was deleted",
        _GROUP,
        "offsets-of-deleted-topic",
    ),
    Cause("txn-timeout", "The transaction timeout passed", _TXN, "transaction-aborted…timeout"),
    Cause(
        "txn-new-producer",
        "Another producer started with the transactional id",
        _TXN,
        "transaction-aborted…InitProducerId",
    ),
    Cause("txn-fenced", "A fenced producer sent a request", _TXN, "producer-refused…EndTxn"),
    Cause(
        "txn-client-abort",
        "The producer aborted its transaction",
        _TXN,
        "transaction-aborted…EndTxn",
    ),
    Cause(
        "txn-terminated",
        "An operator terminated the transaction",
        _TXN,
        "transaction-aborted…InitProducerId…fencepost-cli",
    ),
    Cause(
        "txn-blocks-readers",
        "An open transaction holds back the readers of a topic",
        "txns blame TOPIC --json",
        '"transactional_id": "ID"',
    ),
    Cause(
        "share-released",
        "A member released a record",
        _RECORD,
        "share-records-returned…released by its owner…MEMBER",
    ),
    Cause(
        "share-lock-expired",
        "A member did not acknowledge a record in time",
        _RECORD,
        "share-records-returned…acquisition lock expired…MEMBER",
    ),
    Cause(
        "share-rejected",
        "A member rejected a record",
        _RECORD,
        "share-records-given-up…rejected by its owner…MEMBER",
    ),
    Cause(
        "share-limit",
        "A record reached the delivery limit",
        _RECORD,
        "share-records-given-up…delivery limit 2…MEMBER",
    ),
    Cause(
        "share-session-closed",
        "A member closed its share session",
        _RECORD,
        "share-records-returned…share session closed by its owner…MEMBER",
    ),
    Cause(
        "share-connection-closed",
        "The connection of a member broke",
        _RECORD,
        "share-records-returned…connection closed…MEMBER",
    ),
    Cause(
        "share-in-flight",
        "A member has a record and holds the start offset back",
        "groups blame GROUP --json",
        '"member": "MEMBER"',
    ),
    Cause(
        "doctor-reads-uncommitted",
        "A pipeline reads its input uncommitted",
        "doctor --group GROUP",
        "reads-uncommitted…TOPIC with read_uncommitted",
    ),
    Cause(
        "doctor-offsets-outside",
        "A pipeline commits offsets outside its transaction",
        "doctor --group GROUP",
        "offsets-outside-transaction…GROUP",
    ),
    Cause(
        "doctor-timeout",
        "A producer asks for a longer transaction timeout than the broker allows",
        "doctor --transactional-id ID",
        "timeout-above-maximum…ID",
    ),
    Cause(
        "feature-changed",
        "The level of a feature was changed",
        "cluster history",
        "feature-finalized…level 1 → 2…UpdateFeatures",
    ),
    Cause("broker-down", "No broker listens", "health -b ADDRESS", "ADDRESS"),
)

_TOPIC = "topics history TOPIC"

CLUSTER_CATALOGUE: Final = (
    Cause(
        "leader-failed",
        "A broker failed, and another replica leads",
        _TOPIC,
        "became-leader…leader FORMER → LEADER…broker FORMER is fenced",
    ),
    Cause(
        "leader-stopped",
        "A broker was shut down, and another replica leads",
        _TOPIC,
        "became-leader…leader FORMER → LEADER…broker FORMER shuts down",
    ),
    Cause(
        "leader-preferred",
        "The preferred leader of a partition leads again",
        _TOPIC,
        "became-leader…leader FORMER → LEADER…it is the preferred leader",
    ),
    Cause(
        "leader-none",
        "A partition without a leader has one again",
        _TOPIC,
        "became-leader…leader none → LEADER",
    ),
    Cause(
        "isr-shrunk",
        "A follower did not keep up with its leader, and left the ISR",
        _TOPIC,
        "isr-shrunk…(−FOLLOWER)…broker FOLLOWER…more than replica.lag.time.max.ms",
    ),
    Cause(
        "isr-expanded",
        "A follower has caught up, and is in the ISR again",
        _TOPIC,
        "isr-expanded…(+FOLLOWER)",
    ),
)
"""Causes that only a cluster of several brokers has."""


def catalogue_table() -> str:
    """Return the table of the catalogue."""
    rows = (
        (
            cell(cause.text),
            f"`fencepost {cause.command}`",
            f"`{cell(cause.says).replace('…', ' … ')}`",
        )
        for cause in (*CATALOGUE, *CLUSTER_CATALOGUE)
    )
    return table(("cause", "command", "what it says"), rows)
