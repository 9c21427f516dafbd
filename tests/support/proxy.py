"""A TCP proxy between clients and a broker that can lose a response or hold back a request."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading


class LosingProxy:
    """Forwards connections to ``target`` without rewriting addresses.

    The broker must advertise the proxy's address. ``lose(api_key, …)`` arms it: for each of these
    APIs, the next response is dropped and the connection closed; ``lost`` lists the dropped
    responses. ``hold(api_key)`` holds the next such request until ``release()``; then the request
    arrives, even if its client has disconnected.
    """

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.target: tuple[str, int] | None = None
        self.lost: set[int] = set()
        self._to_lose: set[int] = set()
        self._to_hold: set[int] = set()
        self.holding = threading.Event()
        """Set while a request is held back."""
        self._released = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, *api_keys: int) -> None:
        with self._lock:
            self.lost, self._to_lose = set(), set(api_keys)

    def hold(self, api_key: int) -> None:
        with self._lock:
            self._released.clear()
            self._to_hold = {api_key}

    def release(self) -> None:
        self._released.set()

    def close(self) -> None:
        self.release()
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        assert self.target is not None
        with (
            contextlib.suppress(OSError, EOFError),
            client,
            socket.create_connection(self.target) as broker,
        ):
            while True:
                request = _frame(client)
                api_key = struct.unpack_from(">h", request, 4)[0]
                if self._is_among(self._to_hold, api_key):
                    self.holding.set()
                    self._released.wait()
                    self.holding.clear()
                broker.sendall(request)
                answer = _frame(broker)
                if self._is_among(self._to_lose, api_key):
                    self.lost.add(api_key)
                    return
                client.sendall(answer)

    def _is_among(self, armed: set[int], api_key: int) -> bool:
        """Return whether the API is armed, and disarm it."""
        with self._lock:
            if api_key not in armed:
                return False
            armed.remove(api_key)
            return True


def _frame(sock: socket.socket) -> bytes:
    head = _exactly(sock, 4)
    return head + _exactly(sock, int.from_bytes(head, "big"))


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
