"""Certificates for tests, as PEM files: an authority, and valid and broken certificates."""

from __future__ import annotations

import datetime as dt
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

KEY_PASSWORD = "key-password"

HERE = ("localhost", "127.0.0.1", "::1")

DAY = dt.timedelta(days=1)

Name = Sequence[tuple[x509.ObjectIdentifier, str]]
"""A subject, the most general part first."""


def subject(common_name: str) -> Name:
    """Return a typical subject: ``CN=…,OU=ServiceUsers,O=Acme\\, Inc.,C=DE`` (RFC 2253)."""
    return (
        (NameOID.COUNTRY_NAME, "DE"),
        (NameOID.ORGANIZATION_NAME, "Acme, Inc."),
        (NameOID.ORGANIZATIONAL_UNIT_NAME, "ServiceUsers"),
        (NameOID.COMMON_NAME, common_name),
    )


class Authority:
    """A certificate authority. The certificates that it signs are stored below ``home``."""

    def __init__(self, home: Path, name: str = "ca") -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home, self.name = home, name
        self._ca = trustme.CA(organization_name=f"Fencepost tests {name}")
        self._certificate = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        self._key = _private_key(self._ca.private_key_pem.bytes())
        self.pem = self._ca.cert_pem.bytes().decode()
        self.truststore = home / f"{name}.pem"
        self.truststore.write_text(self.pem)

    def issue(
        self, name: str, *, is_client: bool = False, expires: dt.datetime | None = None
    ) -> Path:
        """Issue a certificate of a server on this machine, or of client ``CN=name``.

        Return the PEM file with key and chain.
        """
        names = () if is_client else ("localhost", "127.0.0.1")
        issued = self._ca.issue_cert(
            *(names or (f"{name}.example",)), common_name=name, not_after=expires
        )
        path = self.home / f"{name}.pem"
        replace(path, issued.private_key_and_cert_chain_pem.bytes())
        return path

    def sign(
        self,
        name: str,
        *,
        subject_name: Name | None = None,
        hosts: Sequence[str] = (),
        valid: tuple[int, int] = (-1, 365),
        password: str = "",
        is_both: bool = False,
    ) -> Certificate:
        """Sign a certificate; ``valid`` is its first and last day, counted from now.

        With ``hosts`` it is a server certificate, otherwise a client certificate. ``is_both``
        allows a server certificate for clients too. A ``password`` encrypts the key.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)
        parts = [x509.NameAttribute(oid, value) for oid, value in subject_name or subject(name)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH] if hosts else []
        if is_both or not hosts:
            usages.append(ExtendedKeyUsageOID.CLIENT_AUTH)
        its_authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(
            self._certificate.public_key()  # type: ignore[arg-type]
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name(parts))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + valid[0] * DAY)
            .not_valid_after(now + valid[1] * DAY)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(its_authority, critical=False)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        encryption: KeySerializationEncryption = NoEncryption()
        if password:
            encryption = BestAvailableEncryption(password.encode())
        return Certificate(
            self.home / f"{name}.pem",
            signed.public_bytes(Encoding.PEM).decode(),
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption).decode(),
            password,
            self,
        )

    def server(self, name: str = "server", **more: object) -> Certificate:
        """Sign a certificate for a broker on this machine."""
        return self.sign(name, **{"hosts": HERE, **more})  # type: ignore[arg-type]

    def client(self, name: str, **more: object) -> Certificate:
        """Sign a certificate for the client ``name``; its subject is :func:`subject`."""
        return self.sign(name, **more)  # type: ignore[arg-type]


class Certificate:
    """A certificate with its key, on disk in one combined and in two separate files."""

    def __init__(
        self, file: Path, chain: str, key: str, password: str, authority: Authority
    ) -> None:
        self.chain, self.key, self.password = chain, key, password
        self.authority = authority
        self.file = file
        """Key and chain, in the format of ``ssl.keystore.location``."""
        self.chain_file, self.key_file = file.with_suffix(".crt"), file.with_suffix(".key")
        self.write(file)
        self.chain_file.write_text(chain)
        self.key_file.write_text(key)

    def write(self, file: Path) -> None:
        """Write key and chain to a file."""
        replace(file, (self.key + self.chain).encode())

    @property
    def keystore(self) -> dict[str, str]:
        """The settings of a broker with this certificate."""
        settings = {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(self.file)}
        return settings | ({"ssl.key.password": self.password} if self.password else {})

    def context(self, trusted: Authority | None = None) -> ssl.SSLContext:
        """Return a client's SSL context with this certificate.

        It trusts ``trusted``, by default the certificate's own authority.
        """
        made = trusting(self.authority if trusted is None else trusted)
        made.load_cert_chain(self.file, password=self.password)
        return made

    def librdkafka(self) -> dict[str, str]:
        """The settings of confluent-kafka with this certificate."""
        return {
            **trusted_by_librdkafka(self.authority),
            "ssl.certificate.location": str(self.chain_file),
            "ssl.key.location": str(self.key_file),
            **({"ssl.key.password": self.password} if self.password else {}),
        }


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically, as a renewal does."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.touch(mode=0o600)
    fresh.write_bytes(content)
    fresh.rename(path)


def trust_settings(*authorities: Authority) -> Mapping[str, str]:
    """Return the settings of a broker that trusts clients of these authorities."""
    if len(authorities) == 1:
        return {
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(authorities[0].truststore),
        }
    both = "\n".join(authority.pem for authority in authorities)
    return {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": both}


def trusting(authority: Authority) -> ssl.SSLContext:
    """Return the SSL context of a client without a certificate."""
    return ssl.create_default_context(cadata=authority.pem)


def trusted_by_librdkafka(authority: Authority) -> dict[str, str]:
    """Return the settings of confluent-kafka without a certificate."""
    return {"security.protocol": "ssl", "ssl.ca.location": str(authority.truststore)}


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key(pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _general_name(host: str) -> x509.GeneralName:
    import ipaddress

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
