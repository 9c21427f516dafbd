"""Apache Kafka's LogCompactionTester, which compares a compacted topic with produced records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.kafka import run_tool
from tests.support.targets import SETTINGS

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools")]

COMPACTING = {
    **SETTINGS,
    "log.segment.bytes": "1048576",
    "log.cleaner.backoff.ms": "200",
    "log.cleaner.min.cleanable.ratio": "0.05",
}


def test_compacted_log_keeps_the_last_value_of_each_key(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "data", COMPACTING).start()
    try:
        said = run_tool(
            "org.apache.kafka.tools.LogCompactionTester",
            *("--bootstrap-server", daemon.bootstrap),
            *("--messages", "250000", "--percent-deletes", "10", "--topics", "1"),
            *("--sleep", "5"),
        )
    finally:
        daemon.kill()
    assert re.search(r"Validated [1-9]\d+ values, 0 mismatches", said), said
    assert "Data verification is completed" in said
    # Without a reduction no log was compacted, and the run would prove nothing.
    reduction = re.search(r"\(([\d.]+)% reduction\)", said)
    assert reduction is not None
    assert float(reduction.group(1)) > 10
