"""One machine with the whole daemon: started, stopped, killed, frozen, and without power."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.errors import BrokerError
from tests.sim.machine import Disk
from tests.sim.network import Node
from tests.sim.sockets import SocketLoop, Wires

DATA_DIR: Final = "/data"


class Daemon:
    """A node, its disk, and the broker that runs there or does not."""

    def __init__(
        self, wires: Wires, node: Node, config: Mapping[str, Any], disk_ms: tuple[int, int]
    ) -> None:
        self.wires, self.node = wires, node
        self.host = wires.host_of(node)
        self.config, self.disk_ms = config, disk_ms
        self.node_id = int(config["node.id"])
        self.disk = Disk(DATA_DIR)
        self.broker: Broker | None = None
        self.loop: SocketLoop | None = None
        self.is_serving = False
        self.is_stopping = False
        self.before_end: Callable[[], None] = lambda: None
        """Called before the process ends."""
        self.after_turn: Callable[[], None] = lambda: None
        """Called after each turn of the process's loop."""

    @property
    def address(self) -> str:
        """Where clients find it."""
        return f"{self.host}:9092"

    @property
    def services(self) -> Services | None:
        """The broker's, while it serves."""
        return self.broker.services if self.broker is not None and self.is_serving else None

    @property
    def opened(self) -> Services | None:
        """The broker's, from the opening of its logs to the end of its shutdown."""
        if self.broker is None or (self.is_stopping and not self.is_serving):
            return None
        return self.broker._services

    @property
    def is_starting(self) -> bool:
        """Whether there is a process that does not serve yet."""
        return self.node.is_up and not self.is_serving and not self.is_stopping

    def start(self) -> None:
        """A process begins, unless there is one."""
        if self.node.is_up:
            return
        self.wires.powered(self.node)
        self.node.begin()
        self.node.say("starts")
        self.is_serving = self.is_stopping = False
        self.loop = loop = SocketLoop(self.node, self.wires, self.disk_ms)
        loop.after_turn = self.after_turn
        with loop.running():
            self.broker = Broker(DATA_DIR, None, self.config, fs=self.disk.files)
            self.broker.on_lost = self._lost
            loop.create_task(self._begin(self.broker))

    async def _begin(self, broker: Broker) -> None:
        try:
            await broker.start()
        except BrokerError as error:
            self.node.say(f"does not start: {error}")
            asyncio.get_running_loop().call_soon(self.kill)
            return
        self.is_serving = True
        self.node.say("serves")

    def _lost(self, why: BrokerError) -> None:
        """The broker must stop: it is no member of its cluster."""
        self.node.say(f"must stop: {why}")
        self.stop()

    def stop(self) -> None:
        """Ask the process to stop."""
        if self.broker is None or self.loop is None or not self.is_serving or self.is_stopping:
            return
        self.is_stopping = True
        self.node.say("is asked to stop")
        broker, loop = self.broker, self.loop
        with loop.running():
            loop.create_task(self._stop(broker))

    async def _stop(self, broker: Broker) -> None:
        await broker.stop()
        self.is_serving = False
        self.node.say("has stopped")
        # In a turn of its own, for this task must end before its loop does.
        asyncio.get_running_loop().call_soon(self.kill)

    def kill(self, *, power_loss: bool = False, loses_disk: bool = False) -> None:
        """End the process at once; a power loss may take writes that were not forced.

        One that loses its disk comes back with an empty one.
        """
        if not self.node.is_up:
            return
        self.before_end()
        self.node.say("loses power" if power_loss else "ends")
        self.node.end()
        self.wires.killed(self.node, power_loss=power_loss)
        if loses_disk:
            self.node.say("loses its disk")
            self.disk = Disk(DATA_DIR)
        elif power_loss:
            self.disk.lose_power(self.wires.scheduler.draw)
        else:
            self.disk.kill()
        self.end()

    def end(self) -> None:
        """End the tasks of the process."""
        loop, self.loop, self.broker, self.is_serving = self.loop, None, None, False
        if loop is not None:
            for one in (loop, *loop.others):
                one.end()
