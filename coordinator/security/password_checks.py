"""Passwords that clients send are hashed in a thread: the loop never waits for it.

That costs milliseconds each, and whoever connects can ask for it. So there is one thread, and few
may wait for it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from fencepost.coordinator.security.mechanism import TooManyLoginsError
from fencepost.coordinator.security.users import Credential
from fencepost.coordinator.wire.scram import salted_password

MAX_WAITING: Final = 256
"""Passwords that wait for the thread: half a second to three, by their iterations."""


class PasswordChecks:
    """The thread and who waits for it."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self.waiting = 0

    def begin(self, credential: Credential, password: str) -> asyncio.Future[bytes]:
        """Hash a password as that of ``credential`` was. Raises TooManyLoginsError."""
        if self.waiting >= MAX_WAITING:
            raise TooManyLoginsError(f"{MAX_WAITING} passwords wait to be checked (MAX_WAITING)")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="passwords")
        mechanism, salt, iterations = (
            credential.mechanism,
            credential.salt,
            credential.iterations,
        )
        future = asyncio.get_running_loop().run_in_executor(
            self._pool, salted_password, mechanism, password, salt, iterations
        )
        self.waiting += 1
        future.add_done_callback(self._done)
        return future

    def _done(self, _future: asyncio.Future[bytes]) -> None:
        self.waiting -= 1

    def close(self) -> None:
        """End the thread; nobody waits any more."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
