"""Processes that an example starts, reads from, and kills: the daemon, workers, a Spark driver."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from fencepost.tools.ports import hold_port

START_S = 60
"""The time limit for the daemon's start, in seconds."""


class Process:
    """A process ``python -m`` with ``arguments``; it can be killed and started again."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        self._command = (sys.executable, "-m", *arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self.lines: asyncio.Queue[bytes] = asyncio.Queue()
        """The lines of the process's standard output; an empty one follows when the output ends."""

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process, and read its output."""
        pipe = asyncio.subprocess.PIPE
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=log
            )
        self._reader = asyncio.create_task(self._follow(self._process))

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        while process.stdout is not None and (line := await process.stdout.readline()):
            self.lines.put_nowait(line)
        self.lines.put_nowait(b"")

    def say(self, command: str) -> None:
        """Send a line to the process's standard input."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{command}\n".encode())

    async def stop(self, how: signal.Signals | None = signal.SIGTERM) -> None:
        """Send the signal ``how``, or none if the process ends by itself, and wait for the end."""
        process, reader = self._process, self._reader  # a supervisor may soon replace both
        if process is None or reader is None:
            return
        if how is not None and process.returncode is None:
            process.send_signal(how)
        await process.wait()
        await reader


class Daemon(Process):
    """A real ``fencepost serve`` with its directory in ``home``, always on the same port."""

    def __init__(self, home: Path, settings: Sequence[str] = ()) -> None:
        """``settings`` are KEY=VALUE of the broker's configuration."""
        self.port = hold_port()  # keeps other processes from taking it while the daemon is down
        self.bootstrap = f"127.0.0.1:{self.port.getsockname()[1]}"
        super().__init__(
            home / "daemon.log",
            *("fencepost", "serve", "--data-dir", str(home / "data"), "--listen", self.bootstrap),
            *(word for setting in settings for word in ("--config", setting)),
        )

    async def start(self) -> None:
        """Start the daemon (again), and wait for its ``listening`` line."""
        self.lines = asyncio.Queue()
        await super().start()
        line = await asyncio.wait_for(self.lines.get(), START_S)
        if not line.startswith(b"listening "):
            raise RuntimeError(f"the daemon did not start, see {self._log}")
