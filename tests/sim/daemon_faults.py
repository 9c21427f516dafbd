"""The faults of a simulated run of daemons, and the requests of operators."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS, TRANSACTION_STATE
from tests.sim.daemon import Daemon
from tests.sim.framed_admin import PREFERRED

if TYPE_CHECKING:
    from tests.sim.daemons import History

TOPIC: Final = "t"
SHORT_LIVED: Final = "r"
"""A topic that is repeatedly deleted and created; the final comparison of records skips it."""
COORDINATORS: Final = 2
"""Partitions of ``__consumer_offsets``, and of ``__transaction_state``."""
MOST_PARTITIONS: Final = 5
DOWN_MS: Final = 800
LOOK_MS: Final = 100
FLAPS: Final = 3
"""Pauses of a node in one :meth:`DaemonFaults.flap`."""

FAULTS: Final = (
    "kill",
    "power_loss",
    "stop",
    "pause",
    "break_off",
    "cut",
    "grow",
    "delete_records",
    "recreate",
)
OF_CLUSTERS: Final = (
    "reassign",
    "call_off",
    "elect_preferred",
    "flap",
    "flip",
    "isolate",
    "kill_leader",
    "kill_coordinator",
    "alter_config",
)
"""Faults that need several brokers."""

LOSING: Final = ("lose_disk", "reboot")
"""Faults of clusters after which acknowledged records may be lost."""
LOSING_STORIES: Final = ("late_incarnation", "late_registration")


class DaemonFaults:
    """Runs faults at random times, one after another, chosen from the names in the options."""

    def __init__(self, history: History) -> None:
        self.history, self.options = history, history.options
        self.scheduler, self.draw = history.scheduler, history.draw
        self.network, self.wires = history.network, history.wires
        self.is_over = False

    def begin(self) -> None:
        """Schedule the first fault."""
        self.scheduler.after(self.draw.randint(1, self.options.fault_pause_ms), self._strike)

    def heal(self) -> None:
        """Schedule no further faults."""
        self.is_over = True

    def _strike(self) -> None:
        if self.is_over:
            return
        getattr(self, self.draw.choice(self.options.faults))()
        pause_ms = self.draw.randint(1, 2 * self.options.fault_pause_ms)
        self.scheduler.after(pause_ms, self._strike)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        self.history.admin.spawn(work)

    # --- processes ---

    def _one(self) -> Daemon:
        return self.draw.choice(self.history.daemons)

    def _broker(self) -> Daemon:
        return self.draw.choice(self.history.brokers)

    def _back(self, daemon: Daemon) -> None:
        self.scheduler.after(self.draw.randint(1, DOWN_MS), daemon.start)

    def kill(self) -> None:
        """Kill a node with ``kill -9``, which loses no write."""
        daemon = self._one()
        daemon.kill()
        self._back(daemon)

    def kill_leader(self) -> None:
        """Kill the leader of a partition with ``kill -9``."""
        self._kill_leader(*self._place())

    def kill_coordinator(self) -> None:
        """Kill a coordinator of transactions or of groups with ``kill -9``."""
        topic = self.draw.choice((TRANSACTION_STATE, CONSUMER_OFFSETS))
        self._kill_leader(topic, self.draw.randrange(COORDINATORS))

    def _kill_leader(self, topic: str, index: int) -> None:
        for broker in self.history.brokers:
            services = broker.services
            replica = None if services is None else services.replicas.replica(topic, index)
            if replica is not None and replica.machine.is_leader:
                broker.kill()
                self._back(broker)
                return

    def power_loss(self) -> None:
        """Cut the power of a node, which may lose any of its unsynced writes."""
        daemon = self._one()
        self._lost_records(daemon)
        may_go_back = daemon is self.history.controller and self.history.has_unforced_image
        daemon.kill(power_loss=True)
        if may_go_back:
            self.history.watch.forget_image()
        self._back(daemon)

    def lose_disk(self) -> None:
        """Kill a broker, and restart it later with an empty disk."""
        broker = self._broker()
        if broker.node.is_up:
            self._lost_records(broker)
            broker.kill(loses_disk=True)
            self._back(broker)

    def reboot(self) -> None:
        """Restart a broker at once with an empty disk; for a while it reaches no other broker."""
        broker = self._broker()
        if broker.node.is_up:
            self._lost_records(broker)
            broker.kill(loses_disk=True)
            self.scheduler.after(1, broker.start)
            others = {other.node.name for other in self.history.brokers if other is not broker}
            self._cut({(broker.node.name, other) for other in others})

    def _lost_records(self, daemon: Daemon) -> None:
        if self.options.loses:
            self.history.watch.lost_records(daemon)

    def stop(self) -> None:
        """Stop a node as SIGTERM does; a broker asks for a controlled shutdown."""
        daemon = self._one()
        daemon.stop()
        self._wait_for_stop(daemon)

    def _wait_for_stop(self, daemon: Daemon) -> None:
        if daemon.is_stopping and daemon.node.is_up:
            self.scheduler.after(LOOK_MS, self._wait_for_stop, daemon)
        else:
            self._back(daemon)

    def pause(self) -> None:
        """Suspend a node as SIGSTOP does, and resume it later."""
        node = self._one().node
        if node.is_up and not node.paused_until_ms:
            node.say("is frozen")
            pause_ms = self.draw.randint(1, self.options.outage_ms)
            node.paused_until_ms = self.scheduler.now + pause_ms

    def flap(self) -> None:
        """Suspend a broker several times, each time for about ``replica.lag.time.max.ms``."""
        node, lag_ms = self._broker().node, self.options.lag_ms

        def stall(times: int) -> None:
            if node.is_up and not self.is_over and times:
                node.paused_until_ms = self.scheduler.now + lag_ms * self.draw.randint(8, 13) // 10
                self.scheduler.after(lag_ms * 3 // 2, stall, times - 1)

        node.say("flaps")
        stall(FLAPS)

    # --- the network ---

    def break_off(self) -> None:
        """Break some connections of a node."""
        node = self._one().node
        node.say(f"loses {self.wires.break_some(node)} connections")

    def cut(self) -> None:
        """Drop everything that one node sends to another node, for a while."""
        sender = self._one().node.name
        other = self.draw.choice([name for name in sorted(self.network.nodes) if name != sender])
        self._cut({self.draw.choice(((sender, other), (other, sender)))})

    def isolate(self) -> None:
        """Cut a broker off from all other daemons, or from the first daemon, often the controller.

        Clients still reach the broker.
        """
        broker_name = self._broker().node.name
        others = [
            daemon.node.name for daemon in self.history.daemons if daemon.node.name != broker_name
        ]
        if self.draw.random() < 0.5:
            others = others[:1]
        self._cut(
            {(broker_name, other) for other in others} | {(other, broker_name) for other in others}
        )

    def _cut(self, ways: set[tuple[str, str]]) -> None:
        ways -= self.network.cut
        self.network.cut |= ways
        self.scheduler.say("--", f"cut: {sorted(ways)}")
        self.scheduler.after(
            self.draw.randint(1, self.options.outage_ms), self.network.cut.difference_update, ways
        )

    # --- operators ---

    def _place(self) -> tuple[str, int]:
        return TOPIC, self.draw.randrange(self.history.promises.partitions)

    def grow(self) -> None:
        """Add a partition to the topic."""
        if self.history.promises.partitions < MOST_PARTITIONS:
            self._do(self.history.admin.grow(TOPIC, self.history.promises))

    def _some_replicas(self) -> list[int]:
        return self.draw.sample(range(1, self.options.brokers + 1), self.options.factor)

    def reassign(self) -> None:
        """Reassign a partition to random replicas."""
        self._do(self.history.admin.reassign(self._place(), self._some_replicas()))

    def call_off(self) -> None:
        """Cancel the reassignment of a partition."""
        self._do(self.history.admin.reassign(self._place(), None))

    def elect_preferred(self) -> None:
        """Elect the preferred leaders of all partitions."""
        self._do(self.history.admin.elect_leaders(PREFERRED))

    def flip(self) -> None:
        """Change the leader of a partition several times, faster than followers notice."""
        place, admin = self._place(), self.history.admin

        async def flip() -> None:
            for _ in range(self.draw.randint(2, 6)):
                replicas = self._some_replicas()
                await admin.reassign(place, replicas)
                await admin.elect_leaders(PREFERRED)
                await admin.wait(self.draw.choice((2, 15, 60, 150)))

        if self.options.factor == self.options.brokers:
            self._do(flip())

    def recreate(self) -> None:
        """Delete :data:`SHORT_LIVED`, and create a topic with the same name."""
        pause_ms = self.draw.choice((1, 50, 400))
        self._do(self.history.admin.recreate(SHORT_LIVED, 1, self.options.factor, pause_ms))

    def alter_config(self) -> None:
        """Change ``segment.bytes`` of the topic."""
        segment_bytes = str(self.draw.randint(1_000_000, 2_000_000))
        self._do(self.history.admin.configure(TOPIC, **{"segment.bytes": segment_bytes}))

    def retain(self) -> None:
        """Change the retention of the topic, by age or by size."""
        age_ms, settings = 0, {"segment.ms": str(self.draw.choice((40, 300)))}
        if self.draw.random() < 0.7:
            age_ms = self.draw.choice((150, 500, 1_500))
            settings["retention.ms"] = str(age_ms)
        else:
            settings["retention.bytes"] = str(self.draw.choice((100, 1_000)))
        self.history.retention.requested(age_ms)
        self._do(self.history.admin.configure(TOPIC, **settings))

    def delete_records(self) -> None:
        """Send DeleteRecords up to the start of an acknowledged batch."""
        promises = self.history.promises
        places = sorted(promises.appended)
        if places:
            place = self.draw.choice(places)
            offset = self.draw.choice(sorted(promises.appended[place]))
            self._do(self.history.admin.delete_records(promises, place, offset))
