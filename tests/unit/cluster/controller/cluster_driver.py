"""A driver for a controller whose decisions take effect at once, with brokers in any state."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar
from uuid import UUID

from fencepost.cluster.controller.activation import (
    ELR_VERSION,
    METADATA_VERSION,
    MIN_INSYNC_REPLICAS,
    bootstrap,
)
from fencepost.cluster.controller.brokers import BrokerHeartbeatReply, BrokerRegistrationRequest
from fencepost.cluster.controller.configs import AlterConfig, OpType
from fencepost.cluster.controller.heartbeats import BrokerHeartbeatRequest
from fencepost.cluster.controller.isr import ProposedIsr
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.reassignments import ReassignablePartition
from fencepost.cluster.controller.topics import NewTopic
from fencepost.cluster.controller.view import ControllerSettings
from fencepost.cluster.image import (
    BROKER_RESOURCE,
    TOPIC_RESOURCE,
    MetadataImage,
    PartitionRegistration,
)
from fencepost.cluster.records import BrokerEndpoint, BrokerFeature, MetadataRecord
from fencepost.logcore.machine import DomainError, Event

CLUSTER_ID = "fPZv1VBsRFmnlRvmGcOW9w"
SETTINGS = ControllerSettings(
    CLUSTER_ID,
    node_id=3000,
    topic_defaults={MIN_INSYNC_REPLICAS: "1", "unclean.leader.election.enable": "false"},
    features={METADATA_VERSION: (7, 30), ELR_VERSION: (0, 1), "kraft.version": (0, 1)},
)
FEATURES = (BrokerFeature(METADATA_VERSION, 7, 30), BrokerFeature(ELR_VERSION, 0, 1))
T = TypeVar("T")


def directory(broker_id: int, number: int = 0) -> UUID:
    """Return the id of a broker's log directory."""
    return UUID(int=(broker_id << 64) + (number << 32) + 1000)


def any_config(_kind: int, _name: str, _after: Mapping[str, str], _old: Mapping[str, str]) -> None:
    """Accept every value of every setting."""


class Cluster:
    """A controller with ``brokers`` registered and unfenced.

    ``elr`` turns eligible leader replicas on, and ``min_isr`` is the cluster's min.insync.replicas.
    """

    def __init__(
        self,
        brokers: Iterable[int] = (0, 1, 2),
        *,
        elr: bool = False,
        min_isr: int = 1,
        racks: Mapping[int, str] | None = None,
        settings: ControllerSettings = SETTINGS,
    ) -> None:
        defaults = {**settings.topic_defaults, MIN_INSYNC_REPLICAS: str(min_isr)}
        self.settings = replace(settings, topic_defaults=defaults)
        self.now_ms = 1_000_000
        self.controller = Controller(self.settings, MetadataImage(), self.now_ms)
        self.events: list[Event] = []
        self.log: list[MetadataRecord] = []
        self._incarnations = 0
        self._draw = random.Random(7)
        levels = {METADATA_VERSION: 30, **({ELR_VERSION: 1} if elr else {})}
        self.append([*bootstrap(self.image, levels, str(min_isr))])
        for broker_id in brokers:
            self.register(broker_id, rack=(racks or {}).get(broker_id))
            self.beat(broker_id)

    # --- the metadata log and the clock ---

    @property
    def image(self) -> MetadataImage:
        return self.controller.image

    @property
    def end(self) -> int:
        """Return the end offset of the metadata log."""
        return self.image.offset + 1

    def append(self, records: Sequence[MetadataRecord]) -> None:
        """Append records to the metadata log and replay them."""
        if records:
            self.log += records
            self.controller.replay(records, self.end, 1, self.now_ms)

    def do(self, outcome: ControllerResult[T]) -> T:
        """Append the records of a controller's result and return its response."""
        self.events += outcome.events
        self.append(outcome.records)
        return outcome.answer

    def restart(self) -> None:
        """Replace the controller with a new controller that has only the metadata image."""
        self.controller = Controller(self.settings, self.image, self.now_ms)

    def pass_time(self, ms: int, *, beating: Iterable[int] = ()) -> None:
        """Advance the clock; ``beating`` brokers heartbeat each second, and due tasks run."""
        beating = tuple(beating)
        end = self.now_ms + ms
        while self.now_ms < end:
            self.now_ms = min(end, self.now_ms + 1_000)
            for broker_id in beating:
                self.beat(broker_id)
            while self.do(self.controller.run_task(self.now_ms)):
                pass

    # --- brokers ---

    def registration(self, broker_id: int, **changes: object) -> BrokerRegistrationRequest:
        self._incarnations += 1
        made = BrokerRegistrationRequest(
            broker_id=broker_id,
            cluster_id=CLUSTER_ID,
            incarnation_id=UUID(int=(1 << 100) + self._incarnations),
            end_points=(BrokerEndpoint("PLAINTEXT", "localhost", 9092 + broker_id, 0),),
            features=FEATURES,
            log_dirs=(directory(broker_id),),
        )
        return replace(made, **changes)  # type: ignore[arg-type]

    def register(self, broker_id: int, **changes: object) -> int:
        """Register a new incarnation of a broker and return its epoch."""
        request = self.registration(broker_id, **changes)
        return self.do(self.controller.register_broker(request, self.end, self.now_ms))

    def epoch(self, broker_id: int) -> int:
        return self.image.brokers[broker_id].epoch

    def beat(
        self, broker_id: int, offset: int | None = None, **changes: object
    ) -> BrokerHeartbeatReply:
        """Send a heartbeat of a broker that has applied all records, or those up to ``offset``."""
        request = BrokerHeartbeatRequest(
            broker_id, self.epoch(broker_id), self.image.offset if offset is None else offset
        )
        request = replace(request, **changes)  # type: ignore[arg-type]
        return self.do(self.controller.heartbeat(request, self.now_ms))

    def fence(self, *broker_ids: int) -> None:
        """Fence brokers by their own request."""
        for broker_id in broker_ids:
            self.beat(broker_id, want_fence=True)

    def unfence(self, *broker_ids: int) -> None:
        for broker_id in broker_ids:
            self.beat(broker_id)

    def reboot(self, broker_id: int, *, clean: bool = False) -> None:
        """End a fenced broker's session and register a new incarnation of the broker."""
        former = self.epoch(broker_id)
        self.controller.heartbeats.end_session(broker_id)
        self.register(broker_id, previous_broker_epoch=former if clean else -1)

    # --- partitions ---

    def create(self, name: str, *assignment: Sequence[int], **configs: str) -> UUID:
        """Create a topic, with a list of replicas for each partition, and return its id."""
        topic_id = UUID(int=(1 << 110) + self._draw.getrandbits(60))
        values = {key.replace("_", "."): value for key, value in configs.items()}
        self.do(
            self.controller.create_topic(
                NewTopic(name, assignment=tuple(enumerate(assignment)), configs=values),
                topic_id=topic_id,
                draw=self._draw,
                check_configs=any_config,
            )
        )
        return topic_id

    def partition(self, name: str, index: int = 0) -> PartitionRegistration:
        return self.image.topics[name].partitions[index]

    def isr_request(self, name: str, isr: Iterable[int], index: int = 0) -> ProposedIsr:
        """Return the change that the partition's leader would request now."""
        known = self.partition(name, index)
        return ProposedIsr(
            self.image.topics[name].topic_id,
            index,
            known.leader_epoch,
            known.partition_epoch,
            tuple((broker_id, self.epoch(broker_id)) for broker_id in isr),
        )

    def alter(
        self, leader: int, *requests: ProposedIsr
    ) -> list[PartitionRegistration | DomainError]:
        """Send AlterPartition as the leader and return a result for each partition."""
        return self.do(self.controller.alter_partition(leader, self.epoch(leader), requests))

    def alter_isr(
        self, name: str, isr: Iterable[int], index: int = 0
    ) -> PartitionRegistration | DomainError:
        """Let the leader of a partition request another ISR."""
        return self.alter(self.partition(name, index).leader, self.isr_request(name, isr, index))[0]

    def reassign(
        self, name: str, replicas: Sequence[int] | None, index: int = 0
    ) -> DomainError | None:
        """Request a reassignment of a partition; ``None`` cancels the current reassignment."""
        wanted = None if replicas is None else tuple(replicas)
        return self.do(
            self.controller.alter_partition_reassignments(
                [ReassignablePartition(name, index, wanted)]
            )
        )[0]

    def set_config(self, topic: str, key: str, value: str | None) -> None:
        """Set a topic's setting, or the cluster-wide broker default if ``topic`` is empty."""
        kind = TOPIC_RESOURCE if topic else BROKER_RESOURCE
        op = OpType.DELETE if value is None else OpType.SET
        self.do(
            self.controller.incremental_alter_configs(
                (kind, topic),
                [AlterConfig(key, op, value)],
                check_configs=any_config,
                list_default=lambda _kind, _key: None,
            )
        )

    def causes(self, kind: str, subject: str) -> list[str]:
        """Return the causes of a subject's events of one kind, in order."""
        return [
            str(event.detail.get("cause"))
            for event in self.events
            if (event.kind, event.subject) == (kind, subject)
        ]
