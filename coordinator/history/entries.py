"""One entry of the history, and its encoding in the log.

Key: the JSON array ``[scope, subject]``, so that a reader finds the entries of one group or
transactional id without decoding other values. Value: a JSON object with the fields of
:class:`Entry`, described by the JSON schema that ``fencepost history schema`` prints. Version 1
encoded the fields in msgpack, and is still read.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import field
from enum import Enum, StrEnum
from typing import Any, Final

import msgpack

from fencepost.coordinator.history.causes import cause_word
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.logcore.values import dataclass

GROUP, TRANSACTION, PARTITION, CLUSTER = "group", "transaction", "partition", "cluster"
CLIENT = "client"
GROUP_REQUEST, TRANSACTION_REQUEST = "group-request", "transaction-request"
"""The scopes of entries. The subject of an entry is the group id or the transactional id; for a
partition, the name of its directory; for the cluster, a broker, a feature, a deleted topic or the
controller; for a client, its client id; for a recorded request, the group or transactional id."""

REQUEST_SCOPES = frozenset({GROUP_REQUEST, TRANSACTION_REQUEST})
"""Scopes of recorded requests (``recorded_apis.py``); most readers skip the entries of these
scopes."""

POLL_PAUSE_REPORTED = "poll-pause-reported"
"""The kind of a group's entry about a consumer whose pushed metrics show a pause between polls."""

ENTRY_VERSION = 2
"""The version of the values. Readers skip values of a later version. New kinds of entries, causes
and details do not need a new version."""

MAX_TEXT_CHARACTERS = 1_000
"""The maximum length of a string in an entry, since clients can send reasons of any length."""

MAX_ITEMS = 50
"""The maximum number of elements of a list or map in an entry."""

MAX_REQUEST_BYTES = 64 << 10
"""The maximum size of a recorded request or response; if it is larger, only its size is recorded.
"""

_WHY = ("reason", "cause", "during", "error")
"""Fields of an event that may hold its cause; the first non-empty one counts."""

_MAX_DEPTH = 3
_INT64 = range(-(1 << 63), 1 << 63)


class Observed(StrEnum):
    """The kinds of entries of the scope ``client``: observations that concern exactly-once."""

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

    ``what`` is the kind of the event. ``client_id`` and ``client_host`` name the client whose
    request caused the event; None for a timer or another broker's action. ``trigger`` names the
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

    @property
    def cause(self) -> str | None:
        """The cause as a word of a fixed set, for counts of causes; None without a cause."""
        return cause_word(self.what, self.detail)


def encode_key(scope: str, subject: str) -> bytes:
    """Return the key of all entries of one subject; a very long subject is truncated."""
    return _json([scope, _plain(subject)])


def keys_of(scope: str, subject: str) -> tuple[bytes, ...]:
    """Return the keys that entries of one subject may have: the present one, and version 1's."""
    old: bytes = msgpack.packb([scope, _plain(subject)])
    return encode_key(scope, subject), old


def encode_value(entry: Entry) -> bytes:
    """Return the value; strings and lists are truncated, so the size of an entry is bounded."""
    return _json(
        {
            "version": ENTRY_VERSION,
            "at_ms": entry.at_ms,
            "scope": entry.scope,
            "subject": _plain(entry.subject),
            "what": entry.what,
            "cause": entry.cause,
            "why": _plain(entry.why),
            "shard": entry.shard,
            "client_id": _plain(entry.client_id),
            "client_host": _plain(entry.client_host),
            "trigger": entry.trigger,
            "detail": _plain(entry.detail),
        }
    )


def decode_value(raw: bytes) -> Entry | None:
    """Return a decoded value; None for a value of a later version.

    Raises ValueError if the value is corrupt.
    """
    try:
        value = json.loads(raw) if raw[:1] == b"{" else msgpack.unpackb(raw)
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
    except (
        *(ValueError, TypeError, KeyError, AttributeError, RecursionError),
        msgpack.UnpackException,
    ) as error:
        raise ValueError(f"{HISTORY_TOPIC} holds a value that cannot be read: {error}") from error


# json.dumps would make an encoder for each value.
_ENCODER: Final = json.JSONEncoder(
    check_circular=False, allow_nan=False, ensure_ascii=False, separators=(",", ":")
)


def _json(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def _plain(value: object, depth: int = 0) -> Any:
    """Convert a value to types that JSON has, and truncate strings and lists."""
    if type(value) is str:  # the common case
        return _text(value)
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return value if value in _INT64 else str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value[:MAX_REQUEST_BYTES]).decode()
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        items = list(value.items())[:MAX_ITEMS]
        return {_text(key): _plain(item, depth + 1) for key, item in items}
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple, frozenset, set)):
        return [_plain(item, depth + 1) for item in list(value)[:MAX_ITEMS]]
    return _text(value)


def _text(value: object) -> str:
    # A lone surrogate, which a decoder may have let through, cannot be encoded as UTF-8.
    text = str(value)
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[: MAX_TEXT_CHARACTERS - 1]}…"
