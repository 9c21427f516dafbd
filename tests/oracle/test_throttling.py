"""Fencepost throttles Java's clients by their quotas as Apache Kafka does; no record is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.kafka import Kafka, run_tool

pytestmark = pytest.mark.oracle

CLIENTS = Path(__file__).with_name("ThrottledClients.java")


def facts(bootstrap: str) -> dict[str, str]:
    said = run_tool(str(CLIENTS), bootstrap)
    return dict(re.findall(r"^FACT (.*?): (.*)$", said, re.MULTILINE))


def test_java_clients_are_throttled_as_on_kafka(kafka: Kafka, fencepost: Daemon) -> None:
    theirs, ours = facts(kafka.bootstrap), facts(fencepost.bootstrap)
    assert ours == theirs
    assert ours == {
        "the producer waited": "true",
        "records that were read": "58",
        "the consumer waited": "true",
        "a topic beyond the burst": "created",
        "another at once": "ThrottlingQuotaExceededException",
        "another when it is time": "created",
    }
