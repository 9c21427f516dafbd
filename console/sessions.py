"""Queries to the brokers: blocking sessions in threads, so that the event loop is not blocked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fencepost.client.queries.session import ClusterSession
from fencepost.client.security import PLAINTEXT, Security
from fencepost.console.limits import MAX_CALLS
from fencepost.protocol.errors import WireError

T = TypeVar("T")


def topic_exists(session: ClusterSession, topic: str) -> bool:
    """Whether ``topic`` exists; if the session does not know it, its metadata is refreshed."""
    client = session.client
    return topic in client.metadata().topics or topic in client.metadata(refresh=True).topics


class SessionPool:
    """Sessions with one cluster; one thread at a time uses a session."""

    def __init__(
        self,
        bootstrap: str,
        timeout_s: float,
        most: int = MAX_CALLS,
        *,
        security: Security = PLAINTEXT,
    ) -> None:
        self.bootstrap = bootstrap
        self._timeout_s = timeout_s
        self._security = security
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="console")
        self._lock = threading.Lock()
        self._idle: list[ClusterSession] = []

    async def run_query(self, query: Callable[[ClusterSession], T]) -> T:
        """Run ``query`` in a thread. Raises the errors of ``query``."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._run_query, query
        )

    def _run_query(self, query: Callable[[ClusterSession], T]) -> T:
        with self._lock:
            session = self._idle.pop() if self._idle else None
        if session is None:
            session = ClusterSession(self.bootstrap, self._timeout_s, security=self._security)
        try:
            return query(session)
        except WireError:
            # The cached metadata may be the cause. The connections are kept: a page whose
            # requests are not authorized repeats them every few seconds.
            session.client.forget()
            raise
        finally:
            with self._lock:
                self._idle.append(session)

    def close(self) -> None:
        """Close all connections; queries in progress fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for session in self._idle:
                session.client.close()
            self._idle.clear()
