"""A ZooKeeper server from Maven Central's jars, on loopback, whose sessions tests can end."""

from __future__ import annotations

import re
import socket
import struct
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from kazoo.client import KazooClient

from fencepost.tools.ports import hold_port
from tests.support.certificates import Authority
from tests.support.kafka import CACHE, ROOT, resolve
from tests.support.kafka39 import java_command
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
"""The server's ``tickTime``; the minimum session timeout is two ticks."""

_CLOSE = -11
"""The operation that ends a session."""


class ZooKeeper:
    """One server, standalone unless ``members`` has the lines of an ensemble for its file."""

    main = "org.apache.zookeeper.server.ZooKeeperServerMain"

    def __init__(self, directory: Path) -> None:
        self._port = _held_port(self)
        self._directory = directory
        self.members = ""
        self.child: Child | None = None

    @property
    def connect(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> Self:
        """Start, and wait until it serves."""
        self.launch()
        until(lambda: self.mode, "ZooKeeper serves")
        return self

    def launch(self) -> None:
        """Start."""
        self._directory.mkdir(parents=True, exist_ok=True)
        settings = self._directory / "zoo.cfg"
        lines = "".join(f"{key}={value}\n" for key, value in self._settings().items())
        settings.write_text(f"{lines}{self.members}")
        self.child = Child([*self._java(), self.main, str(settings)])

    def _java(self) -> list[str]:
        """Return the command line up to the class; OracleMissingError says what is missing."""
        resolve(
            POM, {LIBS: "-DincludeScope=runtime"}, CACHE / "zookeeper.pom.xml", "zookeeper-*.jar"
        )
        return ["java", *OPTIONS, "-cp", f"{LIBS}/*"]

    def _settings(self) -> dict[str, str]:
        return {
            "tickTime": str(TICK_MS),
            "dataDir": f"{self._directory}/data",
            "clientPort": str(self._port),
            "clientPortAddress": "127.0.0.1",
            "minSessionTimeout": "400",
            "maxSessionTimeout": "60000",
        }

    @property
    def mode(self) -> str | None:
        """``standalone``, ``leader`` or ``follower``; None while it does not serve."""
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=5) as client:
                client.sendall(b"srvr")
                reply = client.makefile("r").read()
        except OSError:
            return None
        match = re.search(r"^Mode: (\w+)$", reply, flags=re.MULTILINE)
        return None if match is None else match[1]

    def stop(self) -> None:
        """Kill it; its files stay."""
        assert self.child is not None
        self.child.kill()

    def client(self) -> Any:
        """Return a session for tests, which the caller closes."""
        client = KazooClient(self.connect, timeout=30.0)
        client.start(60)
        return client

    def end(self, session_id: int) -> None:
        """End a session by its id, which is the ``ephemeralOwner`` of its znodes."""
        self.expire((session_id, password_of(session_id)))

    def expire(self, session: tuple[int, bytes]) -> None:
        """End a session by its id and password, as ZooKeeper does after the session timeout."""
        session_id, password = session
        with socket.create_connection(("127.0.0.1", self._port), timeout=60) as client:
            head = struct.pack(">iqiq", 0, 0, 30_000, session_id)
            _send(client, head + struct.pack(">i", len(password)) + password + b"\0")
            _receive(client)
            _send(client, struct.pack(">ii", 1, _CLOSE))
            _receive(client)


class Member(ZooKeeper):
    """A server of an ensemble, numbered from 1."""

    main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"

    def __init__(self, directory: Path, number: int) -> None:
        super().__init__(directory)
        self.line = f"server.{number}=127.0.0.1:{_held_port(self)}:{_held_port(self)}\n"
        (directory / "data").mkdir(parents=True)
        (directory / "data" / "myid").write_text(str(number))


class Ensemble(ZooKeeper):
    """Three servers, two of which form a majority."""

    def __init__(self, directory: Path) -> None:
        self.servers = [Member(directory / str(number), number) for number in (1, 2, 3)]
        for server in self.servers:
            server.members = "initLimit=50\nsyncLimit=25\n" + "".join(
                it.line for it in self.servers
            )

    @property
    def connect(self) -> str:
        """HOST:PORT of each server, separated by commas."""
        return ",".join(server.connect for server in self.servers)

    def launch(self) -> None:
        """Start the servers that do not run."""
        for server in self.servers:
            if server.child is None or server.child.returncode is not None:
                server.launch()

    @property
    def mode(self) -> str | None:
        """``ensemble``, or None while not all servers serve."""
        return "ensemble" if all(server.mode for server in self.servers) else None

    @property
    def leader(self) -> Member:
        """Wait for a leader, and return it."""
        return until(
            lambda: next((server for server in self.servers if server.mode == "leader"), None),
            "a leader",
        )

    def stop(self) -> None:
        """Kill all running servers."""
        for server in self.servers:
            if server.child is not None:
                server.stop()


def _held_port(owner: object) -> int:
    held = hold_port()
    weakref.finalize(owner, held.close)
    return int(held.getsockname()[1])


def password_of(session_id: int) -> bytes:
    """Return the password of a session (``ZooKeeperServer.generatePasswd``)."""
    seed = (session_id ^ 0xB3415C00 ^ 0x5DEECE66D) & (1 << 48) - 1
    found = b""
    for _ in range(4):  # java.util.Random
        seed = (seed * 0x5DEECE66D + 0xB) & (1 << 48) - 1
        found += (seed >> 16).to_bytes(4, "little")
    return found


class SecuredZooKeeper(ZooKeeper):
    """A server that also has TLS, and authenticates users by SASL's DIGEST-MD5.

    It comes with Apache Kafka 3.9, whose jars include the necessary libraries.
    """

    def __init__(
        self, directory: Path, authority: Authority, users: Mapping[str, str], *, wants: str
    ) -> None:
        """``wants`` is ``need`` if clients must have a certificate, otherwise ``none``."""
        super().__init__(directory)
        held = hold_port()
        weakref.finalize(self, held.close)
        self.secure = f"localhost:{held.getsockname()[1]}"
        """HOST:PORT of the TLS listener."""
        self._authority, self._wants = authority, wants
        self._users = dict(users)

    def set_password(self, user: str, password: str) -> None:
        """Set a user's password, which applies when the server next starts."""
        self._users[user] = password

    def _java(self) -> list[str]:
        classes = java_command("")
        users = " ".join(f'user_{user}="{password}"' for user, password in self._users.items())
        jaas = self._directory / "jaas.conf"
        module = "org.apache.zookeeper.server.auth.DigestLoginModule"
        jaas.write_text(f"Server {{ {module} required {users}; }};\n")
        at = classes.index("-cp")
        return [
            "java",
            *OPTIONS,
            f"-Djava.security.auth.login.config={jaas}",
            "-Dzookeeper.serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
            *classes[at : at + 2],
        ]

    def _settings(self) -> dict[str, str]:
        server = self._authority.server("zookeeper").file
        return {
            **super()._settings(),
            "secureClientPort": self.secure.partition(":")[2],
            "secureClientPortAddress": "127.0.0.1",
            "ssl.keyStore.location": str(server),
            "ssl.keyStore.type": "PEM",
            "ssl.trustStore.location": str(self._authority.truststore),
            "ssl.trustStore.type": "PEM",
            "ssl.clientAuth": self._wants,
            "authProvider.sasl": "org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
        }


def _send(client: socket.socket, body: bytes) -> None:
    client.sendall(struct.pack(">i", len(body)) + body)


def _receive(client: socket.socket) -> bytes:
    with client.makefile("rb") as stream:
        (size,) = struct.unpack(">i", stream.read(4))
        return stream.read(size)
