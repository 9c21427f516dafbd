"""The columns of a sink, and their encoding into batches by topic-partition.

The columns have the names and types of the stock Kafka sink: ``value``, and optionally ``key``,
``topic``, ``partition``, ``headers``; also ``timestamp`` if the options enable it. Other columns
are ignored, as by the stock sink.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    StringType,
    StructType,
    TimestampType,
)

from fencepost.pipelines.spark.client_options import warn_once
from fencepost.pipelines.spark.columns import Piece, Rows, encode_rows
from fencepost.pipelines.spark.errors import OptionError, SparkPipelineError
from fencepost.pipelines.spark.options import SinkOptions
from fencepost.pipelines.spark.partitioner import partitions_of
from fencepost.pipelines.spark.tally import RowTally

PREPARED = "fencepost"
"""The key of the column metadata by which ``prepare`` describes its result to the sink."""

_HEADERS = ArrayType(StructType().add("key", StringType()).add("value", BinaryType()))
_TYPES: Mapping[str, tuple[DataType, ...]] = {
    "key": (BinaryType(), StringType()),
    "value": (BinaryType(), StringType()),
    "topic": (StringType(),),
    "partition": (IntegerType(),),
    "headers": (_HEADERS,),
    "timestamp": (TimestampType(),),
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of ``prepare``.

    Task t of ``writers`` has the rows of the partitions whose number is t modulo ``writers``.
    """

    topic: str
    writers: int


def _fits(actual: DataType, allowed: Sequence[DataType]) -> bool:
    """Return whether a type matches one of ``allowed``, except for nullability and case of names.

    Source: ``KafkaWriter.expression``, ``DataTypeUtils.sameType``.
    """
    return any(_same(actual, value) for value in allowed)


def _same(actual: DataType, expected: DataType) -> bool:
    if isinstance(actual, ArrayType) and isinstance(expected, ArrayType):
        return _same(actual.elementType, expected.elementType)
    if isinstance(actual, StructType) and isinstance(expected, StructType):
        return len(actual) == len(expected) and all(
            one.name.lower() == other.name.lower() and _same(one.dataType, other.dataType)
            for one, other in zip(actual, expected, strict=True)
        )
    return isinstance(actual, type(expected))


def check_schema(schema: StructType, options: SinkOptions) -> Prepared | None:
    """Check a sink's columns; return ``prepare``'s result. Raises :class:`OptionError`."""
    names = schema.fieldNames()
    topic, columns = options.topic, options.columns
    for name in names:
        if name not in columns:
            hint = "; includeTimestamp=true makes it the record's" if name == "timestamp" else ""
            warn_once(f"the sink leaves column {name} aside{hint}")
    if "value" not in names:
        raise OptionError(f"a column 'value' is missing; there are {', '.join(names) or 'none'}")
    if topic is None and "topic" not in names:
        raise OptionError("neither the option topic nor a column 'topic' says where rows go")
    for field in schema.fields:
        if field.name in columns and not _fits(field.dataType, _TYPES[field.name]):
            kinds = " or ".join(kind.simpleString() for kind in _TYPES[field.name])
            raise OptionError(
                f"column {field.name} is {field.dataType.simpleString()}, not {kinds}"
            )
    prepared = schema["partition"].metadata.get(PREPARED) if "partition" in names else None
    return Prepared(str(prepared["topic"]), int(prepared["writers"])) if prepared else None


class RowWriter:
    """Turns Arrow batches into pieces of record batches, grouped by topic-partition.

    ``partitions`` returns the number of a topic's partitions. ``first_count`` limits the records of
    the first batch of each topic-partition. ``tally`` counts all rows.
    """

    def __init__(
        self,
        options: SinkOptions,
        partitions: Callable[[str], int],
        tally: RowTally,
        first_count: int | None = None,
    ) -> None:
        self._topic = options.topic
        self._columns = options.columns
        self._partitions = partitions
        self._batch_bytes = options.batch_bytes
        self.tally = tally
        self._first_count = first_count
        self._begun: set[tuple[str, int]] = set()

    def count(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """Count the rows of one Arrow batch without encoding them; return the sink's columns."""
        columns = {
            name: column
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
            if name in self._columns
        }
        self.tally.add(columns, batch.num_rows)
        return columns

    def pieces(self, batch: pa.RecordBatch) -> Iterator[Piece]:
        """Encode one Arrow batch. The order within a topic-partition is kept."""
        if not batch.num_rows:
            return
        columns = self.count(batch)
        for topic, rows in self._by_topic(columns, batch.num_rows):
            yield from self._of_topic(topic, rows)

    def _by_topic(
        self, columns: dict[str, Any], count: int
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        topics = columns.pop("topic", None)
        if self._topic is not None:
            yield self._topic, columns
            return
        if topics is None or topics.null_count:
            raise SparkPipelineError("a row's topic is null, and the option topic is not given")
        for topic in topics.unique().to_pylist():
            rows = pa.array(np.arange(count)).filter(pc.equal(topics, topic))
            yield topic, {name: column.take(rows) for name, column in columns.items()}

    def _of_topic(self, topic: str, columns: dict[str, Any]) -> Iterator[Piece]:
        rows = Rows(
            keys=_binary(columns.get("key")),
            values=_binary(columns["value"]),
            timestamps_ms=_stamps(columns.get("timestamp"), len(columns["value"])),
            headers=columns.get("headers"),
        )
        targets = self._targets(topic, columns.get("partition"), rows)
        order = np.argsort(targets, kind="stable")
        sorted_targets = targets[order]
        edges = [0, *(np.flatnonzero(np.diff(sorted_targets)) + 1), len(targets)]
        if len(edges) > 2:
            rows = Rows(*(column if column is None else column.take(order) for column in rows))
        for begin, behind in pairwise(edges):
            index = int(sorted_targets[begin])
            part = topic, index
            first = None if part in self._begun else self._first_count
            self._begun.add(part)
            topic_rows = Rows(
                *(column if column is None else column[begin:behind] for column in rows)
            )
            yield from encode_rows(topic, index, topic_rows, self._batch_bytes, first)

    def _targets(self, topic: str, given: Any, rows: Rows) -> Any:
        """Return each row's partition, int32[n].

        The partition is the value of the row's column ``partition``; without one, it follows from
        the row's key. All rows without either get the same partition.
        """
        count = self._partitions(topic)
        if given is not None and not given.null_count:
            targets = given.to_numpy(zero_copy_only=False)
        else:
            # Rows without a key go to one partition per Arrow batch, chosen at random each time.
            unkeyed = random.randrange(count)  # noqa: S311 - a choice of partition is no secret
            if rows.keys is None:
                targets = np.full(len(rows.values), unkeyed, np.int32)
            else:
                targets = partitions_of(rows.keys, count, unkeyed)
            if given is not None:
                chosen = given.fill_null(-1).to_numpy(zero_copy_only=False)
                targets = np.where(chosen >= 0, chosen, targets)
        if targets.size and (targets.min() < 0 or targets.max() >= count):
            raise SparkPipelineError(
                f"a row asks for partition {targets.max()} or {targets.min()} of {topic!r}, which"
                f" has {count}"
            )
        return targets


def _binary(column: Any) -> Any:
    return column if column is None or column.type == pa.binary() else column.cast(pa.binary())


def _stamps(column: Any, count: int) -> Any:
    """Return timestamps in ms; the present time for null."""
    now_ms = int(time.time() * 1000)
    if column is None:
        return np.full(count, now_ms, np.int64)
    micros = column.cast(pa.timestamp("us", tz="UTC"), safe=False).cast(pa.int64())
    filled = micros.fill_null(now_ms * 1000).to_numpy(zero_copy_only=False)
    return filled // 1000
