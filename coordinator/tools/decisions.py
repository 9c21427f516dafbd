"""Decisions about the metadata of a broker that is stopped, made by the controller's own rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import Outcome
from fencepost.coordinator.data.storage import Storage
from fencepost.coordinator.metadata.controller_settings import controller_settings

T = TypeVar("T")


def decide(storage: Storage, decision: Callable[[Controller], Outcome[T]]) -> T:
    """Have the controller decide, and append its records; returns the answer.

    Raises what the decision raises, and LogError.
    """
    outcome = decision(controller_of(storage))
    if outcome.records:
        storage.metadata_log.append(outcome.records)
    return outcome.answer


def controller_of(storage: Storage) -> Controller:
    """Return a controller that looks at the broker's metadata as they are now."""
    settings = controller_settings(storage.config, node_id=storage.node_id)
    return Controller(settings, storage.metadata.image, storage.clock.monotonic_ms())
