"""``fencepost serve`` as a node of a cluster, with only a properties file, like Apache Kafka."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fencepost.tools.ports import hold_port
from tests.support.daemon import Daemon


class Member(Daemon):
    """A broker that joins the controllers at ``controller``, HOST:PORT.

    ``controller`` may be empty if ``settings`` have ``controller.quorum.voters``, and is None if
    they have ``zookeeper.connect``.
    """

    def __init__(
        self,
        home: Path,
        controller: str | None,
        *,
        node_id: int = 101,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(home / "logs", {}, listen="-")
        self.node_id = node_id
        self.quorum = controller
        """The address of the controllers."""
        held = hold_port()
        weakref.finalize(self, held.close)
        self._file = home / "server.properties"
        home.mkdir(parents=True, exist_ok=True)
        joins = {} if controller is None else _joins(controller)
        node_settings = {
            **joins,
            "node.id": str(node_id),
            "listeners": f"PLAINTEXT://127.0.0.1:{held.getsockname()[1]}",
            "log.dirs": str(self.data_dir),
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            **(settings or {}),
        }
        self._file.write_text("".join(f"{key}={value}\n" for key, value in node_settings.items()))

    def add_settings(self, settings: Mapping[str, str]) -> None:
        """Add settings, which apply when the broker next starts."""
        with self._file.open("a") as file:
            file.writelines(f"{key}={value}\n" for key, value in settings.items())

    def arguments(self) -> list[str]:
        """See :class:`Daemon`."""
        return ["--config-file", str(self._file)]

    @property
    def identity(self) -> dict[str, str]:
        """The contents of the broker's ``meta.properties``."""
        lines = (self.data_dir / "meta.properties").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")

    @property
    def clean_shutdown_epoch(self) -> int | None:
        """The broker epoch in the clean shutdown file, None without the file."""
        mark = self.data_dir / ".kafka_cleanshutdown"
        return int(json.loads(mark.read_text())["brokerEpoch"]) if mark.exists() else None


def _joins(controller: str) -> dict[str, str]:
    return {
        "process.roles": "broker",
        **({"controller.quorum.bootstrap.servers": controller} if controller else {}),
        "controller.listener.names": "CONTROLLER",
    }


class MemberCluster:
    """A controller, number 100, and several brokers numbered from 1, on loopback."""

    name = "fencepost"

    def __init__(
        self, directory: Path, count: int = 3, settings: Mapping[str, str] | None = None
    ) -> None:
        held = hold_port()
        weakref.finalize(self, held.close)
        address = f"127.0.0.1:{held.getsockname()[1]}"
        common = {
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "offsets.topic.replication.factor": str(min(3, count)),
            "transaction.state.log.replication.factor": str(min(3, count)),
            **(settings or {}),
        }
        listening = {"process.roles": "controller", "listeners": f"CONTROLLER://{address}"}
        self.controller = Member(
            directory / "controller", address, node_id=100, settings={**common, **listening}
        )
        self.nodes = [
            Member(
                directory / str(number),
                address,
                node_id=number,
                settings={"broker.rack": f"rack-{number}", **common},
            )
            for number in range(1, count + 1)
        ]

    @property
    def bootstrap(self) -> str:
        """The addresses of all brokers."""
        return ",".join(node.bootstrap for node in self.nodes)

    def node(self, node_id: int) -> Member:
        """Return a broker by its node id."""
        return self.nodes[node_id - 1]

    def start(self) -> MemberCluster:
        """Start the controller, then all brokers at once; wait until all serve."""
        self.controller.start()
        with ThreadPoolExecutor(len(self.nodes)) as threads:
            list(threads.map(Member.start, self.nodes))
        return self

    def stop(self) -> None:
        """Kill all running nodes."""
        for node in (*self.nodes, self.controller):
            if node.child is not None:
                node.kill()
