"""A ZooKeeper session for an event loop, on top of kazoo, which runs threads of its own.

This module never blocks the loop. Calls are passed to kazoo's connection thread. Their results,
watches and session states are passed back to the loop that created the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple

import structlog
from kazoo.client import KazooState
from kazoo.exceptions import (
    BadVersionError,
    KazooException,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
)

from fencepost.coordinator.zookeeper.connection import ZooKeeperConfig
from fencepost.coordinator.zookeeper.errors import ZooKeeperError
from fencepost.coordinator.zookeeper.kazoo_client import acl_of, client_of, problem_of
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass

_log = structlog.get_logger(__name__)

ANY_VERSION: Final = -1

CLOSE_TIMEOUT_S: Final = 5.0
"""The time limit for closing the session."""


class SessionState(Enum):
    """The state of a session, as far as the client knows."""

    CONNECTED = "CONNECTED"
    SUSPENDED = "SUSPENDED"
    """The connection is lost, and the session may be lost too."""
    LOST = "LOST"
    """The session has expired, and its ephemeral nodes are gone."""


class Znode(NamedTuple):
    """A znode's data and metadata."""

    data: bytes
    version: int
    czxid: int
    owner: int
    """The session that owns an ephemeral node; 0 for a persistent one."""
    ctime_ms: int
    """When the znode was created, by ZooKeeper's clock."""
    child_count: int = 0
    mzxid: int = 0
    """The zxid of the last write."""


@dataclass(frozen=True, slots=True)
class Create:
    """Create a znode."""

    path: str
    data: bytes = b""
    ephemeral: bool = False
    sequence: bool = False


@dataclass(frozen=True, slots=True)
class Set:
    """Write a znode if it has this version."""

    path: str
    data: bytes
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class Put:
    """Write a znode regardless of its version, or create it (``KafkaZkClient.setOrCreate``)."""

    path: str
    data: bytes
    is_new: bool = False
    """Whether the znode probably does not exist yet."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a znode."""

    path: str
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class Check:
    """Apply the transaction only if a znode has this version."""

    path: str
    version: int


Write = Create | Set | Put | Delete | Check


class RefusedError(ZooKeeperError):
    """ZooKeeper has rejected a transaction, and applied none of it."""

    def __init__(self, at: int, why: Exception, write: Write) -> None:
        super().__init__(f"{type(why).__name__} at {write.path}")
        self.at = at
        """The index of the rejected write."""
        self.exists = isinstance(why, NodeExistsError)
        self.is_missing = isinstance(why, NoNodeError)
        self.bad_version = isinstance(why, BadVersionError)
        self.is_passing = isinstance(
            why, (NodeExistsError, BadVersionError, NoNodeError, NotEmptyError)
        )
        """Whether another client's write caused the rejection, so that a retry may succeed."""


class ZkSession:
    """A session, which calls ``on_state`` on the loop for every change of its state.

    After LOST, a new session starts automatically. Methods raise ZooKeeperError if the connection
    is lost; in that case the operation may or may not have been applied.
    """

    def __init__(self, reach: ZooKeeperConfig, on_state: Callable[[SessionState], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_state, self._reach = on_state, reach
        self._client: Any = client_of(reach)
        self._in_flight = asyncio.Semaphore(reach.max_in_flight)
        self._client.add_listener(self._changed)
        self.is_connected = False

    @property
    def session_id(self) -> int:
        """The session's id, which ephemeral nodes name as their owner."""
        client_id = self._client.client_id
        return 0 if client_id is None else int(client_id[0])

    async def start(self) -> None:
        """Connect, and create a missing chroot. Raises ZooKeeperError."""
        if not await asyncio.to_thread(self._begin, self._reach.connection_timeout_ms / 1000):
            why = problem_of(self._client)
            reason = f": {why}" if why else ""
            raise ZooKeeperError(f"ZooKeeper cannot be reached at {self._reach.connect}{reason}")
        # The chroot itself can only be created by a client without that chroot.
        path, self._client.chroot = self._client.chroot, ""
        try:
            if path:
                await self.ensure(path)
        finally:
            self._client.chroot = path

    def _begin(self, timeout_s: float) -> bool:
        if not self._client.start_async().wait(timeout_s):
            self._end()
            return False
        return True

    async def close(self) -> None:
        """End the session: ZooKeeper removes its ephemeral nodes at once."""
        self._client.remove_listener(self._changed)
        self.is_connected = False
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._client.stop()
        self._client.close()

    def _changed(self, state: str) -> None:
        """Pass a state to the loop. Called in kazoo's connection thread, it must not block."""
        new_state = SessionState.CONNECTED if state == KazooState.CONNECTED else SessionState(state)
        self._call_on_loop(partial(self._state_changed, new_state))

    def _state_changed(self, state: SessionState) -> None:
        self.is_connected = state is SessionState.CONNECTED
        _log.info("ZooKeeper session", state=state.value, session=hex(self.session_id))
        self._on_state(state)

    def _call_on_loop(self, work: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(work)

    async def _answer(self, ask: Callable[[], Any]) -> Any:
        async with self._in_flight:
            return await self._answered(ask())

    async def _answered(self, call: Any) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle() -> None:
            if future.done():
                return
            if call.exception is None:
                future.set_result(call.value)
            else:
                future.set_exception(without_traceback(call.exception))

        call.rawlink(lambda _: self._call_on_loop(settle))
        try:
            return await future
        except (NoNodeError, NodeExistsError, BadVersionError):
            raise
        except KazooException as error:
            why = problem_of(self._client) or str(error)
            raise ZooKeeperError(f"ZooKeeper: {type(error).__name__} {why}") from error

    def _watch(self, changed: Callable[[], object] | None) -> Callable[[Any], None] | None:
        """Return a watch for kazoo; it fires once, on a change or on the loss of the connection."""
        return None if changed is None else lambda _event: self._call_on_loop(changed)

    async def get(self, path: str, changed: Callable[[], object] | None = None) -> Znode | None:
        """Return a znode; None if it does not exist. The watch also fires if it is created."""
        try:
            data, stat = await self._answer(
                partial(self._client.get_async, path, watch=self._watch(changed))
            )
        except NoNodeError:
            if changed is None:
                return None
            exists = partial(self._client.exists_async, path, self._watch(changed))
            if await self._answer(exists) is None:
                return None
            return await self.get(path, changed)
        return Znode(
            data,
            stat.version,
            stat.czxid,
            stat.ephemeralOwner,
            stat.ctime,
            stat.numChildren,
            stat.mzxid,
        )

    async def children(self, path: str, changed: Callable[[], object] | None = None) -> list[str]:
        """Return the children's names; if the znode is missing, return none and set no watch."""
        try:
            ask = partial(self._client.get_children_async, path, watch=self._watch(changed))
            return sorted(await self._answer(ask))
        except NoNodeError:
            return []

    async def sync(self) -> None:
        """Make later reads return every write that was committed before this call."""
        await self._answer(partial(self._client.sync_async, "/"))

    async def ensure(self, path: str) -> None:
        """Create a persistent znode and its parents, unless they exist."""
        await self._answer(
            partial(self._client.ensure_path_async, path, acl=acl_of(self._reach, path))
        )

    async def do(self, writes: Sequence[Write]) -> list[Any]:
        """Apply all writes or none; return a path or Stat for each. Raises RefusedError."""
        new = {at for at, write in enumerate(writes) if isinstance(write, Put) and write.is_new}
        while True:
            try:
                return await self._do(
                    [_decided(write, at in new) for at, write in enumerate(writes)]
                )
            except RefusedError as refused:
                at = refused.at
                is_other = refused.exists if at in new else refused.is_missing
                if not isinstance(writes[at], Put) or not is_other:
                    raise
                new ^= {at}

    async def has_done(self, writes: Sequence[Write]) -> bool:
        """Apply all writes; return False if another client's write came first."""
        try:
            await self.do(writes)
        except RefusedError as refused:
            if refused.exists or refused.bad_version:
                return False
            raise
        return True

    async def _do(self, writes: Sequence[Create | Set | Delete | Check]) -> list[Any]:
        transaction = self._client.transaction()
        for write in writes:
            match write:
                case Create():
                    transaction.create(
                        write.path,
                        write.data,
                        acl=acl_of(self._reach, write.path),
                        ephemeral=write.ephemeral,
                        sequence=write.sequence,
                    )
                case Set():
                    transaction.set_data(write.path, write.data, write.version)
                case Delete():
                    transaction.delete(write.path, write.version)
                case Check():
                    transaction.check(write.path, write.version)
        results: list[Any] = await self._answer(transaction.commit_async)
        # Only the rejected write has its own error; every other write has one of these two errors.
        for at, result in enumerate(results):
            if isinstance(result, Exception) and not isinstance(
                result, (RolledBackError, RuntimeInconsistency)
            ):
                raise RefusedError(at, result, writes[at])
        for at, result in enumerate(results):
            if isinstance(result, Exception):
                raise RefusedError(at, result, writes[at])
        return results


def _decided(write: Write, is_new: bool) -> Create | Set | Delete | Check:
    if not isinstance(write, Put):
        return write
    return Create(write.path, write.data) if is_new else Set(write.path, write.data)
