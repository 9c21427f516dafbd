"""The controller as request handlers see it."""

from __future__ import annotations

from fencepost.cluster.controller.acls import AclIndex
from fencepost.coordinator.controller.active import ActiveController
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class ControllerServices:
    """Access to the controller for the handlers of a broker on ZooKeeper.

    If this broker is the elected controller, its decisions may change all znodes, otherwise only
    the znodes that every broker may change.
    """

    active: ActiveController
    metadata: Metadata
    """The image after all decisions, including those not yet written to znodes."""
    is_elected: bool
    acls: AclIndex | None = None
    """The ACLs of the image before the decisions; set only for decisions on ACLs."""
