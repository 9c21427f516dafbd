"""The exactly-once sink: one transaction per micro-batch, which also holds the batch's number.

Tasks write in one shared transaction (:mod:`.task`), or leave encoded rows to the driver, which
writes them when Spark commits. In any case one EndTxn decides, after the batch's number and the
source's offsets have been added to the transaction.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pyarrow import RecordBatch
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from fencepost.logcore.compression import Codec
from fencepost.pipelines.spark import spool
from fencepost.pipelines.spark import transaction as txn
from fencepost.pipelines.spark.checkpoint import local_folder, read_checkpoint
from fencepost.pipelines.spark.errors import (
    OptionError,
    SharedTransactionError,
    SparkPipelineError,
    plain_errors,
)
from fencepost.pipelines.spark.offsets import Partition
from fencepost.pipelines.spark.options import SinkOptions, sink_options
from fencepost.pipelines.spark.plan import CommitProtocol, TaskResult, WritePlan
from fencepost.pipelines.spark.rows import Prepared, check_schema
from fencepost.pipelines.spark.spool import Spool
from fencepost.pipelines.spark.task import write_rows
from fencepost.pipelines.spark.transaction import Sent, TransactionHandle
from fencepost.pipelines.spark.turns import left_behind
from fencepost.pipelines.spark.worker import settled
from fencepost.protocol.errors import WireError


def send_left(plan: WritePlan, ticket: TransactionHandle, messages: Sequence[TaskResult]) -> None:
    """Write the rows that tasks have left to the driver, in the order of the tasks.

    Raises :class:`SharedTransactionError` if the rows that tasks have sent do not add up.
    """
    options = plan.options
    numbers = txn.LocalSequences(added_up(message.sent for message in messages))
    codec = Codec[options.codec.upper()]
    sender = txn.Sender(options.link, ticket, codec, options.level, numbers=numbers)
    for message in messages:
        spooled = message.spooled
        for piece in message.pieces if spooled is None else spool.read(spooled):
            sender.add_compressed(piece)
    sender.flush()


def added_up(sent: Iterable[Iterable[tuple[Partition, Sent]]]) -> dict[Partition, int]:
    """Return the next sequence number of each partition that tasks have written to.

    It equals the number of records that the transaction holds in the partition. Raises
    :class:`SharedTransactionError` if the tasks known to Spark have sent more or fewer records:
    then another task has written as well.
    """
    records: Counter[Partition] = Counter()
    ends: Counter[Partition] = Counter()
    for part, message in itertools.chain.from_iterable(sent):
        records[part] += message.records
        ends[part] = max(ends[part], message.end)
    if wrong := sorted(part for part in ends if ends[part] != records[part]):
        raise SharedTransactionError(
            f"{wrong[0][0]}-{wrong[0][1]}: the transaction holds {ends[wrong[0]]} records, and the"
            f" tasks have written {records[wrong[0]]}; the whole batch has to run again"
        )
    return dict(ends)


def check_mode(options: SinkOptions, prepared: Prepared | None) -> Prepared | None:
    """Return the result of ``prepare``, if the mode uses it.

    Raises :class:`OptionError` if the rows were prepared for another topic.
    """
    if prepared is not None and options.topic != prepared.topic:
        raise OptionError(
            f"the rows were prepared for topic {prepared.topic!r}, but the option topic is"
            f" {options.topic!r}"
        )
    return None if options.mode == "staged" else prepared


@plain_errors
class StreamWriter(DataSourceStreamArrowWriter):
    """The streaming sink."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[RecordBatch]) -> TaskResult:
        """Write or encode the rows of one task."""
        return write_rows(self._plan, iterator)

    @settled
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit the batch's transaction; Spark repeats this for a batch after a crash."""
        written = [message for message in messages if isinstance(message, TaskResult)]
        if len(written) != len(messages):
            raise SharedTransactionError(f"batch {batchId}: a task has left no message")
        tickets = {message.ticket for message in written if message.ticket is not None}
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
        plan = self._plan
        exactly = CommitProtocol(plan, plan.transactional_id(query_id))
        progress = plan.progress_of(batchId, query_id).counted(
            sum(message.rows for message in written), sum(message.checksum for message in written)
        )
        ticket = tickets.pop() if tickets else None
        try:
            if ticket is None:
                begun = exactly.begin()
                if exactly.is_done(progress, begun.done):
                    return
                ticket = begun.ticket
            with aborting(plan, ticket):
                if any(message.is_done for message in written):
                    raise SharedTransactionError(
                        f"batch {batchId} was taken for one that is committed"
                    )
                send_left(plan, ticket, written)
                exactly.commit(ticket, progress)
        finally:
            spool.sweep(_subject(plan.options))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Abort the batch's transaction, if it is still open.

        It raises no error, because Spark would report that instead of the original one. If the
        abort fails, the next attempt aborts the transaction at its beginning.
        """
        subject = _subject(self._plan.options)
        if not _abort(self._plan, messages, subject) and self._plan.prepared is not None:
            self._fence()
        spool.sweep(subject)

    def _fence(self) -> None:
        """Fence the transactional id, which aborts the transaction that planning has begun.

        This process does not have the transaction's handle, so it cannot send EndTxn. Without an
        abort, readers would wait until the transaction times out.
        """
        options, planned = self._plan.options, self._plan.planned
        if options.transactional_id is None and planned is None:
            return
        name = self._plan.transactional_id(planned.query_id if planned else "")
        with contextlib.suppress(SparkPipelineError, WireError):
            txn.begin(options.link, name, options.transaction_timeout_ms)


def _subject(options: SinkOptions) -> str | None:
    """Return the name of a query's spool folders, the same in every process."""
    folder = local_folder(options.checkpoint)
    return options.checkpoint if folder is None else str(folder)


@contextlib.contextmanager
def aborting(plan: WritePlan, ticket: TransactionHandle) -> Iterator[None]:
    """Abort the transaction if the body fails, so that readers do not wait for the timeout.

    If the commit succeeded but its response was lost, the transaction stays committed: brokers
    refuse the abort.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(SparkPipelineError, WireError):
            txn.end(plan.options.link, ticket, commit=False)
        raise


def _abort(
    plan: WritePlan, messages: Iterable[WriterCommitMessage | None], subject: str | None
) -> bool:
    """Abort every transaction that tasks wrote in; return whether any is known."""
    tickets = set(left_behind(subject))
    tickets |= {
        message.ticket for message in messages if isinstance(message, TaskResult) and message.ticket
    }
    if plan.begun is not None:
        tickets.add(plan.begun.ticket)
    for ticket in tickets:
        with contextlib.suppress(SparkPipelineError, WireError):
            txn.end(plan.options.link, ticket, commit=False)
    return bool(tickets)


@plain_errors
class BatchWriter(DataSourceArrowWriter):
    """The batch sink: the whole DataFrame in one transaction."""

    def __init__(self, plan: WritePlan, subject: str) -> None:
        self._plan = plan
        self._subject = subject

    def write(self, iterator: Iterator[RecordBatch]) -> TaskResult:
        """Write or encode the rows of one task."""
        return write_rows(self._plan, iterator)

    @settled
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the transaction."""
        written = [message for message in messages if isinstance(message, TaskResult)]
        plan = self._plan
        tickets = {message.ticket for message in written if message.ticket is not None}
        if len(written) != len(messages) or len(tickets) > 1:
            raise SharedTransactionError(
                f"{len(messages)} tasks have left {len(written)} messages, and {len(tickets)}"
                " transactions"
            )
        try:
            ticket = tickets.pop() if tickets else plan.begin("").ticket
            with aborting(plan, ticket):
                send_left(plan, ticket, written)
                if any(message.rows for message in written):
                    txn.end(plan.options.link, ticket, commit=True)
        finally:
            spool.sweep(self._subject)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort the transaction; no row of the DataFrame becomes visible."""
        _abort(self._plan, messages, self._subject)
        spool.sweep(self._subject)


@settled
def stream_writer(
    options: Mapping[str, str], schema: StructType, *, planning: bool
) -> StreamWriter:
    """Return the writer of a streaming query's next batch, or of its commit.

    In output mode complete each batch's result is appended, as by the stock sink.

    Raises :class:`OptionError` and :class:`ProgressError` if exactly-once is impossible.
    """
    checked = sink_options(options, streaming=True)
    prepared = check_mode(checked, check_schema(schema, checked))
    planned = read_checkpoint(checked.checkpoint)
    plan = WritePlan(checked, is_streaming=True, prepared=prepared, planned=planned)
    if not planning:
        return StreamWriter(plan)
    if prepared is None:
        return StreamWriter(replace(plan, spool=Spool.new(_subject(checked))))
    if checked.transactional_id is None and planned is None:
        raise OptionError(
            f"rows that were prepared are written under a transaction that begins before Spark"
            f" tells whose it is, and the checkpoint {checked.checkpoint!r}, which would say, is"
            " not on this machine's file systems: give the sink a kafka.transactional.id, the same"
            " after a restart, or write with mode=staged"
        )
    return StreamWriter(replace(plan, begun=plan.begin(planned.query_id if planned else "")))


@settled
def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> BatchWriter:
    """Return the writer of ``df.write``. Raises :class:`OptionError`."""
    checked = sink_options(options, streaming=False)
    if overwrite:
        raise OptionError("a topic can't be overwritten: use mode('append')")
    prepared = check_mode(checked, check_schema(schema, checked))
    subject = str(uuid.uuid4())
    name = checked.transactional_id or f"fencepost-batch-{subject}"
    plan = WritePlan(checked, is_streaming=False, prepared=prepared, batch_name=name)
    if prepared is None:
        return BatchWriter(replace(plan, spool=Spool.new(subject)), subject)
    return BatchWriter(replace(plan, begun=plan.begin("")), subject)
