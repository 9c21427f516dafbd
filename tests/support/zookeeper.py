"""A ZooKeeper server from Maven Central's jars, on loopback, and sessions that end at once."""

from __future__ import annotations

import socket
import struct
import weakref
from pathlib import Path
from typing import Any

from kazoo.client import KazooClient

from fencepost.coordinator.tools.ports import hold_port
from tests.support.kafka import CACHE, ROOT, resolve
from tests.support.processes import Child
from tests.support.waits import until

POM = ROOT / "tests" / "oracle" / "zookeeper.pom.xml"
LIBS = CACHE / "zookeeper"
OPTIONS = (
    "-Xmx128m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dzookeeper.admin.enableServer=false",
)
TICK_MS = 200
"""The server's unit of time: sessions may be as short as two of them."""

_CLOSE = -11
"""The operation that ends a session."""


class ZooKeeper:
    """One server."""

    def __init__(self, directory: Path) -> None:
        held = hold_port()
        weakref.finalize(self, held.close)
        self._port = held.getsockname()[1]
        self._directory = directory
        self.child: Child | None = None

    @property
    def connect(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> ZooKeeper:
        """Start, and wait until it serves."""
        resolve(
            POM, {LIBS: "-DincludeScope=runtime"}, CACHE / "zookeeper.pom.xml", "zookeeper-*.jar"
        )
        self._directory.mkdir(parents=True, exist_ok=True)
        settings = self._directory / "zoo.cfg"
        settings.write_text(
            f"tickTime={TICK_MS}\ndataDir={self._directory}/data\nclientPort={self._port}\n"
            "clientPortAddress=127.0.0.1\nminSessionTimeout=400\nmaxSessionTimeout=60000\n"
        )
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        self.child = Child(["java", *OPTIONS, "-cp", f"{LIBS}/*", main, str(settings)])
        until(self._serves, "ZooKeeper serves")
        return self

    def _serves(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=5) as client:
                client.sendall(b"srvr")
                return client.makefile("rb").read().startswith(b"Zookeeper version")
        except OSError:
            return False

    def stop(self) -> None:
        """Kill it; what it has on disk stays."""
        assert self.child is not None
        self.child.kill()

    def client(self) -> Any:
        """A session for tests; its user closes it."""
        found = KazooClient(self.connect, timeout=30.0)
        found.start(60)
        return found

    def end(self, session_id: int) -> None:
        """End the session of which no more is known than its number, as owner of a znode."""
        self.expire((session_id, password_of(session_id)))

    def expire(self, session: tuple[int, bytes]) -> None:
        """End somebody's session, by its id and password, as ZooKeeper does after its time."""
        session_id, password = session
        with socket.create_connection(("127.0.0.1", self._port), timeout=60) as client:
            head = struct.pack(">iqiq", 0, 0, 30_000, session_id)
            _send(client, head + struct.pack(">i", len(password)) + password + b"\0")
            _receive(client)
            _send(client, struct.pack(">ii", 1, _CLOSE))
            _receive(client)


def password_of(session_id: int) -> bytes:
    """What a server gives to who has this session (``ZooKeeperServer.generatePasswd``)."""
    seed = (session_id ^ 0xB3415C00 ^ 0x5DEECE66D) & (1 << 48) - 1
    found = b""
    for _ in range(4):  # java.util.Random
        seed = (seed * 0x5DEECE66D + 0xB) & (1 << 48) - 1
        found += (seed >> 16).to_bytes(4, "little")
    return found


def _send(client: socket.socket, body: bytes) -> None:
    client.sendall(struct.pack(">i", len(body)) + body)


def _receive(client: socket.socket) -> bytes:
    with client.makefile("rb") as stream:
        (size,) = struct.unpack(">i", stream.read(4))
        return stream.read(size)
