"""The exactly-once sink: one transaction per micro-batch, which also holds the batch's number.

Two modes. *direct*: tasks write under one shared transaction, which ``streamWriter`` begins when
Spark plans the batch; no two tasks may write to one partition, which ``prepare`` sees to. *staged*:
tasks only encode, and the driver writes when Spark commits; that needs nothing of the plan. In both
one EndTxn decides, after the batch's number and the source's offsets have joined the transaction.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pyarrow import RecordBatch
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from coordinator.wire.errors import WireError
from logcore.compression import Codec, compress
from pipelines.spark import transaction as txn
from pipelines.spark.broker import Connection, connection
from pipelines.spark.checkpoint import Checkpoint, PlannedBatch, local_checkpoint
from pipelines.spark.columns import Piece
from pipelines.spark.errors import (
    OptionError,
    SharedTransactionError,
    SparkPipelineError,
)
from pipelines.spark.options import SinkOptions, sink_options
from pipelines.spark.progress import Progress, is_done
from pipelines.spark.rows import Prepared, RowWriter, check_schema
from pipelines.spark.spool import Spool
from pipelines.spark.transaction import Ticket
from pipelines.spark.worker import settled

BATCH_ID, QUERY_ID = "streaming.sql.batchId", "sql.streaming.queryId"
"""Local properties by which Spark tells its tasks what they work for."""

_FIRST_SIZES = 997
"""The first batch of a task's attempt has at most 1 + attempt mod this many records. Brokers know a
repeated batch by its sequence numbers alone; should a second attempt ever get past our refusal, its
first batch then breaks the sequence instead of being taken for the first attempt's. Where batches
hold fewer records than that, attempts may look the same: then the offsets tell, see ``Sender``."""


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one task has done."""

    batch_id: int
    query_id: str
    rows: int
    ticket: Ticket | None = None
    """Direct: the transaction that it wrote under."""
    pieces: tuple[Piece, ...] = ()
    """Staged: what the driver has to write."""
    spooled: str | None = None
    """Staged: the file that holds them instead."""


@dataclass(frozen=True)
class Plan:
    """What a writer ships to its tasks."""

    options: SinkOptions
    mode: str
    prepared: Prepared | None = None
    ticket: Ticket | None = None
    batch_id: int = -1
    """Direct: the batch that the ticket is for; −1 for a batch query."""
    skip: bool = False
    """The batch was committed by an earlier attempt."""
    spool: Spool | None = None

    @property
    def link(self) -> Connection:
        """The process's connection to the cluster."""
        options = self.options
        return connection(options.bootstrap, options.client_id, options.timeout_ms)


@settled
def write_rows(plan: Plan, batches: Iterable[RecordBatch]) -> Written:
    """Do a task's part. Raises :class:`SharedTransactionError` where exactly once would end."""
    context = TaskContext.get()
    if context is None:
        raise SparkPipelineError("write is for Spark's tasks alone")
    batch_id = int(context.getLocalProperty(BATCH_ID) or -1)
    query_id = context.getLocalProperty(QUERY_ID) or ""
    if plan.skip:
        return Written(batch_id, query_id, 0)
    options = plan.options
    rows = RowWriter(
        options.topic,
        lambda topic: len(plan.link.partitions(topic)),
        options.batch_bytes,
        1 + context.taskAttemptId() % _FIRST_SIZES if plan.ticket else None,
    )
    pieces = (piece for batch in batches for piece in rows.pieces(batch))
    codec = Codec[options.codec.upper()]
    if plan.ticket is None:
        return _stage(plan, pieces, codec, batch_id, query_id)
    if context.attemptNumber() > 0:
        raise SharedTransactionError(
            f"attempt {context.attemptNumber()} of a task would write a second time into the"
            " transaction of the first; the whole batch has to run again. Set"
            " spark.task.maxFailures to 1, and restart the query (pipelines.spark.supervise)"
        )
    if batch_id != plan.batch_id:
        raise SharedTransactionError(
            f"a task of batch {batch_id} got the transaction of batch {plan.batch_id}"
        )
    sender = txn.Sender(plan.link, plan.ticket, codec, options.level, guarded=True)
    task = context.partitionId()
    for piece in pieces:
        if plan.prepared is None or piece.partition % plan.prepared.writers != task:
            raise SharedTransactionError(
                f"task {task} has rows for partition {piece.partition}, which another task writes:"
                " the rows were moved after prepare(), which has to be the last step"
            )
        sender.add(piece)
    sender.flush()
    return Written(batch_id, query_id, sender.rows, plan.ticket)


def _stage(
    plan: Plan, pieces: Iterator[Piece], codec: Codec, batch_id: int, query_id: str
) -> Written:
    """Compress what the driver will send, and leave it in a file if the driver can read that."""
    level = plan.options.level
    done = (
        piece
        if codec is Codec.NONE
        else piece._replace(payload=compress(codec, piece.payload, level))
        for piece in pieces
    )
    if plan.spool is not None and plan.spool.is_shared():
        name, rows = plan.spool.write(done)
        return Written(batch_id, query_id, rows, spooled=name)
    kept = tuple(piece._replace(payload=bytes(piece.payload)) for piece in done)
    return Written(batch_id, query_id, sum(piece.records for piece in kept), pieces=kept)


def send_staged(plan: Plan, ticket: Ticket, messages: Iterable[Written]) -> None:
    """Write what tasks have left, in the order of the tasks."""
    options = plan.options
    sender = txn.Sender(plan.link, ticket, Codec[options.codec.upper()], options.level)
    for message in messages:
        found: Iterable[Piece] = message.pieces
        if message.spooled is not None:
            if plan.spool is None:
                raise SparkPipelineError(f"nobody knows where {message.spooled} is")
            found = plan.spool.read(message.spooled)
        for piece in found:
            sender.add_sealed(piece)
    sender.flush()


def choose_mode(options: SinkOptions, prepared: Prepared | None) -> str:
    """Direct where ``prepare`` has made that safe, staged otherwise.

    Raises :class:`OptionError` if direct is asked for and is not.
    """
    if prepared is not None and options.topic != prepared.topic:
        raise OptionError(
            f"the rows were prepared for topic {prepared.topic!r}, but the option topic is"
            f" {options.topic!r}"
        )
    if options.mode == "auto":
        return "direct" if prepared is not None else "staged"
    if options.mode == "direct" and prepared is None:
        raise OptionError(
            "mode=direct needs rows that pipelines.spark.prepare has spread over the tasks, so"
            " that no two tasks write to one partition"
        )
    return options.mode


def group_of(transactional_id: str) -> str:
    """The group whose one offset is the sink's progress. It never has members."""
    return f"{transactional_id}-progress"


def transactional_id_of(options: SinkOptions, query_id: str) -> str:
    """One id per query; Spark's query id stays the same as long as the checkpoint does."""
    return options.transactional_id or f"fencepost-{query_id}"


class Exactly:
    """The protocol of one query's batches, for whoever runs them."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint | None) -> None:
        self._plan = plan
        self._checkpoint = checkpoint

    def begin(self, batch_id: int, query_id: str, planned: PlannedBatch | None) -> Plan:
        """Fence earlier attempts, then look whether one of them has committed this batch.

        The order matters: only when they are fenced is the outcome final.
        """
        plan = self._plan
        transactional_id = transactional_id_of(plan.options, query_id)
        ticket = txn.begin(plan.link, transactional_id, plan.options.transaction_timeout_ms)
        wanted = Progress(batch_id, query_id, planned.digest if planned else "")
        skip = is_done(wanted, self.progress(transactional_id), transactional_id)
        return replace(plan, ticket=ticket, batch_id=batch_id, skip=skip)

    def progress(self, transactional_id: str) -> Progress | None:
        """What is committed. Raises :class:`ProgressError` if it is not ours."""
        topic = self._plan.options.progress_topic or ""
        group = group_of(transactional_id)
        row = self._plan.link.committed(group, [(topic, 0)])[topic, 0]
        if row.committed_offset < 0:
            return None
        return Progress.from_text(row.metadata or "", group)

    def planned(self, batch_id: int) -> PlannedBatch | None:
        """What Spark has planned for the batch; None where the checkpoint can't be read."""
        return None if self._checkpoint is None else self._checkpoint.planned(batch_id)

    def commit(self, ticket: Ticket, progress: Progress, planned: PlannedBatch | None) -> None:
        """Let offsets and progress join the transaction, and end it."""
        link = self._plan.link
        topic = self._plan.options.progress_topic or ""
        try:
            known = link.topics()
            sources = {
                part: offset
                for part, offset in (planned.offsets() if planned else {}).items()
                if part[0] in known and part[1] in known[part[0]].partitions
            }
            if sources:
                txn.commit_offsets(link, ticket, ticket.transactional_id, sources, "")
            txn.commit_offsets(
                link,
                ticket,
                group_of(ticket.transactional_id),
                {(topic, 0): progress.batch_id + 1},
                progress.to_text(),
            )
            txn.end(link, ticket, commit=True)
        except (SparkPipelineError, WireError):
            # Nobody has answered, or the answer says that it is over: the progress tells how.
            done = self.progress(ticket.transactional_id)
            if done is None or (done.batch_id, done.query_id) != (
                progress.batch_id,
                progress.query_id,
            ):
                raise


class StreamWriter(DataSourceStreamArrowWriter):
    """The streaming sink."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint | None) -> None:
        self._plan = plan
        self._checkpoint = checkpoint

    def write(self, iterator: Iterator[RecordBatch]) -> Written:
        """Write or encode the rows of one task."""
        return write_rows(self._plan, iterator)

    @settled
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """End the batch's transaction; Spark repeats this for a batch after a crash."""
        written = [message for message in messages if isinstance(message, Written)]
        if len(written) != len(messages):
            raise SharedTransactionError(f"batch {batchId}: a task has left no message")
        tickets = {message.ticket for message in written}
        queries = {message.query_id for message in written}
        batches = {message.batch_id for message in written}
        if batches != {batchId} or len(queries) != 1 or len(tickets) > 1:
            raise SharedTransactionError(
                f"batch {batchId}: tasks worked for batches {sorted(batches)}, queries"
                f" {sorted(queries)}, and {len(tickets)} transactions"
            )
        query_id = queries.pop()
        if not query_id:
            raise SharedTransactionError("Spark does not tell the query's id")
        exactly = Exactly(self._plan, self._checkpoint)
        planned = exactly.planned(batchId)
        rows = sum(message.rows for message in written)
        progress = Progress(batchId, query_id, planned.digest if planned else "", rows)
        if self._plan.mode == "direct":
            ticket = tickets.pop()
            # Without a ticket every task has skipped: the batch is committed.
            if ticket is not None:
                exactly.commit(ticket, progress, planned)
            return
        try:
            begun = exactly.begin(batchId, query_id, planned)
            if not begun.skip and begun.ticket is not None:
                with aborting(begun, begun.ticket):
                    send_staged(begun, begun.ticket, written)
                    exactly.commit(begun.ticket, progress, planned)
        finally:
            _clear(self._plan, written)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Abort the batch's transaction, if it still is one.

        Raises nothing: Spark would tell that instead of what went wrong. What can't be aborted now
        is aborted by the next attempt's beginning.
        """
        _abort(self._plan, [message for message in messages if isinstance(message, Written)])


@contextlib.contextmanager
def aborting(plan: Plan, ticket: Ticket) -> Iterator[None]:
    """End the transaction if what happens in it fails, so that no reader waits for its timeout.

    One that is committed after all, its answer lost, stays committed: brokers refuse the abort.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(SparkPipelineError, WireError):
            txn.end(plan.link, ticket, commit=False)
        raise


def _abort(plan: Plan, written: list[Written]) -> None:
    tickets = {message.ticket for message in written} - {None}
    for ticket in tickets:
        if ticket is not None:
            with contextlib.suppress(SparkPipelineError, WireError):
                txn.end(plan.link, ticket, commit=False)
    _clear(plan, written)


def _clear(plan: Plan, written: Iterable[Written]) -> None:
    if plan.spool is not None:
        plan.spool.remove(message.spooled for message in written if message.spooled)


class BatchWriter(DataSourceArrowWriter):
    """The batch sink: the whole DataFrame as one transaction."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[RecordBatch]) -> Written:
        """Write or encode the rows of one task."""
        return write_rows(self._plan, iterator)

    @settled
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """End the transaction."""
        written = [message for message in messages if isinstance(message, Written)]
        plan = self._plan
        try:
            ticket = plan.ticket
            if ticket is None:
                name = plan.options.transactional_id or f"fencepost-batch-{uuid.uuid4()}"
                ticket = txn.begin(plan.link, name, plan.options.transaction_timeout_ms)
            with aborting(plan, ticket):
                if plan.ticket is None:
                    send_staged(plan, ticket, written)
                if any(message.rows for message in written):
                    txn.end(plan.link, ticket, commit=True)
        finally:
            self._discard()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort the transaction; nothing of the DataFrame is ever seen."""
        if self._plan.ticket is not None:
            with contextlib.suppress(SparkPipelineError, WireError):
                txn.end(self._plan.link, self._plan.ticket, commit=False)
        _abort(self._plan, [message for message in messages if isinstance(message, Written)])
        self._discard()

    def _discard(self) -> None:
        if self._plan.spool is not None:
            self._plan.spool.discard()


@settled
def stream_writer(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool, planning: bool
) -> StreamWriter:
    """The writer of a streaming query's next batch, or of its commit.

    Raises :class:`OptionError` and :class:`ProgressError` for what can't be exactly once.
    """
    checked = sink_options(options, streaming=True)
    if overwrite:
        raise OptionError("a topic can't be overwritten: outputMode complete is not supported")
    prepared = check_schema(schema, checked.topic)
    mode = choose_mode(checked, prepared)
    checkpoint = local_checkpoint(checked.checkpoint)
    plan = Plan(checked, mode, prepared)
    if mode == "staged":
        # The name comes from what both the planning and the committing process know.
        spool = Spool.of(checked.checkpoint) if checkpoint is not None else None
        if planning and spool is not None and not spool.prepare():
            spool = None
        return StreamWriter(replace(plan, spool=spool), checkpoint)
    if checkpoint is None:
        raise OptionError(
            f"mode=direct reads Spark's checkpoint, and {checked.checkpoint!r} is not on this"
            " machine's file systems; mode=staged does without"
        )
    if not planning:
        return StreamWriter(plan, checkpoint)
    planned = checkpoint.planned()
    begun = Exactly(plan, checkpoint).begin(planned.batch_id, checkpoint.query_id(), planned)
    return StreamWriter(begun, checkpoint)


@settled
def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> BatchWriter:
    """The writer of ``df.write``. Raises :class:`OptionError`."""
    checked = sink_options(options, streaming=False)
    if overwrite:
        raise OptionError("a topic can't be overwritten: use mode('append')")
    prepared = check_schema(schema, checked.topic)
    mode = choose_mode(checked, prepared)
    plan = Plan(checked, mode, prepared)
    if mode == "staged":
        spool = Spool.of(str(uuid.uuid4()))
        return BatchWriter(replace(plan, spool=spool if spool.prepare() else None))
    name = checked.transactional_id or f"fencepost-batch-{uuid.uuid4()}"
    ticket = txn.begin(plan.link, name, checked.transaction_timeout_ms)
    return BatchWriter(replace(plan, ticket=ticket))
