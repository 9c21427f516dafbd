"""A session with znodes in memory, for tests without ZooKeeper."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from kazoo.exceptions import BadVersionError

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.zookeeper.connection import ZooKeeperConfig
from fencepost.coordinator.zookeeper.errors import ZooKeeperError
from fencepost.coordinator.zookeeper.session import (
    ANY_VERSION,
    Create,
    Delete,
    Put,
    RefusedError,
    SessionState,
    Set,
    Write,
    ZkSession,
    Znode,
)

SETTINGS = BrokerConfig(
    {
        "zookeeper.connect": "nowhere:1",
        "authorizer.class.name": "kafka.security.authorizer.AclAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
)
TOPICS = "/kafka-acl/Topic"


class Znodes(ZkSession):
    """A ZooKeeper session whose reads and writes complete at once."""

    def __init__(
        self,
        reach: ZooKeeperConfig = ZooKeeperConfig.of(SETTINGS),  # noqa: B008 - it never changes
        on_state: Callable[[SessionState], None] = lambda _state: None,
    ) -> None:
        super().__init__(reach, on_state)
        self.data: dict[str, bytes] = {}
        self.is_away = False
        """Whether writes fail as if there were no connection."""
        self.is_silent = False
        """Whether reads and writes get no response."""
        self.attempts = 0
        """The number of attempted writes."""
        self._versions: dict[str, int] = {}
        self._count = 0

    async def get(self, path: str, changed: Callable[[], object] | None = None) -> Znode | None:
        await self._answer_unless_silent()
        data = self.data.get(path)
        return None if data is None else Znode(data, self._versions.get(path, 0), 0, 0, 0)

    async def children(self, path: str, changed: Callable[[], object] | None = None) -> list[str]:
        below = f"{path}/"
        inside = [znode.removeprefix(below) for znode in self.data if znode.startswith(below)]
        return sorted({name.partition("/")[0] for name in inside})

    async def sync(self) -> None:
        """Do nothing, because all reads are up to date."""

    async def ensure(self, path: str) -> None:
        """Do nothing, because parent znodes need not exist."""

    async def do(self, writes: Sequence[Write]) -> list[Any]:
        self.attempts += 1
        await self._answer_unless_silent()
        if self.is_away:
            raise ZooKeeperError("away")
        for at, write in enumerate(writes):
            if isinstance(write, (Set, Delete)) and write.version not in {
                ANY_VERSION,
                self._versions.get(write.path, 0),
            }:
                raise RefusedError(at, BadVersionError(), write)
        for write in writes:
            match write:
                case Create(path, data, sequence=True):
                    self._count += 1
                    self.data[f"{path}{self._count:010}"] = data
                case Create(path, data) | Set(path, data) | Put(path, data):
                    self.data[path] = data
                    self._versions[path] = self._versions.get(path, -1) + 1
                case Delete(path):
                    self.data.pop(path, None)
        return [None for _ in writes]

    async def _answer_unless_silent(self) -> None:
        if self.is_silent:
            await asyncio.get_running_loop().create_future()

    def deny(self, topic: str, users: Sequence[str]) -> None:
        """Write a DENY ACL for each of ``users`` to a topic's znode."""
        acls = [
            {"principal": f"User:{user}", "permissionType": "Deny", "host": "*", "operation": "All"}
            for user in users
        ]
        self.data[f"{TOPICS}/{topic}"] = json.dumps({"version": 1, "acls": acls}).encode()
