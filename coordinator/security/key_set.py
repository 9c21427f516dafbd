"""The JSON Web Key Set of an issuer, with the keys that sign tokens.

A thread fetches the keys. The broker caches the keys, and keeps them if a later fetch fails. A
token that names an unknown key causes another fetch, but at most once a minute.

Source: ``RefreshingHttpsJwks``, ``RefreshingHttpsJwksVerificationKeyResolver``; RFC 7517.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import unquote, urlsplit

import structlog

from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.mechanism import AuthenticationFailed
from fencepost.logcore.clock import Clock, monotonic_s
from fencepost.logcore.tracebacks import without_traceback

MAX_BYTES: Final = 1 << 20
"""The maximum size of a key set."""

FETCH_TIMEOUT_S: Final = 10.0
"""The time limit for a fetch."""

UNKNOWN_KEY_MS: Final = 60_000
"""The minimum time between a successful fetch and another fetch for an unknown key."""

MAX_WAITING: Final = 1_000
"""The maximum number of logins that wait for a fetch."""

SCHEMES: Final = ("https", "http", "file")

Jwk = Mapping[str, Any]

_log = structlog.get_logger(__name__)


class KeySetError(Exception):
    """The key set cannot be read. The message quotes none of its contents."""


class KeySet:
    """The key set at ``url``. Used only on the event loop; times are milliseconds."""

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        refresh_ms: int,
        backoff_ms: int,
        max_backoff_ms: int,
    ) -> None:
        self.url = url
        self._clock = clock
        self._refresh_ms = refresh_ms
        self._first_backoff_ms, self._max_backoff_ms = backoff_ms, max_backoff_ms
        self._backoff_ms = backoff_ms
        self._keys: tuple[Jwk, ...] = ()
        self._fetched_ms: int | None = None
        """When the last successful fetch began."""
        self._not_before_ms = 0
        self._is_fetching = False
        self._waiting: list[asyncio.Future[None]] = []

    def find(self, fits: Callable[[Jwk], bool]) -> Work[list[Jwk]]:
        """Return the matching keys, fetched if necessary.

        Keys due for a refresh are used until the fetch has ended. Raises AuthenticationFailed if
        no key matches.
        """
        now_ms = self._clock.monotonic_ms()
        keys = [key for key in self._keys if fits(key)]
        age_ms = None if self._fetched_ms is None else now_ms - self._fetched_ms
        if keys:
            if age_ms is not None and age_ms >= self._refresh_ms:
                self._fetch(now_ms)
            return keys
        if age_ms is None or age_ms >= UNKNOWN_KEY_MS or self._is_fetching:
            self._fetch(now_ms)
            if self._is_fetching:
                yield self._wait()
                keys = [key for key in self._keys if fits(key)]
        if not keys:
            cause = "the keys of the issuer are not available" if not self._keys else "no such key"
            raise AuthenticationFailed(cause)
        return keys

    def _wait(self) -> asyncio.Future[None]:
        if len(self._waiting) >= MAX_WAITING:
            raise AuthenticationFailed(f"{MAX_WAITING} logins wait for keys (MAX_WAITING)")
        # Each login needs its own future, because a disconnecting client cancels the future.
        waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waits)
        return waits

    def _fetch(self, now_ms: int) -> None:
        """Begin a fetch, unless one is in progress or has just failed."""
        if self._is_fetching or now_ms < self._not_before_ms:
            return
        self._is_fetching = True
        loop = asyncio.get_running_loop()

        def run() -> None:
            result: tuple[Jwk, ...] | Exception
            try:
                result = fetch_keys(self.url)
            except Exception as error:  # noqa: BLE001 - reported on the loop
                result = without_traceback(error)
            with suppress(RuntimeError):  # the broker has stopped in the meantime
                loop.call_soon_threadsafe(self._fetched, now_ms, result)

        # A daemon thread, not a pool: a stopping broker must not wait for an unresponsive issuer.
        threading.Thread(target=run, name="keys of tokens", daemon=True).start()

    def _fetched(self, began_ms: int, result: tuple[Jwk, ...] | Exception) -> None:
        self._is_fetching = False
        if isinstance(result, Exception):
            self._not_before_ms = self._clock.monotonic_ms() + self._backoff_ms
            self._backoff_ms = min(self._backoff_ms * 2, self._max_backoff_ms)
            cause = str(result) if isinstance(result, KeySetError) else type(result).__name__
            _log.error("keys of tokens not fetched", url=self.url, cause=cause)
        else:
            self._keys, self._fetched_ms = result, began_ms
            self._backoff_ms = self._first_backoff_ms
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


def fetch_keys(url: str) -> tuple[Jwk, ...]:
    """Return the keys of the set at ``url``. Raises :class:`KeySetError`."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "file":
            with Path(unquote(parts.path)).open("rb") as file:
                raw = _read(file)
        else:
            opener = urllib.request.build_opener(_NoRedirects)
            with opener.open(url, timeout=FETCH_TIMEOUT_S) as answer:
                raw = _read(answer)
    except urllib.error.HTTPError as error:
        raise KeySetError(f"status {error.code}") from None
    except OSError as error:
        raise KeySetError(str(getattr(error, "reason", None) or error)) from None
    try:
        keys = json.loads(raw)["keys"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KeySetError("it is not a JSON Web Key Set (RFC 7517)") from None
    if not isinstance(keys, list):
        raise KeySetError("it is not a JSON Web Key Set (RFC 7517)")
    return tuple(key for key in keys if isinstance(key, dict))


def _read(stream: IO[bytes]) -> bytes:
    """Read a stream to its end. Raises KeySetError beyond the time or size limit."""
    until = monotonic_s() + FETCH_TIMEOUT_S
    raw = bytearray()
    while part := stream.read(min(65_536, MAX_BYTES + 1 - len(raw))):
        raw += part
        if len(raw) > MAX_BYTES:
            raise KeySetError(f"longer than {MAX_BYTES} bytes")
        if monotonic_s() > until:
            raise KeySetError(f"not read within {FETCH_TIMEOUT_S:g} s")
    return bytes(raw)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Rejects redirects: the keys come only from the configured URL."""

    def redirect_request(self, *_: Any) -> None:
        return None
