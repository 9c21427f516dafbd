"""Writes the outcome of each test and the clients' versions (``--results FILE``)."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import platform
from pathlib import Path

import pytest

CLIENTS = ("confluent-kafka", "aiokafka", "kafka-python")


class Results:
    """A pytest plugin that collects the worst outcome of each test's phases, and writes them."""

    def __init__(self, path: Path, target: str) -> None:
        self._path = path
        self._target = target
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        counts = report.when == "call" or report.outcome != "passed"
        if counts and self._outcomes.get(report.nodeid) != "failed":
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        summary = {
            "target": self._target,
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "clients": {name: importlib.metadata.version(name) for name in CLIENTS},
            "outcomes": dict(sorted(self._outcomes.items())),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
