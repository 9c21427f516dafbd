"""Splitting a byte stream into frames, independently of sockets.

A frame is a length (int32, not counting itself) and that many bytes. :class:`FrameBuffer` provides
the memory into which the next bytes are received, so that they are copied once on their way from
the kernel to the decoder, and returns complete frames as views of that memory.
"""

from __future__ import annotations

import struct

from fencepost.logcore.byte_count import INPUT_BYTES
from fencepost.protocol.errors import MalformedRequest
from fencepost.protocol.limits import LARGE_FRAME_BYTES, MAX_REQUEST_BYTES

_LENGTH = struct.Struct(">i").unpack_from
_PREFIX_BYTES = 4
_GROWTH = 8
"""The maximum size of the buffer, as a multiple of the received bytes of the frame."""
KEPT_BUFFER_BYTES = 2 << 20
"""A buffer up to this size is kept for the next frame; a larger one is freed."""
_SMALL_BUFFER_BYTES = 8192
"""The initial buffer of a connection: most requests are smaller, most connections idle."""


class FrameBuffer:
    """Receives bytes and returns frames in order.

    Usage: receive into :meth:`writable`, pass the number of bytes to :meth:`received`, then take
    frames with :meth:`next_frame` until it returns None. A frame is a read-only view that is valid
    until the next call of :meth:`writable`; a caller that keeps any of it must copy it.
    """

    __slots__ = ("_buffer", "_end", "_frame_size", "_start", "max_bytes")

    def __init__(self, max_bytes: int = MAX_REQUEST_BYTES) -> None:
        self.max_bytes = max_bytes
        """The maximum size of a frame without its length; may be changed between two frames."""
        self._buffer = bytearray(_SMALL_BUFFER_BYTES)
        self._start = 0
        self._end = 0
        self._frame_size = 0

    @property
    def pending(self) -> int:
        """Return the number of received bytes not yet returned as frames."""
        return self._end - self._start

    @property
    def frame_size(self) -> int:
        """Return the size of the frame being received, including its length; 0 if there is none."""
        return self._frame_size

    def writable(self) -> memoryview:
        """Return the memory for the next bytes; never empty.

        For a large frame (above LARGE_FRAME_BYTES) the memory ends where the frame ends. The data
        after such a frame is then received at the front of the buffer, and need not be moved there.
        """
        self._make_room()
        if self._frame_size > LARGE_FRAME_BYTES:
            stop = min(len(self._buffer), self._start + self._frame_size)
        else:
            stop = min(len(self._buffer), self._end + LARGE_FRAME_BYTES)
        return memoryview(self._buffer)[self._end : stop]

    def received(self, size: int) -> None:
        """Record that ``size`` bytes were received into the memory from :meth:`writable`."""
        self._end += size
        INPUT_BYTES.add(size)

    def next_frame(self) -> memoryview | None:
        """Return the next complete frame without its length, or None if more bytes are needed.

        Raises :class:`MalformedRequest` as soon as a length is negative or above the limit, before
        anything is allocated for it. The buffer must not be used after that.
        """
        received = self._end - self._start
        if received < _PREFIX_BYTES:
            self._frame_size = 0
            return None
        size: int = _LENGTH(self._buffer, self._start)[0]
        if not 0 <= size <= self.max_bytes:
            # The first bytes of TLS: a handshake record in any of its versions.
            hint = "; a client that speaks TLS?" if size >> 16 == 0x1603 else ""
            raise MalformedRequest(f"a frame of {size} bytes; the limit is {self.max_bytes}{hint}")
        if received < size + _PREFIX_BYTES:
            self._frame_size = size + _PREFIX_BYTES
            return None
        self._frame_size = 0
        start = self._start + _PREFIX_BYTES
        self._start = start + size
        return memoryview(self._buffer)[start : self._start].toreadonly()

    def shrink(self) -> None:
        """Free memory that an idle connection does not need."""
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
        needed = max(self._frame_size, _PREFIX_BYTES)
        if self._start + needed <= capacity and self._end < capacity:
            return
        if needed > capacity and pending >= capacity // 2:
            # Memory grows with the received bytes; a length prefix alone allocates nothing.
            self._replace(min(needed, max(LARGE_FRAME_BYTES, pending * _GROWTH)))
        elif self._start:
            view = memoryview(self._buffer)
            view[:pending] = view[self._start : self._end]
            self._start, self._end = 0, pending
        elif self._end == capacity:
            # The buffer is full of frames that were not taken yet; the reader is about to pause.
            self._replace(capacity * 2)

    def _replace(self, capacity: int) -> None:
        """Move the pending bytes to the front of a new buffer of ``capacity`` bytes.

        A new object is needed because a buffer cannot be resized while views of it exist.
        """
        fresh = bytearray(max(capacity, _SMALL_BUFFER_BYTES))
        pending = self._end - self._start
        fresh[:pending] = memoryview(self._buffer)[self._start : self._end]
        self._buffer, self._start, self._end = fresh, 0, pending
