"""The data source under test, with a step at which a fault occurs once.

Spark imports this module in the processes that take the steps: the planner, the tasks, the
committer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from fencepost.pipelines.spark import sink, task
from fencepost.pipelines.spark import transaction as txn
from fencepost.pipelines.spark.datasource import FencepostDataSource
from fencepost.pipelines.spark.turns import TaskTurns
from tests.support.waits import until

STEPS = (
    "before init",
    "after init",
    "sealed",
    "mid write",
    "task finished",
    "commit begins",
    "offsets committed",
    "transaction ended",
    "commit returned",
)


class InjectedError(Exception):
    """The exception that a step raises if a failure is injected there."""


class Fault:
    """A fault that occurs once, at a step, and then writes the process id to the file ``once``."""

    def __init__(self, options: dict[str, str]) -> None:
        self.at = options["crash.at"]
        self.how = options["crash.how"]
        self.once = Path(options["crash.once"])
        self.hold = options.get("crash.hold")
        """Another step, at which every task except the first one waits."""
        self.from_batch = int(options.get("crash.batch", "0"))
        """The first batch in whose commit the fault may occur."""
        self.unsafe = options.get("crash.unsafe", "").split(",")
        """The checks for second attempts that are disabled: ``attempts``, ``sizes``, ``offsets``
        (after ``prepare``), ``claims``.
        """

    def reach(self, step: str) -> None:
        """Raise or wait if this is the step of the fault and the fault has not occurred yet."""
        if step == self.hold and self._is_another_task():
            self._wait()
        if step != self.at or not self._is_first_time():
            return
        if self.how == "wait":
            # The test kills this process, or lets the process continue.
            self._wait()
            return
        raise InjectedError(step)

    @staticmethod
    def _is_another_task() -> bool:
        context = TaskContext.get()
        return context is not None and context.partitionId() > 0

    def _is_first_time(self) -> bool:
        told = self.once.with_suffix(f".{os.getpid()}")
        told.write_text(str(os.getpid()))
        try:
            os.link(told, self.once)
        except FileExistsError:
            return False
        return True

    def _wait(self) -> None:
        gate = self.once.with_suffix(".open")
        until(gate.exists, f"{gate} opens", deadline_s=300)

    @contextlib.contextmanager
    def unguarded(self) -> Iterator[None]:
        """Within the block, disable checks, so that a second attempt is treated like a first one.

        An attempt's id becomes its number, 0 or 1. The sink derives the size of the first batch
        from the id, so the first batches have 1 and 2 records, and differ. With larger sizes, the
        size limit might make the first batches of both attempts equal.
        """
        context = TaskContext.get()
        assert context is not None
        attempt = context.attemptNumber()
        with contextlib.ExitStack() as stack:
            if "attempts" in self.unsafe:
                stack.enter_context(_set(TaskContext, "attemptNumber", lambda _: 0))
                stack.enter_context(_set(TaskContext, "taskAttemptId", lambda _: attempt))
            if "claims" in self.unsafe:
                stack.enter_context(_set(TaskTurns, "claim", lambda *_: None))
            if "sizes" in self.unsafe:
                stack.enter_context(_set(task, "_FIRST_SIZES", 1))
            if "offsets" in self.unsafe:
                stack.enter_context(_set(txn.Sender, "_note_ends", lambda *_: None))
            yield

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Within the block, wrap the sink's calls in steps; afterwards Spark reuses the workers."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                _around(txn, "begin", before="before init", after="after init", of=self)
            )
            stack.enter_context(_around(txn, "end", after="transaction ended", of=self))
            stack.enter_context(_around(txn, "commit_offsets", after="offsets committed", of=self))
            stack.enter_context(_when_written(self))
            yield


def _around(
    owner: Any, name: str, *, before: str = "", after: str = "", of: Fault
) -> contextlib.AbstractContextManager[None]:
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        of.reach(before)
        result = original(*arguments, **named)
        of.reach(after)
        return result

    return _set(owner, name, wrapped)


def _when_written(of: Fault) -> contextlib.AbstractContextManager[None]:
    """Wrap the writes in two steps.

    At ``sealed`` the batches have their sequences. At ``mid write`` one batch is in the log.
    """
    original = txn.Sender._attempt

    def wrapped(sender: txn.Sender, waiting: Any) -> Any:
        of.reach("sealed")
        unwritten = original(sender, waiting)
        # Apache Kafka may refuse the first writes to two partitions with NOT_ENOUGH_REPLICAS,
        # because the request that adds one partition replaces a waiting request for the other
        # (AddPartitionsToTxnManager).
        if len(unwritten) < len(waiting):
            of.reach("mid write")
        return unwritten

    return _set(txn.Sender, "_attempt", wrapped)


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _in_another_order(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in reverse order, as a second attempt may get them after a shuffle."""
    kept = list(batches)
    for batch in reversed(kept):
        yield batch.take(pa.array(range(batch.num_rows)[::-1], pa.int64()))


class CrashingWriter(sink.StreamWriter):
    """The real writer with a fault."""

    fault: Fault

    def write(self, iterator: Any) -> sink.TaskResult:
        context = TaskContext.get()
        assert context is not None
        rows = _in_another_order(iterator) if context.attemptNumber() else iterator
        with self.fault.armed(), self.fault.unguarded():
            written = super().write(rows)
        self.fault.reach("task finished")
        return written

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803 - Spark's name
        if batchId < self.fault.from_batch:
            super().commit(messages, batchId)
            return
        self.fault.reach("commit begins")
        with self.fault.armed():
            super().commit(messages, batchId)
        self.fault.reach("commit returned")


class CrashingDataSource(FencepostDataSource):
    """The data source of ``format("crashing")``."""

    @classmethod
    def name(cls) -> str:
        return "crashing"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        options = dict(self.options)
        fault = Fault({key: options.pop(key) for key in list(options) if key.startswith("crash.")})
        with fault.armed():
            writer = sink.stream_writer(options, schema, planning=self._planning)
        writer.__class__ = CrashingWriter
        writer.fault = fault  # type: ignore[attr-defined]
        return writer
