"""The source of ``format("fencepost")``: plans a query's offset ranges, and reads them.

For a streaming query Spark plans with one :class:`StreamReader`, in a process of its own, and reads
with pickled copies of another one. So ``read`` must not depend on the state of planning.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pyarrow import RecordBatch
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from fencepost.cluster.topic_names import hint
from fencepost.pipelines.spark import offsets as plan
from fencepost.pipelines.spark.broker import LATEST, RETRY_PAUSE_S
from fencepost.pipelines.spark.client_options import warn_once
from fencepost.pipelines.spark.errors import (
    BrokerError,
    DataLossError,
    OptionError,
    plain_errors,
)
from fencepost.pipelines.spark.offsets import OffsetRange, Offsets, Partition
from fencepost.pipelines.spark.options import PositionBound, SourceOptions, source_options
from fencepost.pipelines.spark.read import read_range
from fencepost.pipelines.spark.worker import settled

Json = dict[str, dict[str, int]]

INITIAL: Json = {"": {}}
"""Stands for the start of a new query, which the options determine; it cannot be mistaken for
offsets, because no topic has an empty name. Spark passes this value back with the first batch,
beside the batch's end, and never stores it."""

_log = logging.getLogger(__name__)


class RangePartition(InputPartition):
    """One range, as Spark ships it to a task."""

    def __init__(self, offset_range: OffsetRange) -> None:
        super().__init__(offset_range)
        self.wanted = offset_range


class Planner:
    """Looks up partitions and offsets.

    A planner can be pickled, because it does not hold the connection: each process has its own.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def partitions(self, former: Iterable[Partition] = ()) -> list[Partition]:
        """Return every partition that the query reads, including new ones.

        Partitions of ``former`` that are missing are looked up again until ``timeout_ms`` are
        over: a broker that is starting, or does not know a topic yet, answers in the same way as
        one that has deleted it.
        """
        before = set(former)
        deadline = time.monotonic() + self.options.timeout_ms / 1000
        while True:
            partitions, missing = self._find_partitions()
            lost = before - set(partitions)
            is_new = not any(topic in missing for topic, _ in before)
            if not lost and not missing:
                return partitions
            self.options.link.check_visible({*missing, *(topic for topic, _ in lost)})
            if (missing and is_new) or time.monotonic() > deadline:
                break
            time.sleep(RETRY_PAUSE_S)
        if missing:
            there = self.options.link.topics()
            texts = (f"{name}{hint(name, there)}" for name in missing)
            raise BrokerError(f"topics do not exist: {', '.join(texts)}")
        return partitions

    def _find_partitions(self) -> tuple[list[Partition], list[str]]:
        """Return the existing partitions, and the named topics that are missing."""
        topics = self.options.link.topics(refresh=True)
        if self.options.assigned:
            return list(self.options.assigned), []
        names = list(self.options.topics)
        if self.options.pattern is not None:
            matching = re.compile(self.options.pattern)
            # As in the stock connector the pattern may match any part of a name. Source:
            # ``SubscribePatternStrategy.assignedTopicPartitions``.
            names = [
                name
                for name in sorted(topics)
                if matching.search(name) and not topics[name].is_internal
            ]
            if not names:
                warn_once(f"no topic matches subscribePattern {self.options.pattern!r}")
        missing = [
            name
            for name in self.options.topics
            if name not in topics or not topics[name].partitions
        ]
        there = [name for name in names if name not in missing]
        return [(name, at) for name in there for at in sorted(topics[name].partitions)], missing

    def latest(self, partitions: Sequence[Partition]) -> Offsets:
        """Return the end of each partition: under read_committed the last stable offset."""
        return self._list_offsets(dict.fromkeys(partitions, LATEST))

    def beginning(self, end: Offsets) -> Offsets:
        """Return the start of a new query whose first batch ends at ``end``.

        Spark does not store it, and asks again whenever it repeats that batch. New records and new
        partitions do not change the result. Raises :class:`OptionError` if the options omit
        partitions.
        """
        start = self._resolve(self.options.starting, "starting", sorted(end), end)
        if not self.options.starting.is_timestamp:
            return start
        return {part: min(offset, end[part]) for part, offset in start.items()}

    def starting(self) -> Offsets:
        """Return a batch query's start. Raises :class:`OptionError` for omitted partitions."""
        return self._resolve(self.options.starting, "starting", self.partitions())

    def ending(self, partitions: Sequence[Partition]) -> Offsets:
        """Return a batch query's end."""
        return self._resolve(self.options.ending, "ending", partitions)

    def _resolve(
        self,
        bound: PositionBound,
        which: str,
        partitions: Sequence[Partition],
        latest: Offsets | None = None,
    ) -> Offsets:
        """Resolve a bound to offsets; ``latest`` holds the end offsets if they are known."""
        if bound.everywhere is not None:
            positions = dict.fromkeys(partitions, bound.everywhere)
        else:
            positions = dict(bound.by_partition)
            if set(positions) != set(partitions):
                raise OptionError(
                    f"{which}Offsets names {sorted(positions)}, but the query reads"
                    f" {sorted(partitions)}: name every partition; -2 is the earliest offset,"
                    " -1 the latest"
                )
        if not bound.is_timestamp:
            if latest is not None:
                positions = {p: latest[p] if at == LATEST else at for p, at in positions.items()}
            return positions | self._list_offsets({p: at for p, at in positions.items() if at < 0})
        offsets = self._list_offsets(positions)
        none = [part for part, offset in offsets.items() if offset < 0]
        if none and which == "starting" and not self.options.latest_when_no_record:
            raise OptionError(
                f"{none} have no record at or after the starting timestamp; with"
                " startingOffsetsByTimestampStrategy=latest the query begins at their end"
            )
        ends = self.latest(none) if latest is None else latest
        return offsets | {part: ends[part] for part in none}

    def _list_offsets(self, timestamps: Offsets) -> Offsets:
        return (
            self.options.link.list_offsets(timestamps, self.options.isolation) if timestamps else {}
        )

    def split(self, start: Offsets, end: Offsets) -> list[RangePartition]:
        """Split a batch into tasks, as a pure function, so that a replay reads the same rows."""
        options = self.options
        ranges = plan.ranges(
            start,
            end,
            fail_on_data_loss=options.fail_on_data_loss,
            min_partitions=options.min_partitions,
            max_records=options.max_records_per_partition,
        )
        return [RangePartition(offset_range) for offset_range in ranges]


@plain_errors
class BatchReader(DataSourceReader):
    """``spark.read.format("fencepost")``: the offsets are looked up once, during planning."""

    def __init__(self, options: SourceOptions) -> None:
        self._planner = Planner(options)

    def partitions(self) -> Sequence[InputPartition]:
        """Return one input partition per non-empty range."""
        start = self._planner.starting()
        end = self._planner.ending(sorted(start))
        for part in sorted(start):
            if start[part] > end[part] and self._planner.options.fail_on_data_loss:
                raise OptionError(
                    f"{part[0]}-{part[1]}: starting offset {start[part]} is beyond the end,"
                    f" {end[part]}"
                )
        return self._planner.split(start, end) or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """Yield the rows of one range as Arrow batches."""
        if isinstance(partition, RangePartition):
            yield from read_range(self._planner.options, partition.wanted)


@plain_errors
class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """``spark.readStream.format("fencepost")``."""

    def __init__(self, options: SourceOptions) -> None:
        self._planner = Planner(options)
        self._pinned: Offsets | None = None
        self._latest: Offsets | None = None
        self._triggered_at: float | None = None

    def initialOffset(self) -> Json:  # noqa: N802 - Spark's name
        """Return the constant that stands for the start of a new query."""
        return INITIAL

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit ``maxOffsetsPerTrigger``, which bounds the rows."""
        least, most = self._planner.options.min_offsets, self._planner.options.max_offsets
        if most is not None:
            return ReadMaxRows(most)
        return ReadAllAvailable() if least is None else ReadMinRows(least)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end: later records are left to the next run."""
        self._pinned = self._planner.latest(self._planner.partitions())

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:  # noqa: N802 - Spark's name
        """Return the end of the next batch.

        Raises :class:`DataLossError` if a partition of ``start`` is gone or went backwards.
        """
        former = () if start == INITIAL else plan.from_json(start)
        self._latest = self._ends(former)
        begin = self._begin(start, self._latest)
        lost = [
            f"{part[0]}-{part[1]} from {offset} to {self._latest.get(part, 'nothing')}"
            for part, offset in sorted(begin.items())
            if self._latest.get(part, -1) < offset
        ]
        if lost:
            message = f"end offsets went backwards: {'; '.join(lost)}"
            if self._planner.options.fail_on_data_loss:
                raise DataLossError(f"{message}; {plan.DATA_LOSS_HINT}")
            _log.warning("%s; continuing with the remaining records", message)
        # ``availableNow`` reads everything, so minOffsetsPerTrigger does not delay it.
        if not isinstance(limit, ReadAllAvailable) and self._is_too_early(begin, self._latest):
            return plan.to_json(begin)
        if isinstance(limit, ReadMaxRows):
            return plan.to_json(plan.limit(begin, self._latest, limit.max_rows))
        return plan.to_json(self._latest)

    def _ends(self, former: Iterable[Partition]) -> Offsets:
        """Return the partitions' ends, as of now or as of the start of an ``availableNow`` run."""
        planner = self._planner
        if self._pinned is None:
            return planner.latest(planner.partitions(former))
        if not set(former) <= self._pinned.keys():
            again = planner.partitions(former)
            unseen = [part for part in again if part in set(former) - self._pinned.keys()]
            self._pinned |= planner.latest(unseen)
        return self._pinned

    def _begin(self, start: Json, end: Offsets) -> Offsets:
        return self._planner.beginning(end) if start == INITIAL else plan.from_json(start)

    def _is_too_early(self, begin: Offsets, latest: Offsets) -> bool:
        """Return whether ``minOffsetsPerTrigger`` delays the batch.

        The first batch of a run is not delayed, and neither is ``availableNow``.
        Source: ``KafkaMicroBatchStream.delayBatch``.
        """
        options = self._planner.options
        if options.min_offsets is None or self._pinned is not None:
            return False
        now = time.monotonic()
        is_due = (
            self._triggered_at is None
            or (now - self._triggered_at) * 1000 >= options.max_trigger_delay_ms
            or plan.lag(begin, latest) >= options.min_offsets
        )
        if is_due:
            self._triggered_at = now
        return not is_due

    def reportLatestOffset(self) -> Json | None:  # noqa: N802 - Spark's name
        """Return the last known end: ``latestOffset`` in the query's progress, for the lag."""
        return None if self._latest is None else plan.to_json(self._latest)

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        """Return the tasks of one batch without asking the broker: a replay has the same tasks.

        The exception is the first batch of a query that starts at the earliest offsets. These
        offsets are looked up again, so records that were deleted meanwhile are skipped without an
        error.
        """
        until = plan.from_json(end)
        return self._planner.split(self._begin(start, until), until)

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """Yield the rows of one range as Arrow batches."""
        if isinstance(partition, RangePartition):
            yield from read_range(self._planner.options, partition.wanted)


@settled
def batch_reader(options: Mapping[str, str]) -> BatchReader:
    """Return the reader of ``spark.read``. Raises :class:`OptionError`."""
    return BatchReader(source_options(options, streaming=False))


@settled
def stream_reader(options: Mapping[str, str]) -> StreamReader:
    """Return the reader of ``spark.readStream``. Raises :class:`OptionError`."""
    return StreamReader(source_options(options, streaming=True))
