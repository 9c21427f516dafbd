"""The services of a broker without sockets, on a real directory, so that tests can restart them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fencepost.coordinator.broker_services import Services as BrokerServices
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.runtime import shard as shard_module
from fencepost.coordinator.runtime.background import Pace, each_in_turn
from fencepost.coordinator.runtime.flusher import Flusher
from fencepost.coordinator.runtime.shard import ShardRuntime
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.coordinator.runtime.shards import ShardSet
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.clock import Clock
from fencepost.logcore.fs import FileSystem, OsFileSystem
from fencepost.logcore.machine import EndMarker, ProducerStamp
from fencepost.tools.decisions import decide
from tests.support.clock import ManualClock
from tests.support.metadata_changes import create_topic
from tests.support.waits import until_true


def storage(
    directory: Path,
    config: Mapping[str, str] | None = None,
    *,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    flusher: type[Flusher] = Flusher,
) -> Storage:
    """Open only the storage of a broker, which needs no event loop."""
    clock = ManualClock(1_700_000_000_000) if clock is None else clock
    return Storage(
        fs or OsFileSystem(),
        str(directory),
        BrokerConfig(config),
        clock,
        node_id=1,
        flusher=flusher(clock),
    )


def allocate_producer_ids(store: Storage) -> tuple[int, int]:
    """Allocate a block of producer ids for this broker and return its first id and its size."""
    epoch = store.metadata_log.broker_epoch
    return decide(store, lambda controller: controller.allocate_producer_ids(store.node_id, epoch))


class Services(BrokerServices):
    """A broker on ``directory``. Another object on the same directory is the restarted broker."""

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, str] | None = None,
        *,
        fs: FileSystem | None = None,
        clock: Clock | None = None,
        flusher: type[Flusher] = Flusher,
    ) -> None:
        super().__init__(
            storage(directory, config, fs=fs, clock=clock, flusher=flusher),
            cluster_id="unit-test-cluster-id-0",
            advertised=lambda _listener: ("127.0.0.1", 9092),
        )

    async def start(self) -> Services:
        """Start, and wait until all shards are loaded, for which the daemon does not wait."""
        await super().start()
        for shards in (coordinator._shards for coordinator in self.coordinators.values()):
            assert await shards.loaded(30_000)
        return self

    async def stop(self) -> None:
        steps = [*self.shutdown_steps(), *self.last_shutdown_steps()]
        await each_in_turn([*steps, ("end flushes", self.flusher.close)])
        self.logs.close()

    async def kill(self) -> None:
        """Stop tasks and timers without writing to the files."""
        self.history._loop = None
        if self.history._timer is not None:
            self.history._timer.cancel()
        for shards in (coordinator._shards for coordinator in self.coordinators.values()):
            shards.timers.close()
            if shards._loading is not None:
                shards._loading.cancel()
            for shard in shards.shards:
                if shard._reload is not None:
                    shard._reload.cancel()

    def topic(self, name: str, partitions: int = 1) -> None:
        create_topic(self.metadata, name, partitions, {})


def fail(shard: ShardRuntime) -> None:
    """Append a foreign marker to the shard's partition, so that the shard's next write fails."""
    stranger = ProducerStamp(1 << 40, 0)
    shard.partition.append_marker(EndMarker(stranger, False), 0)
    shard.complete_transaction(EndMarker(stranger, commit=False))
    assert shard.state is ShardState.FAILED


async def serves(shard: ShardRuntime) -> None:
    await until_true(lambda: shard.state is ShardState.ACTIVE, f"{shard.name} serves")


async def reload(shards: ShardSet, index: int) -> None:
    """Lose and regain leadership of the shard, so that it loads its log again."""
    leader_epoch = shards.shard_at(index).leader_epoch
    shards.resigned(index, leader_epoch + 1)
    shards.elected(index, leader_epoch + 2)
    assert await shards.loaded(30_000)


@asynccontextmanager
async def loading(shard: ShardRuntime, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Let the shard fail, and keep the shard loading until the block ends."""
    may_end, has_begun = asyncio.Event(), asyncio.Event()

    class Held(Pace):
        async def __call__(self) -> None:
            has_begun.set()
            await may_end.wait()

    monkeypatch.setattr(shard_module, "Pace", Held)
    fail(shard)
    async with asyncio.timeout(30):
        await has_begun.wait()
    assert shard.state is ShardState.LOADING
    yield
    may_end.set()
    await serves(shard)
