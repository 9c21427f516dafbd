"""A thread that hashes passwords, so that the event loop never waits for a hash.

A hash takes milliseconds, and any client that can connect can request one. Therefore a single
thread computes all hashes, and its queue is limited.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from fencepost.coordinator.security.mechanism import TooManyLoginsError
from fencepost.coordinator.security.users import Credential
from fencepost.protocol.scram import salted_password

MAX_WAITING: Final = 256
"""The maximum number of queued passwords: half a second to three seconds of work, depending on the
iterations."""

MAX_WAITING_PER_HOST: Final = 128
"""The maximum number of queued passwords from one address, so that other addresses find room."""


class PasswordChecks:
    """The hashing thread and its queue."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self.waiting = 0
        self._of_host: Counter[str] = Counter()

    def begin(self, credential: Credential, password: str, host: str = "") -> asyncio.Future[bytes]:
        """Queue a password to be hashed with the salt and iterations of ``credential``.

        ``host`` is the client's address. Raises TooManyLoginsError.
        """
        if self.waiting >= MAX_WAITING:
            raise TooManyLoginsError(f"{MAX_WAITING} passwords wait to be checked (MAX_WAITING)")
        if self._of_host[host] >= MAX_WAITING_PER_HOST:
            most = f"{MAX_WAITING_PER_HOST} passwords of its address"
            raise TooManyLoginsError(f"{most} wait to be checked (MAX_WAITING_PER_HOST)")
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
        self._of_host[host] += 1
        future.add_done_callback(partial(self._done, host))
        return future

    def _done(self, host: str, _future: asyncio.Future[bytes]) -> None:
        self.waiting -= 1
        self._of_host[host] -= 1
        if not self._of_host[host]:
            del self._of_host[host]

    def close(self) -> None:
        """End the thread, and cancel the queue."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
