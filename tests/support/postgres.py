"""A real PostgreSQL server, Debian's, that can be killed and started again."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import tempfile
import weakref
from pathlib import Path

from fencepost.tools.ports import hold_port
from tests.support.kafka import OracleMissingError
from tests.support.processes import Child
from tests.support.waits import until

USER = "postgres"
"""The user of Debian's package: PostgreSQL refuses to run as root."""

START_S = 60.0


def programs() -> Path:
    """Return the folder of PostgreSQL's programs. Raises OracleMissingError without one."""
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4])
    )
    folder = str(versions[-1]) if versions else shutil.which("initdb")
    if folder is None:
        raise OracleMissingError("PostgreSQL is not installed (Debian package postgresql)")
    return Path(folder).parent


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in found.split()]


class PostgresServer:
    """One server, which keeps its port across restarts.

    It runs without fsync: after a SIGKILL the page cache still holds all writes of the server. Only
    a crash of the machine could lose them.
    """

    def __init__(self) -> None:
        try:
            import psycopg  # noqa: F401 - an extra
        except ImportError:
            reason = "psycopg is not installed (pip install '.[postgres]' in a clone of Fencepost)"
            raise OracleMissingError(reason) from None
        self._programs = programs()
        held = hold_port()
        weakref.finalize(self, held.close)
        self.port: int = held.getsockname()[1]
        # PostgreSQL's user may not enter the folder of a test, so the data has a folder elsewhere.
        self._data = tempfile.mkdtemp(prefix="fencepost-postgres-")
        weakref.finalize(self, shutil.rmtree, self._data, ignore_errors=True)
        self._as: list[str] = []
        if os.geteuid() == 0:
            owner = pwd.getpwnam(USER)
            os.chown(self._data, owner.pw_uid, owner.pw_gid)
            ids = (f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}")
            self._as = ["setpriv", *ids, "--clear-groups"]
        made = self._child("initdb", "-D", self._data, "-A", "trust", "-U", USER, "-N")
        if made.wait(START_S):
            raise RuntimeError(made.tail())
        with Path(self._data, "postgresql.conf").open("a", encoding="utf-8") as settings:
            settings.write(
                f"port = {self.port}\nlisten_addresses = '127.0.0.1'\n"
                "unix_socket_directories = ''\nfsync = off\nmax_prepared_transactions = 20\n"
                "autovacuum = off\nshared_buffers = '16MB'\n"
            )
        self.child: Child | None = None

    def _child(self, program: str, *arguments: str) -> Child:
        command = [*self._as, str(self._programs / program), *arguments]
        return Child(command, cwd=Path(self._data))

    @property
    def conninfo(self) -> str:
        return f"host=127.0.0.1 port={self.port} user={USER} dbname={USER}"

    @property
    def is_dead(self) -> bool:
        return self.child is None or self.child.returncode is not None

    def start(self) -> PostgresServer:
        """Start, and wait until the server accepts connections after its recovery."""
        self.child = self._child("postgres", "-D", self._data)
        self.child.wait_for_line("database system is ready to accept", deadline_s=START_S)
        return self

    @property
    def postmaster(self) -> int:
        """Return the process id of the postmaster, which starts all other processes."""
        assert self.child is not None
        return self.child.pid

    def kill(self) -> None:
        """Kill all processes by SIGKILL."""
        assert self.child is not None
        kill_all([self.postmaster, *children_of(self.postmaster)])
        self.child.wait(START_S)

    def stop(self) -> None:
        """Stop cleanly, without waiting for clients."""
        if not self.is_dead:
            assert self.child is not None
            os.kill(self.child.pid, signal.SIGINT)
            self.child.wait(START_S)


def kill_all(pids: list[int]) -> None:
    """Kill processes by SIGKILL; wait until the kernel has closed their connections."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(_runs(pid) for pid in pids), "the end of the killed processes")


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
