"""What a broker keeps on its disk, opened: its metadata, its partitions, and who flushes them.

A command that works on a stopped broker's data needs no more than this (``fencepost log import``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from uuid import UUID

from fencepost.cluster.image import UNASSIGNED
from fencepost.cluster.records import BrokerEndpoint
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.data.log_manager import LogManager
from fencepost.coordinator.data.replicas import Replicas
from fencepost.coordinator.metadata.log import MetadataLog
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.metadata.observed import ObservedMetadata
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.runtime.commits import Commits
from fencepost.coordinator.runtime.flusher import Flusher
from fencepost.logcore.checkpoints import RECOVERY_POINT_CHECKPOINT
from fencepost.logcore.clock import Clock, cluster_clock
from fencepost.logcore.errors import NoRoomError
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.partition import Partition


class Storage:
    """The data of one broker. ``directory`` exists and is locked by this process.

    ``directory_id`` is what the cluster knows it by; ``end_points`` say where the broker will
    listen. ``observed`` is what is known of a cluster whose controllers are elsewhere; there is no
    log of metadata then. A node that is no broker has no partitions but that one. Where the
    controller of others and a broker share a directory, the controller's is opened first, without
    ``loads``, and the broker's storage is given it as ``beside``: the logs are both's.

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
        directory_id: UUID = UNASSIGNED,
        end_points: Sequence[BrokerEndpoint] = (),
        observed: ObservedMetadata | None = None,
        is_broker: bool = True,
        flusher: Flusher | None = None,
        loads: bool = True,
        beside: Storage | None = None,
    ) -> None:
        self.fs = fs
        self.directory = directory
        self.config = config
        self.clock = clock
        self.node_id = node_id
        if beside is not None:
            flusher = beside.flusher
        self.flusher: Flusher = Flusher(clock) if flusher is None else flusher
        """Appends that wait for the disk."""
        self.commits = Commits(self.flusher)
        """Whoever waits until something is committed."""
        self._directory_id, self._end_points = directory_id, end_points
        self._observed = observed
        self.is_broker, self._loads = is_broker, loads
        self.metadata: Metadata
        """Topics, dynamic settings, producer-id blocks."""
        self.own_log: MetadataLog | None = None
        """The log of metadata of a node that decides; None where the controllers are elsewhere."""
        self.logs: LogManager = self._open_logs() if beside is None else beside.logs
        """All partitions."""
        if beside is not None and observed is not None:
            self.metadata = observed
            self.logs.load(observed)
        elif observed is None:
            # The mark of its stop says so, should it become a broker of controllers (KIP-966).
            self.logs.broker_epoch = self.metadata_log.broker_epoch
        self.replicas = Replicas(
            self.logs,
            self.commits,
            config,
            cluster_clock(clock),
            node_id=node_id,
            image=self.metadata.image,
            durable=self.durable,
        )
        """Which partitions this broker leads, and which it follows."""
        if is_broker:
            self.metadata.subscribe(Subscriber.REPLICAS, self.replicas.publish)

    async def durable(self) -> None:
        """Return once the latest image is durable; a controller elsewhere has waited for that.

        Raises StorageError.
        """
        forced = None if self.own_log is None else self.own_log.durable()
        if forced is not None:
            await forced

    def _force(self) -> None:
        """Make the metadata durable at once; raises LogError. A controller elsewhere has waited.

        So has the controller in a process with a broker, which learns only of durable records.
        """
        if self.own_log is None or not self.is_broker:
            return
        self.own_log.force()
        partition = self.own_log.partition
        if partition.recovery_point < partition.log_end_offset:
            raise NoRoomError(f"{partition.name} is not on disk")  # the flush was refused

    def _open_logs(self) -> LogManager:
        logs = LogManager(
            self.fs,
            self.directory,
            self.config,
            self.clock,
            self.flusher,
            self._read_metadata,
            force_metadata=self._force,
            loads=self._loads,
        )
        self.flusher.sealed.checkpoint = partial(logs.save, RECOVERY_POINT_CHECKPOINT)
        try:
            if self.own_log is not None:
                self.own_log.compact()
        except BaseException:
            logs.close()
            raise
        return logs

    @property
    def metadata_log(self) -> MetadataLog:
        """:attr:`own_log`; raises RuntimeError where there is none."""
        if self.own_log is None:
            raise RuntimeError("the controllers are elsewhere")
        return self.own_log

    def end_metadata(self) -> None:
        """Write a snapshot at a stop, if the log has grown: the next start replays less."""
        if self.own_log is not None:
            self.own_log.compact(0)

    def _read_metadata(self, opened: Callable[[], Partition]) -> Metadata:
        if self._observed is not None:
            self.metadata = self._observed
            return self._observed
        self.metadata = self.own_log = log = MetadataLog(
            opened(),
            self.config,
            self.clock,
            self.fs,
            self.directory,
            node_id=self.node_id,
            forced=self.flusher.forced,
            directory_id=self._directory_id,
        )
        log.begin_epoch(self._end_points, is_broker=self.is_broker)
        return log
