"""SCRAM's messages and arithmetic (ScramFormatterTest, ScramMessagesTest)."""

from __future__ import annotations

import base64
import hashlib

import pytest

from fencepost.protocol import scram
from fencepost.protocol.scram import (
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    ClientFinal,
    ClientFirst,
    ScramError,
    ServerFirst,
)

NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVERS = NONCE + "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")


def test_exchange_matches_the_example_of_rfc_7677() -> None:
    first = ClientFirst.of("user", NONCE)
    assert first.encode() == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    answer = ServerFirst.of(SERVERS, SALT, 4096)
    assert answer.encode() == f"r={SERVERS},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode()
    salted = scram.salted_password(SCRAM_SHA_256, "pencil", SALT, 4096)
    signed = scram.signed_text(first, answer, ClientFinal.of(SERVERS))
    proof = scram.client_proof(SCRAM_SHA_256, salted, signed)
    final = ClientFinal.of(SERVERS, proof)
    assert final.encode() == (
        f"c=biws,r={SERVERS},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=".encode()
    )
    key = scram.server_key(SCRAM_SHA_256, salted)
    assert scram.server_final(scram.server_signature(SCRAM_SHA_256, key, signed)) == (
        b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    )
    assert scram.is_proof(SCRAM_SHA_256, scram.stored_key(SCRAM_SHA_256, salted), signed, proof)


@pytest.mark.parametrize("mechanism", [SCRAM_SHA_256, SCRAM_SHA_512])
def test_client_proof_is_valid_only_for_its_password_and_exchange(
    mechanism: scram.ScramMechanism,
) -> None:
    salted = scram.salted_password(mechanism, "right", b"salt", 10)
    stored = scram.stored_key(mechanism, salted)
    proof = scram.client_proof(mechanism, salted, b"signed")
    assert scram.is_proof(mechanism, stored, b"signed", proof)
    other = scram.salted_password(mechanism, "wrong", b"salt", 10)
    assert not scram.is_proof(
        mechanism, stored, b"signed", scram.client_proof(mechanism, other, b"signed")
    )
    assert not scram.is_proof(mechanism, stored, b"other text", proof)
    for of_another_length in (b"", proof[:-1], proof + b"\0"):
        assert not scram.is_proof(mechanism, stored, b"signed", of_another_length)
    assert len(stored) == mechanism.key_bytes == hashlib.new(mechanism.digest).digest_size


@pytest.mark.parametrize(
    ("user", "name"),
    [("user", "user"), ("a=b,c", "a=3Db=2Cc"), ("=2C", "=3D2C"), (",,==", "=2C=2C=3D=3D")],
)
def test_user_name_survives_sasl_encoding(user: str, name: str) -> None:
    assert scram.sasl_name(user) == name
    assert scram.user_name(name) == user
    assert ClientFirst.parse(ClientFirst.of(user, "nonce").encode()).user == user


@pytest.mark.parametrize(
    ("token", "user", "authorized", "extensions", "bare"),
    [
        ("n,,n=u,r=x", "u", "", {}, "n=u,r=x"),
        ("n,a=v,n=u,r=x", "u", "v", {}, "n=u,r=x"),
        ("n,a=a=2Cb,n=u,r=x", "u", "a,b", {}, "n=u,r=x"),
        ("n,,m=some=ext,n=u,r=x", "u", "", {}, "m=some=ext,n=u,r=x"),
        ("n,,n=u,r=x,a=1,tokenauth=true", "u", "", {"a": "1", "tokenauth": "true"}, None),
        ("n,,n=u,r=x,a=b=c", "u", "", {"a": "b=c"}, None),
    ],
)
def test_valid_client_first_message_is_parsed(
    token: str, user: str, authorized: str, extensions: dict[str, str], bare: str | None
) -> None:
    found = ClientFirst.parse(token.encode())
    assert (found.user, found.authorized, found.extensions) == (user, authorized, extensions)
    assert found.nonce == "x"
    assert found.bare == (token.partition(",,")[2] if bare is None else bare)
    assert found.header + found.bare == token


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"n,x=v,n=u,r=x",
        b"y,,n=u,r=x",
        b"p=tls-unique,,n=u,r=x",
        b"n,,n=,r=x",
        b"n,,n=u,r=",
        b"n,,n=a=b,r=x",
        b"n,,n=u,r=x,1=2",
        b"n,,n=u,r=x,a=",
        b"n,,n=u,r=x y",
        b"n,,n=u\0,r=x",
        "n,,n=ü,r=x".encode(),
        b"n,,n=\xff,r=x",
        b"n,,n=u,r=x\n",
        b"n=u,r=x",
    ],
)
def test_invalid_client_first_message_is_refused(token: bytes) -> None:
    with pytest.raises(ScramError):
        ClientFirst.parse(token)


@pytest.mark.parametrize("token", [b"r=n,s=c2FsdA==,i=4096", b"m=x,r=n,s=c2FsdA==,i=4096,e=xyz"])
def test_valid_server_first_message_is_parsed(token: bytes) -> None:
    found = ServerFirst.parse(token)
    assert (found.nonce, found.salt, found.iterations) == ("n", b"salt", 4096)
    assert found.encode() == token


@pytest.mark.parametrize(
    "token",
    [b"r=n,s=c2FsdA==,i=0", b"r=n,s=c2FsdA==,i=-1", b"r=n,s=c2FsdA=,i=1", b"r=n,i=1", b"r=n,s=,i="],
)
def test_invalid_server_first_message_is_refused(token: bytes) -> None:
    with pytest.raises(ScramError):
        ServerFirst.parse(token)


@pytest.mark.parametrize("token", [b"c=biws,r=n,p=cHJvb2Y=", b"c=biws,r=n,a=b,p=cHJvb2Y="])
def test_valid_client_final_message_is_parsed(token: bytes) -> None:
    found = ClientFinal.parse(token)
    assert (found.channel_binding, found.nonce, found.proof) == (b"n,,", "n", b"proof")
    assert found.encode() == token


@pytest.mark.parametrize("token", [b"c=biws,r=n", b"c=biws,p=AAAA", b"c=b,r=n,p=AAAA", b"p=AAAA"])
def test_invalid_client_final_message_is_refused(token: bytes) -> None:
    with pytest.raises(ScramError):
        ClientFinal.parse(token)


def test_server_final_message_is_parsed_or_is_refused() -> None:
    assert scram.parse_server_final(b"v=c2ln") == b"sig"
    assert scram.parse_server_final(b"v=c2ln,a=b") == b"sig"
    for token in (b"e=other-error", b"v=c2l", b"x=c2ln"):
        with pytest.raises(ScramError):
            scram.parse_server_final(token)


def test_nonces_are_unique_and_valid_in_messages() -> None:
    nonces = {scram.new_nonce() for _ in range(100)}
    assert len(nonces) == 100
    for nonce in nonces:
        assert ClientFirst.parse(ClientFirst.of("u", nonce).encode()).nonce == nonce


def test_parse_error_contains_no_part_of_the_message() -> None:
    with pytest.raises(ScramError) as caught:
        ClientFirst.parse(b"my secret")
    assert "secret" not in str(caught.value)
