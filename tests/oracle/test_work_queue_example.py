"""The example of a share group also works on Apache Kafka."""

from __future__ import annotations

import pytest

from examples.work_queue import example
from tests.support.kafka import Kafka

pytestmark = pytest.mark.oracle


async def test_work_queue_example_succeeds_on_kafka(kafka: Kafka) -> None:
    assert await example(kafka.bootstrap) is None
