"""TLS and SASL settings of a client, under Kafka's names.

This is the only module that reads ``security.protocol``, ``sasl.*`` and ``ssl.*`` of clients: for
our own wire client, for aiokafka in pipelines and for the workers of Spark. Invalid settings are
never ignored, and no message contains a value that may be a secret.

Source: ``CommonClientConfigs``, ``SaslConfigs``, ``SslConfigs``, ``DefaultSslEngineFactory``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from fencepost.client.tokens import TOKEN_KEY, TokenError, token_source
from fencepost.logcore.values import dataclass
from fencepost.protocol.jaas import JaasError, parse_jaas
from fencepost.protocol.pem import conversion

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
TLS_VERSIONS = ("TLSv1.2", "TLSv1.3")

PREFIXES = ("security.", "ssl.", "sasl.", "enable.ssl.", "enable.sasl.", "fencepost.oauthbearer.")
"""The prefixes of security settings."""

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
        "sasl.oauthbearer.client.secret",
        "ssl.key.pem",
        TOKEN_KEY,
    }
)
"""Kafka's keys of the type PASSWORD, librdkafka's equivalents, and ours."""

_SYNONYMS = {
    "sasl.mechanisms": "sasl.mechanism",
    "ssl.ca.location": "ssl.truststore.location",
    "ssl.ca.pem": "ssl.truststore.certificates",
    "ssl.certificate.location": "ssl.keystore.location",
    "ssl.certificate.pem": "ssl.keystore.certificate.chain",
    "ssl.key.pem": "ssl.keystore.key",
}
"""Kafka's name of each setting that librdkafka names differently."""

_VERIFICATION = "enable.ssl.certificate.verification"
_UNSECURED = "enable.sasl.oauthbearer.unsecure.jwt"

_KNOWN = frozenset(
    {
        *SECRETS,
        *_SYNONYMS,
        *_SYNONYMS.values(),
        _UNSECURED,
        _VERIFICATION,
        "sasl.username",
        "security.protocol",
        "ssl.cipher.suites",
        "ssl.enabled.protocols",
        "ssl.endpoint.identification.algorithm",
        "ssl.key.location",
        "ssl.keystore.type",
        "ssl.protocol",
        "ssl.truststore.type",
        f"{TOKEN_KEY}.command",
        f"{TOKEN_KEY}.file",
    }
)

TOLERATED_PREFIXES = (
    "sasl.kerberos.",
    "sasl.login.",
    "sasl.oauthbearer.",
    "security.providers",
    "ssl.keymanager.algorithm",
    "ssl.provider",
    "ssl.secure.random.implementation",
    "ssl.trustmanager.algorithm",
)
"""Prefixes of settings that are accepted although most of them have no equivalent here."""

_TOKENS = ("sasl.oauthbearer.", "fencepost.oauthbearer.")

_UNSERVED = {
    "ssl.engine.factory.class": "Java classes are not loaded",
    "ssl.truststore.password": "a PEM truststore has no password",
    "ssl.keystore.password": (
        "a PEM keystore has no password; the private key's is ssl.key.password"
    ),
    "sasl.client.callback.handler.class": "Java classes are not loaded",
}


class SecurityError(ValueError):
    """A setting is invalid, missing or contradicts another; the message begins with its key."""


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings. Files are named here and read for each connection."""

    truststore: str = ""
    """A PEM file with the trusted CA certificates; if empty, the system's are trusted."""
    authorities: str = ""
    """The trusted CA certificates themselves, in PEM."""
    keystore: str = ""
    """A PEM file with the client's private key and certificate chain."""
    key: str = field(default="", repr=False)
    """The private key itself, used with ``chain`` instead of a file."""
    chain: str = field(default="", repr=False)
    key_file: str = ""
    """A PEM file with the key, if ``keystore`` contains only the chain."""
    key_password: str = field(default="", repr=False)
    checks_certificate: bool = True
    """Whether the broker's certificate is verified at all."""
    checks_host: bool = True
    """Whether ``ssl.endpoint.identification.algorithm`` is ``https``."""
    versions: tuple[str, ...] = TLS_VERSIONS
    ciphers: tuple[str, ...] = ()
    """Cipher suites of TLS 1.2, by OpenSSL's names."""


@dataclass(frozen=True, slots=True)
class Security:
    """A client's security settings. Can be compared, pickled and printed without secrets."""

    protocol: str = "PLAINTEXT"
    mechanism: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    login: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """For OAUTHBEARER: the options of ``sasl.jaas.config`` and the token settings, which
    ``tokens.token_source`` reads."""
    tls: Tls = field(default_factory=Tls)

    @property
    def has_tls(self) -> bool:
        """Return whether connections use TLS."""
        return self.protocol.endswith("SSL")

    @property
    def has_login(self) -> bool:
        """Return whether connections begin with SASL."""
        return self.protocol.startswith("SASL")

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> Security:
        """Read Kafka's client properties; ignore those that do not configure security.

        ``sasl.username`` and ``sasl.password`` may replace ``sasl.jaas.config``, and librdkafka's
        names may replace Kafka's. Raises :class:`SecurityError`.
        """
        given = _given(properties)
        if given and "security.protocol" not in given:
            raise SecurityError(
                f"security.protocol: it is not set, and without it {min(given)} has no"
                f" effect: set one of {', '.join(PROTOCOLS)}"
            )
        protocol = given.get("security.protocol", "PLAINTEXT").upper()
        if protocol not in PROTOCOLS:
            raise SecurityError(f"security.protocol: it must be one of {', '.join(PROTOCOLS)}")
        tls = _tls(given, properties) if protocol.endswith("SSL") else Tls()
        if not protocol.startswith("SASL"):
            return cls(protocol, tls=tls)
        return cls(protocol, *_login(given), tls)

    def warnings(self) -> list[str]:
        """Return a sentence for each weakness of these settings."""
        warnings = []
        if self.has_tls and not self.tls.checks_certificate:
            warnings.append(
                f"{_VERIFICATION} is off: an attacker between this client and the broker can"
                " read and change everything"
            )
        elif self.has_tls and not self.tls.checks_host:
            warnings.append(
                "ssl.endpoint.identification.algorithm is empty: any certificate of the"
                " same authority is accepted as the broker's"
            )
        if self.protocol == "SASL_PLAINTEXT" and self.mechanism in {"PLAIN", "OAUTHBEARER"}:
            what = "password" if self.mechanism == "PLAIN" else "token"
            warnings.append(f"{self.mechanism} over {self.protocol} sends the {what} unencrypted")
        return warnings


def _given(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the security settings that are set, by Kafka's names."""
    given: dict[str, str] = {}
    for key, value in properties.items():
        if not key.startswith(PREFIXES) or value is None or value == "":
            continue
        if key in _UNSERVED:
            raise SecurityError(f"{key}: {_UNSERVED[key]}")
        if key not in _KNOWN and not key.startswith(TOLERATED_PREFIXES):
            import difflib  # noqa: PLC0415 - only errors need it

            close = difflib.get_close_matches(key, _KNOWN, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SecurityError(f"{key}: unknown client setting{hint}")
        name = _SYNONYMS.get(key, key)
        if given.setdefault(name, value) != value:
            other = next(key for key, same in _SYNONYMS.items() if same == name)
            raise SecurityError(f"{name}: {other} has the same meaning and another value")
    return given


def _login(given: Mapping[str, str]) -> tuple[str, str, str, tuple[tuple[str, str], ...]]:
    """Return mechanism, user, password and the options of a token."""
    mechanism = given.get("sasl.mechanism", "GSSAPI").upper()
    if mechanism not in MECHANISMS:
        raise SecurityError(
            f"sasl.mechanism: it must be one of {', '.join(MECHANISMS)}"
            + ("; Kafka's default, GSSAPI (Kerberos), is not supported" * (mechanism == "GSSAPI"))
        )
    options = _jaas_options(given, mechanism)
    if mechanism == "OAUTHBEARER":
        token_options = {key: given[key] for key in given if key.startswith((_UNSECURED, *_TOKENS))}
        login = {**options, **token_options}
        try:
            token_source(login)
        except TokenError as error:
            raise SecurityError(f"sasl.mechanism: {error}") from None
        return mechanism, "", "", tuple(sorted(login.items()))
    if options.get("tokenauth", "").lower() == "true":
        raise SecurityError("sasl.jaas.config: delegation tokens (tokenauth) are not supported")
    username = given.get("sasl.username", options.get("username", ""))
    password = given.get("sasl.password", options.get("password", ""))
    if not username or not password:
        raise SecurityError(
            f"sasl.jaas.config: {mechanism} needs username and password, there or in"
            " sasl.username and sasl.password"
        )
    if "\0" in username + password:
        raise SecurityError(
            "sasl.username: neither the user name nor the password can have a zero byte"
        )
    if mechanism != "PLAIN" and not username.isascii():
        raise SecurityError(f"sasl.username: a user name for {mechanism} must be ASCII")
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
            f"sasl.jaas.config: {entry.module} does not match sasl.mechanism={mechanism}"
        )
    return entry.options


def _tls(given: Mapping[str, str], properties: Mapping[str, str]) -> Tls:
    for store in ("truststore", "keystore"):
        form = given.get(f"ssl.{store}.type", "PEM").upper()
        if form != "PEM":
            file = given.get(f"ssl.{store}.location", "FILE")
            how = conversion(store, form, file)
            raise SecurityError(f"ssl.{store}.type: only PEM is supported, not {form}{how}")
    # An empty value is the same as none, except for this key, where it disables the check.
    algorithm = properties.get("ssl.endpoint.identification.algorithm", "https").lower()
    if algorithm not in {"https", "none", ""}:
        raise SecurityError("ssl.endpoint.identification.algorithm: it must be https or empty")
    versions = tuple(
        version.strip()
        for version in given.get("ssl.enabled.protocols", ",".join(TLS_VERSIONS)).split(",")
    )
    newest = given.get("ssl.protocol", TLS_VERSIONS[-1])
    verification = given.get(_VERIFICATION, "true").lower()
    if verification not in {"true", "false"}:
        raise SecurityError(f"{_VERIFICATION}: it must be true or false")
    if newest not in TLS_VERSIONS or not set(versions) <= set(TLS_VERSIONS):
        key = "ssl.protocol" if newest not in TLS_VERSIONS else "ssl.enabled.protocols"
        raise SecurityError(f"{key}: supported are {' and '.join(TLS_VERSIONS)}")
    tls = Tls(
        truststore=given.get("ssl.truststore.location", ""),
        authorities=given.get("ssl.truststore.certificates", ""),
        keystore=given.get("ssl.keystore.location", ""),
        key=given.get("ssl.keystore.key", ""),
        chain=given.get("ssl.keystore.certificate.chain", ""),
        key_file=given.get("ssl.key.location", ""),
        key_password=given.get("ssl.key.password", ""),
        checks_certificate=verification == "true",
        checks_host=algorithm == "https",
        versions=tuple(version for version in versions if version <= newest),
        ciphers=tuple(filter(None, given.get("ssl.cipher.suites", "").split(","))),
    )
    pairs = ("truststore", "authorities"), ("keystore", "key"), ("keystore", "chain")
    for one, other in pairs:
        if getattr(tls, one) and getattr(tls, other):
            raise SecurityError(
                f"ssl.{one}.location: set either a file or the PEM text itself, not both"
            )
    if bool(tls.key) != bool(tls.chain):
        raise SecurityError(
            "ssl.keystore.key and ssl.keystore.certificate.chain must be set together"
        )
    if tls.key_file and not tls.keystore:
        raise SecurityError("ssl.key.location: it needs a certificate, ssl.certificate.location")
    if not tls.versions:
        raise SecurityError("ssl.enabled.protocols: ssl.protocol excludes all of them")
    return tls


PLAINTEXT = Security()
"""No TLS, no SASL."""
