"""A simulated machine that runs the whole daemon; it can be stopped or killed, or lose power."""

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
    """A node with its disk and, while its process runs, a broker or a controller."""

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
        """HOST:PORT of the listener for clients."""
        return f"{self.host}:9092"

    @property
    def services(self) -> Services | None:
        """The broker's services while it serves, otherwise None."""
        return self.broker.services if self.broker is not None and self.is_serving else None

    @property
    def opened(self) -> Services | None:
        """The broker's services, once its logs are open and until the broker has stopped."""
        if self.broker is None or (self.is_stopping and not self.is_serving):
            return None
        return self.broker._services

    @property
    def is_starting(self) -> bool:
        """Whether the process runs and does not serve yet."""
        return self.node.is_up and not self.is_serving and not self.is_stopping

    def start(self) -> None:
        """Start a process, unless one runs."""
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
        """Stop the broker, because it can no longer be a member of its cluster."""
        self.node.say(f"must stop: {why}")
        self.stop()

    def stop(self) -> None:
        """Begin a clean stop of the process, as SIGTERM does."""
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
        # This task must end before `kill` ends its loop.
        asyncio.get_running_loop().call_soon(self.kill)

    def kill(self, *, power_loss: bool = False, loses_disk: bool = False) -> None:
        """Kill the process; with ``power_loss``, unsynced writes may be lost.

        With ``loses_disk``, the next process starts with an empty disk.
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
            for virtual_loop in (loop, *loop.others):
                virtual_loop.end()
