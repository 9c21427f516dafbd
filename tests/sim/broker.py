"""One process of a broker: its life at the controller, its images, what it leads and follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import UUID

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.lifecycle import (
    BrokerState,
    Heartbeat,
    HeartbeatAnswer,
    Intervals,
    Lifecycle,
    Registration,
    Step,
)
from fencepost.cluster.observer import MetadataBatch, MetadataFetched, Observer, SnapshotFetched
from fencepost.cluster.records import BrokerEndpoint
from fencepost.coordinator.replication.metadata_wire import batches_reader
from tests.sim.controller import CONTROLLER, Registered
from tests.sim.network import Answer
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

CLUSTER_ID: Final = "simulated"
ADDRESS: Final = (CONTROLLER, 0)


class Broker(Process):
    """A process of a cluster whose controller has a log of metadata."""

    def __init__(self, cluster: Cluster, broker_id: int) -> None:
        super().__init__(cluster, broker_id)
        self.newest = self.image
        self._deaf_until_ms = 0
        self._is_known = False
        self.incarnation_id = UUID(int=cluster.scheduler.draw.getrandbits(128) | 1 << 100)
        self.lifecycle = Lifecycle(
            Registration(
                broker_id=broker_id,
                cluster_id=CLUSTER_ID,
                incarnation_id=self.incarnation_id,
                listeners=(BrokerEndpoint("PLAINTEXT", f"b{broker_id}", 9092, 0),),
                features=cluster.options.features,
                log_dirs=(directory_of(broker_id),),
                previous_broker_epoch=self.disk.clean_epoch,
            ),
            Intervals(
                heartbeat_ms=self.options.heartbeat_ms,
                session_ms=self.options.session_ms,
                controlled_shutdown_ms=6_000,
                initial_registration_ms=1 << 40,
            ),
        )
        self.disk.clean_epoch = -1
        self.observer = Observer(
            (ADDRESS,),
            _read_batches,
            fetch_timeout_ms=600,
        )

    # --- its life ---

    def _join(self) -> None:
        self.lifecycle.start(self.node.now_ms)
        self._observe()
        self._heartbeat()

    def stop(self) -> None:
        """Ask to be let go."""
        if self.lifecycle.state is BrokerState.SHUTTING_DOWN:
            return
        self.node.say("is to stop")
        self.is_shutting_down = True
        self._steps(self.lifecycle.begin_controlled_shutdown(self.node.now_ms))
        self._heartbeat()
        self.node.after(6_001, self._tick)

    def _tick(self) -> None:
        self._steps(self.lifecycle.on_time(self.node.now_ms))

    def _heartbeat(self) -> None:
        node = self.node
        request = self.lifecycle.next_request(node.now_ms, self.newest.offset)
        if isinstance(request, float | int):
            if request < float("inf"):
                node.after(max(int(request) - node.now_ms, 1), self._heartbeat)
            return
        self.ask_controller(
            request, lambda answer: self._heard(request, answer), purpose="lifecycle"
        )

    def _heard(self, request: Registration | Heartbeat, answer: Any) -> None:
        now_ms, lifecycle = self.node.now_ms, self.lifecycle
        if answer is None:
            steps = lifecycle.on_failure(now_ms)
        elif isinstance(answer, Registered):
            steps = lifecycle.on_registered(answer.error, answer.broker_epoch, now_ms)
        else:
            steps = lifecycle.on_heartbeat(cast("HeartbeatAnswer", answer), now_ms)
        self._steps(steps)
        if self.node.is_up:
            self._heartbeat()

    def _steps(self, steps: list[Step]) -> None:
        for step in steps:
            self.node.say(f"{step.name.lower()} (epoch {self.lifecycle.broker_epoch})")
            if step is Step.REGISTERED:
                self.view.broker_epoch = self.disk.last_epoch = self.lifecycle.broker_epoch
                self.site.is_suspect = False
            elif step is Step.CAUGHT_UP:
                self._is_known = True
                self._publish(self.newest)
                self.lifecycle.ready_to_unfence(self.node.now_ms)
            elif step in (Step.SHUT_DOWN, Step.EPOCH_LOST):
                self._stopped(self.lifecycle.broker_epoch)

    # --- metadata ---

    def _observe(self) -> None:
        node = self.node
        request = self.observer.next_request(node.now_ms)
        if isinstance(request, float | int):
            node.after(max(int(request) - node.now_ms, 1), self._observe)
            return

        def answered(answer: MetadataFetched | SnapshotFetched | None) -> None:
            if answer is None:
                self.observer.on_failure(node.now_ms)
            elif isinstance(answer, SnapshotFetched):
                self._observed(self.observer.on_snapshot_fetched(answer, node.now_ms))
            else:
                self._observed(self.observer.on_fetched(answer, node.now_ms))
            self._observe()

        self.ask_controller(request, answered, purpose="metadata")

    def _observed(self, images: Sequence[MetadataImage]) -> None:
        """An image is not acted upon before the controller has taken note of this process.

        Its registration may have to tell what the disk has lost (kafka: ``BrokerServer`` installs
        the publisher of metadata when the broker has caught up with its registration).
        """
        for image in images:
            self.newest = image
            if self._is_known and self.node.scheduler.now >= self._deaf_until_ms:
                self._publish(image)

    def listen_after(self, wait_ms: int) -> None:
        """Act upon nothing new for a while."""
        if self.node.scheduler.now >= self._deaf_until_ms:
            self.node.say(f"hears no metadata for {wait_ms} ms")
            self._deaf_until_ms = self.node.scheduler.now + wait_ms
            self.node.after(wait_ms, self._hear)

    def _hear(self) -> None:
        """Act upon the newest image; those before it are left out, as the daemon does."""
        if self._is_known and self.newest is not self.image:
            self._publish(self.newest)

    def ask_controller(self, request: Any, answer: Answer, *, purpose: str, **options: Any) -> None:
        """Send a request to the controller."""
        self.cluster.network.call(
            self.node,
            CONTROLLER,
            request,
            answer,
            timeout_ms=self.options.request_timeout_ms,
            purpose=purpose,
            **options,
        )


_read_bytes = batches_reader("PLAINTEXT")


def _read_batches(fetched: bytes) -> Iterable[MetadataBatch]:
    """Snapshots are bytes; otherwise the simulated controller sends batches as they are."""
    return _read_bytes(fetched) if fetched and isinstance(fetched, bytes) else fetched  # type: ignore[return-value]


def directory_of(broker_id: int) -> UUID:
    """The id of a broker's log directory."""
    return UUID(int=(0xD << 64) + broker_id)
