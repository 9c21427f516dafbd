"""Clients that the test broker closes before it stops."""

from __future__ import annotations

from confluent_kafka import Producer

from fencepost.testing import Kafka


def test_broker_that_cannot_restart_for_its_clients_still_stops() -> None:
    kafka = Kafka().start()
    data_dir = kafka.data_dir
    kafka.client(Producer)
    kafka.crash()
    kafka.config["num.partitions"] = "none"
    kafka.stop()
    assert not data_dir.exists()
