"""What coordinators need of a broker, on a real directory: everything but the sockets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coordinator.config import BrokerConfig
from coordinator.group_commit import GroupCommit
from coordinator.group_coordinator import GroupCoordinator
from coordinator.history import History
from coordinator.metadata import MetadataLog
from coordinator.replicas import Replicas
from coordinator.txn_coordinator import TxnCoordinator
from logcore.clock import Clock, ManualClock
from logcore.fs import FileSystem, OsFileSystem

QUICK = {"group.initial.rebalance.delay.ms": "0"}


class Services:
    """One start of a broker on ``directory``; a second object on it is a restart."""

    node_id = 1
    cluster_id = "unit-test-cluster-id-0"
    advertised = ("127.0.0.1", 9092)

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, str] | None = None,
        *,
        fs: FileSystem | None = None,
        clock: Clock | None = None,
        commit: type[GroupCommit] = GroupCommit,
    ) -> None:
        self.clock = ManualClock(1_700_000_000_000) if clock is None else clock
        self.config = BrokerConfig({**QUICK, **(config or {})})
        self.commit = commit(self.clock)
        self.replicas = Replicas(
            fs or OsFileSystem(), str(directory), self.config, self.clock, self.commit
        )
        self.metadata = MetadataLog(
            self.replicas.open_metadata(), self.config, self.clock, node_id=self.node_id
        )
        self.metadata.count_start()
        self.replicas.load(self.metadata)
        self.history = History(self.metadata, self.replicas, self.config, self.clock)
        self.groups = GroupCoordinator(self)  # type: ignore[arg-type]
        self.txns = TxnCoordinator(self)  # type: ignore[arg-type]

    async def start(self) -> Services:
        self.history.start()
        await self.groups.start()
        await self.txns.start()
        return self

    async def stop(self) -> None:
        await self.commit.drain()
        await self.txns.stop()
        await self.groups.stop()
        self.history.stop()
        await self.commit.close()
        self.replicas.close()

    async def kill(self) -> None:
        """Stop without a trace in the files: tasks and timers end, nothing is written."""
        self.history._loop = None
        if self.history._timer is not None:
            self.history._timer.cancel()
        for shards in (self.groups._shards, self.txns._shards):
            shards.timers.close()
            if shards._loading is not None:
                shards._loading.cancel()
            for shard in shards.shards:
                if shard._reload is not None:
                    shard._reload.cancel()

    def topic(self, name: str, partitions: int = 1) -> None:
        self.metadata.create_topic(name, partitions, {})
