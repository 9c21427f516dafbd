"""Certificates of an authority that is made for one test, in the files that Kafka's keys name."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import trustme


class Authority:
    """One authority, and PEM files of what it signs below ``home``."""

    def __init__(self, home: Path, name: str = "ca") -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._home = home
        self._ca = trustme.CA()
        self.truststore = home / f"{name}.pem"
        self.truststore.write_bytes(self._ca.cert_pem.bytes())

    def issue(
        self, name: str, *, is_client: bool = False, expires: dt.datetime | None = None
    ) -> Path:
        """A PEM file with key and chain: of a server on this machine, or of client ``CN=name``."""
        names = () if is_client else ("localhost", "127.0.0.1")
        issued = self._ca.issue_cert(
            *(names or (f"{name}.example",)), common_name=name, not_after=expires
        )
        path = self._home / f"{name}.pem"
        replace(path, issued.private_key_and_cert_chain_pem.bytes())
        return path


def replace(path: Path, content: bytes) -> None:
    """Put a file in the place of another in one step, as a renewal does."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.touch(mode=0o600)
    fresh.write_bytes(content)
    fresh.rename(path)
