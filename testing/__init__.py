"""A Kafka broker for tests: fixtures, a clock that the test controls, faults.

Projects only need the extra ``pytest`` (docs/testing.md): pytest finds ``plugin`` by itself.
Without pytest, :class:`Kafka` is a context manager. The broker's modules are imported at their
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fencepost.coordinator.history.entries import Entry
    from fencepost.testing.cluster import Cluster
    from fencepost.testing.kafka import Kafka
    from fencepost.testing.under_test import KafkaUnderTest
    from fencepost.testing.views import OpenTransaction, Record, ShareRecords

__all__ = [
    "Cluster",
    "Entry",
    "Kafka",
    "KafkaUnderTest",
    "OpenTransaction",
    "Record",
    "ShareRecords",
]

_MODULES = {
    "Cluster": "fencepost.testing.cluster",
    "Entry": "fencepost.coordinator.history.entries",
    "Kafka": "fencepost.testing.kafka",
    "KafkaUnderTest": "fencepost.testing.under_test",
    "OpenTransaction": "fencepost.testing.views",
    "Record": "fencepost.testing.views",
    "ShareRecords": "fencepost.testing.views",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(name)
    return getattr(import_module(_MODULES[name]), name)
