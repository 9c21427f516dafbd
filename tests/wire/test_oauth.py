"""OAUTHBEARER logins of librdkafka, aiokafka, kafka-python and Fencepost's own client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import jwt
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.abc import AbstractTokenProvider
from confluent_kafka import KafkaError, Producer
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm
from kafka import KafkaProducer
from kafka.net.sasl.oauth import AbstractTokenProvider as OtherTokenProvider

from fencepost.client.client import WireClient
from fencepost.client.security import Security
from fencepost.coordinator.daemon.broker import Broker

KEY = rsa.generate_private_key(65_537, 2_048)
STRANGER = rsa.generate_private_key(65_537, 2_048)
MODULE = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("issuer") / "keys.json"
    key = RSAAlgorithm.to_jwk(KEY.public_key(), as_dict=True)
    path.write_text(json.dumps({"keys": [key | {"kid": "one", "alg": "RS256"}]}))
    return path.as_uri()


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory, keys: str) -> Iterator[str]:
    config = {
        "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
        "sasl.enabled.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.jwks.endpoint.url": keys,
        "sasl.oauthbearer.expected.audience": "fencepost",
        "sasl.oauthbearer.allow.unverified.issuer": "true",
        "connection.failed.authentication.delay.ms": "0",
    }
    with Broker.in_thread(tmp_path_factory.mktemp("broker"), config=config) as broker:
        yield broker.bootstrap


def token(key: rsa.RSAPrivateKey = KEY, lifetime_s: float = 600) -> str:
    now = int(time.time())
    claims = {"sub": "alice", "aud": "fencepost", "iat": now - 1, "exp": now + lifetime_s}
    return jwt.encode(claims, key, "RS256", headers={"kid": "one"})


def librdkafka(bootstrap: str, key: rsa.RSAPrivateKey = KEY, **more: object) -> dict[str, object]:
    return {
        "bootstrap.servers": bootstrap,
        "security.protocol": "sasl_plaintext",
        "sasl.mechanisms": "OAUTHBEARER",
        "oauth_cb": lambda _: (token(key), time.time() + 600),
        "log_level": 0,
        **more,
    }


def sent(settings: dict[str, object]) -> list[KafkaError | None]:
    told: list[KafkaError | None] = []
    producer = Producer(settings)
    producer.produce("orders", b"x", on_delivery=lambda error, _: told.append(error))
    producer.flush(20)
    return told


def test_librdkafka_logs_in_with_a_token(bootstrap: str) -> None:
    assert sent(librdkafka(bootstrap)) == [None]


@pytest.mark.slow
def test_token_with_a_foreign_signature_is_refused(bootstrap: str) -> None:
    heard: list[KafkaError] = []
    (error,) = sent(
        librdkafka(bootstrap, STRANGER, error_cb=heard.append, **{"message.timeout.ms": 2_000})
    )
    assert error is not None
    assert any("invalid_token" in report.str() for report in heard), heard


def test_kafka_python_logs_in_with_a_token(bootstrap: str) -> None:
    class Provider(OtherTokenProvider):
        def token(self) -> str:
            return token()

    producer = KafkaProducer(
        bootstrap_servers=bootstrap,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_provider=Provider(),
    )
    assert producer.send("orders", b"x").get(20).topic == "orders"
    producer.close()


async def test_aiokafka_logs_in_with_a_token(bootstrap: str) -> None:
    class Provider(AbstractTokenProvider):
        async def token(self) -> str:
            return token()

    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_provider=Provider(),
    ) as producer:
        assert (await producer.send_and_wait("orders", b"x")).topic == "orders"


def test_fencepost_client_logs_in_with_a_token_file(bootstrap: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(token())
    settings = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "fencepost.oauthbearer.token.file": str(path),
    }
    with WireClient(bootstrap, security=Security.of(settings)) as client:
        assert client.metadata().brokers


@pytest.mark.slow
def test_unsecured_token_is_accepted_only_with_the_required_scope(tmp_path: Path) -> None:
    config = {
        "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
        "sasl.enabled.mechanisms": "OAUTHBEARER",
        "listener.name.sasl_plaintext.oauthbearer.sasl.jaas.config": (
            f'{MODULE} required unsecuredValidatorRequiredScope="kafka";'
        ),
    }
    with Broker.in_thread(tmp_path, config=config) as broker:
        settings = librdkafka(broker.bootstrap)
        del settings["oauth_cb"]
        settings["enable.sasl.oauthbearer.unsecure.jwt"] = True
        allowed = {"sasl.oauthbearer.config": "principal=alice scope=kafka"}
        assert sent(settings | allowed) == [None]
        heard: list[KafkaError] = []
        other = {"sasl.oauthbearer.config": "principal=alice scope=other"}
        bound = {"error_cb": heard.append, "message.timeout.ms": 2_000}
        (error,) = sent(settings | other | bound)
        assert error is not None
        assert any("insufficient_scope" in report.str() for report in heard), heard
