"""The way of a response from its stream to the socket: past memory, where it is in a file.

The kernel sends from the file itself as long as the socket takes it. What is written to a transport
is in order with that only while the transport holds nothing back; it is asked before each piece.
"""

from __future__ import annotations

import asyncio
from typing import Final

from fencepost.coordinator.net.request_stream import WRITE_BYTES, RequestStream

SENT_PER_TURN_BYTES: Final = 4_194_304
"""Bytes of a response that one client is sent before others get their turn; fewer where its file
has to come from the disk and a slice of the loop is over before."""

ARMING_BYTES: Final = 4_096
"""Written through the transport when the socket is full, so that it tells when there is room."""


def socket_of(transport: asyncio.BaseTransport) -> int:
    """The socket below a transport that sends bytes as they are; -1 if there is none."""
    found = transport.get_extra_info("socket")
    return -1 if found is None else int(found.fileno())


def send_next(stream: RequestStream, transport: asyncio.Transport, target: int) -> int:
    """Send the next piece of what is unsent, and return its bytes.

    ``target`` is the socket of the transport, which must be open; -1 to send all by way of memory.
    Raises OSError where the piece is in a file that can not be read.
    """
    room = WRITE_BYTES
    if target >= 0 and stream.is_in_file and not transport.get_write_buffer_size():
        try:
            return stream.send_range(target)
        except BlockingIOError:
            room = ARMING_BYTES
        except OSError:
            # The platform has no such call, or client or file are gone: reading and writing the
            # same bytes does what is right in each case.
            room = WRITE_BYTES
    piece = stream.next_piece(room)
    transport.write(piece)
    return len(piece)
