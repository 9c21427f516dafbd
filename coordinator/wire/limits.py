"""The limits of what comes over the wire, each with its unit, its default and its reason."""

from __future__ import annotations

from fencepost.logcore.values import dataclass

MAX_REQUEST_BYTES = 104_857_600
"""Bytes of one request frame without its length prefix: Kafka's ``socket.request.max.bytes``."""

MAX_QUEUED_REQUEST_BYTES = 268_435_456
"""Bytes of frames above :data:`FIRST_BUFFER_BYTES`, of all connections together. Kafka's default
sets no bound; this one leaves room for two requests of the largest size beside the usual ones."""

MAX_REQUEST_OBJECTS = 100_000
"""Array elements and unknown tags of one request. A decoded element takes 100 to 300 bytes however
few it took on the wire, so without this a frame of 100 MB could ask for gigabytes. The largest
honest requests (OffsetCommit or Fetch over every partition of a big cluster) stay far below."""

MAX_STRING_BYTES = 32_767
"""Bytes of one string, in every message: the older form can say no more, and Kafka's readers take
no more in the newer one either. What is longer would land in records that nobody else can read."""

MAX_ERROR_TEXT_CHARACTERS = 1_000
"""Characters of the text that explains an error. It quotes names as the client sent them: with the
longest, the text would be no string that can be sent."""

UNKNOWN_TAG_OBJECTS = 10
"""An unknown tag counts as so many elements. Tags are what later releases add to a version: a few
(KIP-482). The section they stand in is walked over in one go, at a microsecond each."""

MAX_RESPONSE_OBJECTS = 2_000_000
"""Elements of one response that our client reads: Metadata of a whole cluster may be large, and a
broker is chosen by its user, so this only guards against nonsense."""

MAX_RESPONSE_BYTES = 1 << 30
"""Bytes of one response frame that our client accepts. Kafka's own clients set no bound; a Fetch
stays below ``fetch.max.bytes`` plus one batch."""

MAX_QUEUED_RESPONSE_BYTES = 67_108_864
"""Bytes of responses in memory that clients have not taken yet, of all connections together. Most
records are sent from their file and do not count: this is what a listing of everything takes, or
the send buffers of 256 connections that do not read."""

FIRST_BUFFER_BYTES = 65_536
"""Bytes given to a frame before any of it has arrived: a prefix alone may not reserve more. The
buffer doubles as bytes come in, so memory follows what was really sent."""

SMALL_FRAME_BYTES = 4_096
"""Frames up to this size are copied into a bytes object, which is quicker to walk over."""

BIG_CHUNK_BYTES = 65_536
"""Pieces of a response at least this large go to the socket as they are; below that, one copy into
a joined buffer is cheaper than one more write."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one listener grants its clients. The names in brackets are Kafka's settings."""

    max_request_bytes: int = MAX_REQUEST_BYTES
    """Bytes of one request [socket.request.max.bytes]."""
    max_request_objects: int = MAX_REQUEST_OBJECTS
    """Elements of one request; see :data:`MAX_REQUEST_OBJECTS`."""
    max_connections: int = 10_000
    """Open connections in all [max.connections]. Kafka sets no bound; each costs a descriptor and
    up to ``max_buffered_bytes``."""
    max_connections_per_ip: int = 10_000
    """Open connections of one address [max.connections.per.ip]."""
    max_idle_ms: int = 600_000
    """A connection on which nothing happens for this long is closed [connections.max.idle.ms]."""
    max_queued_request_bytes: int = MAX_QUEUED_REQUEST_BYTES
    """Bytes of all large frames together [queued.max.request.bytes]."""
    max_queued_response_bytes: int = MAX_QUEUED_RESPONSE_BYTES
    """Bytes of responses that wait to be taken [queued.max.response.bytes, which Kafka lacks]."""
    min_frame_bytes_per_second: int = 1_048_576
    """A large frame slower than this is given up when others wait for the memory that it holds, and
    so is a response."""
    slow_frame_grace_ms: int = 5_000
    """How long a large frame, or a response, may be slow even then."""
    frame_timeout_ms: int = 30_000
    """A frame that has begun must keep growing: no byte for this long closes the connection."""
    handshake_timeout_ms: int = 10_000
    """How long a client may take to shake hands, from its connection on; asyncio has 60 s."""
    drain_timeout_ms: int = 2_000
    """How long a stopping server waits for responses under way."""
