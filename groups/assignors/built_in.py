"""The server-side assignors that ``group.consumer.assignors`` may name without a plug-in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fencepost.groups.assignors.model import Assignor
from fencepost.groups.assignors.range import RangeAssignor
from fencepost.groups.assignors.uniform import UniformAssignor

BUILT_IN: Final[Mapping[str, Assignor]] = {
    assignor.name: assignor for assignor in (UniformAssignor(), RangeAssignor())
}
"""The assignors by their names."""

KAFKA_CLASSES: Final[Mapping[str, str]] = {
    "org.apache.kafka.coordinator.group.assignor.UniformAssignor": "uniform",
    "org.apache.kafka.coordinator.group.assignor.RangeAssignor": "range",
}
"""Assignor names by Apache Kafka's class names, which a configuration may contain instead."""
