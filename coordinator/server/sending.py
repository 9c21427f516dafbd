"""Sending of a response from its stream to the socket, directly from files if possible.

The kernel sends a part from its file (``sendfile``) while the socket takes data. Data that is
already in the transport's buffer must be sent first, so ``sendfile`` is used only if that buffer is
empty.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

from fencepost.coordinator.server.request_stream import WRITE_BYTES, RequestStream

SENT_PER_TURN_BYTES: Final = 4_194_304
"""The maximum number of bytes sent to one client in one turn; fewer if reading the file from disk
uses up the slice of time."""

ARMING_BYTES: Final = 4_096
"""The bytes written through the transport when the socket is full, so that the transport reports
when the socket has room again."""


def socket_of(transport: asyncio.BaseTransport) -> int:
    """Return the file descriptor of a transport without TLS; -1 if it has no socket."""
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())


def reset(transport: asyncio.BaseTransport) -> None:
    """Have the kernel reset the connection when the transport closes its socket."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def send_next(stream: RequestStream, transport: asyncio.Transport, target: int) -> int:
    """Send the next part of the unsent data, and return its size.

    The transport must be open. ``target`` is the transport's file descriptor, or -1 to send
    everything from memory. Raises OSError if the part is in a file that cannot be read.
    """
    room = WRITE_BYTES
    if target >= 0 and stream.is_in_file and not transport.get_write_buffer_size():
        try:
            return stream.send_range(target)
        except BlockingIOError:
            room = ARMING_BYTES
        except OSError:
            # The platform lacks sendfile, the client has disconnected, or the file cannot be read.
            # Reading and writing the same bytes handles each of these cases.
            room = WRITE_BYTES
    piece = stream.next_piece(room)
    transport.write(piece)
    return len(piece)
