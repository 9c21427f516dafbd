"""The limits of what comes over the wire, each with its unit, its default and its reason."""

from __future__ import annotations

from dataclasses import dataclass

MAX_REQUEST_BYTES = 104_857_600
"""Bytes of one request frame without its length prefix: Kafka's ``socket.request.max.bytes``."""

MAX_REQUEST_OBJECTS = 100_000
"""Array elements and unknown tags of one request. A decoded element takes 100 to 300 bytes however
few it took on the wire, so without this a frame of 100 MB could ask for gigabytes. The largest
honest requests (OffsetCommit or Fetch over every partition of a big cluster) stay far below."""

MAX_RESPONSE_OBJECTS = 2_000_000
"""The same for a response that our client reads: Metadata of a whole cluster may be large, and a
broker is chosen by its user, so this only guards against nonsense."""

MAX_RESPONSE_BYTES = 1 << 30
"""Bytes of one response frame that our client accepts. Kafka's own clients set no bound; a Fetch
stays below ``fetch.max.bytes`` plus one batch."""

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
    frame_timeout_ms: int = 30_000
    """A frame that has begun must keep growing: no byte for this long closes the connection."""
    write_high_water_bytes: int = 1_048_576
    """Unsent response bytes above which no further request of that connection is served."""
    drain_timeout_ms: int = 2_000
    """How long a stopping server waits for responses under way."""
