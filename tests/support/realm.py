"""A broker with TLS, logins and ACLs, and an operator that sets its users' rights."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from fencepost.client.security import Security
from fencepost.cluster.acl import Operation, PatternType, Permission, ResourceType
from fencepost.protocol.scram import SCRAM_MECHANISMS, salted_password
from fencepost.tools.ports import hold_port
from tests.support.certificates import Authority, trust_settings
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka
from tests.support.targets import SETTINGS
from tests.support.waits import until

MECHANISM = "SCRAM-SHA-512"
LISTENERS: Mapping[str, str] = {"LOGIN": "SASL_SSL", "MUTUAL": "SSL", "BRIEF": "SASL_SSL"}
"""Listeners besides the operator's PLAINTEXT; MUTUAL requires a client certificate."""
OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
BRIEF_MS = 1_500
"""Lifetime of a login at the listener BRIEF."""

RULES: Mapping[str, str] = {
    **SETTINGS,
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "sasl.enabled.mechanisms": f"{MECHANISM},OAUTHBEARER",
    **{
        f"listener.name.{name}.{MECHANISM.lower()}.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        )
        for name in ("login", "brief")
    },
    **{
        f"listener.name.{name}.oauthbearer.sasl.jaas.config": (
            f'{OAUTH} required unsecuredLoginStringClaim_sub="broker";'
        )
        for name in ("login", "brief")
    },
    f"listener.name.brief.{MECHANISM.lower()}.connections.max.reauth.ms": str(BRIEF_MS),
    "listener.name.mutual.ssl.client.auth": "required",
    "ssl.principal.mapping.rules": "RULE:^CN=([^,]*),.*$/$1/,DEFAULT",
}
"""Broker settings; clients of the PLAINTEXT listener on loopback act as the operator."""


class Running(Protocol):
    """A broker that belongs to one test or module."""

    bootstrap: str

    def start(self) -> object: ...
    def kill(self) -> None: ...


class _Kafka(Kafka):
    """An Apache Kafka with more listeners."""

    def __init__(self, home: Path, settings: Mapping[str, str], more: str) -> None:
        super().__init__(home, settings)
        self._more = more

    def _properties(self) -> dict[str, str]:
        properties = super()._properties()
        for key in ("listeners", "advertised.listeners"):
            properties[key] += f",{self._more}"
        properties["listener.security.protocol.map"] += f",{_protocols()}"
        return properties


def _protocols() -> str:
    return ",".join(":".join(pair) for pair in LISTENERS.items())


class Right(NamedTuple):
    """A right of a user, in the terms of ``kafka-acls``."""

    operation: str
    kind: str
    name: str
    is_prefix: bool = False

    def __str__(self) -> str:
        return f"{self.operation} {self.kind}" + (" prefix" if self.is_prefix else "")


class Realm:
    """The broker. Users log in at its ``bootstrap`` with SCRAM over TLS."""

    def __init__(self, kind: str, home: Path) -> None:
        self.authority = Authority(home / "certificates")
        held = [hold_port() for _ in range(1 + len(LISTENERS))]
        for port in held:
            weakref.finalize(self, port.close)
        clear, *ports = (port.getsockname()[1] for port in held)
        self.addresses = {
            name: f"127.0.0.1:{port}" for name, port in zip(LISTENERS, ports, strict=True)
        }
        more = ",".join(f"{name}://{address}" for name, address in self.addresses.items())
        settings = {
            **RULES,
            **self.authority.server("broker").keystore,
            **trust_settings(self.authority),
        }
        self.broker: Running
        if kind == "kafka":
            self.broker = _Kafka(home, settings, more)
        else:
            settings["listeners"] = f"PLAINTEXT://127.0.0.1:{clear},{more}"
            settings["listener.security.protocol.map"] = _protocols()
            self.broker = Daemon(home / "data", settings)
        self.broker.start()
        self.bootstrap = self.addresses["LOGIN"]
        self.operator = Cluster(self.broker.bootstrap)
        self._passwords: dict[str, str] = {}

    def close(self) -> None:
        self.operator.close()
        self.broker.kill()

    def restart(self) -> None:
        """Kill the broker and restart it; all clients must log in again."""
        self.operator.close()
        self.broker.kill()
        self.broker.start()
        self.operator = Cluster(self.broker.bootstrap)

    def new_user(self, *rights: Right) -> str:
        """Create a user with a new name, a password and exactly these rights; return the name."""
        name = unique("user")
        self.set_password(name, secrets.token_urlsafe(12))
        self.allow(name, rights)
        return name

    def set_password(self, user: str, password: str) -> None:
        mechanism, salt = SCRAM_MECHANISMS[MECHANISM], secrets.token_bytes(16)
        upsertion = {
            "name": user,
            "mechanism": mechanism.number,
            "iterations": 4096,
            "salt": salt,
            "salted_password": salted_password(mechanism, password, salt, 4096),
        }
        answer = self.operator.call(
            "alter_user_scram_credentials", 0, deletions=[], upsertions=[upsertion]
        )
        assert answer["results"][0]["error_code"] == "none", answer
        self._passwords[user] = password

    def properties(self, user: str, password: str | None = None) -> dict[str, str]:
        """Return Kafka's client properties of a user."""
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": MECHANISM,
            "sasl.username": user,
            "sasl.password": self._passwords[user] if password is None else password,
            "ssl.truststore.location": str(self.authority.truststore),
        }

    def certified(self, user: str) -> dict[str, str]:
        """Return the client properties of a user with a certificate, for the listener MUTUAL."""
        return {
            "security.protocol": "SSL",
            "ssl.truststore.location": str(self.authority.truststore),
            "ssl.keystore.location": str(self.authority.client(user).file),
        }

    def security(self, user: str, password: str | None = None) -> Security:
        return Security.of(self.properties(user, password))

    def allow(self, user: str, rights: Iterable[Right]) -> None:
        rows = [{**_pattern(right), **_entry(user, right)} for right in rights]
        if rows:
            answer = self.operator.call("create_acls", 3, creations=rows)
            assert all(row["error_code"] == "none" for row in answer["results"]), answer
            until(lambda: self.count(user) >= len(rows), "the rules")

    def revoke(self, user: str, rights: Iterable[Right]) -> None:
        """Remove these rights."""
        before = self.count(user)
        filters = [
            {
                "resource_type_filter": ResourceType[right.kind],
                "resource_name_filter": right.name,
                "pattern_type_filter": _pattern(right)["resource_pattern_type"],
                "principal_filter": f"User:{user}",
                "host_filter": "*",
                "operation": Operation[right.operation],
                "permission_type": Permission.ALLOW,
            }
            for right in rights
        ]
        answer = self.operator.call("delete_acls", 3, filters=filters)
        deleted = sum(len(row["matching_acls"]) for row in answer["filter_results"])
        assert deleted == len(filters), answer
        until(lambda: self.count(user) == before - deleted, "fewer rules")

    def count(self, user: str) -> int:
        """Return the number of ACLs of a user."""
        answer = self.operator.call(
            "describe_acls",
            3,
            resource_type_filter=ResourceType.ANY,
            pattern_type_filter=PatternType.ANY,
            principal_filter=f"User:{user}",
            operation=Operation.ANY,
            permission_type=Permission.ANY,
        )
        return sum(len(resource["acls"]) for resource in answer["resources"])


def _pattern(right: Right) -> dict[str, int]:
    prefixed = PatternType.PREFIXED if right.is_prefix else PatternType.LITERAL
    return {"resource_pattern_type": int(prefixed)}


def _entry(user: str, right: Right) -> dict[str, object]:
    return {
        "resource_type": int(ResourceType[right.kind]),
        "resource_name": right.name,
        "principal": f"User:{user}",
        "host": "*",
        "operation": int(Operation[right.operation]),
        "permission_type": int(Permission.ALLOW),
    }


@contextmanager
def realm(request: pytest.FixtureRequest, home: Path) -> Iterator[Realm]:
    """Yield a broker of the kind that ``--target`` names."""
    kind = request.config.getoption("--target")
    if kind == "container":
        pytest.skip("a broker of the test's own is a process, not a container")
    broker = Realm(kind, home)
    try:
        yield broker
    finally:
        broker.close()
