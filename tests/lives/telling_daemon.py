"""``fencepost serve`` that, on a signal, dumps its state and kills itself within one turn.

    python -m tests.lives.telling_daemon --data-dir DIR --listen HOST:PORT --config KEY=VALUE …

SIGUSR1 writes the state of shards and partitions to the file that TELL names, and ends the process
as kill -9 does. Both happen in one callback of the event loop, so nothing changes in between. When
the process starts, it logs at level DEBUG until every shard is loaded; the log then has the digest
of each loaded shard.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import structlog

from fencepost.coordinator.config import logs
from fencepost.coordinator.daemon import process as daemon
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.metadata.names import INTERNAL_TOPICS, METADATA_TOPIC
from fencepost.coordinator.runtime.shard import ShardRuntime
from fencepost.logcore.partition import Partition

LOADING_MS = 60_000

_log = structlog.get_logger(__name__)


class TellingBroker(Broker):
    """The daemon's broker, which dumps its state at SIGUSR1."""

    async def start(self) -> None:
        logs.set_level("DEBUG")
        await super().start()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._tell)
        self._calming = loop.create_task(self._calm())

    def _all_shards(self) -> list[ShardRuntime]:
        return [*self.services.groups._shards.shards, *self.services.txns._shards.shards]

    async def _calm(self) -> None:
        for coordinator in (self.services.groups, self.services.txns):
            await coordinator._shards.loaded(LOADING_MS)
        _log.debug("every shard is loaded")
        logs.set_level("INFO")

    def _is_known(self, partition: Partition) -> bool:
        """Return whether the topic still exists; its directory may be deleted some time later."""
        topic = self.services.metadata.topic(partition.topic)
        return topic is not None and topic.topic_id == partition.topic_id

    def _tell(self) -> None:
        shards = {}
        for shard in self._all_shards():
            shard.machine.check()
            digest = shard.machine.digest()
            shards[shard.name] = [shard.state.value, shard.partition.log_end_offset, digest]
        partitions = {
            f"{log.topic}-{log.index}": told(log)
            for log in self.services.logs
            if log.topic not in INTERNAL_TOPICS | {METADATA_TOPIC} and self._is_known(log)
        }
        Path(os.environ["TELL"]).write_text(json.dumps([shards, partitions]))
        os.kill(os.getpid(), signal.SIGKILL)


def told(partition: Partition) -> dict[str, Any]:
    """Return a partition's start and end offset, and its batches as first offset → checksum."""
    return {
        "topic_id": str(partition.topic_id),
        "start": partition.log_start_offset,
        "end": partition.log_end_offset,
        "batches": {
            header.base_offset: zlib.crc32(bytes(batch))
            for header, batch in partition.reader.read_all()
        },
    }


if __name__ == "__main__":
    from fencepost.cli import main

    daemon.Broker = TellingBroker  # type: ignore[misc]
    main(["serve", *sys.argv[1:]], prog_name="fencepost")
