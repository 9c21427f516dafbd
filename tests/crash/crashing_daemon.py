"""The real broker over a file system that kills the process at a chosen durable step, or fails.

    python -m tests.crash.crashing_daemon --data-dir DIR --listen HOST:PORT --config KEY=VALUE …

SIGUSR1 starts a count of durable steps and prints the line ``armed``. CRASH_AT=N in the
environment is the step before which the process is killed (the first is 1). With CRASH_TORN=1, half
of a write at that step still happens. With CRASH_ARMED=1 the count starts with the process,
so that the process can be killed during recovery. With CRASH_FAILS=PATH the process is not killed:
the N-th write to a file with PATH in its name fails once, as on a bad disk. With CRASH_CUTS=PATH,
the process is killed in the N-th such write, after CRASH_KEEPS bytes; a negative number counts from
the write's end. SIGUSR2 prints ``steps K``, the number of counted steps.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fencepost.logcore.fs import FileMap, OsFileSystem, ReadableBuffer


class StepCounter:
    """Counts durable steps and ends the process at one of them."""

    def __init__(
        self,
        crash_at: int,
        *,
        torn: bool,
        armed: bool,
        fails: str = "",
        cuts: str = "",
        keeps: int = 0,
    ) -> None:
        self.keeps = keeps
        """Number of written bytes of a cut write; a negative number counts from the end."""
        self.fails = fails
        self._path = fails or cuts
        self.steps = 0
        self.armed = armed
        self._crash_at = crash_at
        self._torn = torn

    def step(self) -> bool:
        """Count one step; return True if only half of it should happen before the kill."""
        if not self.armed or self._path:
            return False
        self.steps += 1
        if self.steps != self._crash_at:
            return False
        if self._torn:
            return True
        self.die()
        return False

    def is_chosen(self, path: str) -> bool:
        """Return whether this write to ``path`` is the one that must fail or be cut."""
        if not self.armed or not self._path or self._path not in path:
            return False
        self.steps += 1
        return self.steps == self._crash_at

    @staticmethod
    def die() -> None:
        """Kill this process by SIGKILL, without handlers, flushes or closed connections."""
        os.kill(os.getpid(), signal.SIGKILL)


class CountedMap:
    """A mapped file; a store into it survives a kill, as a write does."""

    def __init__(self, mapped: FileMap, counter: StepCounter) -> None:
        self._mapped = mapped
        self._counter = counter

    def __getitem__(self, key: slice) -> bytes:
        return self._mapped[key]

    def __setitem__(self, key: slice, value: bytes) -> None:
        if self._counter.step():
            half = len(value) // 2
            self._mapped[key.start : key.start + half] = bytes(value[:half])
            self._counter.die()
        self._mapped[key] = value

    def flush(self) -> None:
        if self._counter.step():
            self._counter.die()
        self._mapped.flush()

    def close(self) -> None:
        self._mapped.close()


class CrashingFileSystem(OsFileSystem):
    """The operating system's file system, with every durable step counted first."""

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter
        self._paths: dict[int, str] = {}

    def _step(self) -> None:
        if self._counter.step():
            self._counter.die()

    def open(self, path: str, *, create: bool = False) -> int:
        if create:
            self._step()
        handle = super().open(path, create=create)
        self._paths[handle] = path
        return handle

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        if self._counter.is_chosen(self._paths[handle]):
            if self._counter.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().write(handle, (b"".join(buffers)[: self._counter.keeps],), position)
            self._counter.die()
        if self._counter.step():
            whole = b"".join(buffers)
            super().write(handle, (whole[: len(whole) // 2],), position)
            self._counter.die()
        return super().write(handle, buffers, position)

    def truncate(self, handle: int, size: int) -> None:
        self._step()
        super().truncate(handle, size)

    def allocate(self, handle: int, position: int, count: int) -> None:
        self._step()
        super().allocate(handle, position, count)

    def sync(self, handle: int) -> None:
        self._step()
        super().sync(handle)

    def map(self, handle: int, size: int) -> FileMap:
        return CountedMap(super().map(handle, size), self._counter)

    def rename(self, source: str, target: str) -> None:
        self._step()
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._step()
        super().remove(path)

    def remove_tree(self, path: str) -> None:
        self._step()
        super().remove_tree(path)

    def make_directory(self, path: str) -> None:
        self._step()
        super().make_directory(path)

    def sync_directory(self, path: str) -> None:
        self._step()
        super().sync_directory(path)


async def run(options: Any, counter: StepCounter) -> None:
    """Serve until SIGTERM."""
    from fencepost import Broker

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def arm() -> None:
        counter.steps, counter.armed = 0, True
        print("armed", flush=True)

    def report() -> None:
        counter.armed = False
        print("steps", counter.steps, flush=True)

    loop.add_signal_handler(signal.SIGUSR1, arm)
    loop.add_signal_handler(signal.SIGUSR2, report)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    broker = Broker(
        options.data_dir,
        listen=options.listen,
        config=dict(pair.split("=", 1) for pair in options.config),
        fs=CrashingFileSystem(counter),
    )
    async with broker:
        print("listening {}:{}".format(*broker.address), flush=True)
        await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--config", action="append", default=[])
    counter = StepCounter(
        int(os.environ.get("CRASH_AT", "0")),
        torn=os.environ.get("CRASH_TORN") == "1",
        armed=os.environ.get("CRASH_ARMED") == "1",
        fails=os.environ.get("CRASH_FAILS", ""),
        cuts=os.environ.get("CRASH_CUTS", ""),
        keeps=int(os.environ.get("CRASH_KEEPS", "0")),
    )
    asyncio.run(run(parser.parse_args(), counter))


if __name__ == "__main__":
    main()
