"""The example that grows a broker into a cluster works with a real Apache Kafka."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.grow_into_kafka import example
from tests.support.kafka import java_command

CLASSES = {"kafka-server-start": "kafka.Kafka", "kafka-storage": "kafka.tools.StorageTool"}


def kafka(script: str, *words: str | Path) -> list[str]:
    """Return the Java command that the script runs."""
    return java_command(CLASSES[script], *map(str, words))


@pytest.mark.oracle
@pytest.mark.usefixtures("java_tools")
@pytest.mark.timeout(600)
def test_grow_example_succeeds(tmp_path: Path) -> None:
    assert example(kafka, tmp_path) is None
