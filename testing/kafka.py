"""A broker in a thread of the test's process; the test controls and queries the broker."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fencepost.testing.access import BrokerAccess
from fencepost.testing.aio import Aio, beside
from fencepost.testing.arguments import checked, setting_texts
from fencepost.testing.broker import OwnBroker
from fencepost.testing.clock import TestClock
from fencepost.testing.levels import SETTINGS
from fencepost.testing.under_test import KafkaUnderTest
from fencepost.testing.waiting import BrokerDownError

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker


@checked
class Kafka(OwnBroker, KafkaUnderTest):
    """One broker, from ``start`` (or ``with``) to ``stop``.

    ``config`` has settings by Kafka's names, which override :data:`SETTINGS`; a bool is written as
    ``true`` or ``false``. Without a ``data_dir`` the broker has a temporary directory. ``rename``
    maps the argument of :meth:`name` and :meth:`topic` to the name in Kafka; by default they are
    equal. With ``users`` (passwords by name) clients must log in. ``tls`` encrypts connections.
    With ``acls`` users may do only what ACLs allow (see :meth:`acl`); the methods of this class may
    do everything. The ``clock`` begins at ``now_ms``, by default at the machine's time of day (even
    if a test has frozen that), and runs at real speed until :attr:`clock`.auto is set to False. It
    may be advanced at any time.
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
        access = BrokerAccess(users, tls=tls, acls=acls)
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
        """Start, and wait until the broker listens. Raises BrokerError, ConfigError."""
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
        """Close the clients, and stop in an orderly way; a temporary directory is removed."""
        self._clients.close()
        self._close_sessions()
        super().stop()
        self._access.close()
        if self._is_temporary and self.data_dir.name:
            shutil.rmtree(self.data_dir, ignore_errors=True)
            self.data_dir = Path()

    def crash(self) -> None:
        """End like ``kill -9``: sockets are reset, and files stay as they are.

        The files hold everything acknowledged, but nothing that an orderly stop would write.
        """
        self._close_sessions()
        super().crash()

    def restart(self) -> Self:
        """Start again on the same directory and port; stop first if the broker still runs."""
        self._close_sessions()
        return super().restart()

    def __repr__(self) -> str:
        return (
            f"<Kafka {self.bootstrap or 'that never started'}{'' if self.is_running else ', down'}>"
        )

    @cached_property
    def aio(self) -> KafkaAio:
        """The methods of this object as coroutines, for asyncio and trio."""
        return KafkaAio(self)

    def serve_again(self) -> None:
        """Start or resume the broker, if it is down or paused."""
        self.resume()
        if not self.is_running:
            self.restart()

    @property
    def trouble(self) -> str:
        """A sentence if the broker is down or paused; otherwise empty."""
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
