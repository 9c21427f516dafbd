"""The report on a broker after a failed test."""

from __future__ import annotations

from pathlib import Path

from fencepost.testing.kafka import Kafka
from fencepost.testing.report import report_of
from tests.support.raw import RawClient


def test_report_lists_unused_faults_and_only_failed_observers(tmp_path: Path) -> None:
    with Kafka(tmp_path) as broker:
        broker.faults.observe(api="Metadata")
        assert report_of(broker, 0) == ""
        broker.faults.add(api="EndTxn", close="after")
        broker.faults.observe(api="ApiVersions", match=lambda _: 1 / 0)
        with RawClient(broker.bootstrap) as client:
            client.call("api_versions", 0)
        unused, failed, directory = report_of(broker, 0).splitlines()
    assert unused == "a fault is not used up after 0 requests: api=EndTxn, close=after, times=1"
    assert failed.startswith("an observer has failed after 0 requests: api=ApiVersions; match of ")
    assert failed.endswith(" raised ZeroDivisionError: division by zero")
    assert directory == f"data directory: {broker.data_dir}"
