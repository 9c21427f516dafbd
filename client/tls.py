"""TLS contexts of clients, from PEM files that may be replaced while a client runs.

Certificates are renewed every few weeks, and a client reconnects often, so it must use the current
files. A Java client must be restarted to read them.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from fencepost.client.security import Security, SecurityError, Tls
from fencepost.logcore.system import private_file
from fencepost.protocol.pem import certificates, conversion, store_type

_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}


class _ReloadingContext(ssl.SSLContext):
    """A context that delegates to an inner context, which it rebuilds when a file has changed."""

    _tls: Tls
    _seen: tuple[tuple[int, int], ...] = ()
    _now: ssl.SSLContext

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        """Wrap the socket with the newest context."""
        return self._newest().wrap_socket(*args, **kwargs)

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Wrap the buffers with the newest context."""
        return self._newest().wrap_bio(*args, **kwargs)

    def _newest(self) -> ssl.SSLContext:
        stamps = _file_stamps(self._tls)
        if stamps != self._seen:
            # After an error, for example of a half-written file, the previous context is used.
            try:
                self._now = _configure(self._tls, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
            except SecurityError:
                if not self._seen:
                    raise
            else:
                self._seen = stamps
        return self._now


def ssl_context(security: Security) -> ssl.SSLContext | None:
    """Return a client's TLS context, which follows changes of its files; None without TLS.

    Raises SecurityError for a file that cannot be read or used.
    """
    if not security.has_tls:
        return None
    tls = security.tls
    context = _ReloadingContext(ssl.PROTOCOL_TLS_CLIENT)
    # paho reads this attribute
    context.check_hostname = tls.checks_certificate and tls.checks_host
    context._tls = tls
    context._newest()
    return context


def _file_stamps(tls: Tls) -> tuple[tuple[int, int], ...]:
    stamps = []
    for name in filter(None, (tls.truststore, tls.keystore, tls.key_file)):
        try:
            state = Path(name).stat()
        except OSError:
            stamps.append((-1, -1))
        else:
            stamps.append((state.st_mtime_ns, state.st_ino))
    return (*stamps, (0, 0))


def _configure(tls: Tls, context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = _VERSIONS[min(tls.versions)]
    context.maximum_version = _VERSIONS[max(tls.versions)]
    context.check_hostname = tls.checks_certificate and tls.checks_host
    if not tls.checks_certificate:
        context.verify_mode = ssl.CERT_NONE
    if tls.ciphers:
        try:
            context.set_ciphers(":".join(tls.ciphers))
        except ssl.SSLError:
            raise SecurityError("ssl.cipher.suites: OpenSSL supports none of them") from None
    if tls.truststore or tls.authorities:
        _load_authorities(context, tls)
    else:
        context.load_default_certs()
    if tls.keystore or tls.key:
        _load_key_pair(context, tls)
    return context


def _load_authorities(context: ssl.SSLContext, tls: Tls) -> None:
    key = "ssl.truststore.location" if tls.truststore else "ssl.truststore.certificates"
    text = _read_pem(key, tls.truststore) if tls.truststore else tls.authorities
    try:
        context.load_verify_locations(cadata="".join(certificates(text)))
    except (ssl.SSLError, ValueError):
        raise SecurityError(
            f"{key}: it contains no PEM certificate{_path_suffix(tls.truststore)}"
        ) from None


def _load_key_pair(context: ssl.SSLContext, tls: Tls) -> None:
    key = "ssl.keystore.location" if tls.keystore else "ssl.keystore.key"

    def password() -> str:
        # Without this, OpenSSL would prompt on the terminal.
        if not tls.key_password:
            raise SecurityError(
                "ssl.key.password: the private key is encrypted, and no password is set"
            )
        return tls.key_password

    text = _read_pem(key, tls.keystore) if tls.keystore else ""
    if tls.key_file:
        _read_pem("ssl.key.location", tls.key_file)
    if tls.keystore and not tls.key_file and "PRIVATE KEY-----" not in text:
        raise SecurityError(f"{key}: it contains no PEM private key{_path_suffix(tls.keystore)}")
    try:
        if tls.keystore:
            context.load_cert_chain(tls.keystore, tls.key_file or None, password=password)
        else:
            with private_file(f"{tls.key.strip()}\n{tls.chain.strip()}\n") as path:
                context.load_cert_chain(path, password=password)
    except ssl.SSLError as error:
        reason = (error.reason or "").replace("_", " ").lower() or "it can't be read"
        hint = ", or ssl.key.password is wrong" if tls.key_password else ""
        raise SecurityError(
            f"{key}: it has no private key with a matching certificate{_path_suffix(tls.keystore)}:"
            f" {reason}{hint}"
        ) from None


def _path_suffix(path: str) -> str:
    return f" ({path})" if path else ""


def _read_pem(key: str, path: str) -> str:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise SecurityError(f"{key}: {path}: {error.strerror}") from None
    form = store_type(raw)
    if form is not None:
        store = "truststore" if "truststore" in key else "keystore"
        how = conversion(store, form, path)
        raise SecurityError(f"{key}: {path} is not PEM but {form}{how}")
    return raw.decode("utf-8", "replace")
