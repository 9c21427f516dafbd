"""The example that moves topics and a group works with a real Apache Kafka."""

from __future__ import annotations

import pytest

from examples.move_to_kafka import example
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka

pytestmark = pytest.mark.oracle


async def test_move_example_to_apache_kafka_succeeds(fencepost: Daemon, kafka: Kafka) -> None:
    assert await example(fencepost.bootstrap, kafka.bootstrap) is None


async def test_move_example_from_apache_kafka_succeeds(fencepost: Daemon, kafka: Kafka) -> None:
    assert await example(kafka.bootstrap, fencepost.bootstrap) is None
