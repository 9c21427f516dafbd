"""A Kafka broker for tests: fixtures, a clock that the test controls, faults.

Projects only need the extra ``pytest`` (docs/testing.md): pytest finds ``plugin`` by itself.
Without pytest, :class:`Kafka` is a context manager. The broker's modules are imported at their
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fencepost.client.queries.incident import IncidentError
    from fencepost.coordinator.history.entries import Entry
    from fencepost.testing.cluster import Cluster
    from fencepost.testing.kafka import Kafka
    from fencepost.testing.replaying import Replay, ReplayError, replay
    from fencepost.testing.under_test import KafkaUnderTest
    from fencepost.testing.views import OpenTransaction, Record, ShareRecords

__all__ = [
    "Cluster",
    "Entry",
    "IncidentError",
    "Kafka",
    "KafkaUnderTest",
    "OpenTransaction",
    "Record",
    "Replay",
    "ReplayError",
    "ShareRecords",
    "replay",
]

_MODULES = {
    "Cluster": "fencepost.testing.cluster",
    "Entry": "fencepost.coordinator.history.entries",
    "IncidentError": "fencepost.client.queries.incident",
    "Kafka": "fencepost.testing.kafka",
    "KafkaUnderTest": "fencepost.testing.under_test",
    "OpenTransaction": "fencepost.testing.views",
    "Record": "fencepost.testing.views",
    "Replay": "fencepost.testing.replaying",
    "ReplayError": "fencepost.testing.replaying",
    "ShareRecords": "fencepost.testing.views",
    "replay": "fencepost.testing.replaying",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(name)
    return getattr(import_module(_MODULES[name]), name)
