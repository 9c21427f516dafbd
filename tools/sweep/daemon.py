"""A broker in a separate process, which kills itself at a crash point.

A sweep starts hundreds of brokers, so they are forked from a fork server that has imported all
modules. The modules of protocol messages are imported at first use; the first broker reports the
modules that it has used, and the fork server then imports them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol, cast

from fencepost.coordinator import handlers
from fencepost.coordinator.daemon.broker import Broker
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.system import kill_this_process, on_signal
from fencepost.logcore.values import dataclass
from fencepost.tools.ports import hold_port
from fencepost.tools.sweep.points import (
    CountedEvent,
    CountedFileSystem,
    CountedLoop,
    EventCounter,
    KillPoint,
)

START_S = 60.0
STOP_S = 20.0

if TYPE_CHECKING:
    from multiprocessing.context import SpawnContext

_spawned = multiprocessing.get_context("spawn")
# The contexts have the same methods. Windows has no fork server.
_forked = (
    cast("SpawnContext", multiprocessing.get_context("forkserver"))
    if "forkserver" in multiprocessing.get_all_start_methods()
    else _spawned
)
_MESSAGES = "kio.schema."
_starting = threading.Lock()
"""The fork server accepts only one thread at a time."""


class Connection(Protocol):
    """The end of a pipe between processes, whose class depends on the system."""

    def send(self, obj: object, /) -> None:
        """Pickle and send an object."""

    def recv(self) -> Any:
        """Receive an object. Raises EOFError."""

    def poll(self, timeout: float | None = 0.0, /) -> bool:
        """Return whether an object arrives in time."""

    def fileno(self) -> int:
        """Return the descriptor."""

    def close(self) -> None:
        """Close this end."""


class DaemonError(Exception):
    """The broker did not start, did not stop, or died for a reason other than the crash point."""


@dataclass(frozen=True, slots=True)
class CountingWrappers:
    """Makes the objects that count a broker's events. It is pickled and sent to its process."""

    every_answer: bool = False
    """Whether answers without a durable operation before them are crash points too."""

    def counter(self, point: KillPoint | None, die: Callable[[CountedEvent], None]) -> EventCounter:
        """Make the counter of one process."""
        return EventCounter(point, die, every_answer=self.every_answer)

    def die(self, pipe: Connection, event: CountedEvent) -> None:
        """Report on ``pipe`` that ``event`` reaches the crash point, and kill the process."""
        pipe.send(("killed", event.what))
        kill_this_process()

    def file_system(self, root: str, counter: EventCounter) -> OsFileSystem:
        """Make the broker's file system, with its data directory at ``root``."""
        return CountedFileSystem(root, counter)

    def loop(self, counter: EventCounter) -> asyncio.AbstractEventLoop:
        """Make the broker's event loop."""
        loop = CountedLoop()
        loop.counter = counter
        return loop


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """Settings that stay the same from one start to the next."""

    data_dir: Path
    log: Path
    """The file for the broker's standard output and error."""
    config: Mapping[str, str]
    counting: CountingWrappers


def preload(messages: Sequence[str]) -> None:
    """Import these modules before brokers are forked; this has no effect after the first fork."""
    loaded = [f"{handlers.__name__}.{module.name}" for module in iter_modules(handlers.__path__)]
    _forked.set_forkserver_preload([__name__, *loaded, *messages])


class Daemon:
    """The broker of one run, across its restarts. ``bootstrap`` is stable until :meth:`close`.

    A ``fresh`` broker is spawned instead of forked; after :meth:`stop`, ``messages`` has the
    modules of protocol messages that it imported.
    """

    def __init__(self, settings: DaemonSettings, *, fresh: bool = False) -> None:
        # If the port were not held, another process could take it while the broker is dead.
        self._port = hold_port()
        self.bootstrap = f"127.0.0.1:{self._port.getsockname()[1]}"
        self.messages: list[str] = []
        self._processes = _spawned if fresh else _forked
        self._settings = settings
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def start(self, point: KillPoint | None = None) -> str | None:
        """Start the broker; return None once it listens, or the event at which it killed itself.

        Raises DaemonError.
        """
        pipe, child_end = self._processes.Pipe()
        process = self._processes.Process(
            target=_main, args=(child_end, self._settings, self.bootstrap, point), daemon=True
        )
        with _starting:
            process.start()
        child_end.close()
        self._process, self._pipe = process, pipe
        message = self._receive(START_S)
        if message is not None and message[0] == "killed":
            self._join()
            return str(message[1])
        if message is None or message[0] != "listening":
            self.kill()
            why = message[1] if message is not None else "no word from it"
            raise DaemonError(f"the broker did not start: {why}")
        return None

    def killed_at(self, timeout_s: float) -> str | None:
        """Return the event at which the broker killed itself; None if it runs after the timeout.

        Raises DaemonError if the broker died for another reason.
        """
        if self._pipe is None or not self._pipe.poll(timeout_s):
            return None
        message = self._receive(0)
        self._join()
        if message is None or message[0] != "killed":
            raise DaemonError(
                f"the broker died by itself{'' if message is None else f': {message[1]}'}"
            )
        return str(message[1])

    def arm(self, point: KillPoint | None) -> None:
        """Restart the count, with another crash point. Raises DaemonError if the broker is gone."""
        if self._pipe is None:
            raise DaemonError("the broker does not run")
        with contextlib.suppress(OSError):
            self._pipe.send(("arm", point))
        message = self._receive(STOP_S)
        if message is None or message[0] != "armed":
            raise DaemonError("the broker died by itself")

    def disarm(self) -> tuple[str | None, list[CountedEvent]]:
        """Stop counting; return the event that triggered the kill, or None, and all events.

        Raises DaemonError if the broker died for another reason.
        """
        if self._pipe is None:
            raise DaemonError("the broker does not run")
        with contextlib.suppress(OSError):
            self._pipe.send(("disarm", None))
        message = self._receive(STOP_S)
        if message is not None and message[0] == "killed":
            self._join()
            return str(message[1]), []
        if message is None or message[0] != "disarmed" or not isinstance(message[1], list):
            raise DaemonError("the broker died by itself")
        return None, message[1]

    def stop(self) -> None:
        """Send SIGTERM, and wait. Raises DaemonError if the broker does not stop properly."""
        if self._process is None or self._process.pid is None:
            raise DaemonError("the broker does not run")
        os.kill(self._process.pid, signal.SIGTERM)
        message = self._receive(STOP_S)
        if message is None or message[0] != "stopped":
            self.kill()
            raise DaemonError(f"the broker did not stop: {message[1] if message else 'silence'}")
        if isinstance(message[1], list):
            self.messages = message[1]
        self._join()

    def kill(self) -> None:
        """Send SIGKILL, if the broker still runs."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
        self._join()

    def close(self) -> None:
        """Kill the broker, and release its port."""
        self.kill()
        self._port.close()

    def _join(self) -> None:
        if self._process is not None:
            self._process.join(STOP_S)
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _receive(self, timeout_s: float) -> tuple[str, object] | None:
        """Receive the process's next message; None if it ends or sends none in time."""
        if self._pipe is None:
            return None
        end = time.monotonic() + timeout_s
        while not self._pipe.poll(max(0.0, min(1.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return None
        try:
            word, value = self._pipe.recv()
        except (EOFError, OSError):
            return None
        return str(word), value


def _main(pipe: Connection, settings: DaemonSettings, listen: str, point: KillPoint | None) -> None:
    """Run the broker in its own process."""
    log = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    # Ctrl-C is for the sweep, which stops its brokers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    counting = settings.counting
    counter = counting.counter(point, partial(counting.die, pipe))
    try:
        with asyncio.Runner(loop_factory=lambda: counting.loop(counter)) as runner:
            runner.run(_serve(pipe, settings, listen, counter))
    except Exception as error:  # the sweep reports any error
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        raise


async def _serve(
    pipe: Connection, settings: DaemonSettings, listen: str, counter: EventCounter
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    on_signal(loop, signal.SIGTERM, stop.set)

    def ordered() -> None:
        # A closed pipe means that the sweep is gone.
        try:
            order, value = pipe.recv()
        except (EOFError, OSError):
            loop.remove_reader(pipe.fileno())
            stop.set()
            return
        if order == "arm":
            counter.reset(value)
            pipe.send(("armed", None))
        else:
            counter.disarm()
            pipe.send(("disarmed", counter.events))

    broker = Broker(
        settings.data_dir,
        listen,
        settings.config,
        fs=settings.counting.file_system(str(settings.data_dir), counter),
    )
    async with broker:
        loop.add_reader(pipe.fileno(), ordered)
        counter.arm()
        pipe.send(("listening", broker.bootstrap))
        await stop.wait()
        counter.disarm()
        loop.remove_reader(pipe.fileno())
    pipe.send(("stopped", sorted(name for name in sys.modules if name.startswith(_MESSAGES))))
