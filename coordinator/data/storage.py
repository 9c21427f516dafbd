"""What a broker keeps on its disk, opened: its metadata, its partitions, and who flushes them.

A command that works on a stopped broker's data needs no more than this (``fencepost log import``).
"""

from __future__ import annotations

from functools import partial

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.data.log_manager import LogManager
from fencepost.coordinator.metadata.log import MetadataLog
from fencepost.coordinator.metadata.topic_admin import TopicAdmin
from fencepost.coordinator.runtime.flusher import Flusher
from fencepost.logcore.checkpoints import RECOVERY_POINT_CHECKPOINT
from fencepost.logcore.clock import Clock
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.partition import Partition


class Storage:
    """The data of one broker. ``directory`` exists and is locked by this process.

    Raises MetadataError, LogError, OSError; nothing stays open then.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        config: BrokerConfig,
        clock: Clock,
        *,
        node_id: int,
        flusher: Flusher | None = None,
    ) -> None:
        self.fs = fs
        self.directory = directory
        self.config = config
        self.clock = clock
        self.node_id = node_id
        self.flusher = Flusher(clock) if flusher is None else flusher
        """Appends that wait for the disk."""
        self.logs = LogManager(fs, directory, config, clock, self.flusher, self._read_metadata)
        """All partitions."""
        self.metadata = self.logs.metadata
        """Topics, dynamic settings, producer-id blocks."""
        self.flusher.sealed.checkpoint = partial(self.logs.save, RECOVERY_POINT_CHECKPOINT)
        try:
            self.metadata.compact()
        except BaseException:
            self.logs.close()
            raise
        self.topics = TopicAdmin(self.metadata, config, node_id)
        """Creating, changing and deleting topics."""

    def _read_metadata(self, partition: Partition) -> MetadataLog:
        metadata = MetadataLog(partition, self.config, self.clock, node_id=self.node_id)
        metadata.count_start()
        return metadata
