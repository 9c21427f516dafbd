"""Brokers with listeners for every security protocol and SASL mechanism."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from click.testing import CliRunner

from fencepost import Broker
from fencepost.cli import main
from fencepost.tools.ports import hold_port
from tests.support.certificates import Authority
from tests.support.kafka import Kafka
from tests.support.targets import SETTINGS

USERS: Final = {"admin": "admin's", "alice": 'pa"ss\\w;o rd=', "bob": "tricky=,"}
"""User → password for PLAIN; :func:`add_users` adds SCRAM credentials as well."""

LISTENERS: Final = {
    "TLS": "SSL",
    "MUTUAL": "SSL",
    "LOGIN": "SASL_PLAINTEXT",
    "SAFE": "SASL_SSL",
    "BRIEF": "SASL_SSL",
}
"""Listener → protocol, besides one with PLAINTEXT. MUTUAL requires a client certificate, and a
login at BRIEF, by PLAIN or SCRAM-SHA-512, lasts 1.5 s."""

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
_OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"


def quoted(text: str) -> str:
    """Return a quoted value for a JAAS configuration."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def listener_settings(authority: Authority, addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the listener settings that both kinds of brokers share."""
    settings = {
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(authority.server("broker").file),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.truststore),
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.brief.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
        "listeners": ",".join(f"{name}://{address}" for name, address in addresses.items()),
        "listener.security.protocol.map": ",".join(
            f"{name}:{LISTENERS.get(name, 'PLAINTEXT')}" for name in addresses
        ),
    }
    settings["advertised.listeners"] = settings["listeners"]
    for name in ("login", "safe"):
        # Unsigned tokens are accepted only if this option is set.
        module = f'{_OAUTH} required unsecuredLoginStringClaim_sub="broker";'
        settings[f"listener.name.{name}.oauthbearer.sasl.jaas.config"] = module
    for mechanism in ("plain", "scram-sha-512"):
        settings[f"listener.name.brief.{mechanism}.connections.max.reauth.ms"] = "1500"
    return settings


def _of_java() -> dict[str, str]:
    """Return settings that only Kafka needs: PLAIN users, and a login module per mechanism."""
    users = " ".join(f"user_{user}={quoted(password)}" for user, password in USERS.items())
    settings = {}
    for name, protocol in LISTENERS.items():
        if protocol.startswith("SASL"):
            prefix = f"listener.name.{name.lower()}"
            settings[f"{prefix}.plain.sasl.jaas.config"] = f"{_PLAIN} required {users};"
            for mechanism in ("scram-sha-256", "scram-sha-512"):
                settings[f"{prefix}.{mechanism}.sasl.jaas.config"] = f"{_SCRAM} required;"
    return settings


class Secured(Protocol):
    """A running broker of either kind."""

    name: str
    authority: Authority
    bootstrap: str
    """The address of its PLAINTEXT listener."""
    listeners: dict[str, str]
    """Listener → address."""

    def stop(self) -> None:
        """Stop the broker."""


def _addresses(owner: object) -> dict[str, str]:
    """Return addresses with ports that are reserved for as long as ``owner`` lives."""
    addresses = {}
    for name in LISTENERS:
        held = hold_port()
        weakref.finalize(owner, held.close)
        addresses[name] = f"127.0.0.1:{held.getsockname()[1]}"
    return addresses


class SecuredKafka(Kafka):
    """A secured broker of Apache Kafka."""

    def __init__(self, directory: Path, settings: Mapping[str, str] = SETTINGS) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(directory, settings)
        self.authority = Authority(directory / "certificates")
        self.listeners = _addresses(self)

    def _properties(self) -> dict[str, str]:
        base = super()._properties()
        properties = listener_settings(self.authority, self.listeners) | _of_java()
        for key in ("listeners", "advertised.listeners", "listener.security.protocol.map"):
            properties[key] = f"{base[key]},{properties[key]}"
        # In a properties file a backslash is an escape.
        return base | {key: value.replace("\\", "\\\\") for key, value in properties.items()}


class SecuredFencepost:
    """A secured broker of Fencepost in a thread."""

    name = "fencepost"

    def __init__(self, directory: Path, settings: Mapping[str, str] = SETTINGS) -> None:
        self.authority = Authority(directory / "certificates")
        self.listeners = _addresses(self)
        plain = hold_port()
        weakref.finalize(self, plain.close)
        self.bootstrap = f"127.0.0.1:{plain.getsockname()[1]}"
        every = {"PLAINTEXT": self.bootstrap, **self.listeners}
        all_settings = {**settings, **listener_settings(self.authority, every)}
        self._thread = Broker.in_thread(directory / "data", config=all_settings)

    def start(self) -> SecuredFencepost:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._thread.stop()


def add_users(broker: Secured) -> None:
    """Add the SCRAM credentials of :data:`USERS` by our own command."""
    for user, password in USERS.items():
        both = ("--mechanism", "SCRAM-SHA-256", "--mechanism", "SCRAM-SHA-512")
        command = ("users", "add", user, *both, "--password-file", "-", "-b", broker.bootstrap)
        done = CliRunner().invoke(main, command, input=password)
        assert done.exit_code == 0, done.output
