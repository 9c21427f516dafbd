"""An Apache Kafka whose listeners ask for everything that clients may be asked for."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import serialization

from fencepost.coordinator.tools.ports import hold_port
from tests.support.certificates import Authority
from tests.support.kafka import Kafka
from tests.support.targets import SETTINGS

USERS: Final = {"admin": "admin's", "alice": 'pa"ss\\w;o rd=', "bob": "tricky=,"}
"""Passwords by user, in PLAIN; whoever sets the scene gives them SCRAM credentials as well."""

LISTENERS: Final = {
    "TLS": "SSL",
    "MUTUAL": "SSL",
    "LOGIN": "SASL_PLAINTEXT",
    "SAFE": "SASL_SSL",
    "BRIEF": "SASL_SSL",
}
"""Protocols of listeners, besides one of PLAINTEXT. MUTUAL wants a certificate of the client, a
login at BRIEF, by PLAIN or SCRAM-SHA-512, holds for 1.5 s."""

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
_OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"


def quoted(text: str) -> str:
    """A value in a JAAS configuration."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def listener_settings(authority: Authority) -> dict[str, str]:
    """What Apache Kafka and Fencepost are told of these listeners."""
    users = " ".join(f"user_{user}={quoted(password)}" for user, password in USERS.items())
    found = {
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(_for_java(authority.issue("broker"))),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.truststore),
        "listener.name.mutual.ssl.client.auth": "required",
    }
    for name, protocol in LISTENERS.items():
        if protocol.startswith("SASL"):
            prefix = f"listener.name.{name.lower()}"
            found[f"{prefix}.plain.sasl.jaas.config"] = f"{_PLAIN} required {users};"
            for mechanism in ("scram-sha-256", "scram-sha-512"):
                found[f"{prefix}.{mechanism}.sasl.jaas.config"] = f"{_SCRAM} required;"
            found[f"{prefix}.oauthbearer.sasl.jaas.config"] = f"{_OAUTH} required;"
    found["listener.name.brief.sasl.enabled.mechanisms"] = "PLAIN,SCRAM-SHA-512"
    for mechanism in ("plain", "scram-sha-512"):
        found[f"listener.name.brief.{mechanism}.connections.max.reauth.ms"] = "1500"
    return found


class SecuredKafka(Kafka):
    """Its addresses are in ``listeners``, by name."""

    def __init__(self, directory: Path, settings: Mapping[str, str] = SETTINGS) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.authority = Authority(directory / "certificates")
        super().__init__(directory, {**settings, **_escaped(listener_settings(self.authority))})
        self.listeners: dict[str, str] = {}
        for name in LISTENERS:
            held = hold_port()
            weakref.finalize(self, held.close)
            self.listeners[name] = f"127.0.0.1:{held.getsockname()[1]}"

    def _properties(self, port: int, controller: int) -> dict[str, str]:
        ours = ",".join(f"{name}://{address}" for name, address in self.listeners.items())
        found = super()._properties(port, controller)
        for key in ("listeners", "advertised.listeners"):
            found[key] = f"{found[key]},{ours}"
        protocols = ",".join(f"{name}:{protocol}" for name, protocol in LISTENERS.items())
        found["listener.security.protocol.map"] += f",{protocols}"
        return found


def _for_java(path: Path) -> Path:
    """The same file with its key as Java reads it: PKCS #8."""
    text = path.read_bytes()
    key = serialization.load_pem_private_key(text, None)
    kind, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    chain = text[text.index(b"-----BEGIN CERTIFICATE") :]
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, no_password) + chain)
    return path


def _escaped(settings: Mapping[str, str]) -> dict[str, str]:
    """As in a file of properties."""
    return {key: value.replace("\\", "\\\\") for key, value in settings.items()}
