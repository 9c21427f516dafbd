"""Copies as ``copier.py`` does, but by ``pipelines.ExactlyOnce``, and keeps such a journal.

    python -m tests.crash.runner fill | copy | work NAME | verify

``copy`` stops at the end of the input, and ``work`` stops at SIGTERM. ``fencepost crash-sweep``
sets the environment variables; ``RUNNER_RECORDS`` and ``RUNNER_SOURCES`` make the input larger.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aiokafka import TopicPartition

from fencepost.pipelines.batching import Limits
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.records import Batch, Output
from tests.crash.copier import BATCH, GROUP, RECORDS, SOURCE, TARGET, Journal, fill, verify
from tests.support.history import Begin, CommitOffset, End, Fence, Outcome, Send

SESSION_TIMEOUT_MS = 1_000


class Copier:
    """A handler, and the journal of its transactions."""

    def __init__(self, bootstrap: str, journal: Journal, name: str) -> None:
        self._journal = journal
        self._fenced = {"subject": name, "epoch": journal.epoch}
        self._txn = ""
        self._began = 0.0
        self._count = 0
        self.pipeline = ExactlyOnce(
            bootstrap,
            group=GROUP,
            topics=[SOURCE],
            handler=self.handle,
            transactional_id=name,
            options=Options(
                limits=Limits(max_records=BATCH, max_ms=20),
                restore=self.restored,
                before_commit=self.before_commit,
                after_commit=self.after_commit,
                session_timeout_ms=SESSION_TIMEOUT_MS,
                producer={"retry_backoff_ms": 20, "linger_ms": 0},
                consumer={"fetch_max_wait_ms": 20},
            ),
        )

    async def restored(self, assigned: frozenset[TopicPartition]) -> None:
        """Record that the new producer has fenced the former owner of its transactional id."""
        del assigned
        now = time.monotonic()
        self._journal.note(Fence, now, **self._fenced)
        print("ready", flush=True)

    async def handle(self, batch: Batch) -> Iterable[Output]:
        """Double the values; the headers name the transaction of each record."""
        self._count += 1
        records = list(batch)
        behind = self._behind(batch)
        self._txn = f"{self._journal.process}#{self._count}"
        self._began = time.monotonic()
        self._journal.note(Begin, self._began, txn=self._txn, **self._fenced)
        unit = (
            ("fencepost-txn", repr(sorted(behind.items())).encode()),
            ("fencepost-txn-size", b"%d" % len(records)),
        )
        outputs = []
        for record in records:
            number = int(record.value)
            value, partition = f"{number}*2", number % 2
            self._journal.note(
                Send,
                self._began,
                txn=self._txn,
                value=value,
                partition=(TARGET, partition),
                outcome=Outcome.UNKNOWN,
                **self._fenced,
            )
            outputs.append(Output(TARGET, value.encode(), None, partition, unit))
        return outputs

    def _behind(self, batch: Batch) -> dict[int, int]:
        return {record.partition: record.offset + 1 for record in batch}

    async def before_commit(self, batch: Batch) -> None:
        """Record the commit before the request: the process may be killed before the response."""
        self._note_end(batch, Outcome.UNKNOWN)

    async def after_commit(self, batch: Batch) -> None:
        self._note_end(batch, Outcome.OK)

    def _note_end(self, batch: Batch, outcome: Outcome) -> None:
        told: dict[str, Any] = {"txn": self._txn, "outcome": outcome, **self._fenced}
        for partition, offset in self._behind(batch).items():
            self._journal.note(
                CommitOffset,
                self._began,
                group=GROUP,
                partition=(SOURCE, partition),
                offset=offset,
                **told,
            )
        self._journal.note(End, self._began, commit=True, **told)

    async def run(self, *, to_end: bool) -> None:
        async with self.pipeline:
            await self.pipeline.run(to_end=to_end)


def main() -> None:
    bootstrap = os.environ["FENCEPOST_BOOTSTRAP"]
    directory = Path(os.environ["FENCEPOST_SWEEP_DIR"])
    records = int(os.environ.get("RUNNER_RECORDS", str(RECORDS)))
    sources = int(os.environ.get("RUNNER_SOURCES", "1"))
    match sys.argv[1:]:
        case ["fill"]:
            fill(bootstrap, records, sources)
        case ["copy"]:
            journal = Journal(directory, os.environ["FENCEPOST_SWEEP_ATTEMPT"])
            asyncio.run(Copier(bootstrap, journal, "runner").run(to_end=True))
        case ["work", name]:
            journal = Journal(directory, os.environ["FENCEPOST_SWEEP_ATTEMPT"])
            asyncio.run(Copier(bootstrap, journal, name).run(to_end=False))
        case ["verify"]:
            verify(bootstrap, directory, records, sources)
        case other:
            raise SystemExit(f"what is {other}?")


if __name__ == "__main__":
    main()
