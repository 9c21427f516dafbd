"""Questions to the brokers: blocking sessions in threads, so that the loop answers meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fencepost.console.limits import MAX_CALLS
from fencepost.coordinator.cli.queries.session import Session
from fencepost.coordinator.wire.client.security import PLAINTEXT, Security
from fencepost.coordinator.wire.errors import WireError

T = TypeVar("T")


def knows(session: Session, topic: str) -> bool:
    """Whether there is ``topic``; a session that has not heard of it asks again."""
    client = session.client
    return topic in client.metadata().topics or topic in client.metadata(refresh=True).topics


class Sessions:
    """Sessions with one cluster; a session is one thread's at a time."""

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
        self._idle: list[Session] = []

    async def ask(self, question: Callable[[Session], T]) -> T:
        """Run ``question`` in a thread. Raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._answer, question
        )

    def _answer(self, question: Callable[[Session], T]) -> T:
        with self._lock:
            session = self._idle.pop() if self._idle else None
        if session is None:
            session = Session(self.bootstrap, self._timeout_s, security=self._security)
        try:
            return question(session)
        except WireError:
            # What is known of the cluster may be what is wrong. The connections may be good: who
            # may not see something asks for it every few seconds.
            session.client.forget()
            raise
        finally:
            with self._lock:
                self._idle.append(session)

    def close(self) -> None:
        """Close all connections; questions that are under way run into it."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for session in self._idle:
                session.client.close()
            self._idle.clear()
