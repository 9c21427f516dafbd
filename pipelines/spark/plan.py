"""The plan and the commit protocol that the sink's tasks and its committing driver share."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.datasource import WriterCommitMessage

from fencepost.pipelines.spark import transaction as txn
from fencepost.pipelines.spark.checkpoint import PlannedBatch
from fencepost.pipelines.spark.columns import Piece
from fencepost.pipelines.spark.errors import SparkPipelineError
from fencepost.pipelines.spark.offsets import Partition
from fencepost.pipelines.spark.options import SinkOptions
from fencepost.pipelines.spark.progress import (
    BatchState,
    Progress,
    batch_state,
    check_same,
    default_transactional_id,
    group_of,
)
from fencepost.pipelines.spark.rows import Prepared
from fencepost.pipelines.spark.spool import Spool
from fencepost.pipelines.spark.transaction import Sent, TransactionHandle
from fencepost.pipelines.spark.turns import BegunTransaction
from fencepost.protocol.errors import WireError


@dataclass(frozen=True)
class TaskResult(WriterCommitMessage):
    """The result of one task."""

    batch_id: int
    query_id: str
    rows: int
    checksum: int = 0
    """The checksum of the rows, if the batch is not identified by its offsets."""
    ticket: TransactionHandle | None = None
    """The transaction that the task wrote in; None if it has sent nothing."""
    sent: tuple[tuple[Partition, Sent], ...] = ()
    is_done: bool = False
    """Whether the task found the batch committed before, and wrote nothing."""
    pieces: tuple[Piece, ...] = ()
    """Encoded rows for the driver to write."""
    spooled: str | None = None
    """The file that holds the encoded rows, if they are not in ``pieces``."""


@dataclass(frozen=True)
class WritePlan:
    """The data that a writer ships to its tasks."""

    options: SinkOptions
    is_streaming: bool
    prepared: Prepared | None = None
    planned: PlannedBatch | None = None
    """The checkpoint's next batch, if this machine can read the checkpoint."""
    begun: BegunTransaction | None = None
    """The transaction that all tasks share, if ``prepare`` has assigned partitions to the tasks."""
    batch_name: str | None = None
    """The transactional id of a batch write."""
    spool: Spool | None = None

    def planned_for(self, batch_id: int, query_id: str) -> PlannedBatch | None:
        """Return the checkpoint's entry for a batch; None if the checkpoint is another query's."""
        planned = self.planned
        if planned is None or (planned.batch_id, planned.query_id) != (batch_id, query_id):
            return None
        return planned

    def progress_of(self, batch_id: int, query_id: str) -> Progress:
        """Return the progress that identifies a batch, without its rows."""
        planned = self.planned_for(batch_id, query_id)
        return Progress(batch_id, query_id, planned.digest if planned else "")

    def transactional_id(self, query_id: str) -> str:
        """Return the transactional id: the batch write's, the configured one, or the default."""
        configured = self.batch_name or self.options.transactional_id
        return configured or default_transactional_id(query_id)

    def begin(self, query_id: str) -> BegunTransaction:
        """Begin the transaction of a micro-batch of that query, or of a batch write."""
        if self.is_streaming:
            return CommitProtocol(self, self.transactional_id(query_id)).begin()
        timeout_ms = self.options.transaction_timeout_ms
        return BegunTransaction(
            txn.begin(self.options.link, self.transactional_id(query_id), timeout_ms)
        )


class CommitProtocol:
    """The commit protocol of one query's batches, for the tasks and the driver."""

    def __init__(self, plan: WritePlan, transactional_id: str) -> None:
        self._plan = plan
        self._id = transactional_id

    def begin(self) -> BegunTransaction:
        """Fence earlier attempts, then read the progress they committed.

        The order matters: the outcome is final only after they are fenced.
        """
        options = self._plan.options
        ticket = txn.begin(options.link, self._id, options.transaction_timeout_ms)
        return BegunTransaction(ticket, self.progress())

    def progress(self) -> Progress | None:
        """Return the committed progress. Raises :class:`ProgressError` for foreign metadata."""
        topic = self._plan.options.progress_topic or ""
        group = group_of(self._id)
        row = self._plan.options.link.committed(group, [(topic, 0)])[topic, 0]
        if row.committed_offset < 0:
            return None
        return Progress.from_text(row.metadata or "", group)

    def is_done(self, progress: Progress, done: Progress | None) -> bool:
        """Return whether ``done`` shows that an earlier attempt has committed the batch.

        Raises :class:`ProgressError` if another batch was committed under its number.
        """
        stands = batch_state(progress, done, self._id)
        if stands is BatchState.LOOKS_DONE and done is not None:
            check_same(progress, done)
        return stands is not BatchState.NEXT

    def commit(self, ticket: TransactionHandle, progress: Progress) -> None:
        """Add offsets and progress to the transaction, and commit it."""
        link = self._plan.options.link
        topic = self._plan.options.progress_topic or ""
        planned = self._plan.planned_for(progress.batch_id, progress.query_id)
        try:
            topics = link.topics()
            sources = {
                part: offset
                for part, offset in (planned.offsets() if planned else {}).items()
                if part[0] in topics and part[1] in topics[part[0]].partitions
            }
            if sources:
                txn.commit_offsets(link, ticket, self._id, sources, "")
            at = {(topic, 0): progress.batch_id + 1}
            txn.commit_offsets(link, ticket, group_of(self._id), at, progress.to_text())
            txn.end(link, ticket, commit=True)
        except (SparkPipelineError, WireError):
            # No broker answered, or the transaction is over: the progress tells how it ended.
            if self.progress() != progress:
                raise
