"""The storage of a node: its metadata, its partitions, and their flusher.

A command on the data of a stopped broker, such as ``fencepost log import``, opens only the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from uuid import UUID

from fencepost.cluster.image import UNASSIGNED
from fencepost.cluster.records import BrokerEndpoint
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.metadata.kraft_metadata_cache import KRaftMetadataCache
from fencepost.coordinator.metadata.log import MetadataLog
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.runtime.commits import Commits
from fencepost.coordinator.runtime.flusher import Flusher
from fencepost.coordinator.runtime.turns import ActionQueue
from fencepost.coordinator.storage.log_manager import LogManager
from fencepost.coordinator.storage.replica_manager import ReplicaManager
from fencepost.logcore.checkpoints import RECOVERY_POINT_CHECKPOINT
from fencepost.logcore.clock import Clock, cluster_clock
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.partition import Partition


class Storage:
    """The data of one node. ``directory`` exists and is locked by this process.

    ``directory_id`` is the id of the log directory; ``end_points`` are the broker's listeners.
    ``observed`` is the metadata of a broker that follows controllers; its storage does not write a
    metadata log. A node that is not a broker has no partition except the metadata log. A controller
    and a broker may share a directory. Then the controller's storage is opened first, without
    ``loads``, and passed to the broker's storage as ``beside``; both use the same logs.

    Raises MetadataError, LogError, OSError; after an error no file stays open.
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
        observed: KRaftMetadataCache | None = None,
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
        """Flushes appends for which requests wait."""
        self.commits = Commits(self.flusher)
        """Requests that wait until their records are committed."""
        self.actions = ActionQueue()
        """Completes requests whose wait an append has ended."""
        self._directory_id, self._end_points = directory_id, end_points
        self._observed = observed
        self.is_broker, self._loads = is_broker, loads
        self.metadata: Metadata
        """Topics, dynamic settings, producer id blocks."""
        self.own_log: MetadataLog | None = None
        """The metadata log that this storage writes; None if the broker follows controllers."""
        self.logs: LogManager = self._open_logs() if beside is None else beside.logs
        """All partitions."""
        if beside is not None and observed is not None:
            self.metadata = observed
            self.logs.load(observed)
        elif observed is None:
            # The clean-shutdown file needs the broker epoch if the node later joins a cluster with
            # controllers (KIP-966).
            self.logs.broker_epoch = self.metadata_log.broker_epoch
        self.replicas = ReplicaManager(
            self.logs,
            self.commits,
            config,
            cluster_clock(clock),
            node_id=node_id,
            image=self.metadata.image,
            durable=self.durable,
        )
        """The partitions that this broker leads and follows."""
        if is_broker:
            self.metadata.subscribe(Subscriber.REPLICAS, self.replicas.publish)

    async def durable(self) -> None:
        """Wait until the latest image is durable, as an image from a remote controller always is.

        Raises StorageError.
        """
        forced = None if self.own_log is None else self.own_log.durable()
        if forced is not None:
            await forced

    def _force(self) -> None:
        """Make the metadata durable synchronously, or raise LogError.

        A broker that follows controllers, remote or in this process, only gets records that are
        durable already.
        """
        if self.own_log is not None and self.is_broker:
            self.own_log.force()

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
        """Return :attr:`own_log`; raise RuntimeError if there is none."""
        if self.own_log is None:
            raise RuntimeError("the controllers are elsewhere")
        return self.own_log

    def end_metadata(self) -> None:
        """Write a snapshot at shutdown if the log has grown, so that the next start is faster."""
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
