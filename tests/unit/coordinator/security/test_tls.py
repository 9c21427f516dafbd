"""A listener's TLS context, from Kafka's settings and files, and its replacement at run time."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from fencepost.coordinator.config.broker_config import BrokerConfig, ConfigSource
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listener_config import ListenerConfig, SecurityProtocol
from fencepost.coordinator.daemon.certificates import ListenerCertificates
from fencepost.coordinator.security.cipher_suites import openssl_name
from fencepost.coordinator.security.principal import ANONYMOUS, Principal
from fencepost.coordinator.security.tls import (
    MAX_STORE_BYTES,
    ListenerTls,
    LoadedTls,
    load,
    tls_settings,
)
from fencepost.logcore.clock import SystemClock
from tests.support.certificates import KEY_PASSWORD, Authority, subject, trust_settings

SSL = ListenerConfig("SSL", protocol=SecurityProtocol.SSL)
SASL_SSL = ListenerConfig("IN", protocol=SecurityProtocol.SASL_SSL)
GIVEN = {"ssl.keystore.location": "/k"}
SECRET = "hunter2"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def loaded(settings: dict[str, str], listener: ListenerConfig = SSL) -> LoadedTls:
    return load(tls_settings(BrokerConfig(settings), listener))


def refused(settings: dict[str, str], listener: ListenerConfig = SSL) -> ConfigError:
    with pytest.raises(ConfigError) as found:
        loaded(settings, listener)
    assert SECRET not in str(found.value)
    return found.value


# --- values of settings ---


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        ({}, "ssl.keystore.location", "needs a certificate"),
        ({"ssl.keystore.type": "JKS", "ssl.keystore.location": "/x.jks"}, "ssl.keystore.type", "?"),
        (GIVEN | {"ssl.truststore.type": "PKCS12"}, "ssl.truststore.type", "openssl pkcs12 -in"),
        (GIVEN | {"ssl.keystore.password": SECRET}, "ssl.keystore.password", "with PEM format"),
        (GIVEN | {"ssl.truststore.password": SECRET}, "ssl.truststore.password", "PEM format"),
        ({"ssl.keystore.key": SECRET}, "ssl.keystore.key", "certificate chain is not specified"),
        (
            {"ssl.keystore.certificate.chain": SECRET},
            "ssl.keystore.certificate.chain",
            "private key is not specified",
        ),
        (
            GIVEN | {"ssl.keystore.key": SECRET, "ssl.keystore.certificate.chain": "c"},
            "ssl.keystore.location",
            "Both SSL key store location and separate private key are specified",
        ),
        (
            GIVEN | {"ssl.truststore.location": "/t", "ssl.truststore.certificates": SECRET},
            "ssl.truststore.location",
            "Both SSL trust store location and separate trust certificates are specified",
        ),
        (
            GIVEN | {"ssl.client.auth": "required"},
            "ssl.truststore.location",
            "without trusted certificates",
        ),
        (
            GIVEN | {"ssl.client.auth": "requested"},
            "ssl.truststore.location",
            "without trusted certificates",
        ),
        (GIVEN | {"ssl.protocol": "SSLv3"}, "ssl.protocol", "TLSv1.2, TLSv1.3, TLS"),
        (
            GIVEN | {"ssl.protocol": "TLSv1.2", "ssl.enabled.protocols": "TLSv1.3"},
            "ssl.enabled.protocols",
            "excludes all of them",
        ),
        (
            GIVEN | {"ssl.principal.mapping.rules": "default"},
            "ssl.principal.mapping.rules",
            "Invalid rule",
        ),
    ],
)
def test_invalid_tls_settings_are_refused_with_key_and_reason(
    settings: dict[str, str], key: str, reason: str
) -> None:
    error = refused(settings)
    assert error.key == key
    if reason == "?":
        reason = "keytool -importkeystore -srckeystore /x.jks"
    assert reason in str(error)


def test_sasl_ssl_listener_ignores_shared_client_auth_setting(authority: Authority) -> None:
    shared = {**GIVEN, **trust_settings(authority), "ssl.client.auth": "required"}
    assert tls_settings(BrokerConfig(shared), SSL).client_auth == "required"
    assert tls_settings(BrokerConfig(shared), SASL_SSL).client_auth == "none"
    own = {**shared, "listener.name.in.ssl.client.auth": "requested"}
    assert tls_settings(BrokerConfig(own), SASL_SSL).client_auth == "requested"


def test_tls_settings_repr_does_not_reveal_secrets() -> None:
    inline = {
        "ssl.keystore.key": SECRET,
        "ssl.keystore.certificate.chain": SECRET,
        "ssl.key.password": SECRET,
    }
    assert SECRET not in repr(tls_settings(BrokerConfig(inline), SSL))


# --- contents of files ---


def test_inline_key_and_certificates_equal_those_of_files(authority: Authority) -> None:
    server = authority.server()
    trust = trust_settings(authority)
    by_file = loaded({**server.keystore, **trust})
    inline = {
        "ssl.keystore.key": server.key.rstrip(),
        "ssl.keystore.certificate.chain": f"some words\n{server.chain.rstrip()}",
        "ssl.truststore.certificates": f"words before it\n{authority.pem}",
    }
    by_text = loaded(inline)
    assert by_file.certificate == by_text.certificate
    assert len(by_file.stamps) == 2
    assert by_text.stamps == ()
    context = by_text.context
    assert context.verify_mode is ssl.CERT_NONE
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.maximum_version is ssl.TLSVersion.TLSv1_3
    assert context.num_tickets == 0


def test_encrypted_key_with_wrong_or_no_password_is_refused(authority: Authority) -> None:
    server = authority.server("hidden", password=KEY_PASSWORD)
    assert loaded(dict(server.keystore)).certificate.subject.startswith("CN=hidden,")
    assert "ssl.key.password is wrong" in str(
        refused({**server.keystore, "ssl.key.password": SECRET})
    )
    without = {"ssl.keystore.location": str(server.file)}
    assert "encrypted, and ssl.key.password is not set" in str(refused(without))


def test_unusable_store_file_is_refused_with_its_reason(
    authority: Authority, tmp_path: Path
) -> None:
    server, other = authority.server(), authority.server("other")
    cases = {
        "it can't be read: No such file": None,
        "Private key not provided": server.chain.encode(),
        "Expected one private key, but found 2": (server.key * 2 + server.chain).encode(),
        "At least one certificate expected": server.key.encode(),
        "does not belong to the first certificate": (other.key + server.chain).encode(),
        f"longer than {MAX_STORE_BYTES} bytes": bytes(MAX_STORE_BYTES + 1),
        "only PEM is supported; this converts it: keytool": b"\xfe\xed\xfe\xed\0\0\0\2",
        "only PEM is supported; this converts it: openssl": b"\x30\x82\x01\x00\x02\x01\x03",
        "can't be read": (server.key + server.chain.replace("MI", "!!", 1)).encode(),
    }
    path = tmp_path / "store"
    for reason, content in cases.items():
        if content is not None:
            path.write_bytes(content)
        error = refused({"ssl.keystore.location": str(path)})
        assert error.key == "ssl.keystore.location"
        assert reason in str(error), reason
        assert "PRIVATE KEY-----" not in str(error)
    path.write_bytes(bytes(MAX_STORE_BYTES - len(server.file.read_bytes())))
    with path.open("ab") as file:
        file.write(server.file.read_bytes())
    loaded({"ssl.keystore.location": str(path)})
    for content in (b"", b"nothing in PEM"):
        path.write_bytes(content)
        error = refused({**server.keystore, "ssl.truststore.location": str(path)})
        assert error.key == "ssl.truststore.location"


def test_suggested_command_converts_pkcs12_store_to_usable_pem(
    authority: Authority, tmp_path: Path
) -> None:
    server = authority.server()
    store = tmp_path / "keys.p12"
    made = f"openssl pkcs12 -export -in {server.file} -out {store} -passout pass:abcdef"
    subprocess.run(made.split(), check=True, capture_output=True)
    error = str(refused({"ssl.keystore.location": str(store)}))
    line = error.partition("this converts it: ")[2]
    assert line == f"openssl pkcs12 -in {store} -nodes -out {store}.pem"
    subprocess.run([*line.split(), "-passin", "pass:abcdef"], check=True, capture_output=True)
    found = loaded({"ssl.keystore.location": f"{store}.pem"})
    assert found.certificate.subject.startswith("CN=server,")


# --- versions and suites ---


@pytest.mark.parametrize(
    ("settings", "lowest", "highest"),
    [
        ({}, "TLSv1_2", "TLSv1_3"),
        ({"ssl.protocol": "TLS"}, "TLSv1_2", "TLSv1_3"),
        ({"ssl.protocol": "TLSv1.2"}, "TLSv1_2", "TLSv1_2"),
        ({"ssl.enabled.protocols": "TLSv1.3"}, "TLSv1_3", "TLSv1_3"),
        ({"ssl.cipher.suites": "TLS_AES_256_GCM_SHA384"}, "TLSv1_3", "TLSv1_3"),
        (
            {"ssl.cipher.suites": "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"},
            "TLSv1_2",
            "TLSv1_2",
        ),
        (
            {"ssl.cipher.suites": "TLS_AES_256_GCM_SHA384,ECDHE-ECDSA-AES256-GCM-SHA384"},
            "TLSv1_2",
            "TLSv1_3",
        ),
    ],
)
def test_protocol_and_cipher_suite_settings_determine_tls_versions(
    authority: Authority, settings: dict[str, str], lowest: str, highest: str
) -> None:
    context = loaded({**authority.server().keystore, **settings}).context
    assert context.minimum_version is ssl.TLSVersion[lowest]
    assert context.maximum_version is ssl.TLSVersion[highest]


@pytest.mark.parametrize(
    ("suites", "reason"),
    [
        ("TLS_NO_WITH_SUCH_SUITE", "OpenSSL does not support the cipher suite"),
        (
            "ECDHE-ECDSA-AES256-GCM-SHA384,nonsense",
            "OpenSSL does not support the cipher suite nonsense",
        ),
        ("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "no client can complete a handshake with it"),
    ],
)
def test_unusable_cipher_suites_are_refused(authority: Authority, suites: str, reason: str) -> None:
    # The private key is for ECDSA, so with an RSA suite every client would fail.
    settings = {**authority.server().keystore, "ssl.cipher.suites": suites}
    assert reason in str(refused(settings))
    only_newer = {"ssl.enabled.protocols": "TLSv1.3", "ssl.cipher.suites": suites}
    if "RSA" in suites:
        assert "none of them can be used with TLSv1.3" in str(refused({**settings, **only_newer}))


def test_iana_cipher_suite_names_map_to_openssl_names() -> None:
    known = {
        str(cipher["name"]) for cipher in ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).get_ciphers()
    }
    registered = (
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
        "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
        "TLS_DHE_RSA_WITH_AES_128_GCM_SHA256",
    )
    assert [openssl_name(name) for name in registered if openssl_name(name) not in known] == []
    assert openssl_name("TLS_RSA_WITH_AES_128_GCM_SHA256") == "AES128-GCM-SHA256"


# --- replacements ---


def test_renewed_certificate_with_other_names_or_dates_is_refused(authority: Authority) -> None:
    now_s = time.time()
    before = ListenerTls(loaded(dict(authority.server("a", subject_name=subject("a")).keystore)))

    def told(found: LoadedTls) -> str:
        try:
            before.check(found, now_s)
        except ConfigError as error:
            return str(error)
        return ""

    same = {"subject_name": subject("a")}
    assert told(loaded(dict(authority.server("b", **same).keystore))) == ""
    other = dict(authority.server("c").keystore)
    assert "Keystore DistinguishedName does not match" in told(loaded(other))
    assert told(loaded({**other, "ssl.allow.dn.changes": "true"})) == ""
    fewer = dict(authority.server("d", hosts=["localhost"], **same).keystore)
    assert "Keystore SubjectAltNames do not match" in told(loaded(fewer))
    assert told(loaded({**fewer, "ssl.allow.san.changes": "true"})) == ""
    more = authority.server("e", hosts=["localhost", "127.0.0.1", "::1", "x.example"], **same)
    assert told(loaded(dict(more.keystore))) == ""
    expired = authority.server("f", valid=(-3, -1), **same)
    assert "the certificate has expired" in told(loaded(dict(expired.keystore)))
    future = authority.server("g", valid=(1, 3), **same)
    assert "the certificate is not valid yet" in told(loaded(dict(future.keystore)))
    trust = {**authority.server("h", **same).keystore, **trust_settings(authority)}
    assert "Cannot add SSL truststore" in told(loaded(trust))


def test_client_certificate_subject_is_mapped_to_principal(authority: Authority) -> None:
    rules = "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/L"
    keystore = dict(authority.server().keystore)
    tls = ListenerTls(loaded({**keystore, "ssl.principal.mapping.rules": rules}))
    alice = ssl.PEM_cert_to_DER_cert(authority.client("Alice").chain)
    stranger = ssl.PEM_cert_to_DER_cert(authority.pem)
    assert tls.principal_of(None) is ANONYMOUS
    assert tls.principal_of(alice) == Principal("User", "alice")
    assert tls.principal_of(stranger) is None
    assert tls.principal_of(b"") is None
    default = ListenerTls(loaded(keystore)).principal_of(alice)
    assert default == Principal("User", "CN=Alice,OU=ServiceUsers,O=Acme\\, Inc.,C=DE")


# --- changes requested while the broker runs ---


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ssl.keystore.location": "nowhere\0else"}, "it can't be read"),
        ({"ssl.keystore.location": "/dev/stdin/x"}, "it can't be read"),
        ({"ssl.keystore.location": "PIPE"}, "it is not a file"),
        ({"ssl.keystore.location": "/dev/tty"}, "it is not a file"),
        ({"ssl.truststore.location": "PIPE"}, "it is not a file"),
        ({"ssl.keystore.location": "LOCKED", "ssl.key.password": "x" * 5_000}, "is wrong"),
    ],
)
async def test_reconfiguration_with_unusable_store_is_refused_with_a_reason(
    authority: Authority, tmp_path: Path, settings: dict[str, str], reason: str
) -> None:
    os.mkfifo(tmp_path / "PIPE")
    locked = authority.server("locked", password=KEY_PASSWORD).file
    named = {"PIPE": str(tmp_path / "PIPE"), "LOCKED": str(locked)}
    before = BrokerConfig({**authority.server("broker").keystore, **trust_settings(authority)})
    found = ListenerCertificates(before, [SSL], SystemClock())
    await found.load()
    asked = {f"listener.name.ssl.{key}": named.get(value, value) for key, value in settings.items()}
    async with asyncio.timeout(20):
        refusal = await found.check(before.proposed(ConfigSource.DYNAMIC_BROKER, asked))
        await found.stop()
    assert refusal is not None
    assert reason in str(refusal)
