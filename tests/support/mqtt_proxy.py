"""A TCP proxy between MQTT clients and a broker; it can inject a fault at a chosen packet."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field
from typing import Self

KINDS = (
    "",
    "CONNECT",
    "CONNACK",
    "PUBLISH",
    "PUBACK",
    "PUBREC",
    "PUBREL",
    "PUBCOMP",
    "SUBSCRIBE",
    "SUBACK",
    "UNSUBSCRIBE",
    "UNSUBACK",
    "PINGREQ",
    "PINGRESP",
    "DISCONNECT",
    "AUTH",
)

PING = b"\xc0\x00"

ACKNOWLEDGES = frozenset({"PUBACK", "PUBREC", "PUBREL", "PUBCOMP"})


@dataclass(frozen=True)
class Packet:
    """A packet; ``connection`` counts from 1, and ``packet_id`` is 0 if it is irrelevant."""

    connection: int
    to_broker: bool
    kind: str
    packet_id: int = 0
    dup: bool = False


@dataclass
class Cut:
    """A fault at the ``nth`` packet of a kind, counted from now; ``done`` is set afterwards.

    ``before``: the packet is lost, and the connection ends. ``after``: the packet arrives, and the
    connection ends. In both cases the broker has processed all earlier packets, which a PINGREQ of
    the proxy confirms. ``hold``: the proxy silently stops forwarding in this direction, from this
    packet on. The fault occurs ``times`` times, at every ``nth`` packet.
    """

    kind: str
    nth: int
    action: str
    to_broker: bool
    times: int = 1
    done: threading.Event = field(default_factory=threading.Event)
    seen: int = 0


@dataclass
class _Link:
    """The two sockets of one connection; ``cut`` is the fault that stopped forwarding."""

    number: int
    client: socket.socket
    broker: socket.socket
    cut: Cut | None = None

    def end(self) -> None:
        _end(self.client)
        _end(self.broker)
        if self.cut is not None and not self.cut.times:
            self.cut.done.set()


class MqttProxy:
    """Listens on ``port``, for the broker at ``target`` on the same machine."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.packets: list[Packet] = []
        self._cuts: list[Cut] = []
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._server)
        self.disconnect()

    def cut(self, kind: str, nth: int = 1, *, action: str, to_broker: bool, times: int = 1) -> Cut:
        """Arm a fault, and return it."""
        assert kind in KINDS
        assert action in {"before", "after", "hold"}
        armed = Cut(kind, nth, action, to_broker, times)
        with self._lock:
            self._cuts.append(armed)
        return armed

    def disconnect(self) -> None:
        """End all connections, and disarm every cut."""
        with self._lock:
            ending, self._open, self._cuts = self._open, [], []
        for connection in ending:
            _end(connection)

    def count(self, kind: str, *, dup: bool | None = None, connection: int | None = None) -> int:
        """Return the number of received packets of a kind, forwarded or not."""
        with self._lock:
            return sum(
                packet.kind == kind
                and (dup is None or packet.dup is dup)
                and (connection is None or packet.connection == connection)
                for packet in self.packets
            )

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                try:
                    broker = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # the broker is restarting
                    client.close()
                    continue
                with self._lock:
                    self._connections += 1
                    link = _Link(self._connections, client, broker)
                    self._open += [client, broker]
                for to_broker in (True, False):
                    threading.Thread(
                        target=self._pass_on, args=(link, to_broker), daemon=True
                    ).start()

    def _pass_on(self, link: _Link, to_broker: bool) -> None:
        source, target = (link.client, link.broker) if to_broker else (link.broker, link.client)
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        is_held = False
        with contextlib.suppress(OSError, EOFError, ValueError), source.makefile("rb") as stream:
            while True:
                frame, packet = _read(stream, link.number, to_broker)
                if link.cut is not None:
                    if packet.kind == "PINGRESP":
                        break
                    continue
                cut = self._note(packet)
                if cut is not None and cut.action == "hold":
                    is_held = True
                    cut.done.set()
                elif cut is not None:
                    self._end_at(link, cut, frame)
                    if to_broker:
                        return  # the other direction waits for the PINGRESP
                elif not is_held:
                    target.sendall(frame)
        link.end()

    @staticmethod
    def _end_at(link: _Link, cut: Cut, frame: bytes) -> None:
        link.cut = cut
        if cut.action == "after" and not cut.to_broker:
            link.client.sendall(frame)
        link.client.shutdown(socket.SHUT_WR)
        link.broker.sendall(frame + PING if cut.action == "after" and cut.to_broker else PING)

    def _note(self, packet: Packet) -> Cut | None:
        with self._lock:
            self.packets.append(packet)
            for cut in self._cuts:
                if cut.kind == packet.kind and cut.to_broker is packet.to_broker:
                    cut.seen += 1
                    if cut.seen == cut.nth:
                        cut.seen, cut.times = 0, cut.times - 1
                        if not cut.times:
                            self._cuts.remove(cut)
                        return cut
        return None


def _read(stream, connection: int, to_broker: bool) -> tuple[bytes, Packet]:  # type: ignore[no-untyped-def]
    head = _exactly(stream, 2)
    while head[-1] & 0x80:
        head += _exactly(stream, 1)
    size = sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(head[1:]))
    body = _exactly(stream, size)
    kind, flags = KINDS[head[0] >> 4], head[0] & 0x0F
    packet_id = 0
    if kind in ACKNOWLEDGES:
        packet_id = int.from_bytes(body[:2], "big")
    elif kind == "PUBLISH" and flags & 0x06:
        topic = int.from_bytes(body[:2], "big")
        packet_id = int.from_bytes(body[2 + topic : 4 + topic], "big")
    return head + body, Packet(connection, to_broker, kind, packet_id, bool(flags & 0x08))


def _exactly(stream, size: int) -> bytes:  # type: ignore[no-untyped-def]
    data: bytes = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
