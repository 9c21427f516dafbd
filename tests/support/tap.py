"""A proxy between clients and a broker that records the errors in the broker's responses."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import Counter
from typing import Self

from tests.support.raw import decode, errors_in

APIS = {
    0: "produce",
    22: "init_producer_id",
    24: "add_partitions_to_txn",
    25: "add_offsets_to_txn",
    26: "end_txn",
    28: "txn_offset_commit",
}
"""The recorded APIs: the requests of a transaction."""


class Tap:
    """Listens on ``address``, which the broker behind it must advertise."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.answers: Counter[tuple[str, str]] = Counter()
        """(API, error name) → number of responses, including ``none``."""
        self._behind: tuple[str, int] | None = None
        self._lock = threading.Lock()
        self._open: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def listen_to(self, broker: str) -> None:
        """Forward connections to ``broker``, HOST:PORT, from now on."""
        host, _, port = broker.rpartition(":")
        self._behind = host, int(port)

    def of(self, error: str) -> dict[str, int]:
        """Return the number of responses with ``error`` by API."""
        with self._lock:
            return {api: count for (api, name), count in self.answers.items() if name == error}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                assert self._behind is not None
                broker = socket.create_connection(self._behind)
                self._open += [client, broker]
                requests: dict[int, tuple[str, int]] = {}
                for source, target, note in (
                    (client, broker, self._request),
                    (broker, client, self._answer),
                ):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(
                        target=self._pass_on, args=(source, target, note, requests), daemon=True
                    ).start()

    @staticmethod
    def _pass_on(source, target, note, requests) -> None:  # type: ignore[no-untyped-def]
        stream = source.makefile("rb")
        with contextlib.suppress(OSError, ValueError):
            while len(size := stream.read(4)) == 4:
                frame = stream.read(struct.unpack(">i", size)[0])
                note(frame, requests)
                target.sendall(size + frame)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _request(frame: bytes, requests: dict[int, tuple[str, int]]) -> None:
        key, version, correlation_id = struct.unpack_from(">hhi", frame)
        if key in APIS:
            requests[correlation_id] = APIS[key], version

    def _answer(self, frame: bytes, requests: dict[int, tuple[str, int]]) -> None:
        request = requests.pop(struct.unpack_from(">i", frame)[0], None)
        if request is not None:
            api, version = request
            _, answer = decode(api, version, frame)
            with self._lock:
                self.answers.update((api, error) for error in errors_in(answer))
