"""TLS of servers other than the broker's listeners: the console and the metrics endpoint."""

from __future__ import annotations

import ssl


class ServerTlsError(ValueError):
    """The files cannot be used; the message names them, without their content."""


def server_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """Return a server's TLS context from PEM files; ``certificate`` may contain the key as well.

    Blocks on file reads. Raises :class:`ServerTlsError`.
    """
    named = certificate if key is None else f"{certificate} and {key}"

    def password() -> str:
        # Without this, OpenSSL would prompt on the terminal.
        raise ServerTlsError(
            f"{key or certificate}: the key is encrypted; openssl pkey decrypts it"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        reason = (error.reason or "they cannot be read").lower().replace("_", " ")
        raise ServerTlsError(
            f"{named}: no PEM certificate and key that belong together: {reason}"
        ) from None
    except OSError as error:
        raise ServerTlsError(f"{named}: {error.strerror}") from None
    return context
