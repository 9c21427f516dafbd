"""Passwords among a broker's settings in ZooKeeper, encoded as Kafka 3.9 does.

Each password is encrypted with a key derived from ``password.encoder.secret`` and a random salt.
The stored form contains all parameters of the decryption except the secret. A broker decodes only
its own passwords.

Source: ``EncryptingPasswordEncoder``, ``CbcParamsEncoder``, ``Csv``,
``DynamicBrokerConfig.toPersistentProps``, ``fromPersistentProps``, ``maybeReEncodePasswords``.
"""

from __future__ import annotations

import binascii
import hashlib
import re
import secrets
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Final

import structlog

from fencepost.coordinator.config.broker_config import BrokerConfig, is_password
from fencepost.coordinator.config.key import HIDDEN, ConfigError
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.metadata.metadata import DEFAULT_SETTINGS

_log = structlog.get_logger(__name__)

SECRET, OLD_SECRET = "password.encoder.secret", "password.encoder.old.secret"

DEFAULT_KEY_FACTORY: Final = "PBKDF2WithHmacSHA512"
_KEY_FACTORY: Final = re.compile(r"PBKDF2WithHmac(SHA(?:1|224|256|384|512))")
CIPHER: Final = "AES/CBC/PKCS5Padding"
KEY_LENGTH: Final = "password.encoder.key.length"
_KEY_BITS: Final = frozenset({128, 192, 256})
_SALT_BYTES, _BLOCK_BYTES = 256, 16

MAX_ITERATIONS: Final = 1_000_000
"""The maximum number of accepted iterations; more would block the broker for over a second."""


class PasswordError(ValueError):
    """A password cannot be decoded. The message contains no secret."""


class Encoder:
    """Encodes with one secret. Raises ConfigError if the package ``cryptography`` is missing."""

    def __init__(
        self, secret: str, key_factory: str, key_bits: int, iterations: int, cipher: str = CIPHER
    ) -> None:
        try:
            import cryptography.hazmat.primitives.ciphers  # noqa: F401, PLC0415 - asks whether it is there
        except ImportError:
            reason = "it needs cryptography: pip install '.[zookeeper]' in a clone of Fencepost"
            raise ConfigError(SECRET, HIDDEN, reason) from None
        self._secret, self._key_factory = secret, key_factory
        self._key_bits, self._iterations, self._cipher = key_bits, iterations, cipher

    def encode(self, password: str) -> str:
        """Return the stored form of a password."""
        salt, vector = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_BLOCK_BYTES)
        key = self._key(self._key_factory, salt, self._iterations, self._key_bits)
        text = password.encode()
        left = _BLOCK_BYTES - len(text) % _BLOCK_BYTES
        encrypted = _encrypted(key, vector, text + bytes([left]) * left)
        fields = {
            "keyFactoryAlgorithm": self._key_factory,
            "cipherAlgorithm": self._cipher,
            "keyLength": self._key_bits,
            "salt": b64encode(salt).decode(),
            "initializationVector": b64encode(vector).decode(),
            "encryptedPassword": b64encode(encrypted).decode(),
            "passwordLength": _length(password),
            "iterations": self._iterations,
        }
        return ",".join(f"{name}:{value}" for name, value in fields.items())

    def decode(self, text: str) -> str:
        """Return the password. Raises PasswordError."""
        fields = dict(field.strip().rpartition(":")[::2] for field in text.split(","))
        try:
            if fields["cipherAlgorithm"] != CIPHER:
                raise PasswordError(f"it is not encrypted by {CIPHER}")
            iterations, bits = int(fields["iterations"]), int(fields["keyLength"])
            salt, vector, encrypted = (
                b64decode(fields[name], validate=True)
                for name in ("salt", "initializationVector", "encryptedPassword")
            )
            if not 0 < iterations <= MAX_ITERATIONS or bits not in _KEY_BITS:
                raise PasswordError("its iterations or key length are invalid")
            if len(vector) != _BLOCK_BYTES or not encrypted or len(encrypted) % _BLOCK_BYTES:
                raise PasswordError("it is cut off")
            key = self._key(fields["keyFactoryAlgorithm"], salt, iterations, bits)
            password = _unpadded(_decrypted(key, vector, encrypted)).decode()
            if _length(password) != int(fields["passwordLength"]):
                raise PasswordError("it was encoded with another secret")
        except KeyError as error:
            raise PasswordError(f"it is not encoded: {error.args[0]} is missing") from None
        except UnicodeDecodeError:
            raise PasswordError("it was encoded with another secret") from None
        except (binascii.Error, ValueError) as error:
            if isinstance(error, PasswordError):
                raise
            raise PasswordError("it is not encoded in Kafka's format") from None
        return password

    def _key(self, key_factory: str, salt: bytes, iterations: int, bits: int) -> bytes:
        match = _KEY_FACTORY.fullmatch(key_factory)
        if match is None:
            raise PasswordError(f"no key is derived by {key_factory[:40]!r}")
        return hashlib.pbkdf2_hmac(
            match[1].lower(), self._secret.encode(), salt, iterations, bits // 8
        )


def _encrypted(key: bytes, vector: bytes, text: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # noqa: PLC0415 - few need it

    encryptor = Cipher(algorithms.AES(key), modes.CBC(vector)).encryptor()
    return bytes(encryptor.update(text) + encryptor.finalize())


def _decrypted(key: bytes, vector: bytes, encrypted: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # noqa: PLC0415 - few need it

    decryptor = Cipher(algorithms.AES(key), modes.CBC(vector)).decryptor()
    return bytes(decryptor.update(encrypted) + decryptor.finalize())


def _unpadded(text: bytes) -> bytes:
    count = text[-1]
    if not 0 < count <= _BLOCK_BYTES or text[-count:] != bytes([count]) * count:
        raise PasswordError("it was encoded with another secret")
    return text[:-count]


def _length(text: str) -> int:
    """Return the length in UTF-16 code units, as Java counts."""
    return len(text.encode("utf-16-le")) // 2


class Passwords:
    """The passwords of one broker. Raises ConfigError."""

    def __init__(self, config: BrokerConfig, *, node_id: int) -> None:
        self._node_id = str(node_id)
        self._encoder, self._former = (_encoder_of(config, key) for key in (SECRET, OLD_SECRET))

    def encoded(self, broker: str, name: str, value: str) -> str:
        """Return the stored form of a password setting.

        Raises ConfigError for a dynamic default of all brokers or if there is no secret, and
        InvalidRequestError for the password of another broker.
        """
        if broker == DEFAULT_SETTINGS:
            reason = "Password config can be defined only at broker level"
            raise ConfigError(name, HIDDEN, reason)
        if broker != self._node_id:
            raise InvalidRequestError(
                f"Unexpected broker id, expected {self._node_id} or empty string, but received"
                f" {broker}"
            )
        if self._encoder is None:
            raise ConfigError(name, HIDDEN, "Password encoder secret not configured")
        return self._encoder.encode(value)

    def plain(self, broker: str, values: Mapping[str, str]) -> Mapping[str, str]:
        """Return settings with decoded passwords, without those that cannot be decoded."""
        if broker != self._node_id or not any(map(is_password, values)):
            return values
        decoded = {}
        for name, value in values.items():
            if not is_password(name):
                decoded[name] = value
                continue
            if self._encoder is None:
                cause = f"{SECRET} is not set"
                _log.error("password in ZooKeeper skipped", setting=name, cause=cause)
                continue
            try:
                decoded[name] = self._encoder.decode(value)
            except PasswordError as error:
                _log.error("password in ZooKeeper skipped", setting=name, cause=str(error))
        return decoded

    def reencoded(self, values: Mapping[str, str]) -> dict[str, str]:
        """Re-encode and return this broker's passwords that were encoded with the old secret."""
        encoded: dict[str, str] = {}
        if self._encoder is None or self._former is None:
            return encoded
        for name, value in values.items():
            if is_password(name):
                try:
                    encoded[name] = self._encoder.encode(self._former.decode(value))
                except PasswordError:
                    continue  # the password is already encoded with the new secret
        return encoded


def _encoder_of(config: BrokerConfig, key: str) -> Encoder | None:
    secret = config.text(key)
    if secret is None:
        return None
    bits = config.int(KEY_LENGTH)
    if bits not in _KEY_BITS:
        raise ConfigError(KEY_LENGTH, bits, "an AES key has 128, 192 or 256 bits")
    return Encoder(
        secret,
        config.text("password.encoder.keyfactory.algorithm") or DEFAULT_KEY_FACTORY,
        bits,
        config.int("password.encoder.iterations"),
        config.text("password.encoder.cipher.algorithm") or CIPHER,  # the only supported cipher
    )
