"""A task of the sink, whose rows reach the transaction in one of three ways.

* After ``prepare``, for clusters, the task sends them to partitions that only it writes to.
* Where Spark runs locally, the tasks of the machine send them in turns (:mod:`.turns`).
* If tasks may be retried, or the rows are few, the task leaves encoded rows to the driver.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pyarrow import RecordBatch
from pyspark import TaskContext

from fencepost.logcore.compression import Codec
from fencepost.pipelines.spark import transaction as txn
from fencepost.pipelines.spark.columns import Piece
from fencepost.pipelines.spark.errors import (
    OptionError,
    ProgressError,
    SharedTransactionError,
    SparkPipelineError,
)
from fencepost.pipelines.spark.plan import TaskResult, WritePlan
from fencepost.pipelines.spark.progress import BatchState, batch_state
from fencepost.pipelines.spark.rows import RowWriter
from fencepost.pipelines.spark.spool import Spool
from fencepost.pipelines.spark.tally import RowTally
from fencepost.pipelines.spark.transaction import TransactionHandle
from fencepost.pipelines.spark.turns import BegunTransaction, TaskTurns, second_attempt
from fencepost.pipelines.spark.worker import settled

BATCH_ID, QUERY_ID = "streaming.sql.batchId", "sql.streaming.queryId"
"""Local properties by which Spark tells its tasks their batch and query."""
MASTER = "spark.master"
"""A setting, which tasks have as a local property (``SQLExecution.withSQLConfPropagated``)."""

SMALL_BYTES = 64 * 1024
"""A task leaves up to this many encoded bytes to the driver. That costs one message, instead of a
connection with Metadata, a transaction to join and a Produce of the task's own."""

_FIRST_SIZES = 997
"""The first batch of a task attempt has at most 1 + (attempt id mod this) records. If a batch has
the first and last sequence number of an earlier one, the broker takes it for a retry and drops it.
Since the first batches of two attempts differ in size, the broker rejects a second attempt that
other checks have missed. Attempts with fewer records may look alike; then ``Sender`` detects the
old offset."""


@settled
def write_rows(plan: WritePlan, batches: Iterable[RecordBatch]) -> TaskResult:
    """Write a task's rows. Raises :class:`SharedTransactionError` if exactly-once would break."""
    context = TaskContext.get()
    if context is None:
        raise SparkPipelineError("write is for Spark's tasks alone")
    return _Task(plan, context, batches).write()


class _Task:
    """One attempt of one task."""

    def __init__(
        self, plan: WritePlan, context: TaskContext, batches: Iterable[RecordBatch]
    ) -> None:
        self._plan = plan
        self._context = context
        self._batches = iter(batches)
        # Both properties also exist in a batch write within foreachBatch.
        batch_id = int(context.getLocalProperty(BATCH_ID) or -1)
        self._wanted = plan.progress_of(batch_id, context.getLocalProperty(QUERY_ID) or "")
        options = plan.options
        self._codec = Codec[options.codec.upper()]
        self._rows = RowWriter(
            options,
            lambda topic: len(options.link.partitions(topic)),
            RowTally(is_exact=plan.is_streaming and not self._wanted.digest),
            1 + context.taskAttemptId() % _FIRST_SIZES if plan.begun else None,
        )

    def write(self) -> TaskResult:
        """Write the rows in the way that plan, mode and machine require."""
        plan = self._plan
        if plan.begun is not None:
            return self._in_own_partitions(plan.begun)
        mode = plan.options.mode
        attempts = attempts_of(self._context.getLocalProperty(MASTER))
        is_shared = plan.spool is not None and plan.spool.is_shared()
        if plan.spool is not None and is_shared and takes_turns(mode, attempts):
            return self._in_turns(plan.spool, SMALL_BYTES if mode == "auto" else 0)
        if mode == "direct":
            raise OptionError(
                "mode=direct needs tasks on one machine (a local master) that can all write to its"
                " temporary folder, or rows that fencepost.pipelines.spark.prepare has spread over"
                " tasks, so that no two tasks write to one partition"
            )
        if plan.spool is not None and is_shared:
            return self._written(spooled=plan.spool.write(self._pieces()))
        return self._written(pieces=[_in_memory(piece) for piece in self._pieces()])

    def _in_own_partitions(self, begun: BegunTransaction) -> TaskResult:
        """Send to partitions of this task alone, in the transaction that planning has begun."""
        plan, context = self._plan, self._context
        if plan.is_streaming:
            transactional_id = plan.transactional_id(self._wanted.query_id)
            if begun.ticket.transactional_id != transactional_id:
                raise ProgressError(
                    f"the checkpoint {plan.options.checkpoint!r} on this machine is that of another"
                    f" query than {self._wanted.query_id}: Spark keeps its own on another file"
                    " system. Give the option checkpointLocation a scheme, or the sink a"
                    " kafka.transactional.id"
                )
            if self._is_done(begun):
                return self._written(is_done=True)
        if context.attemptNumber() > 0:
            raise second_attempt()
        sender = self._sender(begun.ticket, guarded=True)
        task = context.partitionId()
        for piece in self._pieces():
            if plan.prepared is None or piece.partition % plan.prepared.writers != task:
                raise SharedTransactionError(
                    f"task {task} has rows for partition {piece.partition}, which another task"
                    " writes: the rows were moved after prepare(), which has to be the last step"
                )
            sender.add_compressed(piece)
        return self._sent(sender, begun.ticket)

    def _in_turns(self, spool: Spool, small: int) -> TaskResult:
        """Send in turns with the other tasks of this machine, unless there are only a few bytes.

        A few bytes are left to the driver, so that the task needs no connection.
        """
        turns = TaskTurns(spool)
        turns.claim(self._context.partitionId())
        few: list[Piece] = []
        size = 0
        pieces = self._pieces()
        for piece in pieces:
            few.append(piece)
            size += len(piece.payload)
            if size > small:
                break
        else:
            return self._written(pieces=[_in_memory(piece) for piece in few])
        begun = turns.joined(lambda: self._plan.begin(self._wanted.query_id))
        if self._plan.is_streaming and self._is_done(begun):
            return self._written(is_done=True)
        sender = self._sender(begun.ticket, numbers=turns)
        for piece in itertools.chain(few, pieces):
            sender.add_compressed(piece)
        return self._sent(sender, begun.ticket)

    def _is_done(self, begun: BegunTransaction) -> bool:
        """Return whether the progress shows that an earlier attempt has committed the batch.

        If only the rows identify the batch, count them.
        """
        stands = batch_state(self._wanted, begun.done, begun.ticket.transactional_id)
        if stands is BatchState.LOOKS_DONE:
            for batch in self._batches:
                self._rows.count(batch)
        return stands is not BatchState.NEXT

    def _pieces(self) -> Iterator[Piece]:
        """Yield all rows as encoded and compressed pieces."""
        level = self._plan.options.level
        for batch in self._batches:
            for piece in self._rows.pieces(batch):
                yield txn.compressed(piece, self._codec, level)

    def _sender(self, ticket: TransactionHandle, **more: Any) -> txn.Sender:
        options = self._plan.options
        return txn.Sender(options.link, ticket, self._codec, options.level, **more)

    def _sent(self, sender: txn.Sender, ticket: TransactionHandle) -> TaskResult:
        sender.flush()
        return self._written(ticket=ticket, sent=tuple(sender.sent.items()))

    def _written(self, pieces: Iterable[Piece] = (), **more: Any) -> TaskResult:
        # The rows are counted once `pieces` or the spool is filled.
        tally, progress = self._rows.tally, self._wanted
        return TaskResult(
            progress.batch_id,
            progress.query_id,
            tally.rows,
            tally.checksum,
            pieces=tuple(pieces),
            **more,
        )


def _in_memory(piece: Piece) -> Piece:
    """Return the piece in a form that can be pickled."""
    return piece._replace(payload=bytes(piece.payload))


def attempts_of(master: str | None) -> int:
    """Return how often Spark tries a task of a local master; 0 if executors are elsewhere.

    Source: ``SparkContext.createTaskScheduler``: local[N] never retries, regardless of
    ``spark.task.maxFailures``, local[N, F] makes F attempts; local-cluster is a cluster. Spark does
    not speculate under local[N] and local[N, F] (``TaskSchedulerImpl.start``).
    """
    match = re.fullmatch(r"local(?:\[[^,\]]*(?:,\s*(\d+)\s*)?\])?", (master or "").strip())
    return int(match[1] or 1) if match else 0


def takes_turns(mode: str, attempts: int) -> bool:
    """Return whether tasks send in turns, if Spark makes this many attempts on this machine.

    The mode ``auto`` excludes retried tasks, which break a shared transaction.
    """
    return attempts == 1 if mode == "auto" else mode == "direct" and attempts > 0
