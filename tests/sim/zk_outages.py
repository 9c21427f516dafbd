"""The faults of a cluster of daemons on ZooKeeper."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from fencepost.coordinator.zookeeper import znodes
from tests.sim.daemon import Daemon
from tests.sim.daemon_faults import SHORT_LIVED, TOPIC
from tests.sim.stories import Stories
from tests.sim.zk_client import Client
from tests.sim.zk_server import ENSEMBLE, Op
from tests.sim.zk_truth import TOOL

if TYPE_CHECKING:
    from tests.sim.zk_history import ZooKeeperHistory

RESIGNS_MS: Final = 20
FROZEN_MS: Final = 1_200
"""The delay until a controller learns that it has lost ZooKeeper, and the length of the pause that
follows. The pause is longer than a second, the interval of the preferred leader check.
"""

STALLS_MS: Final = (100, 700, 2_000)
"""How long a connection to ZooKeeper, or the whole ensemble, stalls."""


class Outages(Stories):
    """Adds the faults of ZooKeeper and of its controllers."""

    history: ZooKeeperHistory

    def __init__(self, history: ZooKeeperHistory) -> None:
        super().__init__(history)
        self.ensemble, self.truth = history.ensemble, history.truth

    def heal(self) -> None:
        self.ensemble.away_until_ms = 0
        super().heal()

    def clock_jump(self) -> None:
        """Set a broker's clock forward or back."""
        self._broker().node.clock_ms += self.draw.choice((-2_000, 50, 400, 2_000))

    # --- sessions ---

    def _client(self, broker: Daemon) -> Client | None:
        node = self.history.node(broker) if broker.node.is_up else None
        return None if node is None else cast("Client", node.session._client)

    def _expire(self, broker: Daemon) -> None:
        client = self._client(broker)
        session = None if client is None else self.ensemble.sessions.get(client._session_id)
        if session is not None:
            self.ensemble.expire(session)

    def expire(self) -> None:
        """Expire a broker's session; the broker finds out later."""
        self._expire(self._broker())

    def _drop(self, broker: Daemon) -> None:
        client = self._client(broker)
        if client is not None:
            client.drop()

    def disconnect(self) -> None:
        """Break a broker's connection to ZooKeeper; its writes in flight may have taken effect."""
        self._drop(self._broker())

    def zookeeper_cut(self) -> None:
        """Cut a broker off from ZooKeeper for a while, in one direction or in both."""
        name = self._broker().node.name
        ways = [{(name, ENSEMBLE), (ENSEMBLE, name)}, {(name, ENSEMBLE)}, {(ENSEMBLE, name)}]
        self._cut(self.draw.choice(ways))

    def zookeeper_away(self) -> None:
        """Stop ZooKeeper for a while."""
        self.ensemble.goes_away(self.draw.choice(STALLS_MS))

    def late_writes(self) -> None:
        """Delay the controller's requests to ZooKeeper; another controller may come first."""
        client = self._client(self._controller())
        if client is not None:
            stall_ms = self.draw.choice(STALLS_MS)
            client.node.say(f"reaches ZooKeeper {stall_ms} ms late")
            client.stall(stall_ms)
            if self.draw.random() < 0.5:
                self.remove_controller()

    def bounce(self) -> None:
        """Kill a broker and restart it at once; its old session may have expired or be alive."""
        broker = self._broker()
        if broker.node.is_up:
            if self.draw.random() < 0.5:
                self._expire(broker)
            broker.kill()
            self.scheduler.after(self.draw.choice((1, 20)), broker.start)

    # --- faults of the controller ---

    def _controller(self) -> Daemon:
        controller_id = self.truth.controller
        return self._broker() if controller_id is None else self.history.broker(controller_id)

    def kill_controller(self) -> None:
        """Kill the controller with ``kill -9``."""
        controller = self._controller()
        controller.kill()
        self._back(controller)

    def expire_controller(self) -> None:
        """Expire the controller's session; the controller finds out later."""
        self._expire(self._controller())

    def disconnect_controller(self) -> None:
        """Break the controller's connection; the answers to its last writes are lost."""
        self._drop(self._controller())

    def pause_controller(self) -> None:
        """Pause the controller for half to three times its session timeout."""
        node = self._controller().node
        if node.is_up and not node.paused_until_ms:
            pause_ms = self.options.session_ms * self.draw.choice((5, 9, 11, 15, 30)) // 10
            node.say(f"is paused for {pause_ms} ms")
            node.paused_until_ms = self.scheduler.now + pause_ms

    def late_resignation(self) -> None:
        """Let a controller learn that it lost ZooKeeper only when a preferred leader check is due.

        The event loop gets the connection event late, and the process is paused before the loop can
        run the callback.
        """
        self._tell(self._late_resignation())

    async def _late_resignation(self) -> None:
        controller = self._controller()
        place = TOPIC, 0
        now = self._registration(place)
        if now is None or now.replicas[0] == controller.node_id or len(now.replicas) < 2:
            return
        preferred = self.history.broker(now.replicas[0])
        preferred.kill()
        if not await self._until(lambda: self._leads(place, preferred.node_id) is False):
            return
        preferred.start()
        if not await self._until(lambda: self._is_in_sync(place, preferred.node_id)):
            return
        client, loop = self._client(controller), controller.loop
        if client is not None and loop is not None:
            loop.hears_late(RESIGNS_MS)
            client.drop()
            client.node.say("is frozen")
            client.node.paused_until_ms = self.scheduler.now + FROZEN_MS

    def _leads(self, place: tuple[str, int], broker_id: int) -> bool:
        now = self._registration(place)
        return now is not None and now.leader in (broker_id, -1)

    def _is_in_sync(self, place: tuple[str, int], broker_id: int) -> bool:
        now = self._registration(place)
        return now is not None and broker_id in now.isr and now.leader != broker_id

    # --- writes of other clients ---

    def _write(self, *ops: Op) -> bool:
        done = self.ensemble.write(TOOL, ops)
        if done:
            self.scheduler.say(TOOL, ", ".join(f"{op.kind} {op.path}" for op in ops))
        return done

    def remove_controller(self) -> None:
        """Delete ``/controller``, as an operator does to force another election."""
        self._write(Op("delete", znodes.CONTROLLER))

    def mark_for_deletion(self) -> None:
        """Mark a topic for deletion, as a tool does, and create it again."""
        if SHORT_LIVED in self.truth.image.topics:
            self._write(Op("create", znodes.delete_path(SHORT_LIVED)))
            pause_ms = self.draw.choice((1, 50, 400))
            again = self.history.admin.create
            self.scheduler.after(
                pause_ms, lambda: self._do(again(SHORT_LIVED, 1, self.options.factor))
            )

    def isr_note(self) -> None:
        """Write an ISR without a follower, as a leader of an older release does."""
        topic = self.truth.image.topics.get(TOPIC)
        if topic is not None:
            index = self.draw.randrange(len(topic.partitions))
            self._shrink(index, self.draw.choice((0, 100, 1_000)))

    def _shrink(self, index: int, note_ms: int) -> None:
        """Remove a follower from an ISR, and create the ISR notification ``note_ms`` later."""
        path = znodes.state_path(TOPIC, index)
        node = self.ensemble.tree.nodes.get(path)
        if node is None:
            return
        state = znodes.state_of(path, node.data)
        others = [broker_id for broker_id in state.isr if broker_id != state.leader]
        if state.leader < 0 or not others:
            return
        gone = self.draw.choice(others)
        kept = tuple(broker_id for broker_id in state.isr if broker_id != gone)
        written = replace(state, isr=kept)
        note = json.dumps(
            {"version": 1, "partitions": [{"topic": TOPIC, "partition": index}]}
        ).encode()
        if self._write(Op("set", path, znodes.state_data(written), node.version)):
            path = f"{znodes.ISR_CHANGES}/isr_change_"
            self.scheduler.after(note_ms, self._write, Op("create", path, note, sequence=True))
