"""Decisions about the metadata of a broker that is stopped, made by the controller's own rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import Outcome
from fencepost.coordinator.data.storage import Storage
from fencepost.coordinator.metadata.controller_settings import view_of

T = TypeVar("T")


def decide(storage: Storage, decision: Callable[[Controller], Outcome[T]]) -> T:
    """Have the controller decide, and append its records; returns the answer.

    Raises what the decision raises, and LogError.
    """
    view = view_of(storage.metadata, storage.config, storage.node_id)
    outcome = decision(Controller(view.settings, view.image, storage.clock.monotonic_ms()))
    if outcome.records:
        storage.metadata_log.append(outcome.records)
    return outcome.answer
