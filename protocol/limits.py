"""Limits of the wire protocol, each with its unit, its default and its reason."""

from __future__ import annotations

from fencepost.logcore.values import dataclass

MAX_REQUEST_BYTES = 104_857_600
"""The maximum size of a request frame, in bytes without the length prefix: Kafka's
``socket.request.max.bytes``."""

MAX_QUEUED_REQUEST_BYTES = 268_435_456
"""The maximum number of bytes in frames above :data:`LARGE_FRAME_BYTES`, for all connections
together. Kafka has no limit by default; this limit has room for two requests of the largest size
besides smaller ones."""

MAX_REQUEST_OBJECTS = 100_000
"""The maximum number of array elements and unknown tags in a request. A decoded element takes 100
to 300 bytes, however short it is on the wire, so without this limit a frame of 100 MB could
allocate gigabytes. The largest legitimate requests (OffsetCommit or Fetch for every partition of a
big cluster) stay far below the limit."""

MAX_STRING_BYTES = 32_767
"""The maximum size of a string in bytes, for every message. The int16 length prefix has this limit,
and Kafka's readers also apply it to compact strings. A longer string could be stored in records
that other clients cannot read."""

MAX_ERROR_TEXT_CHARACTERS = 1_000
"""The maximum number of characters in an error message. The message quotes names as the client sent
them; with the longest names, it would otherwise exceed the maximum size of a string."""

UNKNOWN_TAG_OBJECTS = 10
"""The number of elements that an unknown tag counts as in the limits of elements. All tags of a
section are skipped in one step, at a microsecond each, and later releases add only a few tags to a
version (KIP-482)."""

MAX_RESPONSE_OBJECTS = 2_000_000
"""The maximum number of elements in a response that our client reads. It only guards against
corrupt data, because users choose the broker. Metadata of a whole cluster may be large."""

MAX_RESPONSE_BYTES = 1 << 30
"""The maximum size, in bytes, of a response frame that our client accepts. Kafka's own clients have
no limit; a Fetch response stays below ``fetch.max.bytes`` plus one batch."""

MAX_QUEUED_RESPONSE_BYTES = 67_108_864
"""The maximum number of bytes in unsent responses in memory, for all connections together. Most
records are sent from their file and do not count. The limit has room for a response that lists
everything, or for 256 KiB of unsent data on each of 256 connections whose clients do not read."""

LARGE_FRAME_BYTES = 65_536
"""A frame above this size needs a grant of memory before all of it is read, and its buffer grows
with the received bytes, because a length prefix alone must not allocate memory."""

SMALL_FRAME_BYTES = 4_096
"""Frames up to this size are copied into a bytes object, which is faster to walk over."""

BIG_CHUNK_BYTES = 65_536
"""Parts of a response of at least this size are written to the socket as they are; for smaller
parts, a copy into a joined buffer is cheaper than another write."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of one server's connections. The names in brackets are Kafka's settings."""

    max_request_bytes: int = MAX_REQUEST_BYTES
    """The maximum size of a request in bytes [socket.request.max.bytes]."""
    max_request_objects: int = MAX_REQUEST_OBJECTS
    """The maximum number of elements in a request; see :data:`MAX_REQUEST_OBJECTS`."""
    max_connections: int = 10_000
    """The maximum number of open connections [max.connections]. Kafka has no limit by default. Each
    connection costs a file descriptor and its buffers."""
    max_connections_per_ip: int = 10_000
    """The maximum number of open connections from one address [max.connections.per.ip]."""
    max_idle_ms: int = 600_000
    """An idle connection is closed after this time [connections.max.idle.ms]."""
    max_queued_request_bytes: int = MAX_QUEUED_REQUEST_BYTES
    """The maximum number of bytes in all large frames together [queued.max.request.bytes]."""
    max_queued_response_bytes: int = MAX_QUEUED_RESPONSE_BYTES
    """The maximum number of bytes in unsent responses [queued.max.response.bytes, which Kafka
    lacks]."""
    min_frame_bytes_per_second: int = 1_048_576
    """While other connections wait for memory, a large frame or response that is slower than this
    is aborted."""
    slow_frame_grace_ms: int = 5_000
    """How long a large frame or response may be that slow while other connections wait."""
    frame_timeout_ms: int = 30_000
    """The connection is closed if an incomplete frame receives no byte for this time."""
    handshake_timeout_ms: int = 10_000
    """The time limit for a TLS handshake, from the connection's start; asyncio's is 60 s."""
    drain_timeout_ms: int = 2_000
    """The time for which a stopping server waits for responses in progress."""
