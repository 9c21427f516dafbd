"""A broker for tests, in a thread of its own, with what a test does to it and asks of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fencepost.testing.access import Access
from fencepost.testing.aio import Aio, beside
from fencepost.testing.arguments import checked, setting_texts
from fencepost.testing.broker import OwnBroker
from fencepost.testing.clock import TestClock
from fencepost.testing.under_test import SETTINGS, KafkaUnderTest
from fencepost.testing.waiting import BrokerDownError

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker


@checked
class Kafka(OwnBroker, KafkaUnderTest):
    """One broker, from ``start`` (or ``with``) to ``stop``.

    ``config`` has settings by Kafka's names, over :data:`SETTINGS`; a truth value becomes Kafka's
    word for it. Without a ``data_dir`` the broker has a directory of its own that goes with it.
    ``rename`` makes the names of :meth:`name` and :meth:`topic`; by default they stay as they are.
    ``users`` (passwords by name) have to log in, ``tls`` encrypts, and with ``acls`` they may do
    only what rules allow (see :meth:`acl`); the methods here may do everything.
    Its ``clock`` begins at ``now_ms``, by default at the machine's time of day (also where a test
    has frozen that), and runs as fast, until :attr:`clock`.auto is set to False. It may be moved on
    at any time.
    """

    clock: TestClock

    def __init__(
        self,
        data_dir: str | Path | None = None,
        config: Mapping[str, object] | None = None,
        *,
        users: Mapping[str, str] | None = None,
        tls: bool = False,
        acls: Sequence[str] | None = None,
        now_ms: int | None = None,
        rename: Callable[[str], str] = str,
    ) -> None:
        access = Access(users, tls=tls, acls=acls)
        KafkaUnderTest.__init__(self, access, rename)
        OwnBroker.__init__(
            self,
            data_dir or "",
            config={**SETTINGS, **access.settings, **setting_texts(config or {})},
            clock=TestClock(now_ms, auto=True),
            forces=False,
            add_scram=access.added,
        )
        self._has_rules = False
        self._is_temporary = data_dir is None

    # --- life ---

    def start(self) -> Self:
        """Start and wait until it listens. Raises BrokerError, and ConfigError for a setting."""
        if self._is_temporary and not self.data_dir.name:
            self.data_dir = Path(tempfile.mkdtemp(prefix="fencepost-"))
        try:
            super().start()
            if not self._has_rules:
                with self._session() as session:
                    self._access.make_rules(session)
                self._has_rules = True
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop it in an orderly way; a temporary directory is removed."""
        self._hang_up()
        super().stop()
        self._access.close()
        if self._is_temporary and self.data_dir.name:
            shutil.rmtree(self.data_dir, ignore_errors=True)
            self.data_dir = Path()

    def crash(self) -> None:
        """End as by ``kill -9``: sockets are reset, files stay as they are at this moment.

        What was acknowledged is in them; what a stop would have written is not.
        """
        self._hang_up()
        super().crash()

    def restart(self) -> Self:
        """Start again, on the same directory and port; stops before that if it still runs."""
        self._hang_up()
        return super().restart()

    def __repr__(self) -> str:
        return (
            f"<Kafka {self.bootstrap or 'that never started'}{'' if self.is_running else ', down'}>"
        )

    @cached_property
    def aio(self) -> KafkaAio:
        """The same methods for coroutines, on asyncio and on trio."""
        return KafkaAio(self)

    def serve_again(self) -> None:
        """Start or resume it, if it is down or paused."""
        self.resume()
        if not self.is_running:
            self.restart()

    @property
    def trouble(self) -> str:
        """That it is down or paused; empty if it is neither."""
        down = "" if self.is_running else "the broker is down"
        return "the broker is paused" if self.is_paused else down

    # --- inside ---

    @property
    def _ends(self) -> int:
        return self.ends

    def _check_running(self) -> None:
        if not self.is_running:
            raise BrokerDownError("the broker is down; kafka.restart() starts it again")
        if self.is_paused:
            raise BrokerDownError("the broker is paused; kafka.resume() lets it go on")

    def _running(self) -> Iterable[Callable[[Callable[[Broker], Any]], Any]]:
        return [self.call]


class KafkaAio(Aio[Kafka]):
    """``kafka.aio``."""

    topic = beside(Kafka.topic)
    crash = beside(Kafka.crash)
    restart = beside(Kafka.restart)
