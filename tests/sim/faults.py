"""The faults of a history, and the actions of operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fencepost.cluster.image import TopicImage
from tests.sim.network import Weather

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

TOPIC: Final = "orders"
MAX_PARTITIONS: Final = 4


class Faults:
    """Runs the enabled faults at random times, one after another."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.scheduler = cluster.scheduler
        self.draw = cluster.scheduler.draw
        self.network = cluster.network
        self.is_over = False

    def begin(self) -> None:
        """Schedule the first fault, if any is enabled."""
        if self.cluster.options.faults:
            self._next()

    def _next(self) -> None:
        mean_ms = self.cluster.options.fault_pause_ms
        self.scheduler.after(self.draw.randint(1, 2 * mean_ms), self._strike)

    def _strike(self) -> None:
        if self.is_over:
            return
        name = self.draw.choice(self.cluster.options.faults)
        getattr(self, name)()
        self._next()

    def heal(self) -> None:
        """Stop the faults, repair the network and start all processes."""
        self.is_over = True
        self.scheduler.say("--", "all faults are over")
        self.network.cut.clear()
        self.network.weather = Weather(latency_ms=self.cluster.options.weather.latency_ms)
        for broker_id in self.cluster.ids:
            self.cluster.start_broker(broker_id)

    # --- processes ---

    def _some_topic(self) -> TopicImage | None:
        """Return a random topic, None if it does not exist now."""
        names = [TOPIC, *self.cluster.coordinator_topics]
        return self.cluster.invariants.image.topics.get(self.draw.choice(names))

    def _some_broker(self) -> int:
        return self.draw.choice(self.cluster.ids)

    def come_back(self, broker_id: int) -> None:
        """Start a broker again after a random time."""
        wait_ms = self.draw.choice((20, 300, 1_500, 3_000))
        self.scheduler.after(1 if self.is_over else wait_ms, self.cluster.start_broker, broker_id)

    def _is_up(self, broker_id: int) -> bool:
        return self.network.nodes[f"b{broker_id}"].is_up

    def _crash(self, broker_id: int) -> None:
        if self._is_up(broker_id):
            self.cluster.crash_broker(broker_id)
            self.come_back(broker_id)

    def kill(self) -> None:
        """Kill a broker with ``kill -9``; everything that it wrote survives."""
        self._crash(self._some_broker())

    def clean_stop(self) -> None:
        """Send SIGTERM to a broker, which begins a controlled shutdown."""
        broker_id = self._some_broker()
        if self._is_up(broker_id):
            self.cluster.processes[broker_id].stop()

    def new_producer(self) -> None:
        """Kill a producer and start it again, without the outcome of its last batches."""
        if self.cluster.producers:
            self.draw.choice(self.cluster.producers).restart()

    # --- the network ---

    def _names(self) -> list[str]:
        return [*self.cluster.world.brokers, *self.cluster.deciders]

    def cut(self) -> None:
        """Cut the network between two nodes, in one direction or in both."""
        one, other = self.draw.sample(self._names(), 2)
        ways = {(one, other)}
        if self.draw.random() < 0.5:
            ways.add((other, one))
        self._cut(ways)

    def isolate(self) -> None:
        """Cut a broker off from all other nodes or from the controller; clients still reach it."""
        name = f"b{self._some_broker()}"
        others = [one for one in self._names() if one != name]
        if self.draw.random() < 0.5:
            others = [*self.cluster.deciders]
        self._cut({(name, one) for one in others} | {(one, name) for one in others})

    def _cut(self, ways: set[tuple[str, str]]) -> None:
        ways -= self.network.cut
        self.network.cut |= ways
        for_ms = self.draw.choice((200, 800, 2_000, 4_000))
        self.scheduler.say("--", f"cut for {for_ms} ms: {sorted(ways)}")
        self.scheduler.after(for_ms, self._mend, ways)

    def _mend(self, ways: set[tuple[str, str]]) -> None:
        self.network.cut -= ways

    def flap(self) -> None:
        """Pause a broker three times, each for about ``replica.lag.time.max.ms``."""
        node = self.network.nodes[f"b{self._some_broker()}"]
        lag_ms = self.cluster.options.broker.lag_ms

        def stall(times: int) -> None:
            if node.is_up and not self.is_over and times:
                node.paused_until_ms = self.scheduler.now + lag_ms * self.draw.randint(8, 13) // 10
                self.scheduler.after(lag_ms * 3 // 2, stall, times - 1)

        node.say("flaps")
        stall(3)

    # --- operators ---

    def flip(self) -> None:
        """Move a partition's leadership several times, faster than its followers notice."""
        topic = self._some_topic()
        if topic is not None:
            index = self.draw.randrange(len(topic.partitions))
            self._flip(topic.name, index, self.draw.randint(2, 10))

    def _flip(self, name: str, index: int, times: int) -> None:
        topic = self.cluster.invariants.image.topics.get(name)
        if self.is_over or not times or topic is None or index >= len(topic.partitions):
            return
        one = topic.partitions[index]
        if len(one.isr) > 1 and not one.adding_replicas and not one.removing_replicas:
            first = self.draw.choice([other for other in one.isr if other != one.leader])
            others = tuple(other for other in one.replicas if other != first)
            self.cluster.controller.reassign(name, index, (first, *others))
            self.cluster.controller.elect_preferred()
        wait_ms = self.draw.choice((2, 15, 60, 150))
        self.scheduler.after(wait_ms, self._flip, name, index, times - 1)

    def delete_records(self) -> None:
        """Have a leader delete its oldest records."""
        image = self.cluster.invariants.image
        topic = image.topics.get(TOPIC)
        if topic is None:
            return
        index = self.draw.randrange(len(topic.partitions))
        leader = topic.partitions[index].leader
        if leader in self.cluster.processes and self._is_up(leader):
            self.cluster.processes[leader].leading.delete_records((topic.topic_id, index))

    def reassign(self) -> None:
        """Reassign a partition to random replicas."""
        topic = self._some_topic()
        if topic is None:
            return
        index = self.draw.randrange(len(topic.partitions))
        ids = list(self.cluster.ids)
        count = self.draw.randint(1, len(ids)) if self.draw.random() < 0.3 else 0
        count = count or min(self.cluster.options.replication_factor, len(ids))
        self.cluster.controller.reassign(topic.name, index, tuple(self.draw.sample(ids, count)))

    def cancel(self) -> None:
        """Cancel an ongoing reassignment."""
        topic = self._some_topic()
        if topic is None:
            return
        going = [
            index
            for index, one in enumerate(topic.partitions)
            if one.adding_replicas or one.removing_replicas
        ]
        if going:
            self.cluster.controller.reassign(topic.name, self.draw.choice(going), None)

    def preferred(self) -> None:
        """Elect the preferred leaders."""
        self.cluster.controller.elect_preferred()

    def alter_config(self) -> None:
        """Change ``retention.ms`` of the topic."""
        self.cluster.controller.alter_config(TOPIC, str(self.draw.randint(1, 1_000_000)))

    def recreate(self) -> None:
        """Delete the topic, and create another one of the same name."""
        if self.draw.random() < 0.6:
            return
        options = self.cluster.options
        self.cluster.controller.delete_topic(TOPIC)
        wait_ms = self.draw.choice((1, 50, 400))
        self.scheduler.after(
            wait_ms, self.create_topic, options.partitions, options.replication_factor
        )

    def create_topic(self, partitions: int, factor: int, name: str = TOPIC) -> None:
        """Have the controller create a topic."""
        raise NotImplementedError

    def add_partitions(self) -> None:
        """Add a partition to the topic."""
        topic = self.cluster.invariants.image.topics.get(TOPIC)
        if topic is not None and len(topic.partitions) < MAX_PARTITIONS:
            self.cluster.controller.add_partition(TOPIC, len(topic.partitions) + 1)
