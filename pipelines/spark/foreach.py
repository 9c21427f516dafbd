"""The sink for ``foreachBatch``: the same protocol, run by the user's own driver process.

The number of the batch is known before its plan runs, so a batch that is committed already costs
nothing, and several things may be done with a micro-batch of which this is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from logcore.compression import Codec
from pipelines.spark import transaction as txn
from pipelines.spark.errors import OptionError
from pipelines.spark.options import sink_options
from pipelines.spark.progress import Progress
from pipelines.spark.rows import RowWriter, check_schema
from pipelines.spark.sink import Exactly, Plan, aborting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def exactly_once_batch(**options: str) -> Callable[[DataFrame, int], None]:
    """A function for ``writeStream.foreachBatch``, with the options of the sink.

    ``kafka.transactional.id`` has to be among them: it names the query, over restarts. The driver
    collects each micro-batch as Arrow and writes it, so a batch has to fit its memory. Raises
    :class:`OptionError`.
    """
    checked = sink_options(options, streaming=True)
    if checked.transactional_id is None:
        raise OptionError("exactly_once_batch needs the option kafka.transactional.id")
    if checked.mode == "direct":
        raise OptionError("exactly_once_batch writes from the driver: mode=direct can't be had")
    name = checked.transactional_id
    plan = Plan(checked, "staged")

    def write(df: DataFrame, batch_id: int) -> None:
        check_schema(df.schema, checked.topic)
        exactly = Exactly(plan, None)
        begun = exactly.begin(batch_id, name, None)
        ticket = begun.ticket
        if begun.skip or ticket is None:
            return
        with aborting(begun, ticket):
            link = plan.link
            sender = txn.Sender(link, ticket, Codec[checked.codec.upper()], checked.level)
            rows = RowWriter(
                checked.topic, lambda topic: len(link.partitions(topic)), checked.batch_bytes
            )
            for batch in df.toArrow().to_batches():
                for piece in rows.pieces(batch):
                    sender.add(piece)
            sender.flush()
            exactly.commit(ticket, Progress(batch_id, name, "", sender.rows), None)

    return write
