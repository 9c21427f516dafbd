"""One entry of the history, and its encoding in the log.

Key: msgpack ``[scope, subject]``, so that a reader finds the entries of one group or transactional
id without decoding other values. Value: a msgpack map with the fields of :class:`Entry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import Enum, StrEnum
from typing import Any

import msgpack

from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.logcore.values import dataclass

GROUP, TRANSACTION, PARTITION, CLUSTER = "group", "transaction", "partition", "cluster"
CLIENT = "client"
"""Scopes. The subject of an entry is the group id or the transactional id; for a partition, its
directory's name; for the cluster, a broker, a feature, a deleted topic or the controller; for a
client, its client id."""

ENTRY_VERSION = 1
"""Version of the values. Readers skip values of a later version."""

MAX_TEXT_CHARACTERS = 1_000
"""Characters of one text in an entry: clients can give reasons of any length."""

MAX_ITEMS = 50
"""Elements of one list or map in an entry."""

_WHY = ("reason", "cause", "during", "error")
"""Fields of an event that may hold its cause; the first non-empty one counts."""

_MAX_DEPTH = 3
_INT64 = range(-(1 << 63), 1 << 63)


class Observed(StrEnum):
    """The kinds of entries of the scope ``client``: what its requests show of exactly-once."""

    PRODUCED = "produced"
    FETCHED = "fetched"
    GROUP_JOINED = "group-joined"
    OFFSETS_COMMITTED = "offsets-committed"
    OFFSETS_COMMITTED_BY_TIMER = "offsets-committed-by-timer"
    OFFSETS_ADDED_TO_TRANSACTION = "offsets-added-to-transaction"
    TRANSACTION_ENDED = "transaction-ended"
    TRANSACTION_NEARLY_TIMED_OUT = "transaction-nearly-timed-out"
    TRANSACTION_TIMEOUT_REFUSED = "transaction-timeout-refused"
    OBSERVATIONS_DROPPED = "observations-dropped"


@dataclass(frozen=True, slots=True)
class Entry:
    """A decision and its cause.

    ``what`` is the kind of the machine's event. ``client_id`` and ``client_host`` name the client
    whose request caused it; None for a timer or another broker's action. ``trigger`` names the
    command: ``request JoinGroup``, ``timer session``, ``report TargetComputed`` or
    ``upkeep ExpireOffsets``; None for a load, and in entries of earlier releases.
    """

    at_ms: int
    scope: str
    subject: str
    what: str
    shard: str
    client_id: str | None = None
    client_host: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    trigger: str | None = None

    @property
    def why(self) -> str | None:
        """The reason or cause, as ``fencepost groups history`` and ``txns history`` show it."""
        return next((str(self.detail[name]) for name in _WHY if self.detail.get(name)), None)


def encode_key(scope: str, subject: str) -> bytes:
    """Return the key of all entries of one subject; a very long subject is truncated."""
    packed: bytes = msgpack.packb([scope, _plain(subject)])
    return packed


def encode_value(entry: Entry) -> bytes:
    """Return the value; texts and lists are truncated, so the size of an entry is bounded."""
    packed: bytes = msgpack.packb(
        {
            "version": ENTRY_VERSION,
            "at_ms": entry.at_ms,
            "scope": entry.scope,
            "subject": _plain(entry.subject),
            "what": entry.what,
            "shard": entry.shard,
            "client_id": _plain(entry.client_id),
            "client_host": _plain(entry.client_host),
            "trigger": entry.trigger,
            "detail": _plain(entry.detail),
        }
    )
    return packed


def decode_value(raw: bytes) -> Entry | None:
    """Decode a value; None for one of a later version. Raises ValueError if it is corrupt."""
    try:
        value = msgpack.unpackb(raw)
        if value["version"] > ENTRY_VERSION:
            return None
        return Entry(
            at_ms=int(value["at_ms"]),
            scope=str(value["scope"]),
            subject=str(value["subject"]),
            what=str(value["what"]),
            shard=str(value["shard"]),
            client_id=value["client_id"],
            client_host=value["client_host"],
            trigger=value.get("trigger"),
            detail=dict(value["detail"]),
        )
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise ValueError(f"{HISTORY_TOPIC} holds a value that cannot be read: {error}") from error


def _plain(value: object, depth: int = 0) -> Any:
    """Convert a value to types that msgpack can encode, within the bounds."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if value in _INT64 else str(value)
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        items = list(value.items())[:MAX_ITEMS]
        return {str(key)[:MAX_TEXT_CHARACTERS]: _plain(one, depth + 1) for key, one in items}
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple, frozenset, set)):
        return [_plain(one, depth + 1) for one in list(value)[:MAX_ITEMS]]
    text = str(value)
    # A lone surrogate, which a decoder may have let through, cannot be encoded as UTF-8.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[: MAX_TEXT_CHARACTERS - 1]}…"
