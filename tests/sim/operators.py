"""Operators' requests to a controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from uuid import UUID

from fencepost.cluster.controller import reassignments, topics
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.partition_change import Election
from fencepost.logcore.machine import DomainError

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.network import Node


class Decider(Protocol):
    """A controller that takes operators' requests."""

    @property
    def node(self) -> Node:
        """The node that it runs on."""

    def decide(self, decision: Callable[[Controller], ControllerResult[Any]]) -> Any:
        """Carry out a decision; return its answer."""


class Operators:
    """Sends requests to the controller; each method returns whether its request succeeded."""

    cluster: Cluster
    refusal: ClassVar[type[DomainError]]
    """The errors that a decision may raise; any other is a bug."""

    def _asked(self) -> Decider | None:
        """Return the controller to ask, None if no controller is available."""
        raise NotImplementedError

    def _try(self, decision: Callable[[Controller], ControllerResult[Any]], what: str) -> bool:
        asked = self._asked()
        if asked is None:
            return False
        try:
            answers = asked.decide(decision)
        except self.refusal as error:
            asked.node.say(f"{what} is refused: {type(error).__name__}")
            return False
        said = "".join(f", {type(one).__name__}" for one in _refusals(answers))
        asked.node.say(what + said)
        return not said

    def create_topic(self, name: str, partitions: int, factor: int) -> bool:
        """Create a topic."""
        draw = self.cluster.scheduler.draw
        topic_id = UUID(int=draw.getrandbits(128) | 1 << 100)
        wanted = topics.NewTopic(name, partitions, factor)
        return self._try(
            lambda one: one.create_topic(
                wanted, topic_id=topic_id, draw=draw, check_configs=lambda *_: None
            ),
            f"creates {name} with {partitions} partitions",
        )

    def add_partition(self, name: str, count: int) -> bool:
        """Increase the partitions of a topic to ``count``."""
        draw = self.cluster.scheduler.draw
        return self._try(
            lambda one: one.create_partitions(name, count, assignments=None, draw=draw),
            f"gives {name} {count} partitions",
        )

    def reassign(self, name: str, index: int, replicas: tuple[int, ...] | None) -> bool:
        """Begin a reassignment, or cancel it if ``replicas`` is None."""
        item = reassignments.ReassignablePartition(name, index, replicas)
        return self._try(
            lambda one: one.alter_partition_reassignments([item]),
            f"reassigns {name}-{index} to {replicas}",
        )

    def elect_preferred(self) -> bool:
        """Elect the preferred leaders of all partitions."""
        return self._try(
            lambda one: one.elect_leaders(Election.PREFERRED, None), "elects preferred leaders"
        )


def _refusals(answers: Any) -> list[DomainError]:
    """Return the errors among the answers to a request for several items."""
    if not isinstance(answers, list):
        return []
    parts = [one[-1] if isinstance(one, tuple) else one for one in answers]
    return [one for one in parts if isinstance(one, DomainError)]
