"""Names and dates of certificates. JDK 17 computed the expected names of Java."""

from __future__ import annotations

import datetime as dt
import random
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from fencepost.coordinator.security.certificate import (
    CertificateError,
    distinguished_name,
    read_certificate,
)
from tests.support.certificates import Authority

JAVA = [
    (
        (
            "3031310b300906035504061302444531133011060355040a0c0a41636d652c20496e632e310d300b060355"
            "04030c04636c6961"
        ),
        "CN=clia,O=Acme\\, Inc.,C=DE",
    ),
    (
        "301b3119301706035504030c102023612b623d2263225c3c643e3b6520",
        'CN=\\ \\#a\\+b\\=\\"c\\"\\\\\\<d\\>\\;e\\ ',
    ),
    ("300d310b300906035504030c022378", "CN=\\#x"),
    ("30123110300e06035504030c07202074776f2020", "CN=\\ \\ two\\ \\ "),
    (
        "30223114301206092a864886f70d01090116056140622e63310a300806035504030c016d",
        "CN=m,1.2.840.113549.1.9.1=#16056140622e63",
    ),
    (
        (
            "307631133011060a0992268993f22c6401191603636f6d31173015060a0992268993f22c64011916076578"
            "616d706c6531123010060a0992268993f22c6401010c027531310c300a06035504090c03532031310a3008"
            "06035504070c014c310b300906035504080c025354310b3009060355040b0c024f55"
        ),
        "OU=OU,ST=ST,L=L,STREET=S 1,UID=u1,DC=example,DC=com",
    ),
    (
        "30233114300806035504030c01783008060355040b0c0179310b3009060355040613025553",
        "C=US,CN=x+OU=y",
    ),
    (
        "30273125300806035504030c01783008060355040b0c0179300f060a0992268993f22c6401010c017a",
        "CN=x+OU=y+UID=z",
    ),
    ("301b3119301706035504030c104ac3bc7267656e20e282ac20f09f9880", "CN=Jürgen € 😀"),
    ("30123110300e060355040314074ac3bc7267656e", "CN=Jürgen"),
    ("30133111300f06035504031c080000004a00000075", "CN=#1c080000004a00000075"),
    ("300f310d300b060355040313044a752a40", "CN=Ju*@"),
    (
        (
            "303d310b3009060355040513023132310a300806035504040c0173310a3008060355042a0c0167310a3008"
            "060355040c0c0174310a300806032a03040c0176"
        ),
        "1.2.3.4=#0c0176,2.5.4.12=#0c0174,2.5.4.42=#0c0167,2.5.4.4=#0c0173,2.5.4.5=#13023132",
    ),
    ("3010310e300c06035504030c05610a620163", "CN=a\nb\x01c"),
    ("301a310a30080603550403160178310c300a060355040a1203313233", "O=#1203313233,CN=x"),
    ("3000", ""),
    ("3018310a300806035504030c0161310a300806035504030c0162", "CN=b,CN=a"),
    ("300f310d300b06035504030c0461202062", "CN=a  b"),
]
"""Subjects in DER, with the names that Java's ``X500Principal.getName(RFC2253)`` returns."""

OURS = [("300f310d300b06035504031e0400fc20ac", "CN=ü€")]
"""A subject whose name differs: Java decodes each byte of a BMPString as a character, even 0."""


@pytest.mark.parametrize(("der", "name"), [*JAVA, *OURS])
def test_distinguished_name_equals_the_name_of_java(der: str, name: str) -> None:
    assert distinguished_name(bytes.fromhex(der)[2:]) == name


def test_certificate_is_read_with_subject_dates_and_alternative_names(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.server(valid=(-3, 40))
    der = ssl.PEM_cert_to_DER_cert(issued.chain)
    found = read_certificate(der)
    assert found.subject == "CN=server,OU=ServiceUsers,O=Acme\\, Inc.,C=DE"
    peer = x509.load_der_x509_certificate(der)
    assert found.not_before_s == peer.not_valid_before_utc.timestamp()
    assert found.not_after_s == peer.not_valid_after_utc.timestamp()
    assert b"\x82localhost" in found.alternative_names
    assert len(found.alternative_names) == 3
    assert (
        read_certificate(ssl.PEM_cert_to_DER_cert(authority.pem)).alternative_names == frozenset()
    )
    # Dates after 2049 have another encoding.
    late = authority.server("late", valid=(0, 365 * 60))
    year = dt.datetime.fromtimestamp(
        read_certificate(ssl.PEM_cert_to_DER_cert(late.chain)).not_after_s, dt.UTC
    ).year
    assert year > 2080


def test_malformed_certificate_raises_only_certificate_error(tmp_path: Path) -> None:
    der = ssl.PEM_cert_to_DER_cert(Authority(tmp_path).server().chain)
    draw = random.Random(7)
    for count in range(0, len(der), 7):
        with pytest.raises(CertificateError):
            read_certificate(der[:count])
    for _ in range(3_000):
        broken = bytearray(der)
        for _ in range(draw.randint(1, 4)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        try:
            read_certificate(bytes(broken))
        except CertificateError:
            continue
