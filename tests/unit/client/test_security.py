"""Client settings with Kafka's keys, and the resulting TLS contexts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import pickle
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from kio.schema.errors import ErrorCode

from fencepost.client.client import (
    ApiError,
    AsyncWireClient,
    AuthenticationError,
    BrokerUnreachable,
    WireClient,
)
from fencepost.client.login import MAX_ITERATIONS, _dialogue
from fencepost.client.security import (
    PLAINTEXT,
    SECRETS,
    Security,
    SecurityError,
)
from fencepost.client.tls import ssl_context
from fencepost.client.tokens import TOKEN_KEY, TokenError, token_source
from fencepost.cluster.acl import Operation
from fencepost.protocol.scram import (
    SCRAM_SHA_256,
    ClientFinal,
    ClientFirst,
    ScramError,
    ServerFirst,
    salted_password,
    server_final,
    server_key,
    server_signature,
    signed_text,
)
from tests.support.certificates import Authority, replace
from tests.support.cluster import Cluster
from tests.support.guarded import ADMIN, Guarded, topic

SECRET = "hunter2-;='\"\\"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"


def scram(**more: str) -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "alice",
        "sasl.password": SECRET,
        **more,
    }


class TestSettings:
    def test_settings_without_security_protocol_are_plaintext(self) -> None:
        assert Security.of({"bootstrap.servers": "a:1"}) == PLAINTEXT
        assert ssl_context(PLAINTEXT) is None

    def test_jaas_config_equals_username_and_password(self) -> None:
        quoted = SECRET.replace("\\", "\\\\").replace('"', '\\"')
        by_jaas = Security.of(
            {
                "security.protocol": "sasl_plaintext",
                "sasl.mechanism": "SCRAM-SHA-512",
                "sasl.jaas.config": f'{SCRAM} required username="alice" password="{quoted}";',
            }
        )
        assert by_jaas == Security.of(scram())
        assert (by_jaas.username, by_jaas.password) == ("alice", SECRET)
        assert by_jaas.has_login
        assert not by_jaas.has_tls

    def test_security_can_be_pickled_and_its_repr_has_no_secret(self) -> None:
        security = Security.of(
            scram(
                **{
                    "security.protocol": "SASL_SSL",
                    "ssl.keystore.key": f"-----BEGIN PRIVATE KEY-----{SECRET}",
                    "ssl.keystore.certificate.chain": SECRET,
                    "ssl.key.password": SECRET,
                }
            )
        )
        assert pickle.loads(pickle.dumps(security)) == security
        assert hash(security)
        assert "hunter2" not in repr(security)
        assert "alice" in repr(security)

    def test_oauthbearer_login_has_its_claims_and_token_endpoint(self) -> None:
        security = Security.of(
            {
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "OAUTHBEARER",
                "sasl.jaas.config": f'{OAUTH} required unsecuredLoginStringClaim_sub="alice";',
                "sasl.oauthbearer.token.endpoint.url": "https://idp/token",
            }
        )
        assert dict(security.login) == {
            "unsecuredLoginStringClaim_sub": "alice",
            "sasl.oauthbearer.token.endpoint.url": "https://idp/token",
        }

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"security.protocol": "TLS"}, "security.protocol: it must be one of PLAINTEXT, SSL"),
            ({"security.protocol": "SASL_SSL"}, "sasl.mechanism: .*GSSAPI"),
            (scram(**{"sasl.mechanism": "NTLM"}), "sasl.mechanism: it must be one of"),
            (scram(**{"sasl.password": ""}), "SCRAM-SHA-512 needs username"),
            (
                scram(**{"sasl.jaas.config": f'{PLAIN} required username="hunter2";'}),
                "PlainLoginModule does not match sasl.mechanism=SCRAM-SHA-512",
            ),
            (scram(**{"sasl.jaas.config": f"{SCRAM} required password=hunter2"}), "semicolon"),
            (
                {"security.protocol": "SSL", "ssl.truststore.type": "JKS"},
                "ssl.truststore.type: only PEM is supported, not JKS; .*keytool",
            ),
            (
                {"security.protocol": "SSL", "ssl.keystore.type": "PKCS12"},
                "ssl.keystore.type: .*openssl pkcs12",
            ),
            (
                {"security.protocol": "SSL", "ssl.truststore.password": "hunter2"},
                "ssl.truststore.password: a PEM truststore has no password",
            ),
            ({"security.protocol": "SSL", "ssl.keystore.key": "hunter2"}, "must be set together"),
            (
                {
                    "security.protocol": "SSL",
                    "ssl.keystore.key": "hunter2",
                    "ssl.keystore.location": "x",
                },
                "ssl.keystore.location: .* not both",
            ),
            (
                {"security.protocol": "SSL", "ssl.enabled.protocols": "TLSv1.1"},
                "ssl.enabled.protocols: supported are TLSv1.2 and TLSv1.3",
            ),
            (
                {
                    "security.protocol": "SSL",
                    "ssl.protocol": "TLSv1.2",
                    "ssl.enabled.protocols": "TLSv1.3",
                },
                "ssl.protocol excludes all",
            ),
            (
                {"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "ldaps"},
                "https or empty",
            ),
            ({"ssl.engine.factory.class": "x.Y"}, "Java classes are not"),
            (scram(**{"sasl.mechanisms": "PLAIN"}), "sasl.mechanisms has the same meaning"),
            (scram(**{"sasl.user": "alice"}), "sasl.user: unknown client setting.*sasl.username"),
            (scram(**{"sasl.username": "älice"}), "ASCII"),
            ({"sasl.mechanism": "PLAIN"}, "security.protocol: it is not set"),
            (scram(**{"sasl.mechanism": "OAUTHBEARER"}), "OAUTHBEARER needs a token"),
            (
                {"security.protocol": "SSL", "ssl.key.location": "key.pem"},
                "ssl.key.location: it needs a certificate",
            ),
        ],
    )
    def test_invalid_setting_is_refused_with_its_key(
        self, settings: dict[str, str], reason: str
    ) -> None:
        with pytest.raises(SecurityError, match=reason) as refused:
            Security.of(settings)
        assert "hunter2" not in str(refused.value)

    def test_librdkafkas_keys_equal_kafkas_keys(self) -> None:
        ours = {"ssl.truststore.location": "ca.pem", "ssl.keystore.location": "chain.pem"}
        theirs = {"ssl.ca.location": "ca.pem", "ssl.certificate.location": "chain.pem"}
        assert Security.of(
            scram(**{"security.protocol": "sasl_ssl", "sasl.mechanisms": "SCRAM-SHA-512"}, **theirs)
        ) == Security.of(scram(**{"security.protocol": "SASL_SSL"}, **ours))

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            (scram(), ""),
            (scram(**{"sasl.mechanism": "PLAIN"}), "PLAIN over SASL_PLAINTEXT"),
            (
                {"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": ""},
                "algorithm is empty",
            ),
            (
                {"security.protocol": "SSL", "enable.ssl.certificate.verification": "false"},
                "verification is off",
            ),
        ],
    )
    def test_insecure_setting_gives_a_warning(self, settings: dict[str, str], words: str) -> None:
        found = Security.of(settings).warnings()
        assert len(found) == bool(words)
        assert words in "".join(found)

    def test_secret_keys_are_those_of_kafkas_password_type(self) -> None:
        assert {"sasl.jaas.config", "ssl.key.password", "ssl.keystore.key"} <= SECRETS
        assert "sasl.mechanism" not in SECRETS


def over_tls(**more: str) -> Security:
    return Security.of({"security.protocol": "SSL", **more})


async def greeted(client: ssl.SSLContext | None, server: ssl.SSLContext) -> str:
    """Connect over loopback; the server answers with the client's common name."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        subject = (writer.get_extra_info("peercert") or {}).get("subject", ())
        names = [value for row in subject for key, value in row if key == "commonName"]
        writer.write(f"{names[0] if names else 'nobody'}\n".encode())
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        try:
            return (await reader.readline()).decode().strip()
        finally:
            writer.close()


def server_side(keystore: Path, truststore: Path | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keystore)
    if truststore is not None:
        context.load_verify_locations(truststore)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class TestTokens:
    def test_token_is_read_from_value_file_url_or_command(self, tmp_path: Path) -> None:
        path = tmp_path / "token"
        path.write_text("from.a.file\n")
        for login, token in (
            ({TOKEN_KEY: "as.it.is"}, "as.it.is"),
            ({f"{TOKEN_KEY}.file": str(path)}, "from.a.file"),
            ({"sasl.oauthbearer.token.endpoint.url": path.as_uri()}, "from.a.file"),
            ({f"{TOKEN_KEY}.command": "echo 'of a.command' more"}, None),
            ({f"{TOKEN_KEY}.command": "echo of.a.command"}, "of.a.command"),
        ):
            if token is None:
                with pytest.raises(TokenError, match="echo contains no token"):
                    token_source(login).fetch()
            else:
                assert token_source(login).fetch() == token

    @pytest.mark.parametrize(
        "login",
        [
            {
                "unsecuredLoginStringClaim_sub": "alice",
                "unsecuredLoginListClaim_scope": "|read|write",
                "unsecuredLoginLifetimeSeconds": "60",
                "unsecuredLoginExtension_traceId": "123",
            },
            {
                "enable.sasl.oauthbearer.unsecure.jwt": "true",
                "sasl.oauthbearer.config": "principal=alice scope=read,write lifeSeconds=60"
                " extension_traceId=123",
            },
        ],
    )
    def test_unsecured_token_has_the_configured_claims_and_extensions(
        self, login: dict[str, str]
    ) -> None:
        source = token_source(login)
        header, claims, signature = source.fetch().split(".")
        assert json.loads(base64.urlsafe_b64decode(header + "==")) == {"alg": "none"}
        told = json.loads(base64.urlsafe_b64decode(claims + "=="))
        assert (told["sub"], told["scope"]) == ("alice", ["read", "write"])
        assert told["exp"] - told["iat"] == 60
        assert (signature, source.extensions) == ("", {"traceId": "123"})

    @pytest.mark.parametrize(
        ("login", "reason"),
        [
            ({}, "needs a token"),
            ({"unsecuredLoginNumberClaim_sub": "x"}, "not a number"),
            ({"unsecuredLoginStringClaim_name": "x"}, "needs a claim sub"),
            ({"sasl.oauthbearer.token.endpoint.url": "https://x"}, "only file: URLs"),
            ({f"{TOKEN_KEY}.command": "false"}, "false ended with status 1"),
            ({f"{TOKEN_KEY}.command": "/nowhere/at all"}, "No such file"),
            ({f"{TOKEN_KEY}.command": "echo 'unclosed"}, "the command for a token"),
            ({f"{TOKEN_KEY}.file": "/nowhere"}, "No such file"),
            ({f"{TOKEN_KEY}.file": "/dev/zero"}, "/dev/zero contains no token"),
        ],
    )
    def test_login_without_usable_token_is_refused(
        self, login: dict[str, str], reason: str
    ) -> None:
        with pytest.raises(TokenError, match=reason):
            token_source(login).fetch()


class TestTls:
    async def test_server_certificate_of_another_authority_is_refused(self, tmp_path: Path) -> None:
        ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
        server = server_side(ours.issue("broker"))
        good = over_tls(**{"ssl.truststore.location": str(ours.truststore)})
        assert await greeted(ssl_context(good), server) == "nobody"
        text = over_tls(**{"ssl.truststore.certificates": ours.truststore.read_text()})
        assert await greeted(ssl_context(text), server) == "nobody"
        for wrong in (over_tls(**{"ssl.truststore.location": str(others.truststore)}), over_tls()):
            with pytest.raises(ssl.SSLCertVerificationError):
                await greeted(ssl_context(wrong), server)

    async def test_server_name_is_verified_unless_the_algorithm_is_empty(
        self, tmp_path: Path
    ) -> None:
        ca = Authority(tmp_path)
        server = server_side(ca.issue("elsewhere", is_client=True))
        settings = {"ssl.truststore.location": str(ca.truststore)}
        with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
            await greeted(ssl_context(over_tls(**settings)), server)
        settings["ssl.endpoint.identification.algorithm"] = ""
        assert await greeted(ssl_context(over_tls(**settings)), server) == "nobody"

    async def test_client_certificate_is_sent_from_file_or_text(self, tmp_path: Path) -> None:
        ca = Authority(tmp_path)
        server = server_side(ca.issue("broker"), ca.truststore)
        shared = {"ssl.truststore.location": str(ca.truststore)}
        path = ca.issue("alice", is_client=True)
        by_file = over_tls(**shared, **{"ssl.keystore.location": str(path)})
        assert await greeted(ssl_context(by_file), server) == "alice"
        key, end, chain = path.read_text().partition("-----END PRIVATE KEY-----")
        if not end:
            key, end, chain = path.read_text().partition("-----END EC PRIVATE KEY-----")
        by_text = over_tls(
            **shared,
            **{"ssl.keystore.key": key + end, "ssl.keystore.certificate.chain": chain},
        )
        assert await greeted(ssl_context(by_text), server) == "alice"

    def test_encrypted_key_without_the_right_password_is_refused(self, tmp_path: Path) -> None:
        issued = trustme.CA().issue_cert("a.example")
        key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
        hidden = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"opens"),
        )
        path = tmp_path / "client.pem"
        path.write_bytes(hidden + b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        location = {"ssl.keystore.location": str(path)}
        assert ssl_context(over_tls(**location, **{"ssl.key.password": "opens"}))
        with pytest.raises(SecurityError, match=r"ssl.key.password: the private key is encrypted"):
            ssl_context(over_tls(**location))
        with pytest.raises(SecurityError, match=r"or ssl.key.password is wrong") as wrong:
            ssl_context(over_tls(**location, **{"ssl.key.password": "hunter2"}))
        assert "hunter2" not in str(wrong.value)

    @pytest.mark.parametrize("key", ["ssl.truststore.location", "ssl.keystore.location"])
    def test_missing_or_non_pem_store_is_refused(self, tmp_path: Path, key: str) -> None:
        path = tmp_path / "store"
        with pytest.raises(SecurityError, match=f"{key}: {path}: No such file"):
            ssl_context(over_tls(**{key: str(path)}))
        path.write_bytes(b"\xfe\xed\xfe\xed\x00\x00\x00\x02")
        with pytest.raises(SecurityError, match=f"{key}: {path} is not PEM but JKS; .*keytool"):
            ssl_context(over_tls(**{key: str(path)}))
        path.write_bytes(b"\x30\x82\x00\x00")
        with pytest.raises(SecurityError, match=f"{key}: .* but PKCS12; .*-in {path} "):
            ssl_context(over_tls(**{key: str(path)}))
        path.write_bytes(b"neither")
        with pytest.raises(SecurityError, match=rf"{key}: it contains no PEM .* \({path}\)"):
            ssl_context(over_tls(**{key: str(path)}))

    def test_key_of_another_certificate_is_refused(self, tmp_path: Path) -> None:
        ca = trustme.CA()
        one, other = ca.issue_cert("a.example"), ca.issue_cert("b.example")
        path = tmp_path / "mixed.pem"
        path.write_bytes(one.private_key_pem.bytes() + other.cert_chain_pems[0].bytes())
        with pytest.raises(SecurityError, match=r"no private key with .*mismatch"):
            ssl_context(over_tls(**{"ssl.keystore.location": str(path)}))

    async def test_renewed_truststore_applies_to_the_next_connection(self, tmp_path: Path) -> None:
        old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
        context = ssl_context(over_tls(**{"ssl.truststore.location": str(old.truststore)}))
        renewed = server_side(new.issue("broker"))
        with pytest.raises(ssl.SSLCertVerificationError):
            await greeted(context, renewed)
        before = old.truststore.read_bytes()
        replace(old.truststore, b"half writ")  # an unusable file changes nothing
        assert await greeted(context, server_side(old.issue("broker"))) == "nobody"
        replace(old.truststore, before + new.truststore.read_bytes())
        assert await greeted(context, renewed) == "nobody"

    async def test_ssl_protocol_restricts_the_tls_version(self, tmp_path: Path) -> None:
        ca = Authority(tmp_path)
        server = server_side(ca.issue("broker"))
        settings = {"ssl.truststore.location": str(ca.truststore), "ssl.protocol": "TLSv1.2"}
        assert await greeted(ssl_context(over_tls(**settings)), server) == "nobody"
        server.minimum_version = ssl.TLSVersion.TLSv1_3
        with pytest.raises(OSError):  # noqa: PT011 - an alert or a closed connection
            await greeted(ssl_context(over_tls(**settings)), server)


def told_by_both(address: tuple[str, int], security: Security) -> list[str]:
    """Return the errors that both clients raise for a broker that they cannot use."""
    bootstrap = f"{address[0]}:{address[1]}"

    def blocking() -> None:
        with WireClient(bootstrap, security=security, timeout_ms=200) as client:
            client.metadata()

    async def run() -> None:
        async with AsyncWireClient(bootstrap, security=security, timeout_ms=200) as client:
            await client.metadata()

    found = []
    for ask in (blocking, lambda: asyncio.run(run())):
        with pytest.raises((AuthenticationError, BrokerUnreachable)) as refused:
            ask()
        found.append(f"{type(refused.value).__name__}: {refused.value}")
    return found


@contextlib.contextmanager
def answering(context: ssl.SSLContext | None, answer: bytes = b"") -> Iterator[tuple[str, int]]:
    """Listen in a thread: present the certificate, send ``answer`` and close."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), client:
                    whole = context.wrap_socket(client, server_side=True) if context else client
                    with whole:
                        whole.recv(4096)
                        whole.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


class TestWhatIsTold:
    @pytest.mark.parametrize(
        ("made", "words"),
        [
            ({"valid": (-9, -2)}, "AuthenticationError: .* certificate has expired"),
            ({"valid": (2, 9)}, "AuthenticationError: .* not valid yet: is this machine's clock"),
            ({"hosts": ["kafka.example"]}, "AuthenticationError: .* is not for 127.0.0.1"),
        ],
    )
    def test_invalid_broker_certificate_is_reported_with_its_problem(
        self, tmp_path: Path, made: dict[str, Any], words: str
    ) -> None:
        authority = Authority(tmp_path)
        truststore = {"ssl.truststore.location": str(authority.truststore)}
        context = server_side(authority.server("broker", **made).file)
        with answering(context) as address:
            for told in told_by_both(address, over_tls(**truststore)):
                assert re.search(words, told), told

    def test_untrusted_broker_certificate_is_reported(self, tmp_path: Path) -> None:
        with answering(server_side(Authority(tmp_path).server("broker").file)) as address:
            for told in told_by_both(address, over_tls()):
                assert re.search("AuthenticationError: .*not signed by an authority", told), told

    def test_listener_of_another_protocol_is_reported(self) -> None:
        alert = b"\x15\x03\x03\x00\x02\x02\x50"
        with answering(None, alert) as address:
            for told in told_by_both(address, PLAINTEXT):
                assert "AuthenticationError" in told
                assert "the listener speaks TLS" in told
        with answering(None, b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
            for told in told_by_both(address, over_tls()):
                assert "the listener does not use TLS" in told
        with answering(None) as address:
            for told in told_by_both(address, PLAINTEXT):
                assert "the listener requires TLS or a login" in told


def scram_broker(
    first: ClientFirst, *, iterations: int = 4096, nonce: str = "", knows: str = SECRET
) -> tuple[ServerFirst, Callable[[bytes], bytes]]:
    """Return the broker's first message, and a function that answers the client's last."""
    salt = b"salt"
    answer = ServerFirst.of(nonce or first.nonce + "more", salt, iterations)
    salted = salted_password(SCRAM_SHA_256, knows, salt, iterations)

    def end(token: bytes) -> bytes:
        final = ClientFinal.parse(token)
        signed = signed_text(first, answer, final)
        signature = server_signature(SCRAM_SHA_256, server_key(SCRAM_SHA_256, salted), signed)
        return server_final(signature)

    return answer, end


class TestScram:
    """The client verifies the broker's side of SCRAM."""

    def dialogue(self) -> tuple[Any, ClientFirst]:
        security = Security.of(scram(**{"sasl.mechanism": "SCRAM-SHA-256"}))
        spoken = _dialogue(security)
        return spoken, ClientFirst.parse(next(spoken))

    def test_broker_with_the_right_password_is_accepted(self) -> None:
        spoken, first = self.dialogue()
        answer, end = scram_broker(first)
        last = spoken.send(answer.encode())
        with pytest.raises(StopIteration):
            spoken.send(end(last))

    @pytest.mark.parametrize(
        ("wrong", "reason"),
        [
            ({"nonce": "another's"}, "nonce does not begin"),
            ({"nonce": "OURS"}, "nonce does not begin"),
            ({"iterations": 4095}, "4095 iterations, which must be between 4096"),
            ({"iterations": MAX_ITERATIONS + 1}, "1000001 iterations"),
        ],
    )
    def test_invalid_server_first_message_is_refused(
        self, wrong: dict[str, Any], reason: str
    ) -> None:
        spoken, first = self.dialogue()
        if wrong.get("nonce") == "OURS":
            wrong = {"nonce": first.nonce}
        iterations = wrong.get("iterations", 4096)
        answer = ServerFirst.of(wrong.get("nonce", f"{first.nonce}x"), b"salt", iterations)
        with pytest.raises(ScramError, match=reason):
            spoken.send(answer.encode())

    def test_broker_without_the_password_is_refused(self) -> None:
        spoken, first = self.dialogue()
        answer, end = scram_broker(first, knows="something else")
        last = spoken.send(answer.encode())
        with pytest.raises(ScramError, match="signature is wrong"):
            spoken.send(end(last))


def test_unauthorized_topic_and_missing_topic_give_different_errors(
    tmp_path: Path,
) -> None:
    with Guarded(tmp_path, {}) as broker:
        with Cluster(broker.bootstrap) as admin:
            broker.log_in(admin, ADMIN).create_topic("hidden")
        broker.allow(topic(Operation.DESCRIBE, "absent"))
        with WireClient(broker.bootstrap) as client:
            for name, code in (
                ("hidden", ErrorCode.topic_authorization_failed),
                ("absent", ErrorCode.unknown_topic_or_partition),
            ):
                with pytest.raises(ApiError) as refused:
                    client.call("ListOffsets", to_leader=(name, 0))
                assert refused.value.code is code
