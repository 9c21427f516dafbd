"""Brokers of Apache Kafka and of Fencepost in one cluster, with controllers of either kind."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fencepost.logcore.checkpoints import MetaProperties, write_meta_properties
from fencepost.logcore.fs import OsFileSystem
from fencepost.tools.ports import hold_port
from tests.support import kafka43
from tests.support.kafka import CLUSTER_ID, JAVA_OPTIONS, Kafka, Libs, Quorum, jars
from tests.support.member import Member
from tests.support.targets import SETTINGS

JAVA, OLDER, PYTHON = "J", "O", "P"
"""Letters of a layout: a node of Apache Kafka, one of Apache Kafka 4.3, a node of Fencepost."""

LEVELS_OF_4_3 = ("--release-version", "4.3")
"""Arguments of ``kafka-storage format`` for the controllers of a cluster with an older broker."""

FIRST_CONTROLLER = 100

Node = Kafka | Member


def formatted(directory: Path, node_id: int) -> Path:
    """Create the directory of a Fencepost node, in the cluster that the Kafka nodes belong to."""
    directory.mkdir(parents=True, exist_ok=True)
    meta = MetaProperties(CLUSTER_ID, node_id, uuid.uuid4())
    write_meta_properties(OsFileSystem(), str(directory), meta)
    return directory


class MixedCluster:
    """Brokers numbered from 1, and controllers from 100, each in a process of its own, on loopback.

    ``layout`` has a letter for each broker: in ``JPP`` the first is Apache Kafka's, two are
    Fencepost's. ``controllers`` is ``J`` or ``JJJ``, or ``P``, as Fencepost supports only one.
    Layouts with a single kind are allowed. A cluster with a broker of Apache Kafka 4.3 starts with
    the feature levels of 4.3.
    """

    def __init__(
        self,
        directory: Path,
        layout: str,
        settings: Mapping[str, str] = SETTINGS,
        *,
        controllers: str = JAVA,
        java_options: Sequence[str] = JAVA_OPTIONS,
        libs: Libs = jars,
    ) -> None:
        """``libs`` returns the jars of Apache Kafka's release, except for :data:`OLDER` brokers."""
        self._libs = libs
        self._format_words = LEVELS_OF_4_3 if OLDER in layout else ()
        self.name = f"{layout} under {controllers}"
        """The name of the layout in tests and figures."""
        self.layout = layout
        self._directory = directory
        self._java_options = java_options
        replicas = str(min(3, len(layout)))
        self._voters: dict[str, str] = {}
        """The quorum settings of each Kafka node, if the controllers are Kafka's."""
        self._addresses: list[str] = []
        """HOST:PORT of each controller."""
        self._common = {
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.replication.factor": replicas,
            **settings,
        }
        self.controllers: list[Node] = (
            [self._controller_of_ours()]
            if controllers == PYTHON
            else [*self._controllers_of_kafka(len(controllers))]
        )
        self.nodes: list[Node] = [
            self._broker(number, letter) for number, letter in enumerate(layout, 1)
        ]

    def _controllers_of_kafka(self, count: int) -> list[Kafka]:
        made = [
            Kafka(
                self._room(node_id),
                self._common,
                node_id=node_id,
                is_broker=False,
                format_words=self._format_words,
                libs=self._libs,
            )
            for node_id in range(FIRST_CONTROLLER, FIRST_CONTROLLER + count)
        ]
        voters = ",".join(f"{controller.node_id}@{controller.controller}" for controller in made)
        for controller in made:
            controller.add_settings({"controller.quorum.voters": voters})
        self._voters = {"controller.quorum.voters": voters}
        self._addresses = [controller.controller for controller in made]
        return made

    def _controller_of_ours(self) -> Member:
        held = hold_port()
        weakref.finalize(self, held.close)
        address = f"127.0.0.1:{held.getsockname()[1]}"
        self._voters, self._addresses = {}, [address]
        settings = {
            **self._common,
            "process.roles": "controller",
            "listeners": f"CONTROLLER://{address}",
        }
        made = Member(
            self._room(FIRST_CONTROLLER), address, node_id=FIRST_CONTROLLER, settings=settings
        )
        formatted(made.data_dir, FIRST_CONTROLLER)
        return made

    def _broker(self, node_id: int, letter: str) -> Node:
        room, node_settings = (
            self._room(node_id),
            {"broker.rack": f"rack-{node_id}", **self._common},
        )
        if letter == PYTHON:
            return Member(room, ",".join(self._addresses), node_id=node_id, settings=node_settings)
        return Kafka(
            room,
            {**node_settings, **self._voters},
            java_options=self._java_options,
            node_id=node_id,
            controller=Quorum(FIRST_CONTROLLER, self._addresses[0]),
            replicas=min(3, len(self.layout)),
            libs=kafka43.jars if letter == OLDER else self._libs,
        )

    def _room(self, node_id: int) -> Path:
        room = self._directory / str(node_id)
        room.mkdir(parents=True, exist_ok=True)
        return room

    @property
    def bootstrap(self) -> str:
        """The addresses of all brokers."""
        return ",".join(node.bootstrap for node in self.nodes)

    @property
    def all_nodes(self) -> list[Node]:
        """The brokers, and then the controllers."""
        return [*self.nodes, *self.controllers]

    def node(self, node_id: int) -> Node:
        """Return a broker or controller by its node id."""
        return next(node for node in self.all_nodes if node.node_id == node_id)

    def address(self, controller: Node) -> str:
        """Return HOST:PORT of a controller."""
        return self._addresses[self.controllers.index(controller)]

    def numbers(self, letter: str) -> list[int]:
        """Return the node ids of the brokers of one kind."""
        return [number for number, kind in enumerate(self.layout, 1) if kind == letter]

    def start(self) -> MixedCluster:
        """Start the controllers, then all brokers at once; wait until all serve."""
        for nodes in (self.controllers, self.nodes):
            with ThreadPoolExecutor(len(nodes)) as threads:
                list(threads.map(lambda node: node.start(), nodes))
        return self

    def stop(self) -> None:
        """Kill all running nodes."""
        for node in self.all_nodes:
            if node.child is not None:
                node.kill()
