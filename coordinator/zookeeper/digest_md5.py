"""The client side of SASL's DIGEST-MD5, with which brokers log in to ZooKeeper's servers.

Only authentication is supported (``qop=auth``). The protocol prescribes MD5, so an eavesdropper can
guess the password from an exchange that TLS does not protect.

Source: RFC 2831; ``SaslClientCallbackHandler``, ``SecurityUtils`` of ZooKeeper.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final
from urllib.request import parse_http_list, parse_keqv_list

SERVER_NAME: Final = "zk-sasl-md5"
"""The server name in this protocol; every ZooKeeper server has this name."""

URI: Final = f"zookeeper/{SERVER_NAME}"
_COUNT: Final = "00000001"


class DigestError(ValueError):
    """The server's message violates the protocol. The error message contains no secret."""


class DigestMd5:
    """One login."""

    def __init__(self, user: str, password: str, *, uri: str = URI, cnonce: str = "") -> None:
        self._user, self._password, self._uri = user, password, uri
        self._cnonce = cnonce or secrets.token_hex(16)
        self._proof = ""

    def answer(self, challenge: bytes) -> bytes:
        """Return the response to the server's challenge. Raises DigestError."""
        directives = _fields(challenge)
        nonce, realm = directives.get("nonce"), directives.get("realm", SERVER_NAME)
        if not nonce or directives.get("algorithm") != "md5-sess":
            raise DigestError("the server's challenge is not a DIGEST-MD5 message")
        if "auth" not in directives.get("qop", "auth").split(","):
            raise DigestError("the server does not offer plain authentication (qop=auth)")
        secret = _md5(b":".join(map(_bytes, (self._user, realm, self._password))))
        session = _hex(secret + f":{nonce}:{self._cnonce}".encode())

        def digest(what: str) -> str:
            parts = (session, nonce, _COUNT, self._cnonce, "auth", _hex(what.encode()))
            return _hex(":".join(parts).encode())

        self._proof = digest(f":{self._uri}")
        fields = {
            "charset": "utf-8",
            "username": _quoted(self._user),
            "realm": _quoted(realm),
            "nonce": _quoted(nonce),
            "nc": _COUNT,
            "cnonce": _quoted(self._cnonce),
            "digest-uri": _quoted(self._uri),
            "maxbuf": "65536",
            "response": digest(f"AUTHENTICATE:{self._uri}"),
            "qop": "auth",
        }
        return ",".join(f"{key}={value}" for key, value in fields.items()).encode()

    def check(self, last: bytes) -> None:
        """Verify that the server knows the password as well. Raises DigestError."""
        proof = _fields(last).get("rspauth", "")
        if not self._proof or not hmac.compare_digest(proof.encode(), self._proof.encode()):
            raise DigestError("the server does not know the password")


def _fields(text: bytes) -> dict[str, str]:
    try:
        return dict(parse_keqv_list(parse_http_list(text.decode())))
    except (ValueError, IndexError):  # IndexError for an empty value
        raise DigestError("the server's message is not a DIGEST-MD5 message") from None


def _bytes(text: str) -> bytes:
    """Encode as ISO 8859-1 if possible, as the protocol requires, or else as UTF-8."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _hex(data: bytes) -> str:
    return _md5(data).hex()
