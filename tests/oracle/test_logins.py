"""Logins, frame by frame: responses before, during and after a login equal Apache Kafka's."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.protocol.scram import (
    SCRAM_MECHANISMS,
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    ClientFirst,
    ScramMechanism,
    salted_password,
)
from fencepost.tools.ports import hold_port
from tests.oracle.traces_frames import framed, header
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka
from tests.support.raw import ConnectionLostError, RawClient
from tests.support.targets import SETTINGS
from tests.unit.coordinator.logging_in import ScramClient

pytestmark = pytest.mark.oracle

PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
ONCE, AGAIN, OPEN = "ONCE", "AGAIN", "PLAINTEXT"
"""The listeners: one for logins without a time limit, one for logins that must be renewed, and one
without authentication.
"""

Places = dict[str, str]
"""Listener → address."""

CLOSED = "closed"


class Door:
    """One connection, and the results of the steps on it."""

    def __init__(self, places: Places, listener: str = ONCE) -> None:
        self.steps: list[object] = []
        self._client = RawClient(places[listener])

    def close(self) -> None:
        self._client.close()

    def call(self, api: str, version: int, **body: Any) -> dict[str, Any]:
        """Send a request; keep and return the response, ``{}`` if the connection is closed.

        The kept response has no random values.
        """
        try:
            answer = dict(self._client.call(api, version, **body))
        except (ConnectionLostError, BrokenPipeError, ConnectionResetError):
            self.steps.append(CLOSED)
            return {}
        noted = dict(answer)
        if "mechanisms" in noted:
            noted["mechanisms"] = sorted(noted["mechanisms"])
        if api == "sasl_authenticate" and noted["auth_bytes"][:2] in {b"r=", b"v="}:
            noted["auth_bytes"] = noted["auth_bytes"][:2]
        if api == "api_versions":
            noted = {"error_code": noted["error_code"]}
        if api == "metadata":
            noted = {"topics": noted["topics"]}
        self.steps.append(noted)
        return answer

    def bytes(self, data: bytes, keep: int = 64) -> bytes:
        """Send bytes and return the response; keep the first ``keep`` bytes of the response."""
        try:
            self._client.send_bytes(data)
            answer = self._client.receive_frame()
        except (ConnectionLostError, BrokenPipeError, ConnectionResetError):
            self.steps.append(CLOSED)
            return b""
        self.steps.append(answer[:keep])
        return answer

    def handshake(self, mechanism: str, version: int = 1) -> None:
        self.call("sasl_handshake", version, mechanism=mechanism)

    def plain(self, token: bytes, version: int = 1) -> None:
        self.call("sasl_authenticate", version, auth_bytes=token)

    def scram(
        self,
        user: str,
        password: str,
        mechanism: ScramMechanism,
        bend: Callable[[str], str | None] = lambda nonce: None,
    ) -> None:
        client = ScramClient(user, password, mechanism)
        first = self.call("sasl_authenticate", 2, auth_bytes=client.first.encode())
        if not first or first["error_code"] != "none":
            return
        nonce = first["auth_bytes"].decode()[2:].partition(",")[0]
        final = client.final(first["auth_bytes"], bend(nonce))
        self.call("sasl_authenticate", 2, auth_bytes=final)

    def look(self) -> None:
        """Send a Metadata request, and keep whether the broker serves it."""
        self.call("metadata", 1, topics=[])


Scene = Callable[[Places], Door]

GOOD = b"\0alice\0right"


def logging_in(first: int | None, handshake: int, token: int) -> Scene:
    def scene(places: Places) -> Door:
        door = Door(places)
        if first is not None:
            software = {"client_software_name": "x", "client_software_version": "1"}
            door.call("api_versions", first, **(software if first >= 3 else {}))
        door.handshake("PLAIN", handshake)
        if handshake == 0:
            door.bytes(framed(GOOD))
        else:
            door.plain(GOOD, token)
        door.look()
        return door

    return scene


def plain(token: bytes, version: int) -> Scene:
    def scene(places: Places) -> Door:
        door = Door(places)
        door.handshake("PLAIN")
        door.plain(token, version)
        door.look()
        return door

    return scene


def bare(mechanism: str, *tokens: bytes) -> Scene:
    def scene(places: Places) -> Door:
        door = Door(places)
        door.handshake(mechanism, 0)
        for token in tokens:
            door.bytes(framed(token), keep=2)
        return door

    return scene


def scram(
    user: str,
    password: str,
    name: str,
    bend: Callable[[str], str | None] = lambda nonce: None,
) -> Scene:
    def scene(places: Places) -> Door:
        door = Door(places)
        door.handshake(name)
        door.scram(user, password, SCRAM_MECHANISMS[name], bend)
        door.look()
        return door

    return scene


def scram_tokens(*tokens: bytes) -> Scene:
    def scene(places: Places) -> Door:
        door = Door(places)
        door.handshake("SCRAM-SHA-256")
        for token in tokens:
            door.call("sasl_authenticate", 2, auth_bytes=token)
        return door

    return scene


def handshake(mechanism: str, version: int, listener: str = ONCE) -> Scene:
    def scene(places: Places) -> Door:
        door = Door(places, listener)
        door.handshake(mechanism, version)
        door.look()
        return door

    return scene


def frames(*data: bytes, after: str = "", listener: str = ONCE) -> Scene:
    def scene(places: Places) -> Door:
        door = Door(places, listener)
        if after:
            door.handshake(after)
        for message in data:
            door.bytes(message)
        return door

    return scene


REQUESTS: dict[str, tuple[int, dict[str, Any]]] = {
    "api_versions": (0, {}),
    "sasl_handshake": (1, {"mechanism": "PLAIN"}),
    "sasl_authenticate": (1, {"auth_bytes": GOOD}),
    "list_groups": (0, {}),
    "describe_cluster": (0, {"include_cluster_authorized_operations": False}),
    "find_coordinator": (0, {"key": "g"}),
    "heartbeat": (0, {"group_id": "g", "generation_id": 1, "member_id": "m"}),
    "leave_group": (0, {"group_id": "g", "member_id": "m"}),
    "list_transactions": (0, {"state_filters": [], "producer_id_filters": []}),
    "metadata": (1, {"topics": []}),
    "create_topics": (5, {"topics": [], "timeout": 1, "validate_only": False}),
    "delete_groups": (1, {"groups_names": ["g"]}),
}
TOP_LEVEL = REQUESTS.keys() - {"metadata", "create_topics", "delete_groups"}
"""APIs whose responses have a top-level error."""


def before(api: str, *, after_versions: bool) -> Scene:
    def scene(places: Places) -> Door:
        door = Door(places)
        if after_versions:
            door.call("api_versions", 0)
        version, body = REQUESTS[api]
        door.call(api, version, **body)
        if api != "sasl_handshake":
            door.look()
        return door

    return scene


def during(api: str) -> Scene:
    def scene(places: Places) -> Door:
        door = Door(places)
        door.handshake("PLAIN")
        version, body = REQUESTS[api]
        answer = door.call(api, version, **body)
        if answer:
            door.steps[-1] = answer.get("error_code")
        door.look()
        return door

    return scene


def again(first: str, second: str, token: bytes, version: int = 1) -> Scene:
    """Return a scene with two logins, on the listener where logins must be renewed."""

    def scene(places: Places) -> Door:
        door = Door(places, AGAIN)
        door.handshake(first)
        door.plain(GOOD)
        door.look()
        door.handshake(second, version)
        if version == 0:
            door.bytes(framed(token))
        else:
            door.plain(token)
        door.look()
        return door

    return scene


def twice_in_a_second(places: Places) -> Door:
    door = Door(places, AGAIN)
    for _ in range(2):
        door.handshake("PLAIN")
        door.plain(GOOD)
    door.handshake("PLAIN")
    door.look()
    return door


def without_an_end(places: Places) -> Door:
    door = Door(places)
    door.handshake("PLAIN")
    door.plain(GOOD)
    door.handshake("PLAIN")
    door.plain(GOOD)
    door.look()
    return door


def where_nobody_is_asked(places: Places) -> Door:
    door = Door(places, OPEN)
    for version in (0, 1):
        door.handshake("PLAIN", version)
    for version in (0, 1, 2):
        door.plain(GOOD, version)
    door.look()
    return door


def versions_again(places: Places) -> Door:
    door = Door(places)
    door.bytes(framed(header(18, 99) + b"\0\2x\0021\0"), keep=6)
    for name in ("a b", "", "x"):
        door.call("api_versions", 3, client_software_name=name, client_software_version="1")
    door.call("api_versions", 0)
    return door


CUT_HANDSHAKES = (header(17, 1), header(17, 1) + b"\0\5PLA")
NONCE = "client-nonce"
FIRST = ClientFirst.of("alice", NONCE).encode()

SCENES: dict[str, Scene] = {
    **{
        f"login {first} {shake} {token}": logging_in(first, shake, token)
        for first in (None, 0, 3, 4)
        for shake, token in ((0, 0), (1, 0), (1, 1), (1, 2))
    },
    **{
        f"PLAIN v{version} {token!r}": plain(token, version)
        for version in (0, 1, 2)
        for token in (
            b"\0alice\0wrong",
            b"\0nobody\0right",
            b"alice\0alice\0right",
            b"bob\0alice\0right",
            b"bob\0alice\0wrong",
            b"\0\0right",
            b"\0alice\0",
            b"alice\0right",
            b"",
            b"\0alice\0right\0",
            b"\0alice\0right\0\0\0",
            b"\xff\0\xff\0\xff",
        )
    },
    **{
        f"{name} {user} {password}": scram(user, password, name)
        for name in SCRAM_MECHANISMS
        for user, password in (("alice", "right"), ("alice", "wrong"), ("nobody", "right"))
    },
    "SCRAM of a user without one of it": scram("only512", "right", "SCRAM-SHA-256"),
    **{
        f"another nonce {number}": scram("alice", "right", "SCRAM-SHA-256", bend)
        for number, bend in enumerate(
            (lambda nonce: nonce[:-1], lambda nonce: "r", lambda nonce: nonce + "x")
        )
    },
    **{
        f"first token {token!r}": scram_tokens(token)
        for token in (
            FIRST,
            b"",
            b"n,,",
            b"y,,n=alice,r=n",
            b"p=tls-unique,,n=alice,r=n",
            b"n,a=alice,n=alice,r=n",
            b"n,a=bob,n=alice,r=n",
            b"n,,m=x,n=alice,r=n",
            b"n,,n=alice,r=n,a=b",
            b"n,,n=alice,r=n,tokenauth=false",
            b"n,,n=a=b,r=n",
            b"n,,n=\xc3\xbc,r=n",
            b"n,,n=alice,r=",
            b"c=biws,r=n,p=AAAA",
        )
    },
    **{
        f"last token {token!r}": scram_tokens(FIRST, token)
        for token in (b"", FIRST, b"c=biws,r=n,p=AAAA", b"c=biws,r=client-nonce,p=", b"p=AAAA")
    },
    "bare PLAIN": bare("PLAIN", GOOD),
    "bare PLAIN, wrong": bare("PLAIN", b"\0alice\0wrong"),
    "bare PLAIN, empty": bare("PLAIN", b""),
    "bare SCRAM": bare("SCRAM-SHA-256", FIRST, b"c=biws,r=n,p=AAAA"),
    "a request for a bare token": bare("PLAIN", header(3, 1) + bytes(4)),
    **{
        f"handshake {name} v{version}": handshake(name, version)
        for version in (0, 1)
        for name in ("GSSAPI", "OAUTHBEARER", "plain", "", "SCRAM-SHA-1", "x" * 1000)
    },
    **{
        f"{api} before the handshake, {is_later}": before(api, after_versions=is_later)
        for api in REQUESTS
        for is_later in (False, True)
    },
    **{f"{api} during the login": during(api) for api in REQUESTS},
    **{
        f"handshake version {version}": frames(framed(header(17, version) + b"\0\5PLAIN"))
        for version in (2, 10, -1, 32767)
    },
    **{
        f"token version {version}": frames(framed(header(36, version) + bytes(4)), after="PLAIN")
        for version in (3, 99, -1)
    },
    **{
        f"frame of {size} bytes, {after or 'first'}": frames(struct.pack(">i", size), after=after)
        for size in (-1, -(2**31), 2**31 - 1, 104_857_600, 524_289)
        for after in ("", "PLAIN")
    },
    **{
        f"frame {data!r}, {after or 'first'}": frames(framed(data), after=after)
        for data in (
            *CUT_HANDSHAKES,
            b"",
            b"\0",
            b"\x60\x00\x01",
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(20),
            header(36, 1) + b"\0\0\0\5abc",
            header(36, 1) + b"\xff\xff\xff\xff",
            header(999, 0),
        )
        for after in ("", "PLAIN")
    },
    "versions again after errors": versions_again,
    "a second login": again("PLAIN", "PLAIN", GOOD),
    "a second login, bare": again("PLAIN", "PLAIN", GOOD, 0),
    "a second login of another user": again("PLAIN", "PLAIN", b"\0bob\0bobs"),
    "a second login of another user, bare": again("PLAIN", "PLAIN", b"\0bob\0bobs", 0),
    "a second login, wrong": again("PLAIN", "PLAIN", b"\0alice\0wrong"),
    "a second login by another mechanism": again("PLAIN", "SCRAM-SHA-256", FIRST),
    "a second login by no mechanism": again("PLAIN", "NONE", GOOD),
    "twice in a second": twice_in_a_second,
    "a second login without an end of the first": without_an_end,
    "where nobody is asked": where_nobody_is_asked,
}

NO_TELLING = "a user that there is not is told as much as one that there is, and fails at the proof"
BY_ITEM = "what has no error of its own is not answered: its body is not read before the login"
NO_BODY = "what comes during a login is refused by its header alone"

DELIBERATE = {
    **{f"{name} nobody right": NO_TELLING for name in SCRAM_MECHANISMS},
    "SCRAM of a user without one of it": NO_TELLING,
    **{f"{api} during the login": BY_ITEM for api in REQUESTS.keys() - TOP_LEVEL},
    **{f"frame {data!r}, PLAIN": NO_BODY for data in CUT_HANDSHAKES},
}
"""Scenes whose responses differ, with the reasons."""


def settings(once: int, again: int, open_: int) -> dict[str, str]:
    users = 'user_alice="right" user_bob="bobs"'
    found = {
        "listeners": (
            f"{ONCE}://127.0.0.1:{once},{AGAIN}://127.0.0.1:{again},{OPEN}://127.0.0.1:{open_}"
        ),
        "listener.security.protocol.map": (
            f"{ONCE}:SASL_PLAINTEXT,{AGAIN}:SASL_PLAINTEXT,{OPEN}:PLAINTEXT,CONTROLLER:PLAINTEXT"
        ),
        "sasl.enabled.mechanisms": ",".join(("PLAIN", *SCRAM_MECHANISMS)),
        "connection.failed.authentication.delay.ms": "10",
        "listener.name.again.connections.max.reauth.ms": "3600000",
    }
    for name in (ONCE, AGAIN):
        prefix = f"listener.name.{name.lower()}"
        found[f"{prefix}.plain.sasl.jaas.config"] = f"{PLAIN_MODULE} required {users};"
        for mechanism in SCRAM_MECHANISMS:
            found[f"{prefix}.{mechanism.lower()}.sasl.jaas.config"] = f"{SCRAM_MODULE} required;"
    return found


def with_users(places: Places) -> Places:
    """Create the SCRAM users through the listener without authentication."""
    with Cluster(places[OPEN]) as cluster:
        for user, mechanism in (
            ("alice", SCRAM_SHA_256),
            ("alice", SCRAM_SHA_512),
            ("only512", SCRAM_SHA_512),
        ):
            upsertion = {
                "name": user,
                "mechanism": mechanism.number,
                "iterations": 4096,
                "salt": b"salt",
                "salted_password": salted_password(mechanism, "right", b"salt", 4096),
            }
            answer = cluster.call(
                "alter_user_scram_credentials", 0, deletions=[], upsertions=[upsertion]
            )
            assert [told["error_code"] for told in answer["results"]] == ["none"]
    return places


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Places]]:
    """Yield the addresses of each broker's listeners."""
    home = tmp_path_factory.mktemp("logins")
    held = [hold_port() for _ in range(5)]
    ports = [port.getsockname()[1] for port in held]
    kafka = Judge(home / "kafka", ports[0], ports[1])
    ours = settings(ports[2], ports[3], ports[4])
    daemon = Daemon(home / "ours", {**SETTINGS, **ours})
    kafka.start()
    daemon.start()
    told = dict(zip((ONCE, AGAIN, OPEN), ports[2:], strict=True))
    try:
        yield {
            "ours": with_users({name: f"127.0.0.1:{port}" for name, port in told.items()}),
            "theirs": with_users(kafka.places),
        }
    finally:
        daemon.kill()
        kafka.kill()
        for port in held:
            port.close()


class Judge(Kafka):
    """Apache Kafka with three listeners."""

    def __init__(self, home: Path, once: int, again: int) -> None:
        home.mkdir()
        super().__init__(home)
        port, controller = self._ports
        found = settings(once, again, port)
        found["advertised.listeners"] = found["listeners"]
        found["listeners"] += f",CONTROLLER://127.0.0.1:{controller}"
        self._settings |= found
        ports = {ONCE: once, AGAIN: again, OPEN: port}
        self.places = {name: f"127.0.0.1:{number}" for name, number in ports.items()}


@pytest.mark.parametrize("name", SCENES)
def test_login_frames_get_apache_kafkas_responses(brokers: dict[str, Places], name: str) -> None:
    told = {}
    for who, places in brokers.items():
        door = SCENES[name](places)
        door.close()
        told[who] = door.steps
    if name in DELIBERATE:
        assert told["ours"] != told["theirs"], f"no difference any more: {DELIBERATE[name]}"
    else:
        assert told["ours"] == told["theirs"]
