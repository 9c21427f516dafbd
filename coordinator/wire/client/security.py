"""How a client reaches a broker that asks for encryption and a login, by Kafka's names.

The one place where ``security.protocol``, ``sasl.*`` and ``ssl.*`` of a client are read: for our
own wire client, and for what pipelines hand to aiokafka and Spark to its workers. Nothing wrong is
passed over, and no message holds a value that may be a secret.

Source: ``CommonClientConfigs``, ``SaslConfigs``, ``SslConfigs``, ``DefaultSslEngineFactory``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fencepost.coordinator.wire.jaas import JaasError, parse_jaas

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
TLS_VERSIONS = ("TLSv1.2", "TLSv1.3")

PREFIXES = ("security.", "ssl.", "sasl.")
"""What names of keys begin with that are about security."""

SECRETS = frozenset(
    {
        "sasl.jaas.config",
        "sasl.password",
        "sasl.oauthbearer.client.credentials.client.secret",
        "sasl.oauthbearer.assertion.private.key.passphrase",
        "ssl.key.password",
        "ssl.keystore.key",
        "ssl.keystore.certificate.chain",
        "ssl.keystore.password",
        "ssl.truststore.certificates",
        "ssl.truststore.password",
    }
)
"""Kafka's keys of the type PASSWORD, and librdkafka's ``sasl.password``."""

_UNSERVED = {
    "ssl.engine.factory.class": "no Java class can be loaded here",
    "ssl.truststore.password": "a PEM truststore has no password",
    "ssl.keystore.password": "a PEM keystore has none; the key's own is ssl.key.password",
    "sasl.client.callback.handler.class": "no Java class can be loaded here",
}

_FORMS = {
    "truststore": "keytool -exportcert -rfc -keystore FILE -alias NAME > ca.pem",
    "keystore": "openssl pkcs12 -in FILE -nodes -out client.pem",
}


class SecurityError(ValueError):
    """A setting is wrong, missing or contradicts another; the message begins with its key."""


@dataclass(frozen=True, slots=True)
class Tls:
    """What connections are encrypted with. Files are named here, and read for each of them."""

    truststore: str = ""
    """A PEM file of the authorities that are believed; with none, those of the system."""
    authorities: str = ""
    """Those authorities themselves, in PEM."""
    keystore: str = ""
    """A PEM file with the client's own key and certificate chain."""
    key: str = field(default="", repr=False)
    """That key itself, with ``chain``, instead of a file."""
    chain: str = field(default="", repr=False)
    key_password: str = field(default="", repr=False)
    checks_host: bool = True
    """``ssl.endpoint.identification.algorithm`` is ``https``."""
    versions: tuple[str, ...] = TLS_VERSIONS
    ciphers: tuple[str, ...] = ()
    """Suites of TLS 1.2, by OpenSSL's names."""


@dataclass(frozen=True, slots=True)
class Security:
    """As whom and how a client connects. Can be compared, pickled and printed: no secret shows."""

    protocol: str = "PLAINTEXT"
    mechanism: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    login: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Of OAUTHBEARER: the options of ``sasl.jaas.config`` and the keys ``sasl.oauthbearer.*``."""
    tls: Tls = field(default_factory=Tls)

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.protocol.endswith("SSL")

    @property
    def has_login(self) -> bool:
        """Whether connections begin with SASL."""
        return self.protocol.startswith("SASL")

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> Security:
        """From Kafka's client properties; those that are not about security are left aside.

        ``sasl.username`` and ``sasl.password`` may stand instead of ``sasl.jaas.config``. Raises
        :class:`SecurityError`.
        """
        given = {
            key: value
            for key, value in properties.items()
            if key.startswith(PREFIXES) and value is not None and value != ""
        }
        for key in given.keys() & _UNSERVED.keys():
            raise SecurityError(f"{key}: {_UNSERVED[key]}")
        protocol = given.get("security.protocol", "PLAINTEXT").upper()
        if protocol not in PROTOCOLS:
            raise SecurityError(f"security.protocol: one of {', '.join(PROTOCOLS)} is wanted")
        tls = _tls(given, properties) if protocol.endswith("SSL") else Tls()
        if not protocol.startswith("SASL"):
            return cls(protocol, tls=tls)
        return cls(protocol, *_login(given), tls)


def _login(given: Mapping[str, str]) -> tuple[str, str, str, tuple[tuple[str, str], ...]]:
    """Mechanism, user, password, options of a token."""
    mechanism = given.get("sasl.mechanism", "GSSAPI").upper()
    if mechanism not in MECHANISMS:
        raise SecurityError(
            f"sasl.mechanism: one of {', '.join(MECHANISMS)} is wanted"
            + ("; Kafka's default, GSSAPI (Kerberos), is not spoken" * (mechanism == "GSSAPI"))
        )
    options = _jaas_options(given, mechanism)
    if mechanism == "OAUTHBEARER":
        own = {key: value for key, value in given.items() if key.startswith("sasl.oauthbearer.")}
        return mechanism, "", "", tuple(sorted({**options, **own}.items()))
    username = given.get("sasl.username", options.get("username", ""))
    password = given.get("sasl.password", options.get("password", ""))
    if not username or not password:
        raise SecurityError(
            f"sasl.jaas.config: username and password are wanted for {mechanism}, there or in"
            " sasl.username and sasl.password"
        )
    return mechanism, username, password, ()


def _jaas_options(given: Mapping[str, str], mechanism: str) -> Mapping[str, str]:
    text = given.get("sasl.jaas.config")
    if text is None:
        return {}
    try:
        entry = parse_jaas(text)
    except JaasError as error:
        raise SecurityError(f"sasl.jaas.config: {error}") from None
    if not entry.family or not mechanism.startswith(entry.family):
        raise SecurityError(
            f"sasl.jaas.config: {entry.module} does not go with sasl.mechanism={mechanism}"
        )
    return entry.options


def _tls(given: Mapping[str, str], properties: Mapping[str, str]) -> Tls:
    for store in ("truststore", "keystore"):
        form = given.get(f"ssl.{store}.type", "PEM").upper()
        if form != "PEM":
            raise SecurityError(
                f"ssl.{store}.type: only PEM is read, not {form}; {_FORMS[store]!r} converts"
            )
    # An empty value is no value, but for this key, where it means that no name is checked.
    algorithm = properties.get("ssl.endpoint.identification.algorithm", "https").lower()
    if algorithm not in {"https", ""}:
        raise SecurityError("ssl.endpoint.identification.algorithm: https or nothing is wanted")
    versions = tuple(
        version.strip()
        for version in given.get("ssl.enabled.protocols", ",".join(TLS_VERSIONS)).split(",")
    )
    newest = given.get("ssl.protocol", TLS_VERSIONS[-1])
    if newest not in TLS_VERSIONS or not set(versions) <= set(TLS_VERSIONS):
        key = "ssl.protocol" if newest not in TLS_VERSIONS else "ssl.enabled.protocols"
        raise SecurityError(f"{key}: {' and '.join(TLS_VERSIONS)} are spoken")
    tls = Tls(
        truststore=given.get("ssl.truststore.location", ""),
        authorities=given.get("ssl.truststore.certificates", ""),
        keystore=given.get("ssl.keystore.location", ""),
        key=given.get("ssl.keystore.key", ""),
        chain=given.get("ssl.keystore.certificate.chain", ""),
        key_password=given.get("ssl.key.password", ""),
        checks_host=algorithm == "https",
        versions=tuple(version for version in versions if version <= newest),
        ciphers=tuple(filter(None, given.get("ssl.cipher.suites", "").split(","))),
    )
    for one, other in (("truststore", "authorities"), ("keystore", "key"), ("keystore", "chain")):
        if getattr(tls, one) and getattr(tls, other):
            raise SecurityError(f"ssl.{one}.location: a file, or the PEM text itself, not both")
    if bool(tls.key) != bool(tls.chain):
        raise SecurityError("ssl.keystore.key and ssl.keystore.certificate.chain go together")
    if not tls.versions:
        raise SecurityError("ssl.enabled.protocols: none is left under ssl.protocol")
    return tls


PLAINTEXT = Security()
"""No encryption, no login."""
