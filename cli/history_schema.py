"""The JSON schema of history entries, which ``fencepost history schema`` prints.

The documentation publishes it as ``docs/history-entry.schema.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fencepost.coordinator.history.causes import CAUSES
from fencepost.coordinator.history.entries import (
    CLIENT,
    CLUSTER,
    ENTRY_VERSION,
    GROUP,
    GROUP_REQUEST,
    MAX_ITEMS,
    MAX_TEXT_CHARACTERS,
    PARTITION,
    TRANSACTION,
    TRANSACTION_REQUEST,
)
from fencepost.coordinator.history.recorded_apis import CONNECTION_CLOSED, REQUEST

_REQUESTS: Final = {
    REQUEST: "a request, with `fencepost.history.requests.enable`",
    CONNECTION_CLOSED: "the client's connection closed",
}

KINDS: Final[Mapping[str, Mapping[str, str]]] = {
    GROUP: {
        "group-created": "the first member came",
        "group-deleted": "the group was deleted, or its last offset expired",
        "group-upgraded": "from the classic to the consumer protocol",
        "group-downgraded": "from the consumer to the classic protocol",
        "rebalance-started": "classic protocol: all members must rejoin",
        "rebalance-waits": "the members that the rebalance waits for",
        "generation-started": "classic protocol: the rebalance is complete",
        "assignment-refused": "an assignment of the leader was refused",
        "member-joined": "a member joined",
        "member-left": "a member left by a request of its own, or an administrator's",
        "member-expired": "a member was removed because it was silent or late",
        "member-fenced": "a static member was replaced by another with its group.instance.id",
        "pending-member-expired": "a client did not use the member id that it was given",
        "pending-member-evicted": "a client's member id had to make room for another client's",
        "group-epoch-bumped": "consumer protocol: a rebalance begins",
        "target-assigned": "the new assignment of all members",
        "assignor-failed": "the assignor raised an error, or was too late",
        "member-reconciled": "a member revoked or received partitions",
        "poll-pause-reported": "a consumer's pushed metrics show a long time between two polls",
        "regex-resolved": "the topics that match a regular expression changed",
        "regex-refused": "a regular expression cannot be used",
        "offsets-expired": "committed offsets expired",
        "offsets-of-deleted-topic": "the offsets of a deleted topic were removed",
        "share-state-initialized": "share groups: partitions were initialized",
        "share-offsets-altered": "share groups: start offsets were set",
        "share-state-deleted": "share groups: the state of partitions was deleted",
        "records-skipped": "records of another release's format were skipped while loading",
        "share-partition-loaded": "the leader has loaded the state of a share partition",
        "share-partition-failed": "the state of a share partition could not be loaded",
        "share-partition-fenced": "another leader has the share partition",
        "share-records-returned": "records will be delivered again",
        "share-records-given-up": "records were archived, and are not delivered again",
        "share-state-not-written": "a new state could not be written",
        "share-records-dead-lettered": "records are in the dead-letter queue",
        "share-dead-letter-failed": "records could not be written to the dead-letter queue",
        "share-start-offset-moved": "records were deleted from the log before they were consumed",
    },
    TRANSACTION: {
        "epoch-bumped": "InitProducerId, or a fence: earlier epochs are fenced",
        "producer-id-rotated": "a new producer id, since the epochs were exhausted",
        "producer-fenced": "the producer's epoch was bumped by another client or the timeout",
        "producer-refused": "a fenced producer sent a request",
        "timeout-postponed": "a timeout could not abort the transaction yet",
        "transaction-aborted": "the end of a transaction",
        "transaction-committed": "the end of a transaction, with `fencepost.history.commits` "
        "for every one",
        "transaction-kept": "a prepared transaction survived InitProducerId (KIP-939)",
        "transaction-resumed": "a new coordinator completes the transaction",
        "transaction-timed-out": "the transaction timeout aborted it",
        "transactional-id-expired": "the transactional id was unused for too long",
        "records-passed-over": "records of another release's format were skipped while loading",
    },
    PARTITION: {
        "leader-elected": "the controller elected a leader",
        "leader-lost": "no replica can lead",
        "became-leader": "the broker has taken over",
        "isr-changed": "replicas left and joined the ISR",
        "isr-expanded": "replicas joined the ISR",
        "isr-shrunk": "replicas left the ISR",
        "isr-update-failed": "the controller refused a new ISR",
        "reassignment-changed": "a reassignment began or changed",
        "reassignment-ended": "a reassignment was completed or cancelled",
        "follower-failed": "the follower stopped, since an append failed",
        "log-truncated": "the follower cut off records that its leader does not have",
    },
    CLUSTER: {
        "broker-registered": "a broker has started",
        "broker-fenced": "a broker has lost its session, or has shut down",
        "broker-unfenced": "a broker may lead partitions",
        "broker-in-controlled-shutdown": "a broker hands over its partitions",
        "broker-unregistered": "a broker was removed",
        "log-directories-offline": "directories of a broker failed",
        "feature-finalized": "the level of a feature changed",
        "topic-deletion-began": "on ZooKeeper: the controller begins to delete a topic",
        "topic-deleted": "a topic was deleted",
        "controller-elected": "on ZooKeeper: a broker became the controller",
        "controller-resigned": "on ZooKeeper: the controller gave up",
    },
    CLIENT: {
        "produced": "a client has sent a Produce request to a topic",
        "fetched": "a client has read a topic, with its isolation level",
        "group-joined": "a client has joined a group",
        "offsets-committed": "a client has committed offsets outside a transaction",
        "offsets-committed-by-timer": "a client commits offsets at equal intervals",
        "offsets-added-to-transaction": "a client has committed offsets in a transaction",
        "transaction-ended": "a client has ended a transaction",
        "transaction-nearly-timed-out": "a transaction was open for most of its timeout",
        "transaction-timeout-refused": "a transaction timeout above the broker's maximum",
        "observations-dropped": "observations beyond the limit were only counted",
    },
    GROUP_REQUEST: _REQUESTS,
    TRANSACTION_REQUEST: _REQUESTS,
}
"""Scope → kind of an entry → its meaning. An entry of the scope ``client`` is recorded once in ten
minutes."""

SUBJECTS: Final[Mapping[str, str]] = {
    GROUP: "the group id",
    TRANSACTION: "the transactional id",
    PARTITION: "topic and partition, as `orders-0`",
    CLUSTER: "a broker, a feature, a topic or the controller",
    CLIENT: "the client id",
    GROUP_REQUEST: "the group id",
    TRANSACTION_REQUEST: "the transactional id",
}

_INT64 = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
_TEXT = {"type": "string", "maxLength": MAX_TEXT_CHARACTERS}
_TEXT_OR_NULL = {"type": ["string", "null"], "maxLength": MAX_TEXT_CHARACTERS}

DETAILS: Final[Mapping[str, tuple[Mapping[str, Any], str]]] = {
    "reason": (_TEXT, "Why, in words."),
    "cause": (_TEXT, "Why, in words."),
    "member": (_TEXT_OR_NULL, "The member id that the entry is about, or that set it off."),
    "client_id": (_TEXT_OR_NULL, "The client id of that member."),
    "client_host": (_TEXT_OR_NULL, "The address of that member, as Java prints it."),
    "old_generation": (_INT64, "The generation before."),
    "new_generation": (_INT64, "The generation after."),
    "old_epoch": (_INT64, "The epoch of a group or member before."),
    "epoch": (_INT64, "The epoch of a group, member or controller after."),
    "members": (_INT64, "The number of members."),
    "partitions": (_INT64, "The number of partitions."),
    "producer_id": (_INT64, "The producer id."),
    "producer_epoch": (_INT64, "The producer epoch after the event."),
    "open_ms": (_INT64, "How long the transaction was open."),
    "leader_epoch": (_INT64, "The leader epoch."),
}
"""Details that several kinds of entries have, each with its schema and meaning. Other details occur
only in some kinds; ``fencepost consume __fencepost_history`` shows them."""


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of an entry's value in ``__fencepost_history``."""
    details = {name: {**kind, "description": text} for name, (kind, text) in DETAILS.items()}
    fields: dict[str, dict[str, Any]] = {
        "version": {"const": ENTRY_VERSION, "description": "The version of this schema."},
        "at_ms": {**_INT64, "description": "The broker's time in ms since 1970-01-01 UTC."},
        "scope": {"enum": list(KINDS), "description": "What the subject is."},
        "subject": {**_TEXT, "description": "The name of what changed."},
        "what": {"type": "string", "description": "The kind of the entry."},
        "cause": {
            "enum": [*sorted(CAUSES), None],
            "description": "The cause as a word of a fixed set; null for a kind without one.",
        },
        "why": {**_TEXT_OR_NULL, "description": "The cause in words."},
        "shard": {**_TEXT, "description": "The coordinator's partition, or the broker."},
        "client_id": {
            **_TEXT_OR_NULL,
            "description": "The client whose request caused it; null for a timer.",
        },
        "client_host": {**_TEXT_OR_NULL, "description": "The address of that client."},
        "trigger": {
            **_TEXT_OR_NULL,
            "description": "The command: request JoinGroup, timer session, report …, upkeep ….",
        },
        "detail": {
            "type": "object",
            "maxProperties": MAX_ITEMS,
            "properties": details,
            "description": "The facts of the kind: names, numbers, epochs, offsets.",
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An entry of __fencepost_history",
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
        "oneOf": [
            {"properties": {"scope": {"const": scope}, "what": {"enum": list(kinds)}}}
            for scope, kinds in KINDS.items()
        ],
    }
