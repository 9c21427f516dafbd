"""Changes to a stopped broker's metadata, made by the controller's state machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.coordinator.metadata.controller_settings import controller_settings
from fencepost.coordinator.storage.storage import Storage

T = TypeVar("T")


def decide(storage: Storage, decision: Callable[[Controller], ControllerResult[T]]) -> T:
    """Let the controller's state machine decide, append its records, and return its answer.

    Raises the decision's errors, and LogError.
    """
    outcome = decision(controller_of(storage))
    if outcome.records:
        storage.metadata_log.append(outcome.records)
    return outcome.answer


def controller_of(storage: Storage) -> Controller:
    """Return the controller's state machine with the broker's current metadata."""
    settings = controller_settings(storage.config, node_id=storage.node_id)
    return Controller(settings, storage.metadata.image, storage.clock.monotonic_ms())
