"""The brokers that workloads share: one of each side, warm, and up until the end of the run.

A JVM that has run for minutes is faster than a fresh one. Each side therefore runs the same
workloads for :data:`WARM_UP_S` seconds, unmeasured, before the first measured one.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.brokers import Broker, Make
from bench.clients import delete_topics
from bench.suite import DEFAULTS
from bench.suites.data import librdkafka
from bench.suites.groups import requests, synchronous_commits
from bench.suites.share import acknowledging
from bench.suites.txn import consume_transform_produce, one_record

WARM_UP_S = 120

WORKLOADS = (
    librdkafka(16),
    requests,
    synchronous_commits,
    one_record,
    consume_transform_produce(100),
    acknowledging,
)
"""One after the other and again from the beginning, until the time is over."""


class WarmBrokers(ExitStack):
    """A broker of each side, which is started and warmed up when it is first needed."""

    def __init__(self) -> None:
        super().__init__()
        self._brokers: dict[str, Broker] = {}

    def broker(self, side: str, make: Make) -> Broker:
        """Return the side's broker, which ``make`` creates if it is the first one."""
        if side not in self._brokers:
            home = self.enter_context(tempfile.TemporaryDirectory(prefix="fencepost-bench-"))
            broker = make(Path(home), DEFAULTS)
            broker.start()
            self.callback(broker.kill)
            print(f"warming up {side} for {WARM_UP_S} s", file=sys.stderr, flush=True)
            warm_up(broker)
            self._brokers[side] = broker
        return self._brokers[side]


def warm_up(broker: Broker) -> None:
    """Run :data:`WORKLOADS` for at least :data:`WARM_UP_S` seconds."""
    end = time.monotonic() + WARM_UP_S
    for run in itertools.cycle(WORKLOADS):
        run(broker)
        delete_topics(broker.bootstrap)
        if time.monotonic() >= end:
            return
