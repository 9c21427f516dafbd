"""An OpenTelemetry collector receives the logs and spans of the recorded history.

The collector is built from OpenTelemetry's Go modules. It has the OTLP receiver and the debug
exporter, which prints what the collector receives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.tools.ports import hold_port
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.go_build import built
from tests.support.processes import Child
from tests.support.targets import SETTINGS
from tests.wire.clients import confluent_producer
from tests.wire.command_line import cli
from tests.wire.test_history import told
from tests.wire.test_history_export import make_history

MODULE = Path(__file__).with_name("otel_collector")

CONFIG = """\
yaml:
  receivers: {{otlp: {{protocols: {{http: {{endpoint: "{address}"}}}}}}}}
  exporters: {{debug: {{verbosity: detailed}}}}
  service:
    telemetry: {{metrics: {{level: none}}}}
    pipelines:
      logs: {{receivers: [otlp], exporters: [debug]}}
      traces: {{receivers: [otlp], exporters: [debug]}}
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    settings = {**SETTINGS, "fencepost.history.commits": "true"}
    started = Daemon(tmp_path_factory.mktemp("otlp"), settings).start()
    yield started
    started.stop()


@pytest.mark.oracle
def test_collector_receives_logs_and_spans(daemon: Daemon) -> None:
    name = unique("told")
    with Cluster(daemon.bootstrap) as cluster:
        group = make_history(daemon, cluster)
        topic = cluster.create_topic(unique("told"), 1)
        with confluent_producer(daemon.bootstrap, transactional_id=name) as producer:
            producer.init_transactions(60)
            producer.begin_transaction()
            producer.produce(topic, b"1")
            producer.commit_transaction(60)
        told(daemon, "txns", name, "transaction-committed")
    binary = built(".", "otel-collector", MODULE)
    port = hold_port()
    address = f"127.0.0.1:{port.getsockname()[1]}"
    config = CONFIG.format(address=address)
    collector = Child([str(binary), "--config", config])
    try:
        collector.wait_for_line(r"Everything is ready", deadline_s=60)
        cli(daemon.bootstrap, "history", "export", "--otlp", f"http://{address}")
        collector.wait_for_line(rf"fencepost\.transactional_id: Str\({name}\)", deadline_s=60)
        collector.wait_for_line(rf"messaging\.consumer\.group\.name: Str\({group}\)", deadline_s=60)
        collector.wait_for_line(rf"Body: Str\({group}: member-left", deadline_s=60)
        printed = "\n".join(collector.lines)
    finally:
        status = collector.terminate()
        port.close()
    assert status == 0
    names = set(re.findall(r"^ +Name +: (\w+)$", printed, re.MULTILINE))
    assert names == {"transaction", "rebalance"}
    assert "EventName: fencepost.transaction-committed" in printed
