"""A real Mosquitto, with persistence, that can be killed and started again."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import signal
import weakref
from pathlib import Path

import pytest

from fencepost.tools.ports import hold_port
from tests.support.processes import Child
from tests.support.waits import until

PLACES = (None, "/usr/sbin:/usr/local/sbin")
"""Search paths: Debian installs it in a folder that a user's PATH may not have."""


def executable() -> str:
    """Return the path of Mosquitto; without it skip the test, or fail it where CI requires it."""
    for path in PLACES:
        if program := shutil.which("mosquitto", path=path):
            return program
    if os.environ.get("REQUIRE_ORACLE"):
        pytest.fail("mosquitto is not installed (Debian package mosquitto)")
    pytest.skip("mosquitto is not installed (Debian package mosquitto)")


class Mosquitto:
    """One broker, which keeps its port across restarts."""

    def __init__(
        self, home: Path, *, max_inflight_messages: int = 1_000, secured: str = ""
    ) -> None:
        """``secured`` has the settings of a second, secured listener at ``secured_port``."""
        self._executable = executable()
        home.mkdir(parents=True)
        ports = []
        for held in (hold_port(), hold_port()):
            weakref.finalize(self, held.close)
            ports.append(held.getsockname()[1])
        self.port: int = ports[0]
        self.secured_port: int = ports[1]
        shy = f"listener {self.secured_port} 127.0.0.1\n{secured}\n" if secured else ""
        self._database = home / "mosquitto.db"
        self._config = home / "mosquitto.conf"
        user = "user root\n" if os.geteuid() == 0 else ""
        self._config.write_text(
            f"per_listener_settings true\n{user}"
            f"persistence true\npersistence_location {home}/\nautosave_interval 3600\n"
            f"max_inflight_messages {max_inflight_messages}\nmax_queued_messages 0\n"
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\n{shy}"
        )
        self.child: Child | None = None

    def start(self) -> Mosquitto:
        self.child = Child([self._executable, "-c", str(self._config), "-v"])
        self.child.wait_for_line(r"mosquitto version \S+ running", deadline_s=60)
        return self

    def reload(self) -> None:
        """Let Mosquitto reload its password file by SIGHUP."""
        assert self.child is not None
        line_count = len(self.child.lines)
        os.kill(self.child.pid, signal.SIGHUP)
        self.child.wait_for_line(r"Reloading config", deadline_s=60, since=line_count)

    def save(self) -> None:
        """Let Mosquitto persist its state, which it otherwise only does when it stops cleanly."""
        assert self.child is not None

        def modified_ns() -> int:
            return self._database.stat().st_mtime_ns if self._database.exists() else 0

        before = modified_ns()
        os.kill(self.child.pid, signal.SIGUSR1)
        until(lambda: modified_ns() > before, "Mosquitto's database written")

    def stop(self) -> None:
        """Stop Mosquitto cleanly, so that it persists its state."""
        assert self.child is not None
        self.child.terminate()

    def kill(self) -> None:
        """Kill the process by SIGKILL."""
        if self.child is not None:
            self.child.kill()


def password_file(path: Path, **users: str) -> Path:
    """Write a password file as ``mosquitto_passwd`` does (``$7$``: PBKDF2 with SHA-512)."""
    lines = []
    for name, password in users.items():
        salt = os.urandom(12)
        hashed = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, 101)
        encoded = "$".join(base64.b64encode(part).decode() for part in (salt, hashed))
        lines.append(f"{name}:$7$101${encoded}\n")
    path.write_text("".join(lines))
    return path
