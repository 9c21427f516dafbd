"""Starts the real daemon, as a user does: ``fencepost serve`` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fencepost.tools.ports import hold_port
from tests.support.processes import Child
from tests.support.targets import SETTINGS

START_S, STOP_S = 60.0, 60.0
WATCH_S = 0.005
"""Interval of a watcher's checks."""

ROOT = Path(__file__).resolve().parents[2]


class Daemon:
    """One ``fencepost serve``, which keeps its port across restarts, so that clients reconnect."""

    name = "fencepost"

    def __init__(
        self,
        data_dir: Path,
        settings: Mapping[str, str] = SETTINGS,
        *,
        command: Sequence[str] = (sys.executable, "-m", "fencepost", "serve"),
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        listen: str = "",
    ) -> None:
        """``listen`` is HOST:PORT; by default the daemon gets a free port, which it keeps.

        The setting ``listeners`` overrides it.
        """
        self.data_dir = data_dir
        self.settings = dict(settings)
        self.bootstrap = ""
        self.child: Child | None = None
        self.is_listening = False
        self._command = list(command)
        self._env = dict(env or {})
        self._cwd = cwd
        self._listen = listen
        if not listen:
            port = hold_port()
            weakref.finalize(self, port.close)
            self._listen = f"127.0.0.1:{port.getsockname()[1]}"

    def start(self, *, env: Mapping[str, str] | None = None, deadline_s: float = START_S) -> Daemon:
        """Start, and wait for the line ``listening HOST:PORT``; ``env`` only applies this time."""
        self.launch(env=env)
        return self.wait_until_listening(deadline_s)

    def launch(self, *, env: Mapping[str, str] | None = None) -> Child:
        """Start without waiting; a test that expects an early exit watches the child itself."""
        self.is_listening = False
        self.child = Child(
            [*self._command, *self.arguments()],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self._env, **(env or {})},
            cwd=self._cwd,
        )
        return self.child

    def arguments(self) -> list[str]:
        """Return the arguments of the command."""
        listen = [] if "listeners" in self.settings else ["--listen", self._listen]
        pairs = [item for pair in self.settings.items() for item in ("--config", "=".join(pair))]
        return ["--data-dir", str(self.data_dir), *listen, *pairs]

    def wait_until_listening(self, deadline_s: float = START_S) -> Daemon:
        assert self.child is not None
        match = self.child.wait_for_line(r"^listening (\S+:\d+)$", deadline_s=deadline_s)
        self.bootstrap = match.group(1)
        self.is_listening = True
        return self

    def kill(self) -> None:
        """Kill the daemon by SIGKILL."""
        assert self.child is not None
        self.child.kill()

    def stop(self, *, deadline_s: float = STOP_S) -> None:
        """Send SIGTERM; RuntimeError unless the daemon ends with status 0."""
        assert self.child is not None
        status = self.child.terminate(deadline_s=deadline_s)
        if status != 0:
            raise RuntimeError(f"exit status {status}:\n{self.child.tail()}")

    @contextlib.contextmanager
    def restarted_when(
        self, due: Callable[[], bool], *, env: Mapping[str, str] | None = None
    ) -> Iterator[list[int]]:
        """Within the block, kill the daemon by SIGKILL and restart it whenever ``due`` is true.

        ``env`` only applies to these restarts. Yield a list that gets an item for each restart.
        """
        starts: list[int] = []
        leave = threading.Event()

        def watch() -> None:
            while not leave.wait(WATCH_S):
                if due():
                    starts.append(len(starts))
                    self.kill()
                    self.start(env=env)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield starts
        finally:
            leave.set()
            watcher.join()
