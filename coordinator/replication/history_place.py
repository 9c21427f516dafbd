"""The partition of the history topic that a broker of a cluster leads and writes to.

Each broker is the preferred leader of one partition, and asks the controller to create that
partition when the broker has its first entry. While the broker leads no partition of the topic, for
example after a restart, it buffers its entries. The topic has the same replication factor as the
offsets topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

import structlog
from kio.schema.errors import ErrorCode

from fencepost.client.cluster import error_codes
from fencepost.cluster.image import TopicImage
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.coordinator.replication.controller_channel import ControllerChannel
from fencepost.coordinator.replication.controller_connection import NewestVersionRequest
from fencepost.coordinator.storage.replica_manager import ReplicaManager
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Partition
from fencepost.protocol.api import ApiKey
from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Entity

TIMEOUT_MS: Final = 30_000
REFUSED_S: Final = 10.0
"""The pause after an error before the controller is asked again."""
_OVERTAKEN: Final = (ErrorCode.topic_already_exists, ErrorCode.invalid_partitions)
"""Error codes for a change that another broker made first; the next image contains that change."""

_log = structlog.get_logger(__name__)


class HistoryPartition:
    """Finds the partition of this broker, or has it created; bound to the running loop."""

    def __init__(
        self,
        config: BrokerConfig,
        metadata: Metadata,
        replicas: ReplicaManager,
        channel: ControllerChannel,
        *,
        node_id: int,
    ) -> None:
        self._config = config
        self._metadata, self._replicas, self._channel = metadata, replicas, channel
        self._node_id = node_id
        self._creation: asyncio.Future[Entity] | None = None
        self._not_before_s = 0.0
        """The time, on the loop's clock, before which the controller is not asked again."""

    def partition(self) -> Partition | None:
        """Return the partition to append to, or None while this broker leads none.

        If the broker is not the preferred leader of any partition, ask the controller for one.
        """
        topic, me = self._metadata.topic(HISTORY_TOPIC), self._node_id
        partitions = () if topic is None else topic.partitions
        led = [index for index, partition in enumerate(partitions) if partition.leader == me]
        indexes = [
            index for index, partition in enumerate(partitions) if partition.replicas[:1] == (me,)
        ]
        if not indexes and self._creation is None and self._not_before_s <= _loop_s():
            self._ask(topic)
        for index in sorted(led, key=lambda index: index not in indexes):
            try:
                return self._replicas.leader(HISTORY_TOPIC, index)
            except DomainError:
                continue  # the image is newer than the replicas
        return None

    def _ask(self, topic: TopicImage | None) -> None:
        """Ask the controller for the partition, once there are enough brokers for its replicas."""
        others = sorted(
            (
                broker
                for broker in self._metadata.image.brokers.values()
                if broker.broker_id != self._node_id
            ),
            key=lambda broker: (
                not broker.is_active,
                broker.broker_id < self._node_id,
                broker.broker_id,
            ),
        )
        count = self._config.int("offsets.topic.replication.factor")
        nodes = [self._node_id, *(other.broker_id for other in others)][:count]
        if len(nodes) < count:
            return
        self._creation = self._channel.send(self._request(topic, nodes))
        self._creation.add_done_callback(self._answered)

    def _request(self, topic: TopicImage | None, nodes: Sequence[int]) -> NewestVersionRequest:
        if topic is None:
            return NewestVersionRequest(ApiKey.CREATE_TOPICS, partial(self._create, nodes=nodes))
        count = len(topic.partitions) + 1
        return NewestVersionRequest(
            ApiKey.CREATE_PARTITIONS, partial(_grow, count=count, nodes=nodes)
        )

    def _create(self, make: RequestFactory, nodes: Sequence[int]) -> Entity:
        row = make.CreatableReplicaAssignment(partition_index=0, broker_ids=nodes)
        configs = self._metadata.history_configs()
        topic = make.CreatableTopic(
            name=HISTORY_TOPIC,
            num_partitions=-1,
            replication_factor=-1,
            assignments=[row],
            configs=[make.CreatableTopicConfig(name=key, value=configs[key]) for key in configs],
        )
        return make.message(topics=[topic], timeout_ms=TIMEOUT_MS)

    def _answered(self, answer: asyncio.Future[Entity]) -> None:
        self._creation = None
        if answer.cancelled():
            return
        failure, wrong = answer.exception(), []
        if failure is None:
            wrong = [
                error_code
                for error_code in error_codes(answer.result())
                if error_code and error_code not in _OVERTAKEN
            ]
        if failure is not None or wrong:
            self._not_before_s = _loop_s() + REFUSED_S
            cause = str(failure) if failure is not None else ErrorCode(wrong[0]).name.upper()
            _log.warning("no place for the history", cause=cause)


def _loop_s() -> float:
    return asyncio.get_running_loop().time()


def _grow(make: RequestFactory, count: int, nodes: Sequence[int]) -> Entity:
    row = make.CreatePartitionsAssignment(broker_ids=nodes)
    topic = make.CreatePartitionsTopic(name=HISTORY_TOPIC, count=count, assignments=[row])
    return make.message(topics=[topic], timeout=TIMEOUT_MS)
