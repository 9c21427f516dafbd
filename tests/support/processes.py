"""Child processes whose output is read by a thread, so that no pipe ever fills up."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PAGE_BYTES = resource.getpagesize()


class Child:
    """One child process, whose standard output and error are collected in ``lines``."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.command = list(command)
        self.lines: list[str] = []
        self._grown = threading.Condition()
        self._process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=None if env is None else dict(env),
            cwd=cwd,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._grown:
                self.lines.append(line.rstrip("\n"))
                self._grown.notify_all()
        self._process.wait()
        with self._grown:
            self._grown.notify_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def resident_bytes(self) -> int:
        """Return the resident memory of the process (VmRSS)."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * PAGE_BYTES

    @property
    def returncode(self) -> int | None:
        """The exit status: None while it runs, the negative signal number if one ended it."""
        return self._process.poll()

    def wait_for_line(self, pattern: str, *, deadline_s: float, since: int = 0) -> re.Match[str]:
        """Return the match of the first present or future line that contains ``pattern``.

        ``since`` is the number of lines to skip, as an earlier ``len(child.lines)``.
        """
        end = time.monotonic() + deadline_s
        seen = since
        with self._grown:
            while True:
                for line in self.lines[seen:]:
                    if match := re.search(pattern, line):
                        return match
                seen = len(self.lines)
                if not self._reader.is_alive():
                    raise RuntimeError(f"{self.command} ended ({self.returncode}):\n{self.tail()}")
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no {pattern!r} within {deadline_s} s:\n{self.tail()}")
                self._grown.wait(min(left, 0.1))

    def tail(self, lines: int = 60) -> str:
        """Return the last lines of its output."""
        return "\n".join(self.lines[-lines:])

    def kill(self) -> None:
        """Kill the process by SIGKILL, and wait until it has ended."""
        if self.returncode is None:
            self._process.kill()
        self.wait(60)

    def terminate(self, *, deadline_s: float = 60) -> int:
        """Send SIGTERM and wait; after the deadline kill the process and raise TimeoutError."""
        if self.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"SIGTERM did not end {self.command}:\n{self.tail()}") from None

    def wait(self, deadline_s: float) -> int:
        """Wait until the process has ended and all output is read; return the exit status."""
        status = self._process.wait(deadline_s)
        self._reader.join(deadline_s)
        return status
