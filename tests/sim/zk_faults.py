"""The faults of a cluster on ZooKeeper, and the actions of operators and tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.image import BROKER_RESOURCE, TOPIC_RESOURCE
from fencepost.cluster.records import ConfigRecord
from fencepost.coordinator.zookeeper import znodes
from fencepost.logcore.machine import DomainError
from tests.sim.faults import TOPIC, Faults
from tests.sim.operators import Operators
from tests.sim.zk_client import Client
from tests.sim.zk_server import ENSEMBLE, Op
from tests.sim.zk_truth import TOOL

if TYPE_CHECKING:
    from tests.sim.zk_broker import ZooKeeperBroker
    from tests.sim.zk_cluster import ZooKeeperCluster

LOOK_AGAIN_MS = 400


class ZooKeeperOperators(Operators):
    """Sends operators' requests to a broker that takes itself for the controller."""

    cluster: ZooKeeperCluster
    refusal = DomainError

    def __init__(self, cluster: ZooKeeperCluster) -> None:
        self.cluster = cluster

    def _asked(self) -> ZooKeeperBroker | None:
        scheduler = self.cluster.scheduler
        found = [
            one
            for one in self.cluster.running()
            if one.zookeeper.elected is not None and one.node.paused_until_ms <= scheduler.now
        ]
        return scheduler.draw.choice(found) if found else None

    def alter_config(self, name: str, value: str) -> None:
        """Set ``retention.ms`` of a topic."""
        record = ConfigRecord(TOPIC_RESOURCE, name, "retention.ms", value)

        def decision(one: Controller) -> ControllerResult[None]:
            return ControllerResult(None, (record,) if name in one.image.topics else ())

        self._try(decision, f"sets retention.ms of {name} to {value}")

    def alter_broker(self, broker_id: int, value: str) -> bool:
        """Set ``log.retention.ms`` of a broker."""
        record = ConfigRecord(BROKER_RESOURCE, str(broker_id), "log.retention.ms", value)
        told = f"sets log.retention.ms of b{broker_id} to {value}"
        return self._try(lambda _: ControllerResult(None, (record,)), told)

    def delete_topic(self, name: str) -> bool:
        """Delete a topic."""

        def decision(one: Controller) -> ControllerResult[None]:
            topic = one.image.topics.get(name)
            return ControllerResult(None) if topic is None else one.delete_topic(topic.topic_id)

        return self._try(decision, f"deletes {name}")


class ZooKeeperFaults(Faults):
    """Runs the enabled faults at random times, one after another."""

    cluster: ZooKeeperCluster

    def heal(self) -> None:
        self.cluster.ensemble.away_until_ms = 0
        super().heal()
        options = self.cluster.options
        for wait_ms in (500, 2_000, 5_000):
            for name in (TOPIC, *self.cluster.coordinator_topics):
                count = options.partitions if name == TOPIC else 1
                self.scheduler.after(
                    wait_ms, self._look_for, count, options.replication_factor, name
                )

    def create_topic(self, partitions: int, factor: int, name: str = TOPIC) -> None:
        """Create a topic, and retry: the broker asked may no longer be the controller."""
        self.cluster.controller.create_topic(name, partitions, factor)
        self.scheduler.after(LOOK_AGAIN_MS, self._look_for, partitions, factor, name)

    def _look_for(self, partitions: int, factor: int, name: str) -> None:
        if name not in self.cluster.truth.image.topics:
            self.create_topic(partitions, factor, name)

    def pause(self) -> None:
        """Send SIGSTOP to a broker, and SIGCONT after a while."""
        self._pause(self._some_broker(), self.draw.choice((100, 700, 1_500, 2_500)))

    def _pause(self, broker_id: int, for_ms: int) -> None:
        node = self.network.nodes[f"b{broker_id}"]
        if node.is_up and node.paused_until_ms <= self.scheduler.now:
            node.paused_until_ms = self.scheduler.now + for_ms
            node.say(f"is paused for {for_ms} ms")

    def clock_jump(self) -> None:
        """Set a broker's clock forward or back."""
        node = self.network.nodes[f"b{self._some_broker()}"]
        node.clock_ms += self.draw.choice((-2_000, 50, 400, 2_000))

    # --- sessions ---

    def _client(self, broker_id: int) -> Client:
        process = cast("ZooKeeperBroker", self.cluster.processes[broker_id])
        return cast("Client", process.zookeeper.session._client)

    def _expire(self, broker_id: int) -> None:
        if self._is_up(broker_id):
            session = self.cluster.ensemble.sessions.get(self._client(broker_id)._session_id)
            if session is not None:
                self.cluster.ensemble.expire(session)

    def expire(self) -> None:
        """Expire a broker's session; the broker finds out later."""
        self._expire(self._some_broker())

    def disconnect(self) -> None:
        """Break a broker's connection to ZooKeeper; its writes in flight may have been done."""
        broker_id = self._some_broker()
        if self._is_up(broker_id):
            self._client(broker_id).drop()

    def zookeeper_cut(self) -> None:
        """Cut a broker off from ZooKeeper for a while, in one direction or in both."""
        name = f"b{self._some_broker()}"
        ways = [{(name, ENSEMBLE), (ENSEMBLE, name)}, {(name, ENSEMBLE)}, {(ENSEMBLE, name)}]
        self._cut(self.draw.choice(ways))

    def zookeeper_away(self) -> None:
        """Stop ZooKeeper for a while."""
        self.cluster.ensemble.goes_away(self.draw.choice((100, 700, 2_000)))

    def bounce(self) -> None:
        """Kill a broker, which is back at once; its old session may have expired or still live."""
        broker_id = self._some_broker()
        if self._is_up(broker_id):
            if self.draw.random() < 0.5:
                self._expire(broker_id)
            self.cluster.crash_broker(broker_id)
            self.scheduler.after(self.draw.choice((1, 20)), self.cluster.start_broker, broker_id)

    # --- faults of the controller ---

    def _controller_id(self) -> int:
        return self.cluster.truth.controller or self._some_broker()

    def kill_controller(self) -> None:
        """Kill the controller with ``kill -9``."""
        self._crash(self._controller_id())

    def expire_controller(self) -> None:
        """Expire the controller's session; the controller finds out later."""
        self._expire(self._controller_id())

    def disconnect_controller(self) -> None:
        """Break the controller's connection, which loses the answers to its last writes."""
        broker_id = self._controller_id()
        if self._is_up(broker_id):
            self._client(broker_id).drop()

    def pause_controller(self) -> None:
        """Pause the controller for half to three times its session timeout."""
        session_ms = self.cluster.options.broker.session_ms
        self._pause(self._controller_id(), session_ms * self.draw.choice((5, 9, 11, 15, 30)) // 10)

    # --- writes of other clients ---

    def _write(self, *ops: Op) -> bool:
        done = self.cluster.ensemble.write(TOOL, ops)
        if done:
            self.scheduler.say(TOOL, ", ".join(f"{one.kind} {one.path}" for one in ops))
        return done

    def remove_controller(self) -> None:
        """Delete ``/controller``, as an operator does to force another election."""
        self._write(Op("delete", znodes.CONTROLLER))

    def mark_for_deletion(self) -> None:
        """Mark the topic for deletion, as a tool does, and create it again."""
        if self.draw.random() < 0.6:
            return
        if TOPIC in self.cluster.truth.image.topics:
            self._write(Op("create", znodes.delete_path(TOPIC)))
            options = self.cluster.options
            wait_ms = self.draw.choice((1, 50, 400))
            self.scheduler.after(
                wait_ms, self.create_topic, options.partitions, options.replication_factor
            )

    def isr_note(self) -> None:
        """Remove a follower from the ISR, as a leader of an older release does by itself."""
        topic = self.cluster.truth.image.topics.get(TOPIC)
        if topic is None:
            return
        index = self.draw.randrange(len(topic.partitions))
        path = znodes.state_path(TOPIC, index)
        node = self.cluster.ensemble.tree.nodes.get(path)
        if node is None:
            return
        state = znodes.state_of(path, node.data)
        others = [one for one in state.isr if one != state.leader]
        if state.leader < 0 or not others:
            return
        gone = self.draw.choice(others)
        kept = tuple(one for one in state.isr if one != gone)
        written = znodes.PartitionStateZnode(
            state.leader, kept, state.leader_epoch, state.controller_epoch
        )
        note = json.dumps(
            {"version": 1, "partitions": [{"topic": TOPIC, "partition": index}]}
        ).encode()
        if self._write(Op("set", path, znodes.state_data(written), node.version)):
            path = f"{znodes.ISR_CHANGES}/isr_change_"
            wait_ms = self.draw.choice((0, 100, 1_000))
            self.scheduler.after(wait_ms, self._write, Op("create", path, note, sequence=True))
