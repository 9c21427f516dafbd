"""Close the files that killed logs leave open in the test process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.log_file import LogFile


@pytest.fixture
def killed_logs_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close open files after a test, as a real kill does; some clients fail above 1,024 files."""
    left: set[int] = set()
    openers = OsFileSystem.open, OsFileSystem.open_for_reading
    close, retire = OsFileSystem.close, LogFile.retire

    def opening(fs: OsFileSystem, path: str, *, create: bool = False) -> int:
        handle = openers[0](fs, path, create=create)
        left.add(handle)
        return handle

    def opening_for_reading(fs: OsFileSystem, path: str) -> int:
        handle = openers[1](fs, path)
        left.add(handle)
        return handle

    def closing(fs: OsFileSystem, handle: int) -> None:
        left.discard(handle)
        close(fs, handle)

    def retiring(file: LogFile) -> None:
        # The file's finalizer closes the descriptor. Closing it here could close another file that
        # has reused the number.
        left.discard(file._handle)
        retire(file)

    monkeypatch.setattr(LogFile, "retire", retiring)
    monkeypatch.setattr(OsFileSystem, "open", opening)
    monkeypatch.setattr(OsFileSystem, "open_for_reading", opening_for_reading)
    monkeypatch.setattr(OsFileSystem, "close", closing)
    yield
    while left:  # finalizers may close files meanwhile
        with suppress(OSError):
            close(OsFileSystem(), left.pop())
