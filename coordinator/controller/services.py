"""The part of a controller that handlers work with."""

from __future__ import annotations

from fencepost.cluster.controller.acls import AclIndex
from fencepost.coordinator.controller.active import ActiveController
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class ControllerServices:
    """Decisions that this broker makes on ZooKeeper's znodes, which it has no log of.

    Either it is the elected controller, or it changes znodes that every broker may change.
    """

    active: ActiveController
    metadata: Metadata
    """The image with all decisions; brokers and this one learn of them once they are written."""
    is_elected: bool
    acls: AclIndex | None = None
    """The ACLs of the image with which the decisions began; set where they are about ACLs."""
