"""Passwords as Kafka 3.9 stores them in ZooKeeper; tests/oracle has tests with Kafka's broker."""

from __future__ import annotations

from typing import Any, Final

import pytest

from fencepost.cluster.image import BROKER_RESOURCE, MetadataImage
from fencepost.cluster.records import ConfigRecord
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.zookeeper.broker_store import BrokerStore
from fencepost.coordinator.zookeeper.passwords import (
    DEFAULT_KEY_FACTORY,
    MAX_ITERATIONS,
    Encoder,
    PasswordError,
    Passwords,
)

KEY: Final = "listener.name.safe.ssl.key.password"
ENCODER: Final = Encoder("the secret", DEFAULT_KEY_FACTORY, 128, 4096)


@pytest.mark.parametrize("password", ["", "a", "sixteen letters!", "ä:,=😀", "x" * 5000])
def test_encoded_password_can_be_decoded_only_with_its_secret(password: str) -> None:
    text = ENCODER.encode(password)
    assert ENCODER.decode(text) == password
    assert ENCODER.encode(password) != text, "each has a salt of its own"
    fields = [part.partition(":")[0] for part in text.split(",")]
    assert sorted(fields) == [
        "cipherAlgorithm",
        "encryptedPassword",
        "initializationVector",
        "iterations",
        "keyFactoryAlgorithm",
        "keyLength",
        "passwordLength",
        "salt",
    ]
    with pytest.raises(PasswordError):
        Encoder("another", DEFAULT_KEY_FACTORY, 128, 4096).decode(text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("AES/CBC/PKCS5Padding", "DES/CBC/PKCS5Padding"),
        ("keyLength:128", "keyLength:64"),
        ("keyLength:128", "keyLength:x"),
        ("SHA512", "MD5"),
        ("iterations:4096", "iterations:0"),
        ("iterations:4096", f"iterations:{MAX_ITERATIONS + 1}"),
        ("passwordLength:8", "passwordLength:7"),
        ("salt:", "salt:!"),
        ("encryptedPassword:", "encryptedPassword:AA"),
        ("initializationVector", "vector"),
    ],
)
def test_malformed_encoded_password_is_refused(before: str, after: str) -> None:
    text = ENCODER.encode("password")
    assert before in text
    with pytest.raises(PasswordError):
        ENCODER.decode(text.replace(before, after))


def passwords(**secrets: str) -> Passwords:
    told = {
        f"password.encoder.{name.replace('_', '.')}": secret for name, secret in secrets.items()
    }
    return Passwords(BrokerConfig(told), node_id=1)


def test_broker_encodes_and_decodes_only_its_own_passwords() -> None:
    own = passwords(secret="the secret")
    text = own.encoded("1", KEY, "password")
    values = {KEY: text, "log.cleaner.threads": "2"}
    assert own.plain("1", values) == {**values, KEY: "password"}
    assert own.plain("2", values) == values
    assert passwords().plain("1", values) == {"log.cleaner.threads": "2"}
    assert own.plain("1", {KEY: "in the clear"}) == {}
    with pytest.raises(ConfigError, match="only at broker level"):
        own.encoded("", KEY, "password")
    with pytest.raises(InvalidRequestError, match="Unexpected broker id"):
        own.encoded("2", KEY, "password")
    with pytest.raises(ConfigError, match="Password encoder secret not configured"):
        passwords().encoded("1", KEY, "password")


def test_unsupported_cipher_key_length_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="128, 192 or 256"):
        passwords(secret="the secret", key_length="200")


def test_password_encoded_with_old_secret_is_reencoded_once() -> None:
    text = passwords(secret="old").encoded("1", KEY, "password")
    both = passwords(secret="new", old_secret="old")
    anew = both.reencoded({KEY: text, "log.cleaner.threads": "2"})
    assert both.plain("1", anew) == {KEY: "password"}
    assert both.reencoded(anew) == {}
    assert passwords(secret="new").reencoded({KEY: text}) == {}


def test_config_change_encodes_only_new_passwords() -> None:
    """Every change of a broker's settings includes the stored passwords (KAFKA-14136)."""
    nobody: Any = None  # this test does not write
    own = BrokerStore(
        BrokerConfig({}), nobody, MetadataImage(), passwords(secret="the secret"), nobody, node_id=1
    )
    own.append([ConfigRecord(BROKER_RESOURCE, "1", KEY, "password")])
    kept = own.settings("1")[KEY]
    assert ENCODER.decode(kept) == "password"
    more = ConfigRecord(BROKER_RESOURCE, "1", "log.cleaner.threads", "2")
    own.append([ConfigRecord(BROKER_RESOURCE, "1", KEY, kept), more])
    assert own.settings("1") == {KEY: kept, "log.cleaner.threads": "2"}
    assert own.plain_settings("1")[KEY] == "password"
    own.append([ConfigRecord(BROKER_RESOURCE, "1", KEY, "another")])
    assert own.plain_settings("1")[KEY] == "another"
