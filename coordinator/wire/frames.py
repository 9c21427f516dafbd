"""Cutting a stream of bytes into frames, without knowing a socket.

A frame is a length (int32, not counting itself) and that many bytes. :class:`FrameBuffer` gives out
the memory that the next bytes are received into, so that they are copied once on their way from the
kernel to the decoder, and hands complete frames out as views of that same memory.
"""

from __future__ import annotations

import struct

from fencepost.coordinator.wire.errors import MalformedRequest
from fencepost.coordinator.wire.limits import FIRST_BUFFER_BYTES, MAX_REQUEST_BYTES
from fencepost.logcore.byte_count import TAKEN_IN

_LENGTH = struct.Struct(">i").unpack_from
_PREFIX_BYTES = 4
_GROWTH = 8
"""The buffer may become this many times as large as what has arrived of the frame."""
KEPT_BUFFER_BYTES = 2 << 20
"""A buffer up to this size is kept for the next frame; a larger one is given back."""
_SMALL_BUFFER_BYTES = 8192
"""What a connection starts with: most requests are smaller, most connections idle."""


class FrameBuffer:
    """Receives bytes, gives out frames in order.

    Use: receive into :meth:`writable`, tell :meth:`received` how many bytes came, then take frames
    with :meth:`next_frame` until it returns None. A frame is a read-only view that is valid until
    the next call of :meth:`writable`; whoever keeps any of it must copy.
    """

    __slots__ = ("_buffer", "_end", "_start", "_wanted", "max_bytes")

    def __init__(self, max_bytes: int = MAX_REQUEST_BYTES) -> None:
        self.max_bytes = max_bytes
        """Of a frame without its length; may be changed between two of them."""
        self._buffer = bytearray(_SMALL_BUFFER_BYTES)
        self._start = 0
        self._end = 0
        self._wanted = 0

    @property
    def pending(self) -> int:
        """Bytes that have arrived and were not yet handed out."""
        return self._end - self._start

    @property
    def wanted(self) -> int:
        """Bytes of the frame that has begun, its length included; 0 where none has."""
        return self._wanted

    def writable(self) -> memoryview:
        """Where the next bytes go; never empty.

        Of a frame that is larger than what is read at once, exactly the rest is asked for: what
        follows it then starts at the front of the buffer and is never moved.
        """
        self._make_room()
        if self._wanted > FIRST_BUFFER_BYTES:
            stop = min(len(self._buffer), self._start + self._wanted)
        else:
            stop = min(len(self._buffer), self._end + FIRST_BUFFER_BYTES)
        return memoryview(self._buffer)[self._end : stop]

    def received(self, size: int) -> None:
        """``size`` bytes were put at the front of what :meth:`writable` gave."""
        self._end += size
        TAKEN_IN.add(size)

    def next_frame(self) -> memoryview | None:
        """The next complete frame without its length, or None if more bytes are needed.

        Raises :class:`MalformedRequest` as soon as a length is negative or above the limit, before
        anything is reserved for it. Nothing can be read after that.
        """
        have = self._end - self._start
        if have < _PREFIX_BYTES:
            self._wanted = 0
            return None
        size: int = _LENGTH(self._buffer, self._start)[0]
        if not 0 <= size <= self.max_bytes:
            # What TLS begins with: a record of a handshake, in one of its versions.
            hint = "; a client that speaks TLS?" if size >> 16 == 0x1603 else ""
            raise MalformedRequest(f"a frame of {size} bytes; the limit is {self.max_bytes}{hint}")
        if have < size + _PREFIX_BYTES:
            self._wanted = size + _PREFIX_BYTES
            return None
        self._wanted = 0
        start = self._start + _PREFIX_BYTES
        self._start = start + size
        return memoryview(self._buffer)[start : self._start].toreadonly()

    def shrink(self) -> None:
        """Give memory back that an idle connection does not need."""
        if self.pending == 0 and len(self._buffer) > _SMALL_BUFFER_BYTES:
            self._replace(_SMALL_BUFFER_BYTES)

    def _make_room(self) -> None:
        pending = self._end - self._start
        capacity = len(self._buffer)
        if pending == 0:
            self._start = self._end = 0
            if capacity > KEPT_BUFFER_BYTES:
                self._replace(_SMALL_BUFFER_BYTES)
            return
        needed = max(self._wanted, _PREFIX_BYTES)
        if self._start + needed <= capacity and self._end < capacity:
            return
        if needed > capacity and pending >= capacity // 2:
            # Memory follows what has really arrived; a prefix alone reserves nothing.
            self._replace(min(needed, max(FIRST_BUFFER_BYTES, pending * _GROWTH)))
        elif self._start:
            view = memoryview(self._buffer)
            view[:pending] = view[self._start : self._end]
            self._start, self._end = 0, pending
        elif self._end == capacity:
            # Full of complete frames that nobody has taken yet; the reader is about to pause.
            self._replace(capacity * 2)

    def _replace(self, capacity: int) -> None:
        """Move what is pending to the front of a buffer of ``capacity`` bytes.

        A new object, because a buffer cannot be resized while there are views of it.
        """
        fresh = bytearray(max(capacity, _SMALL_BUFFER_BYTES))
        pending = self._end - self._start
        fresh[:pending] = memoryview(self._buffer)[self._start : self._end]
        self._buffer, self._start, self._end = fresh, 0, pending
