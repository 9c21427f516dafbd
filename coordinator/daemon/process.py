"""``fencepost serve``: one broker as a process.

The process writes ``listening HOST:PORT`` to standard output as soon as clients can connect, and
with ``--test-hooks`` also ``test hooks HOST:PORT``. Everything else goes to standard error. SIGTERM
and SIGINT start an orderly shutdown: the broker accepts no new connections, completes the requests
in flight, flushes and closes the logs, writes the clean-shutdown mark and exits with status 0.
Further signals are ignored during the shutdown, which takes seconds at most. SIGHUP reloads the
settings: see :meth:`BrokerConfig.reload`. The process reports these states to systemd if it runs as
a service of ``Type=notify`` (``systemd.py``).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from fencepost.coordinator import light_imports
from fencepost.coordinator.config import logs
from fencepost.coordinator.config.broker_config import ConfigError, load, take_data_directory
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.collector import Collector
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.daemon.systemd import Notifier
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.runtime.background import Threads, report, spawn
from fencepost.logcore.clock import Clock
from fencepost.logcore.errors import LogError
from fencepost.logcore.system import (
    RELOAD,
    descriptor_limit,
    ignore_signals,
    loop_factory,
    on_signal,
    raise_descriptor_limit,
)
from fencepost.logcore.tracebacks import without_traceback

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

_log = light_imports.structlog.get_logger(__name__)


DEFAULT_LISTEN = "127.0.0.1:9092"

SWITCH_INTERVAL_S = 0.0001
"""The interpreter's switch interval. The event loop waits this long for a computing thread to
release the GIL after each of a request's three system calls. With CPython's default of 5 ms, a
small request takes 15 ms while the cleaner runs. The shorter interval slows down two threads that
compute all the time by a tenth."""


class ProcessHooks(Protocol):
    """Hooks by which tests control a broker in another process: its clock, and a listener."""

    @property
    def clock(self) -> Clock:
        """The clock that the broker uses."""

    async def start(self, broker: Broker) -> str:
        """Serve the hooks once the broker listens; return HOST:PORT. Raises OSError."""

    async def stop(self) -> None:
        """Close the hooks, before the broker stops."""


def serve(
    data_dir: Path | None,
    *,
    listen: str | None = None,
    pairs: Sequence[str] = (),
    config_file: Path | None = None,
    add_scram: Sequence[str] = (),
    log_level: str = "INFO",
    log_format: str = "auto",
    hooks: ProcessHooks | None = None,
) -> int:
    """Run a broker until SIGTERM or SIGINT, and return the exit status.

    The status is 1 if the broker cannot start or fails, 2 for invalid settings.

    ``data_dir`` defaults to ``log.dirs``; ``listen`` to ``listeners``, or else to
    :data:`DEFAULT_LISTEN`. ``log_level`` is one of Kafka's, ``log_format`` one of
    :data:`logs.FORMATS`; ``add_scram`` is passed to :class:`Broker`.
    """
    logs.configure(terminal=logs.FORMATS[log_format])
    logs.set_level(log_level)
    raise_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    settings = partial(_settings, pairs, config_file)
    try:
        clock = None if hooks is None else hooks.clock
        broker_settings = load(pairs, config_file)
        directory = _directory(data_dir, broker_settings)
        if not broker_settings.get("listeners"):
            listen = listen or DEFAULT_LISTEN
        broker = Broker(directory, listen, broker_settings, add_scram=add_scram, clock=clock)
    except (ConfigError, BrokerError) as error:
        _log.error("invalid settings", cause=str(error))
        return EXIT_USAGE
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run(broker, settings, hooks))
    except ConfigError as error:
        _log.error("invalid settings", cause=str(error))
        return EXIT_USAGE
    except (BrokerError, MetadataError, LogError, OSError) as error:
        _log.error("broker failed", cause=str(error))
        return EXIT_FAILED
    return EXIT_OK


def _directory(data_dir: Path | None, settings: dict[str, str]) -> Path:
    configured = take_data_directory(settings)
    directory = configured if data_dir is None else data_dir
    if directory is None:
        raise BrokerError("give --data-dir, or log.dirs in the configuration")
    return directory


def _settings(pairs: Sequence[str], config_file: Path | None) -> dict[str, str]:
    """Read the settings again. Raises ConfigError."""
    if config_file is not None and config_file.exists() and not config_file.is_file():
        # A pipe delivers the settings only once; opening it again might block forever.
        raise ConfigError(
            str(config_file), "", "it is not a regular file, so it can be read only once"
        )
    settings = load(pairs, config_file)
    take_data_directory(settings)
    return settings


async def _run(
    broker: Broker, settings: Callable[[], Mapping[str, str]], hooks: ProcessHooks | None
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(report)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        on_signal(loop, number, stop.set)
    notifier = Notifier(loop)
    # Without a handler SIGHUP would end the process; the settings have just been read.
    on_signal(loop, RELOAD, _log.info, "settings will be read again once the broker serves")
    lost: list[BrokerError] = []

    def end(why: BrokerError) -> None:
        lost.append(without_traceback(why))
        stop.set()

    broker.on_lost = end
    if not await _started(broker, stop):
        return
    hooked = None if hooks is None else await _hooked(broker, hooks)
    collector = Collector(loop)
    collector.start()
    sys.stdout.write(_listening(broker) + "\n")
    if hooked is not None:
        sys.stdout.write(f"test hooks {hooked}\n")
    sys.stdout.flush()
    notifier.ready(_listening(broker))
    reloads = _SettingsReloader(broker, settings, notifier)
    on_signal(loop, RELOAD, reloads.begin)
    preparing = spawn(broker.warm_up(), "warm-up")
    await stop.wait()
    ignore_signals(loop, (RELOAD,))
    reloads.close()
    notifier.stopping()
    preparing.cancel()
    collector.stop()
    _log.info("broker stops")
    if hooks is not None:
        await hooks.stop()
    await broker.stop()
    ignore_signals(loop, (signal.SIGTERM, signal.SIGINT))
    _log.info("broker stopped")
    for why in lost:
        raise why


async def _started(broker: Broker, stop: asyncio.Event) -> bool:
    """Start the broker; return False if a signal stopped it before it served.

    A broker that joins a cluster may wait a minute for its controllers.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None or not broker.roles.registers:
        await broker.start()
        return True
    for number in (signal.SIGTERM, signal.SIGINT):
        on_signal(loop, number, task.cancel)
    try:
        await broker.start()
    except asyncio.CancelledError:
        task.uncancel()
        _log.info("broker stopped before it served")
        return False
    for number in (signal.SIGTERM, signal.SIGINT):
        on_signal(loop, number, stop.set)
    return True


async def _hooked(broker: Broker, hooks: ProcessHooks) -> str:
    try:
        return await hooks.start(broker)
    except OSError as error:
        await broker.stop()
        raise BrokerError(f"the test hooks cannot be served: {error}") from error


def _listening(broker: Broker) -> str:
    host, port = broker.address
    return f"listening {f'[{host}]' if ':' in host else host}:{port}"


class _SettingsReloader:
    """Reloads the settings file: applies all changes, or none if any setting is invalid."""

    def __init__(
        self, broker: Broker, settings: Callable[[], Mapping[str, str]], notifier: Notifier
    ) -> None:
        self._broker, self._settings, self._notifier = broker, settings, notifier
        # A single thread, so that the settings read last are also applied last.
        self._threads = Threads("settings")
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Read the file in a thread, since the disk may block."""
        task = spawn(self._run(), "read the settings again")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel pending reloads."""
        for task in self._tasks:
            task.cancel()
        self._threads.close()

    async def _run(self) -> None:
        self._notifier.reloading()
        try:
            settings = await self._threads.run(self._settings)
            changed, at_next_start = self._broker.config.reload(settings)
        except ConfigError as error:
            _log.error("settings not read again", cause=str(error))
        else:
            _log.info("settings read again", changed=changed, at_next_start=at_next_start)
        if self._broker.certificates is not None:
            await self._broker.certificates.refresh()
        self._notifier.ready(_listening(self._broker))


def raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit: partitions and connections need them."""
    try:
        raise_descriptor_limit()
    except (OSError, ValueError) as error:
        _log.warning("file limit not raised", limit=descriptor_limit(), cause=str(error))
