"""TLS of listeners, from Kafka's ``ssl.*`` keys and the files that they name.

There are three steps: :func:`tls_settings` reads the keys, and rejects contradictions; :func:`load`
reads the files and builds a context, which takes time and waits for the disk; :class:`ListenerTls`
holds the context for new connections, and decides whether another context may replace it.

No error message quotes the contents of a file or of a PASSWORD value.
Source: ``DefaultSslEngineFactory``, ``SslFactory``, ``ChannelBuilders``.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Final, NoReturn

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import HIDDEN, ConfigError
from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.config.listeners import client_auth
from fencepost.coordinator.security.certificate import (
    Certificate,
    CertificateError,
    read_certificate,
)
from fencepost.coordinator.security.cipher_suites import chosen_suites
from fencepost.coordinator.security.principal import ANONYMOUS, USER, Principal
from fencepost.coordinator.security.principal_mapping import PrincipalMapping
from fencepost.logcore.system import private_file
from fencepost.logcore.values import dataclass
from fencepost.protocol.pem import (
    certificates,
    conversion,
    private_keys,
    store_type,
)

MAX_STORE_BYTES: Final = 4 << 20
"""The maximum size of a key or certificate file. All CA certificates of a browser take 250 KiB."""

_VERIFY: Final = {
    "none": ssl.CERT_NONE,
    "requested": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
_VERSIONS: Final = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_NEWEST: Final = {**{name: name for name in _VERSIONS}, "TLS": "TLSv1.3"}
"""The newest version that each value of ``ssl.protocol`` permits."""

_KEYSTORE, _TRUSTSTORE = "ssl.keystore.location", "ssl.truststore.location"
_KEY, _CHAIN = "ssl.keystore.key", "ssl.keystore.certificate.chain"
_AUTHORITIES, _KEY_PASSWORD = "ssl.truststore.certificates", "ssl.key.password"

Stamp = tuple[int, int, int]
"""A file's modification time, inode number and size."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The TLS settings of one listener; ``repr`` shows no secret."""

    listener: str
    keystore: str
    """A file with key and chain; empty if ``key`` and ``chain`` are given."""
    key: str = field(repr=False)
    chain: str = field(repr=False)
    key_password: str = field(repr=False)
    truststore: str
    authorities: str = field(repr=False)
    client_auth: str
    versions: tuple[str, ...]
    suites: tuple[str, ...]
    rules: str
    allows_dn_changes: bool
    allows_san_changes: bool

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the settings name."""
        return tuple(filter(None, (self.keystore, self.truststore)))


@dataclass(frozen=True, slots=True)
class LoadedTls:
    """A listener's TLS context and certificate, as loaded from its settings and files."""

    settings: TlsSettings
    stamps: tuple[Stamp | None, ...]
    """The stamps of the files when they were read."""
    context: ssl.SSLContext
    certificate: Certificate
    """The broker's certificate."""


# --- the keys ------------------------------------------------------------------------------------


def tls_settings(config: BrokerConfig, listener: ListenerConfig) -> TlsSettings:
    """Return the TLS settings of a listener. Raises ConfigError; reads no file."""

    def text(name: str) -> str:
        return str(config.on_listener(listener.name, name) or "")

    _check_stores(text)
    enabled = config.on_listener(listener.name, "ssl.enabled.protocols")
    newest = _NEWEST.get(text("ssl.protocol"))
    if newest is None:
        _refuse("ssl.protocol", text("ssl.protocol"), f"it must be one of {', '.join(_NEWEST)}")
    versions = sorted(version for version in _names(enabled) if version <= newest)
    if not versions:
        _refuse("ssl.enabled.protocols", enabled, f"ssl.protocol={newest} excludes all of them")
    suites = _names(config.on_listener(listener.name, "ssl.cipher.suites"))
    rules = text("ssl.principal.mapping.rules")
    try:
        PrincipalMapping(rules)
    except ValueError as error:
        _refuse("ssl.principal.mapping.rules", rules, str(error))
    settings = TlsSettings(
        listener=listener.name,
        keystore=text(_KEYSTORE),
        key=text(_KEY),
        chain=text(_CHAIN),
        key_password=text(_KEY_PASSWORD),
        truststore=text(_TRUSTSTORE),
        authorities=text(_AUTHORITIES),
        client_auth=client_auth(config, listener),
        versions=tuple(versions),
        suites=suites,
        rules=rules,
        allows_dn_changes=bool(config.on_listener(listener.name, "ssl.allow.dn.changes")),
        allows_san_changes=bool(config.on_listener(listener.name, "ssl.allow.san.changes")),
    )
    if settings.client_auth != "none" and not (settings.truststore or settings.authorities):
        _refuse(
            _TRUSTSTORE,
            "",
            (
                f"ssl.client.auth={settings.client_auth} needs it or {_AUTHORITIES}: without"
                " trusted certificates, every authority of the operating system would be"
                " accepted"
            ),
        )
    return settings


def _check_stores(text: Callable[[str], str]) -> None:
    for store in ("keystore", "truststore"):
        form, key = text(f"ssl.{store}.type").upper(), f"ssl.{store}.type"
        if form != "PEM":
            file = text(f"ssl.{store}.location") or "FILE"
            _refuse(key, form, f"only PEM is supported{conversion(store, form, file)}")
    if text("ssl.keystore.password"):
        reason = "SSL key store password cannot be specified with PEM format, only"
        _refuse("ssl.keystore.password", HIDDEN, f"{reason} {_KEY_PASSWORD} may be specified")
    if text("ssl.truststore.password"):
        reason = "SSL trust store password cannot be specified for PEM format"
        _refuse("ssl.truststore.password", HIDDEN, reason)
    if text(_KEY) and not text(_CHAIN):
        _refuse(
            _KEY, HIDDEN, "SSL private key is specified, but certificate chain is not specified"
        )
    if text(_CHAIN) and not text(_KEY):
        _refuse(
            _CHAIN, HIDDEN, "SSL certificate chain is specified, but private key is not specified"
        )
    if text(_KEY) and text(_KEYSTORE):
        reason = "Both SSL key store location and separate private key are specified"
        _refuse(_KEYSTORE, text(_KEYSTORE), reason)
    if text(_AUTHORITIES) and text(_TRUSTSTORE):
        reason = "Both SSL trust store location and separate trust certificates are specified"
        _refuse(_TRUSTSTORE, text(_TRUSTSTORE), reason)
    if not text(_KEY) and not text(_KEYSTORE):
        reason = f"a TLS listener needs a certificate: set it, or {_KEY} and {_CHAIN}"
        _refuse(_KEYSTORE, "", reason)


def _names(value: object) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else ()


def _refuse(key: str, value: object, reason: str) -> NoReturn:
    raise ConfigError(key, value, reason)


# --- the files -----------------------------------------------------------------------------------


def stamps_of(settings: TlsSettings) -> tuple[Stamp | None, ...]:
    """Return the current stamps of the files; None for an inaccessible file."""
    return tuple(map(_stamp, settings.files))


def _stamp(path: str) -> Stamp | None:
    try:
        state = Path(path).stat()
    except (OSError, ValueError):
        return None
    return state.st_mtime_ns, state.st_ino, state.st_size


def load(settings: TlsSettings) -> LoadedTls:
    """Read the files, and build a context that can complete a handshake. Raises ConfigError.

    Call it in a thread: it waits for the disk, and decrypting a key may take a long time.
    """
    stamps = stamps_of(settings)
    key, chain = _identity(settings)
    authorities = _authorities(settings)
    try:
        shown = read_certificate(ssl.PEM_cert_to_DER_cert(chain[0]))
    except (CertificateError, ValueError) as error:
        source = settings.keystore or HIDDEN
        raise _chain_error(settings, source, "the first certificate can't be read") from error
    context = _context(settings, key, chain, authorities)
    _try_out(settings, context)
    return LoadedTls(settings, stamps, context, shown)


def _identity(settings: TlsSettings) -> tuple[str, list[str]]:
    """Return the private key and the chain, each in PEM."""
    if settings.keystore:
        text = _read(_KEYSTORE, "keystore", settings.keystore)
        keys, chain = private_keys(text), certificates(text)
    else:
        keys, chain = private_keys(settings.key), certificates(settings.chain)
    source = settings.keystore or HIDDEN
    if len(keys) != 1:
        problem = "Private key not provided"
        if keys:
            problem = f"Expected one private key, but found {len(keys)}"
        raise ConfigError(_KEYSTORE if settings.keystore else _KEY, source, problem)
    if not chain:
        raise _chain_error(settings, source, "At least one certificate expected, but none found")
    return keys[0], chain


def _chain_error(settings: TlsSettings, source: str, reason: str) -> ConfigError:
    return ConfigError(_KEYSTORE if settings.keystore else _CHAIN, source, reason)


def _authorities(settings: TlsSettings) -> list[str]:
    if not settings.truststore and not settings.authorities:
        return []
    key, source = _AUTHORITIES, HIDDEN
    if settings.truststore:
        key, source = _TRUSTSTORE, settings.truststore
        authorities = certificates(_read(key, "truststore", source))
    else:
        authorities = certificates(settings.authorities)
    if not authorities:
        raise ConfigError(key, source, "At least one certificate expected, but none found")
    return authorities


def _read(key: str, store: str, path: str) -> str:
    source = Path(path)
    if source.is_fifo() or source.is_char_device():
        # Opening a FIFO or a device may block forever, and a client may have named it.
        raise ConfigError(key, path, "it is not a file")
    try:
        with source.open("rb") as file:
            content = file.read(MAX_STORE_BYTES + 1)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        reason = getattr(error, "strerror", error)
        raise ConfigError(key, path, f"it can't be read: {reason}") from None
    if len(content) > MAX_STORE_BYTES:
        raise ConfigError(key, path, f"it is longer than {MAX_STORE_BYTES} bytes")
    form = store_type(content)
    if form is not None:
        raise ConfigError(
            key, path, f"it is {form}, and only PEM is supported{conversion(store, form, path)}"
        )
    return content.decode("utf-8", "replace")


def _context(
    settings: TlsSettings, key: str, chain: list[str], authorities: list[str]
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[settings.versions[0]]
    context.maximum_version = _VERSIONS[settings.versions[-1]]
    # A resumed session would outlive the client's certificate, and the trust in its authority. A
    # session cache would grow with clients that never return.
    context.options |= (
        ssl.OP_NO_RENEGOTIATION
        | ssl.OP_NO_COMPRESSION
        | ssl.OP_CIPHER_SERVER_PREFERENCE
        | ssl.OP_NO_TICKET
    )
    context.num_tickets = 0
    _choose_suites(settings, context)
    _load_certificate(settings, context, key, chain)
    context.verify_mode = _VERIFY[settings.client_auth]
    if authorities:
        # As in Java, every certificate in the truststore is trusted, self-signed or not.
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(cadata="".join(authorities))
        except (ssl.SSLError, ValueError):
            key_name = _TRUSTSTORE if settings.truststore else _AUTHORITIES
            source = settings.truststore or HIDDEN
            raise ConfigError(key_name, source, "a certificate in it can't be read") from None
    return context


def _choose_suites(settings: TlsSettings, context: ssl.SSLContext) -> None:
    if not settings.suites:
        return
    older, has_newer = chosen_suites(settings.suites)
    if older:
        try:
            context.set_ciphers(":".join(older))
        except ssl.SSLError:
            older = ()
        names = {str(cipher["name"]) for cipher in context.get_ciphers()}
        missing = [name for name in older if name not in names]
        if missing or not older:
            reason = (
                f"OpenSSL does not support the cipher suite {', '.join(missing or settings.suites)}"
            )
            raise ConfigError("ssl.cipher.suites", ",".join(settings.suites), reason)
        if not has_newer:
            context.maximum_version = ssl.TLSVersion.TLSv1_2
    else:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    if context.minimum_version > context.maximum_version:
        reason = f"none of them can be used with {', '.join(settings.versions)}"
        raise ConfigError("ssl.cipher.suites", ",".join(settings.suites), reason)


def _load_certificate(
    settings: TlsSettings, context: ssl.SSLContext, key: str, chain: list[str]
) -> None:
    is_requested = False

    def password() -> str:
        # Without a callback OpenSSL would prompt on the terminal.
        nonlocal is_requested
        is_requested = True
        return settings.key_password

    key_name = _KEYSTORE if settings.keystore else _KEY
    source = settings.keystore or HIDDEN
    try:
        with private_file("".join((key, *chain))) as path:
            context.load_cert_chain(path, password=password)
    except (ssl.SSLError, ValueError, OSError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            reason = "the private key does not belong to the first certificate"
        elif is_requested and not settings.key_password:
            reason = f"the private key is encrypted, and {_KEY_PASSWORD} is not set"
        elif is_requested:
            reason = f"the private key can't be decrypted: {_KEY_PASSWORD} is wrong"
        else:
            reason = "the private key or the certificate chain can't be read"
        raise ConfigError(key_name, source, reason) from None


def _try_out(settings: TlsSettings, context: ssl.SSLContext) -> None:
    """Perform a handshake in memory, which fails if the key fits none of the cipher suites."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    verifies, context.verify_mode = context.verify_mode, ssl.CERT_NONE
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(theirs, ours), context.wrap_bio(ours, theirs, server_side=True))
    try:
        for end in ends * 2:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        reason = f"no client can complete a handshake with it: {reason_of(error)}"
        raise ConfigError(_KEYSTORE, settings.keystore or HIDDEN, reason) from None
    finally:
        context.verify_mode = verifies


def reason_of(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason for an error, without its numbers."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    return (error.reason or "unknown").replace("_", " ").lower()


# --- the current context ------------------------------------------------------------------------


class ListenerTls:
    """The TLS context of one listener's new connections; open connections keep their context."""

    def __init__(self, loaded: LoadedTls) -> None:
        self.install(loaded)
        self.handshake_failures = 0
        """Failed handshakes with clients."""
        self.reloads = 0
        self.failed_reloads = 0
        self.is_stale = False
        """Whether the changed files or settings cannot be used, so that the old context remains."""

    def install(self, loaded: LoadedTls) -> None:
        """Use ``loaded`` for new connections."""
        self.loaded = loaded
        self.context = loaded.context
        self._mapping = PrincipalMapping(loaded.settings.rules)

    @property
    def not_after_s(self) -> float:
        """When the certificate expires, in seconds since 1970."""
        return self.loaded.certificate.not_after_s

    def principal_of(self, der: bytes | None) -> Principal | None:
        """Return the principal of a certificate; None, which denies access, if no rule matches."""
        if der is None:
            return ANONYMOUS
        try:
            name = self._mapping.name_of(read_certificate(der).subject)
        except CertificateError:
            return None
        return None if name is None else Principal(USER, name)

    def check(self, fresh: LoadedTls, now_s: float) -> None:
        """Raise ConfigError if ``fresh`` must not replace the current certificate or truststore."""
        settings, shown, before = fresh.settings, fresh.certificate, self.loaded.certificate
        key = _KEYSTORE if settings.keystore else _CHAIN
        source = settings.keystore or HIDDEN
        if not shown.not_before_s <= now_s < shown.not_after_s:
            word = "has expired" if now_s >= shown.not_after_s else "is not valid yet"
            raise ConfigError(key, source, f"the certificate {word}")
        if not settings.allows_dn_changes and shown.subject.lower() != before.subject.lower():
            raise ConfigError(
                key,
                source,
                f"Keystore DistinguishedName does not match: existing {before.subject}, new"
                f" {shown.subject}; ssl.allow.dn.changes would allow it",
            )
        if not settings.allows_san_changes and before.alternative_names - shown.alternative_names:
            raise ConfigError(
                key,
                source,
                "Keystore SubjectAltNames do not match: the new certificate lacks names of the"
                " existing one; ssl.allow.san.changes would allow it",
            )
        if settings.authorities or settings.truststore:
            old = self.loaded.settings
            if not (old.authorities or old.truststore):
                raise ConfigError(
                    _TRUSTSTORE,
                    settings.truststore or HIDDEN,
                    "Cannot add SSL truststore to an existing listener for which no truststore was"
                    " configured",
                )
