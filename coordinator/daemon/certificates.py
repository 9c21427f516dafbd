"""The certificates of TLS listeners: loaded at startup, and reloaded when they are renewed.

Files and settings are checked every :data:`LOOK_MS`, at SIGHUP, and when a dynamic setting of the
broker changes. A thread loads and checks a new certificate first. If it cannot be used, the
listener keeps the current one, and the log and a metric report it. Open connections are not
affected.

Source: ``SslFactory``, ``DynamicBrokerConfig``; Kafka itself does not watch the files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from typing import Final

import structlog

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.runtime.background import Repeated, Threads, spawn
from fencepost.coordinator.security.tls import (
    ListenerTls,
    Stamp,
    TlsSettings,
    load,
    stamps_of,
    tls_settings,
)
from fencepost.logcore.clock import Clock
from fencepost.logcore.tracebacks import without_traceback

LOOK_MS: Final = 30_000
"""Interval between checks of the files, in milliseconds."""

EXPIRY_WARNING_DAYS: Final = 30
"""A certificate that expires within this number of days causes one warning a day."""

_DAY_S: Final = 86_400

_log = structlog.get_logger(__name__)


class ListenerCertificates:
    """The certificates of the TLS listeners. Raises ConfigError for invalid settings."""

    def __init__(
        self, config: BrokerConfig, listeners: Iterable[ListenerConfig], clock: Clock
    ) -> None:
        self._config, self._clock = config, clock
        self._listeners = {listener.name: listener for listener in listeners if listener.is_tls}
        for listener in self._listeners.values():
            tls_settings(config, listener)
        self.tls: dict[str, ListenerTls] = {}
        """By listener name; filled by :meth:`load`."""
        self._refused: dict[str, tuple[TlsSettings, tuple[Stamp | None, ...]]] = {}
        """Settings and file stamps that could not be used, by listener; they are not tried again.
        """
        self._warned_s: dict[str, float] = {}
        self._threads = Threads("certificates")
        self._lock = asyncio.Lock()
        self._looks = Repeated("look at certificates", self.refresh, lambda: LOOK_MS)
        self._again: asyncio.Task[None] | None = None
        self._is_running = False

    async def load(self) -> None:
        """Load all certificates, unless :meth:`start` has been called. Raises ConfigError."""
        if self._is_running:
            return
        for name, listener in self._listeners.items():
            settings = tls_settings(self._config, listener)
            self.tls[name] = ListenerTls(await self._threads.run(partial(load, settings)))
            self._warn_of_expiry(name)

    def start(self) -> None:
        """Start the periodic checks, unless they are running."""
        if self._is_running:
            return
        self._is_running = True
        self._config.listen(self.check_now)
        self._looks.start(LOOK_MS)

    async def stop(self) -> None:
        """Stop the checks."""
        self._is_running = False
        await self._looks.stop()
        if self._again is not None:
            await asyncio.wait({self._again})
        self._threads.close()

    def check_now(self) -> None:
        """Check all certificates now, in a task."""
        if self._is_running and (self._again is None or self._again.done()):
            self._again = spawn(self._schedule_check(), "look at certificates")

    async def _schedule_check(self) -> None:
        await self.refresh()

    async def refresh(self) -> None:
        """Reload the certificates that have changed and can be used."""
        async with self._lock:
            for name in self.tls:
                await self._refresh(name)
                self._warn_of_expiry(name)

    async def _refresh(self, name: str) -> None:
        tls, loaded_tls = self.tls[name], None
        try:
            settings = tls_settings(self._config, self._listeners[name])
            loaded_tls = settings, await self._threads.run(partial(stamps_of, settings))
            if loaded_tls == (tls.loaded.settings, tls.loaded.stamps):
                tls.is_stale = False
                self._refused.pop(name, None)
                return
            if loaded_tls == self._refused.get(name):
                return
            loaded = await self._threads.run(partial(load, settings))
            tls.check(loaded, self._now_s)
        except ConfigError as error:
            if loaded_tls is not None:
                self._refused[name] = loaded_tls
            tls.is_stale = True
            tls.failed_reloads += 1
            _log.error("certificate not read again", listener=name, cause=str(error))
            return
        tls.install(loaded)
        tls.is_stale = False
        tls.reloads += 1
        self._refused.pop(name, None)
        self._warned_s.pop(name, None)
        _log.info("certificate read again", listener=name, subject=loaded.certificate.subject)

    def check(self, config: BrokerConfig) -> asyncio.Future[ConfigError | None]:
        """Check in a task whether the listeners could use ``config``, without applying it.

        The future's result is the error, or None if every listener could use its settings.
        Listeners whose settings would not change are not checked.
        """
        result: asyncio.Future[ConfigError | None] = asyncio.get_running_loop().create_future()

        async def report_result() -> None:
            refusal: Exception | None = None
            try:
                await self._check(config)
            except Exception as error:  # noqa: BLE001 - the caller must learn of it
                refusal = without_traceback(error)
            if result.done():  # the caller may have cancelled the future
                return
            if refusal is None or isinstance(refusal, ConfigError):
                result.set_result(refusal)
            else:
                result.set_exception(without_traceback(refusal))

        spawn(report_result(), "check certificates")
        return result

    async def _check(self, config: BrokerConfig) -> None:
        for name, tls in self.tls.items():
            settings = tls_settings(config, self._listeners[name])
            if settings != tls.loaded.settings:
                tls.check(await self._threads.run(partial(load, settings)), self._now_s)

    @property
    def _now_s(self) -> float:
        return self._clock.now_ms() / 1000

    def _warn_of_expiry(self, name: str) -> None:
        left_s = self.tls[name].not_after_s - self._now_s
        if left_s >= EXPIRY_WARNING_DAYS * _DAY_S:
            return
        if self._now_s - self._warned_s.get(name, -_DAY_S) < _DAY_S:
            return
        self._warned_s[name] = self._now_s
        until = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(self.tls[name].not_after_s))
        if left_s <= 0:
            _log.error("certificate has expired", listener=name, not_after=until)
        else:
            days = int(left_s // _DAY_S)
            _log.warning("certificate expires", listener=name, not_after=until, days_left=days)
