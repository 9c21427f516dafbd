"""SCRAM messages and computations, for the broker and for our client.

The messages are those that Kafka accepts: names of ASCII characters, no channel binding; unknown
extensions are ignored, and passwords are used unchanged (no SASLprep). Signatures cover the
messages exactly as they were sent.

Source: RFC 5802, RFC 7677; ``ScramMessages``, ``ScramFormatter``, ``ScramMechanism``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Final

from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class ScramMechanism:
    """One of the two supported mechanisms."""

    name: str
    number: int
    """The number of the mechanism in requests (``ScramMechanism``)."""
    digest: str
    """The name of its hash function."""
    key_bytes: int
    """The length of every key and signature."""


SCRAM_SHA_256: Final = ScramMechanism("SCRAM-SHA-256", 1, "sha256", 32)
SCRAM_SHA_512: Final = ScramMechanism("SCRAM-SHA-512", 2, "sha512", 64)
SCRAM_MECHANISMS: Final[Mapping[str, ScramMechanism]] = {
    mechanism.name: mechanism for mechanism in (SCRAM_SHA_256, SCRAM_SHA_512)
}
"""The mechanisms by name."""

MIN_ITERATIONS: Final = 4_096
"""The minimum number of iterations of a password's hash."""

GS2_HEADER: Final = "n,,"
"""No channel binding, and no authorization id other than the user."""


class ScramError(ValueError):
    """A message is not valid SCRAM, or the broker has refused the login.

    The error quotes nothing from the messages except the reason that the broker has sent.
    """


# --- messages ---

_ALPHA = "[A-Za-z]+"
_VALUE_SAFE = r"[\x01-\x2b\x2d-\x3c\x3e-\x7f]+"
_VALUE = r"[\x01-\x2b\x2d-\x7f]+"
_PRINTABLE = r"[\x21-\x2b\x2d-\x7e]+"
_SASL_NAME = r"(?:[\x01-\x2b\x2d-\x3c\x3e-\x7f]|=2C|=3D)+"
_BASE64 = "(?:[a-zA-Z0-9/+]{4})*(?:[a-zA-Z0-9/+]{3}=|[a-zA-Z0-9/+]{2}==)?"
_RESERVED = f"(?:m={_VALUE},)?"
_EXTENSIONS = f"(?:,{_ALPHA}={_VALUE})*"

_CLIENT_FIRST = re.compile(
    f"(?P<header>n,(?:a=(?P<authorized>{_SASL_NAME}))?,)"
    f"(?P<bare>{_RESERVED}n=(?P<name>{_SASL_NAME}),r=(?P<nonce>{_PRINTABLE})"
    f"(?P<extensions>{_EXTENSIONS}))"
)
_SERVER_FIRST = re.compile(
    f"{_RESERVED}r=(?P<nonce>{_PRINTABLE}),s=(?P<salt>{_BASE64}),i=(?P<iterations>[0-9]{{1,9}})"
    f"{_EXTENSIONS}"
)
_CLIENT_FINAL = re.compile(
    f"(?P<unsigned>c=(?P<channel>{_BASE64}),r=(?P<nonce>{_PRINTABLE}){_EXTENSIONS})"
    f",p=(?P<proof>{_BASE64})"
)
_SERVER_FINAL = re.compile(
    f"(?:e=(?P<error>{_VALUE_SAFE})|v=(?P<signature>{_BASE64})){_EXTENSIONS}"
)


def sasl_name(user: str) -> str:
    """Return a user's name as it is encoded in a message."""
    return user.replace("=", "=3D").replace(",", "=2C")


def user_name(name: str) -> str:
    """Return the user's name, decoded from a message."""
    return name.replace("=2C", ",").replace("=3D", "=")


def new_nonce() -> str:
    """Return random characters with 192 bits of entropy."""
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, slots=True, repr=False)
class ClientFirst:
    """The client's first message, which names the user."""

    header: str
    bare: str
    """The part that is signed."""
    user: str
    authorized: str
    """The authorization id; empty for the user itself."""
    nonce: str
    extensions: Mapping[str, str]

    @classmethod
    def of(cls, user: str, nonce: str, extensions: Mapping[str, str] | None = None) -> ClientFirst:
        """Build the message of a client."""
        more = "".join(f",{key}={value}" for key, value in (extensions or {}).items())
        bare = f"n={sasl_name(user)},r={nonce}{more}"
        return cls(GS2_HEADER, bare, user, "", nonce, dict(extensions or {}))

    @classmethod
    def parse(cls, token: bytes) -> ClientFirst:
        """Parse a token. Raises ScramError."""
        message = _parse(_CLIENT_FIRST, token, "the first message of a client")
        pairs = (extension.partition("=") for extension in message["extensions"].split(",")[1:])
        return cls(
            message["header"],
            message["bare"],
            user_name(message["name"]),
            user_name(message["authorized"] or ""),
            message["nonce"],
            {key: value for key, _, value in pairs},
        )

    def encode(self) -> bytes:
        """Return the token."""
        return (self.header + self.bare).encode()


@dataclass(frozen=True, slots=True, repr=False)
class ServerFirst:
    """The broker's first message: salt and iterations of the user's password hash."""

    text: str
    """The message itself, all of which is signed."""
    nonce: str
    """The client's nonce, extended by the broker."""
    salt: bytes
    iterations: int

    @classmethod
    def of(cls, nonce: str, salt: bytes, iterations: int) -> ServerFirst:
        """Build the message of a broker."""
        return cls(f"r={nonce},s={_text(salt)},i={iterations}", nonce, salt, iterations)

    @classmethod
    def parse(cls, token: bytes) -> ServerFirst:
        """Parse a token. Raises ScramError."""
        message = _parse(_SERVER_FIRST, token, "the first message of a broker")
        iterations = int(message["iterations"])
        if iterations == 0:
            raise ScramError("the broker requires no iterations")
        return cls(message[0], message["nonce"], base64.b64decode(message["salt"]), iterations)

    def encode(self) -> bytes:
        """Return the token."""
        return self.text.encode()


@dataclass(frozen=True, slots=True, repr=False)
class ClientFinal:
    """The client's last message, with the proof that the client knows the password."""

    unsigned: str
    """The signed part: the message without its proof."""
    channel_binding: bytes
    """The GS2 header of the first message."""
    nonce: str
    proof: bytes

    @classmethod
    def of(cls, nonce: str, proof: bytes = b"") -> ClientFinal:
        """Build the message of a client; its signed part does not depend on the proof."""
        unsigned = f"c={_text(GS2_HEADER.encode())},r={nonce}"
        return cls(unsigned, GS2_HEADER.encode(), nonce, proof)

    @classmethod
    def parse(cls, token: bytes) -> ClientFinal:
        """Parse a token. Raises ScramError."""
        message = _parse(_CLIENT_FINAL, token, "the last message of a client")
        channel, proof = base64.b64decode(message["channel"]), base64.b64decode(message["proof"])
        return cls(message["unsigned"], channel, message["nonce"], proof)

    def encode(self) -> bytes:
        """Return the token."""
        return f"{self.unsigned},p={_text(self.proof)}".encode()


def server_final(signature: bytes) -> bytes:
    """Return the broker's last token, which contains its signature."""
    return f"v={_text(signature)}".encode()


def parse_server_final(token: bytes) -> bytes:
    """Return the signature in the broker's last token. Raises ScramError, also for a refusal."""
    message = _parse(_SERVER_FINAL, token, "the last message of a broker")
    if message["error"] is not None:
        raise ScramError(f"the broker refuses the login: {message['error'][:100]}")
    return base64.b64decode(message["signature"])


def _parse(pattern: re.Pattern[str], token: bytes, description: str) -> re.Match[str]:
    match = pattern.fullmatch(token.decode(errors="replace"))
    if match is None:
        raise ScramError(f"{description} is not a SCRAM message")
    return match


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


# --- keys ---


def salted_password(
    mechanism: ScramMechanism, password: str, salt: bytes, iterations: int
) -> bytes:
    """Return the salted password; each iteration takes a microsecond, which slows down guessing."""
    return hashlib.pbkdf2_hmac(mechanism.digest, password.encode(), salt, iterations)


def stored_key(mechanism: ScramMechanism, salted: bytes) -> bytes:
    """Return the key that a broker stores to check proofs."""
    return _hash(mechanism, _hmac(mechanism, salted, b"Client Key"))


def server_key(mechanism: ScramMechanism, salted: bytes) -> bytes:
    """Return the key with which a broker proves that it stores the user's credentials."""
    return _hmac(mechanism, salted, b"Server Key")


def signed_text(first: ClientFirst, answer: ServerFirst, final: ClientFinal) -> bytes:
    """Return the AuthMessage, which both sides sign."""
    return f"{first.bare},{answer.text},{final.unsigned}".encode()


def client_proof(mechanism: ScramMechanism, salted: bytes, signed: bytes) -> bytes:
    """Return the proof that the client knows the password."""
    key = _hmac(mechanism, salted, b"Client Key")
    return _xor(key, _hmac(mechanism, _hash(mechanism, key), signed))


def is_proof(mechanism: ScramMechanism, stored: bytes, signed: bytes, proof: bytes) -> bool:
    """Return whether a proof matches the stored key of a password."""
    if len(proof) != mechanism.key_bytes:
        return False
    key = _xor(proof, _hmac(mechanism, stored, signed))
    return hmac.compare_digest(_hash(mechanism, key), stored)


def server_signature(mechanism: ScramMechanism, key: bytes, signed: bytes) -> bytes:
    """Return the broker's signature, which proves that it has the user's server key."""
    return _hmac(mechanism, key, signed)


def _hmac(mechanism: ScramMechanism, key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, mechanism.digest)


def _hash(mechanism: ScramMechanism, data: bytes) -> bytes:
    return hashlib.new(mechanism.digest, data).digest()


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
