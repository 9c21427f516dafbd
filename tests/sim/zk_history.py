"""Simulated runs of daemons that elect their controller on a simulated ZooKeeper, from a seed.

The daemon imports kazoo's client in ``coordinator/zookeeper/session.py``, where
:mod:`tests.sim.zk_client` replaces it.
"""

from __future__ import annotations

from asyncio import events
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, cast

from fencepost.cluster.image import MetadataImage, PartitionRegistration, changed_topics
from fencepost.coordinator.storage.replica import Replica
from fencepost.coordinator.zookeeper import session
from fencepost.coordinator.zookeeper.node import ZooKeeperNode
from fencepost.logcore.partition import Partition
from tests.sim.daemon import Daemon
from tests.sim.daemons import History, Result, played
from tests.sim.invariants import BrokenInvariantError
from tests.sim.machine import EPOCH_MS
from tests.sim.watch import Key, Watch, replicas_of
from tests.sim.zk_client import Client
from tests.sim.zk_options import ZooKeeperOptions, draw_options
from tests.sim.zk_server import Ensemble
from tests.sim.zk_truth import Truth
from tests.sim.zk_writers import Writers

TOLD: Final = ("leader_and_isr", "update_metadata", "stop_replica")
"""Methods of :class:`ZooKeeperNode` that serve a controller's requests."""


class ZooKeeperWatch(Watch):
    """The invariants of a cluster whose controller is elected on ZooKeeper."""

    def __init__(self, unforced: frozenset[str] = frozenset()) -> None:
        super().__init__(unforced)
        self._empty: dict[tuple[int, Key], tuple[int, int]] = {}
        """Replicas that lost their disk, and do not have all committed records again → the
        incarnation of the node that lost the disk, and the log end offset on this disk."""

    def lost_records(self, daemon: Daemon) -> None:
        """Record that a broker has lost its disk.

        A restarted broker may stay in an ISR, or join it, until the controller has noticed the new
        registration.
        """
        incarnation = daemon.node.incarnation
        ends = {
            (replica.local.topic_id, replica.local.index): partition.log_end_offset
            for replica, partition in replicas_of(daemon)
        }
        self._empty |= {
            (daemon.node_id, key): (incarnation, ends.get(key, 0)) for key in self._known
        }
        super().lost_records(daemon)

    def _is_suspect(self, broker_id: int, key: Key) -> bool:
        return (broker_id, key) in self._empty

    def _look_at_replica(self, daemon: Daemon, replica: Replica, partition: Partition) -> None:
        key = replica.local.topic_id, replica.local.index
        incarnation, end = self._empty.get((daemon.node_id, key), (daemon.node.incarnation, 0))
        if incarnation != daemon.node.incarnation:
            # The leader may yet take records as committed because the lost disk had them.
            committed = self._committed.get(key)
            if partition.log_end_offset >= max(end, 0 if committed is None else committed.end):
                del self._empty[daemon.node_id, key]
        super()._look_at_replica(daemon, replica, partition)

    def _judge(self, key: Key, now: PartitionRegistration) -> None:
        if (now.leader, key) in self._empty:
            # Kafka's controller on ZooKeeper also elects a replica that has lost its disk.
            self._voids(key)
        super()._judge(key, now)

    def _look_at_settings(self, image: MetadataImage) -> None:
        """Check nothing: tools may delete settings."""

    def _look_at_isr(self, image: MetadataImage, name: str, now: PartitionRegistration) -> None:
        """Check nothing: a broker leaves the ISR later than its session expires."""

    def _different(self, image: MetadataImage, controllers: MetadataImage) -> str:
        parts = {
            "brokers": _brokers_of,
            "topics": _topics_of,
            "settings": _settings_of,
        }
        return ", ".join(
            f"other {name}: {part(image)} for {part(controllers)}"
            for name, part in parts.items()
            if part(image) != part(controllers)
        )


def _brokers_of(image: MetadataImage) -> object:
    return {
        key: (broker.listeners, broker.rack)
        for key, broker in image.brokers.items()
        if not broker.fenced
    }


def _topics_of(image: MetadataImage) -> object:
    return {
        name: (
            topic.topic_id,
            [
                (
                    partition.leader,
                    partition.leader_epoch,
                    partition.partition_epoch,
                    partition.isr,
                    partition.replicas,
                    partition.adding_replicas,
                    partition.removing_replicas,
                )
                for partition in topic.partitions
            ],
        )
        for name, topic in image.topics.items()
    }


def _settings_of(image: MetadataImage) -> object:
    return {key: dict(values) for key, values in image.configs.items() if values}


class ZooKeeperHistory(History):
    """The brokers, the ensemble and the clients of one simulated run."""

    options: ZooKeeperOptions
    ensemble: Ensemble
    truth: Truth

    def __init__(
        self, options: ZooKeeperOptions, told: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(options, told)
        self.before_told: Callable[[Daemon, Any], bool] = lambda _broker, _request: False
        """Called before a broker serves a controller's request; True drops the request."""
        self.after_told: Callable[[Daemon, Any], bool] = lambda _broker, _request: False
        """Called after a broker has served a controller's request; True drops the answer."""
        self._heard: dict[tuple[str, int], int] = {}
        """(node, incarnation) → newest controller epoch of an accepted request."""
        if "power_loss" not in options.faults:
            self.machines.unexpected |= {"log cut"}  # power losses lose no write
        self.machines.changes += (
            (session, "client_of", partial(Client, self.ensemble)),
            *((ZooKeeperNode, name, self._told(getattr(ZooKeeperNode, name))) for name in TOLD),
        )
        for broker in self.brokers:
            broker.after_turn = partial(self._check_office, broker)

    def _joins(self) -> dict[str, Any]:
        options = self.options
        self.ensemble = Ensemble(
            self.network, members=options.servers, lag_ms=options.member_lag_ms
        )
        self.ensemble.clock_ms += EPOCH_MS
        self.truth = Truth(self.ensemble)
        self.truth.deciding = self._deciding
        return {"zookeeper.connect": "z:2181"}

    def _watch(self, unforced: frozenset[str]) -> Watch:
        watch = ZooKeeperWatch(unforced)
        self.truth.decided = watch.look_at_image
        return watch

    def _faults(self) -> Writers:
        return Writers(self)

    @property
    def image(self) -> MetadataImage:
        """The metadata in ZooKeeper as an image."""
        return self.truth.image

    def node(self, broker: Daemon) -> ZooKeeperNode | None:
        """Return a broker's ZooKeeper node object, None while its process has none."""
        member = None if broker.broker is None else broker.broker._member
        return None if member is None else cast("ZooKeeperNode", member.cluster_view)

    def broker(self, broker_id: int) -> Daemon:
        """Return a broker."""
        return self.brokers[broker_id - 1]

    def _daemon_of(self, name: str) -> Daemon | None:
        return next((broker for broker in self.brokers if broker.node.name == name), None)

    # --- what is checked ---

    def _deciding(self, name: str) -> MetadataImage | None:
        broker = self._daemon_of(name)
        node = None if broker is None else self.node(broker)
        elected = None if node is None else node.elected
        changes = () if elected is None else elected.store._changes
        return changes[0].after if changes else None

    def _check_office(self, broker: Daemon) -> None:
        """Check that no broker acts as the controller unless it is active and connected."""
        node = self.node(broker)
        if node is not None and node.elected is not None and not node.session.is_connected:
            raise BrokenInvariantError(f"{broker.node.name} is active without ZooKeeper")
        if node is not None and node.controller_id == broker.node_id and node.elected is None:
            raise BrokenInvariantError(f"{broker.node.name} has no office, and says that it has")

    def _told(self, serve: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def told(node: ZooKeeperNode, body: Any, connected_s: float) -> Any:
            loop = events._get_running_loop()
            broker = self._daemon_of(loop.node.name)  # type: ignore[attr-defined]
            assert broker is not None
            if self.before_told(broker, body):
                self._forget(broker, body)
                await loop.create_future()  # type: ignore[union-attr]
            known = node._image
            answer = await serve(node, body, connected_s)
            _check_ages(broker.node.name, known, node._image)
            self._accepted(broker, body, answer if isinstance(answer, int) else answer[0])
            if self.after_told(broker, body):
                self._forget(broker, body)
            return answer

        return told

    def _forget(self, broker: Daemon, body: Any) -> None:
        """Break the connection that carried a controller's request."""
        controller = self.broker(body.controller_id)
        self.wires.break_way(controller.node, broker.node.name)

    def _accepted(self, broker: Daemon, body: Any, error: int) -> None:
        if error:
            return
        process = broker.node.name, broker.node.incarnation
        heard = self._heard.get(process, 0)
        if body.controller_epoch < heard:
            raise BrokenInvariantError(
                f"{broker.node.name} takes what a controller of epoch"
                f" {body.controller_epoch} says, after one of {heard}"
            )
        self._heard[process] = body.controller_epoch

    # --- the end ---

    def _unsettled(self) -> list[str]:
        wrong = super()._unsettled() + self.truth.left_over()
        if self.truth.controller is None:
            return [*wrong, "there is no controller"]
        for broker in self.brokers:
            node = self.node(broker)
            if node is not None and broker.services is not None:
                wrong += self._misled(broker, node, broker.services.metadata.image)
        return wrong

    def _misled(self, broker: Daemon, node: ZooKeeperNode, known: MetadataImage) -> list[str]:
        name, wrong = broker.node.name, list[str]()
        is_active = node.elected is not None
        if is_active != (broker.node_id == self.truth.controller):
            wrong.append(f"{name} takes itself for the controller: {is_active}")
        if node.controller_id != self.truth.controller:
            wrong.append(f"{name} takes {node.controller_id} for the controller")
        wrong += [f"{name} has {it}" for it in self.truth.access.different(known)]
        if node.elected is not None:
            different = self.watch._different(node.elected.store.image, self.image)
            if different:
                wrong.append(f"{name} has {different} in what it decides by")
        return wrong


def _check_ages(name: str, before: MetadataImage, after: MetadataImage) -> None:
    """Raise BrokenInvariantError if a broker knows an older state of a partition than before."""
    for topic_id in changed_topics(before, after):
        was, now = before.topics_by_id.get(topic_id), after.topics_by_id.get(topic_id)
        pairs = (
            () if was is None or now is None else zip(was.partitions, now.partitions, strict=False)
        )
        for old, new in pairs:
            if (new.leader_epoch, new.partition_epoch) < (old.leader_epoch, old.partition_epoch):
                raise BrokenInvariantError(f"{name} takes {new} for {old}")


def play(seed: int, told: Callable[[str], None] | None = None) -> Result:
    """Run the simulation of a seed; a failure raises, with the last events in its notes."""
    return live(draw_options(seed), told)


def live(options: ZooKeeperOptions, told: Callable[[str], None] | None = None) -> Result:
    """Run the simulation of these options."""
    repeat = f"make sim WORLD=zookeeper SEED={options.seed} N=1"
    return played(ZooKeeperHistory(options, told), repeat)
