"""The sink for ``foreachBatch``: the sink's commit protocol, run by the user's driver process.

A program can combine it with other writes of the same micro-batch. If the batch's number is already
committed, the sink compares the batch with the committed one: by source offsets if the option
``checkpointLocation`` lets it read them, and otherwise by rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.errors import PySparkAttributeError

from fencepost.logcore.compression import Codec
from fencepost.pipelines.spark import transaction as txn
from fencepost.pipelines.spark.checkpoint import PlannedBatch, read_checkpoint
from fencepost.pipelines.spark.errors import OptionError
from fencepost.pipelines.spark.options import sink_options
from fencepost.pipelines.spark.plan import CommitProtocol, WritePlan
from fencepost.pipelines.spark.progress import BatchState, batch_state
from fencepost.pipelines.spark.rows import RowWriter, check_schema
from fencepost.pipelines.spark.sink import aborting
from fencepost.pipelines.spark.tally import RowTally
from fencepost.pipelines.spark.task import QUERY_ID

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def exactly_once_batch(**options: str) -> Callable[[DataFrame, int], None]:
    """Return a function for ``writeStream.foreachBatch``, with the options of the sink.

    The option ``kafka.transactional.id`` is required: it identifies the query across restarts. The
    driver collects each micro-batch as Arrow and writes it, so a batch must fit into its memory.
    Raises :class:`OptionError`.
    """
    checked = sink_options(options, streaming=True)
    if checked.transactional_id is None:
        raise OptionError("exactly_once_batch needs the option kafka.transactional.id")
    if checked.mode == "direct":
        raise OptionError("exactly_once_batch writes from the driver: mode=direct is not possible")
    name = checked.transactional_id

    def write(df: DataFrame, batch_id: int) -> None:
        check_schema(df.schema, checked)
        planned = read_checkpoint(checked.checkpoint)
        query_id = _query_id(df, planned)
        plan = WritePlan(checked, is_streaming=True, planned=planned)
        exactly = CommitProtocol(plan, name)
        begun = exactly.begin()
        progress = plan.progress_of(batch_id, query_id)
        stands = batch_state(progress, begun.done, name)
        if stands is BatchState.DONE:
            return
        link = checked.link
        tally = RowTally(is_exact=not progress.digest)
        rows = RowWriter(checked, lambda topic: len(link.partitions(topic)), tally)
        batches = df.toArrow().to_batches()
        if stands is BatchState.LOOKS_DONE:
            for batch in batches:
                rows.count(batch)
            exactly.is_done(progress.counted(tally.rows, tally.checksum), begun.done)
            return
        with aborting(plan, begun.ticket):
            sender = txn.Sender(link, begun.ticket, Codec[checked.codec.upper()], checked.level)
            for batch in batches:
                for piece in rows.pieces(batch):
                    sender.add(piece)
            sender.flush()
            exactly.commit(begun.ticket, progress.counted(tally.rows, tally.checksum))

    return write


def _query_id(df: DataFrame, planned: PlannedBatch | None) -> str:
    """Return the micro-batch's query id. Raises :class:`OptionError` if it is unknown."""
    try:
        query_id = df.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
    except PySparkAttributeError:  # Spark Connect
        query_id = None
    if query_id:
        return str(query_id)
    if planned is not None:
        return planned.query_id
    raise OptionError(
        "exactly_once_batch does not find out which query it works for: Spark tells the thread in"
        " which foreachBatch calls its function, unless PYSPARK_PIN_THREAD is false, and does not"
        " tell in Spark Connect. The option checkpointLocation, the same as the query's and on a"
        " file system of the driver's machine, says it too"
    )
