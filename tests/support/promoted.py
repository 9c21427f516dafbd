"""Nodes that start from the files of ``fencepost cluster promote``: a broker, Kafka controllers."""

from __future__ import annotations

from pathlib import Path

from tests.support.daemon import Daemon
from tests.support.kafka import START_S, Libs, jars, java_command
from tests.support.processes import Child


class PromotedBroker(Daemon):
    """``fencepost serve`` with only ``broker.properties``."""

    def __init__(self, data_dir: Path, output: Path) -> None:
        super().__init__(data_dir, {}, listen="-")
        self._file = output / "broker.properties"

    def arguments(self) -> list[str]:
        """See :class:`Daemon`."""
        return ["--config-file", str(self._file)]


class PromotedController:
    """A controller of Apache Kafka with its ``controller.properties``."""

    def __init__(self, node_id: int, output: Path, libs: Libs = jars) -> None:
        """``libs`` returns the jars of the release."""
        self.node_id, self._libs = node_id, libs
        self.room = output / f"controller-{node_id}"
        self.child: Child | None = None

    @property
    def metadata(self) -> Path:
        """The controller's metadata directory."""
        return self.room / "metadata"

    def launch(self) -> PromotedController:
        """Start it without waiting."""
        file = self.room / "controller.properties"
        self.child = Child(java_command("kafka.Kafka", str(file), libs=self._libs))
        return self

    def start(self) -> PromotedController:
        """Start it, and wait until it serves."""
        return self.launch().wait()

    def wait(self) -> PromotedController:
        """Wait until it serves."""
        assert self.child is not None
        self.child.wait_for_line(r"Kafka Server started", deadline_s=START_S)
        return self

    def stop(self) -> None:
        """Stop it cleanly."""
        assert self.child is not None
        self.child.terminate()

    def kill(self) -> None:
        """Kill the process by SIGKILL, if it runs."""
        if self.child is not None:
            self.child.kill()
