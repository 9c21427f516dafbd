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

from fencepost.coordinator.wire.errors import WireError
from fencepost.logcore.compression import Codec, compress
from fencepost.pipelines.spark import spool
from fencepost.pipelines.spark import transaction as txn
from fencepost.pipelines.spark.checkpoint import PlannedBatch, local_folder, read_checkpoint
from fencepost.pipelines.spark.columns import Piece
from fencepost.pipelines.spark.errors import (
    OptionError,
    ProgressError,
    SharedTransactionError,
    SparkPipelineError,
)
from fencepost.pipelines.spark.options import SinkOptions, sink_options
from fencepost.pipelines.spark.progress import Progress, Standing, check_same, standing
from fencepost.pipelines.spark.rows import Prepared, RowWriter, check_schema
from fencepost.pipelines.spark.spool import Spool
from fencepost.pipelines.spark.tally import Tally
from fencepost.pipelines.spark.transaction import Ticket
from fencepost.pipelines.spark.worker import settled

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
    checksum: int = 0
    """Of the rows, where the batch is not known by its offsets."""
    ticket: Ticket | None = None
    """Direct: the transaction that it wrote under; None where the batch was committed before."""
    pieces: tuple[Piece, ...] = ()
    """Staged: what the driver has to write."""
    spooled: str | None = None
    """Staged: the file that holds them instead."""


@dataclass(frozen=True)
class Plan:
    """What a writer ships to its tasks."""

    options: SinkOptions
    mode: str
    is_streaming: bool
    prepared: Prepared | None = None
    planned: PlannedBatch | None = None
    """What the checkpoint says is to run, if that is what this machine holds under its name."""
    ticket: Ticket | None = None
    done: Progress | None = None
    """Direct: what was committed before the ticket's transaction."""
    spool: Spool | None = None

    def planned_for(self, batch_id: int, query_id: str) -> PlannedBatch | None:
        """What is planned for the batch that runs; None where the checkpoint is another's."""
        planned = self.planned
        if planned is None or (planned.batch_id, planned.query_id) != (batch_id, query_id):
            return None
        return planned

    def progress_of(self, batch_id: int, query_id: str) -> Progress:
        """What the batch will be known by, but for its rows."""
        planned = self.planned_for(batch_id, query_id)
        return Progress(batch_id, query_id, planned.digest if planned else "")


@settled
def write_rows(plan: Plan, batches: Iterable[RecordBatch]) -> Written:
    """Do a task's part. Raises :class:`SharedTransactionError` where exactly once would end."""
    context = TaskContext.get()
    if context is None:
        raise SparkPipelineError("write is for Spark's tasks alone")
    # Both are there in a batch write amid foreachBatch, too.
    batch_id = int(context.getLocalProperty(BATCH_ID) or -1)
    query_id = context.getLocalProperty(QUERY_ID) or ""
    wanted = plan.progress_of(batch_id, query_id)
    options = plan.options
    rows = RowWriter(
        options,
        lambda topic: len(plan.options.link.partitions(topic)),
        Tally(is_exact=plan.is_streaming and not wanted.digest),
        1 + context.taskAttemptId() % _FIRST_SIZES if plan.ticket else None,
    )
    pieces = (piece for batch in batches for piece in rows.pieces(batch))
    codec = Codec[options.codec.upper()]
    if plan.ticket is None:
        found, spooled = _stage(plan, pieces, codec)
        tally = rows.tally
        return Written(
            batch_id, query_id, tally.rows, tally.checksum, pieces=found, spooled=spooled
        )
    if plan.is_streaming:
        stands = _standing_in_task(plan, wanted)
        if stands is Standing.LOOKS_DONE:
            for batch in batches:
                rows.count(batch)
        if stands is not Standing.NEXT:
            return Written(batch_id, query_id, rows.tally.rows, rows.tally.checksum)
    if context.attemptNumber() > 0:
        raise SharedTransactionError(
            f"attempt {context.attemptNumber()} of a task would write a second time into the"
            " transaction of the first; the whole batch has to run again. Set"
            " spark.task.maxFailures to 1, and restart the query"
            " (fencepost.pipelines.spark.supervise)"
        )
    sender = txn.Sender(plan.options.link, plan.ticket, codec, options.level, guarded=True)
    task = context.partitionId()
    for piece in pieces:
        if plan.prepared is None or piece.partition % plan.prepared.writers != task:
            raise SharedTransactionError(
                f"task {task} has rows for partition {piece.partition}, which another task writes:"
                " the rows were moved after prepare(), which has to be the last step"
            )
        sender.add(piece)
    sender.flush()
    return Written(batch_id, query_id, rows.tally.rows, rows.tally.checksum, plan.ticket)


def _standing_in_task(plan: Plan, wanted: Progress) -> Standing:
    """What became of the batch before; only tasks know for certain which query it belongs to."""
    ticket = plan.ticket
    if ticket is None or ticket.transactional_id != transactional_id_of(
        plan.options, wanted.query_id
    ):
        raise ProgressError(
            f"the checkpoint {plan.options.checkpoint!r} on this machine is that of another query"
            f" than {wanted.query_id}: Spark keeps its own on another file system. Give the"
            " option checkpointLocation a scheme, or the sink a kafka.transactional.id"
        )
    return standing(wanted, plan.done, ticket.transactional_id)


def _stage(
    plan: Plan, pieces: Iterator[Piece], codec: Codec
) -> tuple[tuple[Piece, ...], str | None]:
    """Compress what the driver will send, and leave it in a file if the driver can read that."""
    level = plan.options.level
    done = (
        piece
        if codec is Codec.NONE
        else piece._replace(payload=compress(codec, piece.payload, level))
        for piece in pieces
    )
    if plan.spool is not None and plan.spool.is_shared():
        return (), plan.spool.write(done)
    return tuple(piece._replace(payload=bytes(piece.payload)) for piece in done), None


def send_staged(plan: Plan, ticket: Ticket, messages: Iterable[Written]) -> None:
    """Write what tasks have left, in the order of the tasks."""
    options = plan.options
    sender = txn.Sender(plan.options.link, ticket, Codec[options.codec.upper()], options.level)
    for message in messages:
        spooled = message.spooled
        for piece in message.pieces if spooled is None else spool.read(spooled):
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
            "mode=direct needs rows that fencepost.pipelines.spark.prepare has spread over tasks,"
            " so that no two tasks write to one partition"
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

    def __init__(self, plan: Plan, transactional_id: str) -> None:
        self._plan = plan
        self._id = transactional_id

    def begin(self) -> Plan:
        """Fence earlier attempts, then look what they have committed.

        The order matters: only when they are fenced is the outcome final.
        """
        plan = self._plan
        ticket = txn.begin(plan.options.link, self._id, plan.options.transaction_timeout_ms)
        return replace(plan, ticket=ticket, done=self.progress())

    def progress(self) -> Progress | None:
        """What is committed. Raises :class:`ProgressError` if it is not ours."""
        topic = self._plan.options.progress_topic or ""
        group = group_of(self._id)
        row = self._plan.options.link.committed(group, [(topic, 0)])[topic, 0]
        if row.committed_offset < 0:
            return None
        return Progress.from_text(row.metadata or "", group)

    def is_done(self, found: Progress, done: Progress | None) -> bool:
        """Whether ``done`` says that an earlier attempt has committed the batch.

        Raises :class:`ProgressError` where something else was committed under its number.
        """
        stands = standing(found, done, self._id)
        if stands is Standing.LOOKS_DONE and done is not None:
            check_same(found, done)
        return stands is not Standing.NEXT

    def commit(self, ticket: Ticket, progress: Progress) -> None:
        """Let offsets and progress join the transaction, and end it."""
        link = self._plan.options.link
        topic = self._plan.options.progress_topic or ""
        planned = self._plan.planned_for(progress.batch_id, progress.query_id)
        try:
            known = link.topics()
            sources = {
                part: offset
                for part, offset in (planned.offsets() if planned else {}).items()
                if part[0] in known and part[1] in known[part[0]].partitions
            }
            if sources:
                txn.commit_offsets(link, ticket, self._id, sources, "")
            at = {(topic, 0): progress.batch_id + 1}
            txn.commit_offsets(link, ticket, group_of(self._id), at, progress.to_text())
            txn.end(link, ticket, commit=True)
        except (SparkPipelineError, WireError):
            # Nobody has answered, or the answer says that it is over: the progress tells how.
            if self.progress() != progress:
                raise


class StreamWriter(DataSourceStreamArrowWriter):
    """The streaming sink."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

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
        exactly = Exactly(self._plan, transactional_id_of(self._plan.options, query_id))
        found = self._plan.progress_of(batchId, query_id).counted(
            sum(message.rows for message in written), sum(one.checksum for one in written)
        )
        if self._plan.mode == "direct":
            ticket = tickets.pop()
            if ticket is not None:
                exactly.commit(ticket, found)
            elif not exactly.is_done(found, exactly.progress()):
                raise SharedTransactionError(f"batch {batchId} was taken for one that is committed")
            return
        try:
            begun = exactly.begin()
            if begun.ticket is not None and not exactly.is_done(found, begun.done):
                with aborting(begun, begun.ticket):
                    send_staged(begun, begun.ticket, written)
                    exactly.commit(begun.ticket, found)
        finally:
            spool.sweep(_subject(self._plan.options))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Abort the batch's transaction, if it still is one.

        Raises nothing: Spark would tell that instead of what went wrong. What cannot be aborted now
        is aborted by the next attempt's beginning.
        """
        if not _abort(self._plan, messages) and self._plan.mode == "direct":
            self._fence()
        spool.sweep(_subject(self._plan.options))

    def _fence(self) -> None:
        """Abort by the transactional id, where no task has left the ticket that planning got.

        Else readers would wait for what no longer goes on until the transaction times out.
        """
        options, planned = self._plan.options, self._plan.planned
        if options.transactional_id is None and planned is None:
            return
        name = transactional_id_of(options, planned.query_id if planned else "")
        with contextlib.suppress(SparkPipelineError, WireError):
            txn.begin(self._plan.options.link, name, options.transaction_timeout_ms)


def _subject(options: SinkOptions) -> str | None:
    """What a query's spooled files are named by, in every process and whatever its folder is."""
    folder = local_folder(options.checkpoint)
    return options.checkpoint if folder is None else str(folder)


@contextlib.contextmanager
def aborting(plan: Plan, ticket: Ticket) -> Iterator[None]:
    """End the transaction if what happens in it fails, so that no reader waits for its timeout.

    One that is committed after all, its answer lost, stays committed: brokers refuse the abort.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(SparkPipelineError, WireError):
            txn.end(plan.options.link, ticket, commit=False)
        raise


def _abort(plan: Plan, messages: Iterable[WriterCommitMessage | None]) -> bool:
    """Abort every transaction that tasks wrote under; say whether any is known."""
    found = {message.ticket for message in messages if isinstance(message, Written)}
    tickets = {ticket for ticket in {plan.ticket, *found} if ticket is not None}
    for ticket in tickets:
        with contextlib.suppress(SparkPipelineError, WireError):
            txn.end(plan.options.link, ticket, commit=False)
    return bool(tickets)


class BatchWriter(DataSourceArrowWriter):
    """The batch sink: the whole DataFrame as one transaction."""

    def __init__(self, plan: Plan, subject: str) -> None:
        self._plan = plan
        self._subject = subject

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
                ticket = txn.begin(plan.options.link, name, plan.options.transaction_timeout_ms)
            with aborting(plan, ticket):
                if plan.ticket is None:
                    send_staged(plan, ticket, written)
                if any(message.rows for message in written):
                    txn.end(plan.options.link, ticket, commit=True)
        finally:
            spool.sweep(self._subject)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort the transaction; nothing of the DataFrame is ever seen."""
        _abort(self._plan, messages)
        spool.sweep(self._subject)


@settled
def stream_writer(
    options: Mapping[str, str], schema: StructType, *, planning: bool
) -> StreamWriter:
    """The writer of a streaming query's next batch, or of its commit.

    In output mode complete each batch's result is appended, as by the stock sink.

    Raises :class:`OptionError` and :class:`ProgressError` for what cannot be exactly once.
    """
    checked = sink_options(options, streaming=True)
    prepared = check_schema(schema, checked)
    mode = choose_mode(checked, prepared)
    planned = read_checkpoint(checked.checkpoint)
    plan = Plan(checked, mode, is_streaming=True, prepared=prepared, planned=planned)
    if mode == "staged":
        return StreamWriter(replace(plan, spool=Spool.new(_subject(checked)) if planning else None))
    if not planning:
        return StreamWriter(plan)
    if checked.transactional_id is None and planned is None:
        raise OptionError(
            f"mode=direct begins a batch before Spark tells whose it is, and the checkpoint"
            f" {checked.checkpoint!r}, which would say, is not on this machine's file systems: give"
            " the sink a kafka.transactional.id, the same after a restart, or write with"
            " mode=staged"
        )
    name = transactional_id_of(checked, planned.query_id if planned else "")
    return StreamWriter(Exactly(plan, name).begin())


@settled
def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> BatchWriter:
    """The writer of ``df.write``. Raises :class:`OptionError`."""
    checked = sink_options(options, streaming=False)
    if overwrite:
        raise OptionError("a topic can't be overwritten: use mode('append')")
    prepared = check_schema(schema, checked)
    mode = choose_mode(checked, prepared)
    plan = Plan(checked, mode, is_streaming=False, prepared=prepared)
    subject = str(uuid.uuid4())
    if mode == "staged":
        return BatchWriter(replace(plan, spool=Spool.new(subject)), subject)
    name = checked.transactional_id or f"fencepost-batch-{uuid.uuid4()}"
    ticket = txn.begin(plan.options.link, name, checked.transaction_timeout_ms)
    return BatchWriter(replace(plan, ticket=ticket), subject)
