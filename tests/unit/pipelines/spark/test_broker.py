"""The connection of Spark's source and sink while the broker is unavailable."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fencepost.pipelines.spark.broker import ClusterConnection
from fencepost.pipelines.spark.errors import BrokerError
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon


def test_topics_request_is_retried_until_the_broker_is_back(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path).start()
    with Cluster(daemon.bootstrap) as client:
        client.create_topic("t")
    link = ClusterConnection(daemon.bootstrap, client_id="c")
    assert set(link.topics()) == {"t"}
    daemon.kill()
    starting = threading.Thread(target=daemon.start)
    starting.start()
    assert set(link.topics(refresh=True)) == {"t"}
    starting.join()
    link.close()
    daemon.kill()


def test_first_request_to_unreachable_broker_fails_without_waiting() -> None:
    begin = time.monotonic()
    with pytest.raises(BrokerError):
        ClusterConnection("127.0.0.1:1", client_id="c", timeout_ms=600_000).topics()
    assert time.monotonic() - begin < 300
