"""A broker's connection to ZooKeeper: settings, refused settings, and the login."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.zookeeper.connection import ZooKeeperConfig, is_sensitive
from fencepost.coordinator.zookeeper.digest_md5 import DigestError, DigestMd5
from tests.support.certificates import Authority

NETTY = "org.apache.zookeeper.ClientCnxnSocketNetty"
MODULE = "org.apache.zookeeper.server.auth.DigestLoginModule"
JAAS = "fencepost.zookeeper.jaas.config"
TLS = {"zookeeper.ssl.client.enable": "true", "zookeeper.clientCnxnSocket": NETTY}


def reach(**settings: str) -> ZooKeeperConfig:
    return ZooKeeperConfig.of(BrokerConfig({"zookeeper.connect": "a:1,b:2/x", **settings}))


def test_zookeeper_settings_default_to_those_of_kafka():
    found = reach()
    assert (found.connect, found.tls, found.login, found.sets_acls) == (
        "a:1,b:2/x",
        None,
        None,
        False,
    )
    assert (found.timeout_ms, found.connection_timeout_ms, found.max_in_flight) == (
        18_000,
        18_000,
        10,
    )


def test_connection_timeout_defaults_to_the_session_timeout():
    assert reach(**{"zookeeper.session.timeout.ms": "7000"}).connection_timeout_ms == 7000
    assert reach(**{"zookeeper.connection.timeout.ms": "5"}).connection_timeout_ms == 5


def test_jaas_config_sets_user_and_password_of_the_login():
    found = reach(**{JAAS: f'{MODULE} required username="a b" password="se\\"cret";'})
    assert found.login == ("a b", 'se"cret')
    assert "cret" not in repr(found)


def test_tls_settings_determine_protocols_ciphers_and_hostname_check(tmp_path: Path):
    authority = Authority(tmp_path)
    files = {
        "zookeeper.ssl.truststore.location": str(authority.truststore),
        "zookeeper.ssl.keystore.location": str(authority.client("broker").file),
    }
    found = reach(**TLS, **files, **{"zookeeper.set.acl": "true"})
    assert found.tls is not None
    assert found.sets_acls, "the certificate says who writes"
    context = found.tls._newest()  # type: ignore[attr-defined]
    assert context.maximum_version == ssl.TLSVersion.TLSv1_2
    assert context.check_hostname
    more = {
        "zookeeper.ssl.enabled.protocols": "TLSv1.2,TLSv1.3",
        "zookeeper.ssl.endpoint.identification.algorithm": "",
        "zookeeper.ssl.cipher.suites": "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    }
    tls = reach(**TLS, **files, **more).tls
    assert tls is not None
    context = tls._newest()  # type: ignore[attr-defined]
    assert context.maximum_version == ssl.TLSVersion.TLSv1_3
    assert not context.check_hostname
    assert "ECDHE-ECDSA-AES128-GCM-SHA256" in {cipher["name"] for cipher in context.get_ciphers()}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"zookeeper.ssl.crl.enable": "true"}, "zookeeper.ssl.crl.enable"),
        ({"zookeeper.ssl.ocsp.enable": "true"}, "zookeeper.ssl.ocsp.enable"),
        ({"zookeeper.metadata.migration.enable": "true"}, "zookeeper.metadata.migration.enable"),
        ({"zookeeper.ssl.client.enable": "true"}, "zookeeper.clientCnxnSocket"),
        ({"zookeeper.set.acl": "true"}, "zookeeper.set.acl"),
        ({**TLS, "zookeeper.set.acl": "true"}, "zookeeper.set.acl"),
        ({**TLS, "zookeeper.ssl.truststore.type": "JKS"}, "zookeeper.ssl.truststore.type"),
        ({**TLS, "zookeeper.ssl.keystore.location": "/no"}, "zookeeper.ssl.keystore.location"),
        ({**TLS, "zookeeper.ssl.truststore.password": "x"}, "zookeeper.ssl.truststore.password"),
        (
            {**TLS, "zookeeper.ssl.endpoint.identification.algorithm": "x"},
            "zookeeper.ssl.endpoint.identification.algorithm",
        ),
        ({**TLS, "zookeeper.ssl.cipher.suites": "NONE"}, "zookeeper.ssl.cipher.suites"),
        ({JAAS: "secret"}, JAAS),
        ({JAAS: f'{MODULE} required username="secret";'}, JAAS),
        ({JAAS: 'com.sun.security.auth.module.Krb5LoginModule required a="secret";'}, JAAS),
    ],
)
def test_unsupported_zookeeper_setting_is_a_config_error_with_its_key(
    settings: dict[str, str], key: str
):
    with pytest.raises(ConfigError) as caught:
        reach(**settings)
    assert caught.value.key == key
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zookeeper.max.in.flight.requests", "0"),
        ("zookeeper.session.timeout.ms", "0"),
        ("zookeeper.connection.timeout.ms", "soon"),
        ("zookeeper.ssl.protocol", "SSLv3"),
        ("zookeeper.ssl.enabled.protocols", "TLSv1.1"),
        ("zookeeper.sync.time.ms", "2000"),
    ],
)
def test_invalid_zookeeper_setting_value_is_a_config_error(key: str, value: str):
    with pytest.raises(ConfigError, match=key):
        BrokerConfig({key: value})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/config/users", True),
        ("/config/users/a", True),
        ("/config/brokers/<default>", True),
        ("/config/topics/users", False),
        ("/brokers/ids/1", False),
    ],
)
def test_only_user_and_broker_config_paths_are_sensitive(path: str, expected: bool):
    assert is_sensitive(path) is expected


# --- the login ---

CHALLENGE = (
    b'realm="elwood.innosoft.com",nonce="OA6MG9tEQGm2hh",qop="auth",algorithm=md5-sess,'
    b"charset=utf-8"
)


def example() -> DigestMd5:
    """Return the example of RFC 2831, section 4."""
    return DigestMd5("chris", "secret", uri="imap/elwood.innosoft.com", cnonce="OA6MHXh6VqTrRk")


def test_digest_md5_response_equals_the_example_of_rfc_2831():
    login = example()
    answer = login.answer(CHALLENGE)
    assert b"response=d388dad90d4bbd760a152321f2143af7" in answer
    assert b'username="chris"' in answer
    assert b"secret" not in answer
    login.check(b"rspauth=ea40f60335c427b5527b84dbabcdfffd")


@pytest.mark.parametrize(
    "last", [b"", b"rspauth=", b"rspauth=ea40f60335c427b5527b84dbabcdfffe", b"\xff"]
)
def test_digest_md5_server_with_wrong_proof_is_refused(last: bytes):
    login = example()
    login.answer(CHALLENGE)
    with pytest.raises(DigestError):
        login.check(last)
    with pytest.raises(DigestError):
        example().check(last)


@pytest.mark.parametrize(
    "challenge",
    [
        b"",
        b"\xff",
        b"nonce",
        CHALLENGE.replace(b"md5-sess", b"md5"),
        CHALLENGE.replace(b'qop="auth"', b'qop="auth-conf"'),
        CHALLENGE.replace(b'nonce="OA6MG9tEQGm2hh"', b'nonce=""'),
    ],
)
def test_malformed_digest_md5_challenge_is_refused(challenge: bytes):
    with pytest.raises(DigestError):
        example().answer(challenge)
