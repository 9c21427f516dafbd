"""One connection of a replay. A request on it may wait while others go to other connections."""

from __future__ import annotations

import socket
from typing import Final

from fencepost.client.queries.incident import Step
from fencepost.logcore.clock import monotonic_s
from fencepost.protocol.codec import decode_response, encode_request
from fencepost.protocol.schema import Entity

MAX_RESPONSE_BYTES: Final = 100 << 20
_LENGTH: Final = 4
_CONNECT_S: Final = 10.0


class ReplayConnection:
    """A blocking socket. Responses have the order of their requests."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, _CONNECT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, step: Step, api_key: int, body: Entity) -> None:
        """Send a request; its correlation id is the number of its step. Raises OSError."""
        chunks = encode_request(api_key, step.version, step.number, step.client_id, body)
        self._socket.settimeout(_CONNECT_S)
        self._socket.sendall(b"".join(chunks))

    def receive(self, step: Step, api_key: int, timeout: float) -> Entity | None:
        """Return the response of a step; None if none has come, or the connection was closed."""
        end = monotonic_s() + timeout
        try:
            while True:
                size = int.from_bytes(self._read(_LENGTH, end), "big")
                if size > MAX_RESPONSE_BYTES:
                    return None
                frame = self._read(size, end)
                # The responses of abandoned requests come first.
                if int.from_bytes(frame[:_LENGTH], "big") == step.number:
                    return decode_response(api_key, step.version, frame)[1]
        except OSError:
            return None

    def _read(self, size: int, end: float) -> bytes:
        parts = []
        while size:
            self._socket.settimeout(max(end - monotonic_s(), 0.001))
            part = self._socket.recv(min(size, 1 << 20))
            if not part:
                raise ConnectionResetError("closed by the broker")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the connection, even while a request waits."""
        self._socket.close()
