"""A cluster whose brokers elect their controller on ZooKeeper, and the history of a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from fencepost.cluster.image import MetadataImage
from tests.sim.cluster import Cluster, Result
from tests.sim.faults import Faults
from tests.sim.process import Process
from tests.sim.shards import quiet
from tests.sim.zk_broker import ZooKeeperBroker, models
from tests.sim.zk_faults import ZooKeeperOperators
from tests.sim.zk_server import ENSEMBLE, Ensemble
from tests.sim.zk_swarm import ZooKeeperOptions, draw_options
from tests.sim.zk_tools import Tools
from tests.sim.zk_truth import Truth


class ZooKeeperCluster(Cluster):
    """The brokers, the ensemble and the clients of one history."""

    options: ZooKeeperOptions

    def __init__(
        self, options: ZooKeeperOptions, told: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(options, told)
        self.deciders = (ENSEMBLE,)
        self.ensemble = Ensemble(self.network, members=options.servers, lag_ms=options.lag_ms)
        self.truth = Truth(self.ensemble, self.invariants)
        self.truth.deciding = self._deciding
        self._processes: list[ZooKeeperBroker] = []
        """All processes so far, so that the garbage collector does not end any at its own time."""
        self.before_told: Callable[[ZooKeeperBroker, Any], bool] = lambda _broker, _request: False
        """Called with each request of a controller before it is served; True drops the request."""
        self.after_told: Callable[[ZooKeeperBroker, Any], bool] = lambda _broker, _request: False
        """Called with each request of a controller once it is served; True drops the answer."""

    def _controller(self) -> Any:
        return ZooKeeperOperators(self)

    def _faults(self) -> Faults:
        return Tools(self)

    def _process(self, broker_id: int) -> Process:
        process = ZooKeeperBroker(self, broker_id)
        self._processes.append(process)
        return process

    def running(self) -> Iterator[ZooKeeperBroker]:
        """Yield the running processes."""
        for one in self.processes.values():
            if one.node.is_up:
                yield cast("ZooKeeperBroker", one)

    def _deciding(self, name: str) -> MetadataImage | None:
        found = [one for one in self.running() if one.node.name == name]
        elected = found[0].zookeeper.elected if found else None
        changes = () if elected is None else elected.store._changes
        return changes[0].after if changes else None

    def end(self) -> None:
        """End all processes and their event loops."""
        for one in self._processes:
            one.node.end()
            one.loop.end()

    # --- the end of a history ---

    def _stale_images(self) -> list[str]:
        """Return a message for each difference between the brokers and ZooKeeper."""
        wrong = self.truth.left_over()
        if self.truth.controller is None:
            return [*wrong, "there is no controller"]
        for one in self.running():
            zookeeper = one.zookeeper
            is_active = zookeeper.elected is not None
            if is_active != (one.broker_id == self.truth.controller):
                wrong.append(f"{one.node.name} takes itself for the controller: {is_active}")
            if zookeeper.controller_id != self.truth.controller:
                wrong.append(f"{one.node.name} takes {zookeeper.controller_id} for the controller")
            wrong += [f"{one.node.name} has {it}" for it in self.truth.access.different(one.image)]
            images = {"it is told": one.image}
            if zookeeper.elected is not None:
                images["it decides by"] = zookeeper.elected.store.image
            for name, image in images.items():
                if different := self._different(image):
                    wrong.append(f"{one.node.name} has other {different} in what {name}")
        return wrong

    def _different(self, image: Any) -> str:
        truth = self.truth.image
        parts = {
            "brokers": [
                {
                    key: (one.listeners, one.rack)
                    for key, one in image.brokers.items()
                    if not one.fenced
                }
                for image in (image, truth)
            ],
            "topics": [
                {
                    name: (
                        topic.topic_id,
                        [
                            (
                                one.leader,
                                one.leader_epoch,
                                one.partition_epoch,
                                one.isr,
                                one.replicas,
                                one.adding_replicas,
                                one.removing_replicas,
                            )
                            for one in topic.partitions
                        ],
                    )
                    for name, topic in image.topics.items()
                }
                for image in (image, truth)
            ],
            "settings": [
                {key: dict(values) for key, values in image.configs.items() if values}
                for image in (image, truth)
            ],
        }
        return ", ".join(
            f"{name} ({one} for {other})" for name, (one, other) in parts.items() if one != other
        )


@contextmanager
def told(cluster: ZooKeeperCluster, repeat: str) -> Iterator[None]:
    """Install the models, add the last events to a failure, and end the cluster."""
    scheduler = cluster.scheduler
    try:
        with scheduler.explained(cluster.options, repeat), quiet(), models(scheduler.draw):
            yield
    finally:
        cluster.end()


def play(seed: int, tell: Callable[[str], None] | None = None) -> Result:
    """Play the history of a seed; a failure raises, with the last events in its notes."""
    cluster = ZooKeeperCluster(draw_options(seed), tell)
    with told(cluster, f"make sim WORLD=zookeeper SEED={seed} N=1"):
        return cluster.run()
