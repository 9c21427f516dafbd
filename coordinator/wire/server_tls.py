"""TLS of servers beside the broker's own listeners: the console's, and that of the metrics."""

from __future__ import annotations

import ssl


class ServerTlsError(ValueError):
    """The files can not be used; the message says which, and nothing of what they hold."""


def server_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """A context of a server from PEM files; without ``key`` it stands in that of the certificate.

    Waits for the disk. Raises :class:`ServerTlsError`.
    """
    named = certificate if key is None else f"{certificate} and {key}"

    def password() -> str:
        # Without this, OpenSSL would ask the terminal.
        raise ServerTlsError(
            f"{key or certificate}: the key is encrypted; openssl pkey decrypts it"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        reason = (error.reason or "they can not be read").lower().replace("_", " ")
        raise ServerTlsError(
            f"{named}: no PEM certificate and key that belong together: {reason}"
        ) from None
    except OSError as error:
        raise ServerTlsError(f"{named}: {error.strerror}") from None
    return context
