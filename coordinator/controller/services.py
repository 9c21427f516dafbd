"""The controller as request handlers see it."""

from __future__ import annotations

from fencepost.cluster.controller.acls import AclIndex
from fencepost.coordinator.controller.active import ActiveController
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class ControllerServices:
    """Decisions that this broker writes to ZooKeeper's znodes.

    Either it is the elected controller, or it changes znodes that every broker may change.
    """

    active: ActiveController
    metadata: Metadata
    """The image after all decisions; brokers, this one included, learn of them once written."""
    is_elected: bool
    acls: AclIndex | None = None
    """The ACLs of the image before the decisions; set only for decisions on ACLs."""
