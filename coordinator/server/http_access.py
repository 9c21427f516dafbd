"""TLS and HTTP Basic authentication of the broker's HTTP servers.

Source: RFC 7617.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from fencepost.coordinator.server.http_messages import HttpError
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.values import dataclass
from fencepost.protocol.server_tls import ServerTlsError, server_context

LOOK_S: Final = 30.0
"""The minimum time in seconds between two checks of the certificate files for changes. The files
are checked when a connection is opened."""

MAX_USERS: Final = 100
MAX_USERS_BYTES: Final = 65_536
"""The maximum number of users in a user file, and the maximum size of the file."""

_log = structlog.get_logger(__name__)


class HttpAccessError(ValueError):
    """A user file cannot be used. The message contains none of its content."""


class HttpUsers:
    """The users of a file: one NAME:PASSWORD per line, ``#`` begins a comment."""

    def __init__(self, path: str) -> None:
        try:
            with Path(path).open("rb") as file:
                raw = file.read(MAX_USERS_BYTES + 1)
                mode = stat.S_IMODE(Path(path).stat().st_mode)
        except OSError as error:
            raise HttpAccessError(f"{path}: {error.strerror}") from None
        if len(raw) > MAX_USERS_BYTES:
            raise HttpAccessError(f"{path} has more than {MAX_USERS_BYTES} bytes")
        lines = [line.strip() for line in raw.split(b"\n")]
        pairs = [line for line in lines if line and not line.startswith(b"#")]
        for number, pair in enumerate(pairs, 1):
            name, colon, password = pair.partition(b":")
            if not (name and colon and password):
                raise HttpAccessError(f"{path}: entry {number} is not NAME:PASSWORD")
        if not 1 <= len(pairs) <= MAX_USERS:
            raise HttpAccessError(f"{path} has {len(pairs)} users; it may have 1 to {MAX_USERS}")
        if mode & 0o044:
            _log.warning("others can read passwords", file=path, mode=f"{mode:o}")
        self._digests = [hashlib.sha256(pair).digest() for pair in pairs]

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise HttpError unless the headers contain a name and its password."""
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        try:
            pair = base64.b64decode(credentials.strip(), validate=True)
        except (binascii.Error, ValueError):
            pair = b""
        shown = hashlib.sha256(pair).digest()
        # All entries are compared, so that the time does not reveal whether a name exists.
        matches = sum([hmac.compare_digest(shown, digest) for digest in self._digests])
        if scheme.lower() != "basic" or not matches:
            raise HttpError(
                401,
                "user name and password are required",
                {"WWW-Authenticate": 'Basic realm="fencepost", charset="UTF-8"'},
            )


@dataclass(slots=True)
class _Loaded:
    context: ssl.SSLContext
    stamps: tuple[tuple[int, int], ...]
    looked_s: float


class RenewedContext:
    """The TLS context of PEM files; the files are read again after a change.

    The constructor raises :class:`ServerTlsError` if the files cannot be used. If changed files
    cannot be used, the error is logged, and the previous context remains in use.
    """

    def __init__(self, certificate: str, key: str | None) -> None:
        self._certificate, self._key = certificate, key
        self._now = self._load()

    async def __call__(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        if monotonic_s() - self._now.looked_s >= LOOK_S:
            self._now.looked_s = monotonic_s()
            await asyncio.to_thread(self._check_files)
        return self._now.context

    def _check_files(self) -> None:
        try:
            if self._stamps() != self._now.stamps:
                self._now = self._load()
                _log.info("certificate read again", file=self._certificate)
        except (ServerTlsError, OSError) as error:
            _log.error("certificate not read again", cause=str(error))

    def _load(self) -> _Loaded:
        context = server_context(self._certificate, self._key)
        return _Loaded(context, self._stamps(), monotonic_s())

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        states = [Path(path).stat() for path in (self._certificate, self._key) if path]
        return tuple((state.st_mtime_ns, state.st_ino) for state in states)
