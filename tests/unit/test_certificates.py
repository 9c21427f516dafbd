"""The certificates of other tests have the described contents."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from tests.support.certificates import KEY_PASSWORD, Authority, Certificate, trust_settings


def shaken(server: Certificate, client: ssl.SSLContext) -> str:
    """Run a TLS handshake in memory and return the client's common name that the server gets."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.file, password=server.password)
    context.load_verify_locations(cadata=server.authority.pem)
    context.verify_mode = ssl.CERT_REQUIRED
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = context.wrap_bio(to_server, to_client, server_side=True)
    other = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    for _ in range(3):
        for end in (other, one):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = one.getpeercert()
    assert shown is not None
    return dict(part[0] for part in shown["subject"])["commonName"]


def test_handshake_needs_the_same_authority_and_a_valid_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, alice = authority.server(password=KEY_PASSWORD), authority.client("alice")
    assert "ENCRYPTED PRIVATE KEY" in server.file.read_text()
    assert shaken(server, alice.context()) == "alice"
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(server, alice.context(trusted=Authority(tmp_path, "other")))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shaken(authority.server("old", valid=(-9, -2)), alice.context())
    assert "ssl.truststore.location" in trust_settings(authority)
