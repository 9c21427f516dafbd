"""The example that moves topics and a group succeeds with a real Apache Kafka."""

from __future__ import annotations

import pytest

from examples.move_to_kafka import example
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka

pytestmark = pytest.mark.oracle


async def test_a_group_goes_on_where_it_was(fencepost: Daemon, kafka: Kafka) -> None:
    assert await example(fencepost.bootstrap, kafka.bootstrap) is None


async def test_and_back_again(fencepost: Daemon, kafka: Kafka) -> None:
    assert await example(kafka.bootstrap, fencepost.bootstrap) is None
