"""The options of source and sink: the names of Spark's own Kafka connector, checked at once.

Spark passes the names in any case. An unknown option is an error, because a misspelt
``failOnDataLoss`` would otherwise silently change the guarantees. Options of Kafka's clients that
have no effect here (there is no consumer group and no linger, and ``acks`` is always ``all``) are
ignored, and the log says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fencepost.client.cluster import parse_bootstrap
from fencepost.client.security import PLAINTEXT, PREFIXES, Security, SecurityError
from fencepost.pipelines.spark import client_options
from fencepost.pipelines.spark.broker import (
    DEFAULT_TIMEOUT_MS,
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    ClusterConnection,
    connection,
)
from fencepost.pipelines.spark.errors import OptionError
from fencepost.pipelines.spark.offsets import Offsets, Partition

DEFAULT_TRIGGER_DELAY_MS = 15 * 60 * 1000
"""``maxTriggerDelay``: how long ``minOffsetsPerTrigger`` may delay a micro-batch."""
DEFAULT_FETCH_BYTES = 8 * 1024 * 1024
"""``kafka.fetch.max.bytes``: the size of one Fetch response; a task uses several times as much
memory."""
DEFAULT_BATCH_BYTES = 900_000
"""The size of a record batch before compression; ``kafka.max.request.size`` lowers it. It is below
the broker's default ``max.message.bytes`` of 1,048,588, with room for incompressible data. Kafka's
``batch.size`` has no effect: it limits what a producer collects while other batches are sent."""
DEFAULT_TRANSACTION_TIMEOUT_MS = 600_000
"""``kafka.transaction.timeout.ms``: the time limit of a micro-batch. Brokers allow up to 15 min by
default (``transaction.max.timeout.ms``)."""
MAX_TRANSACTIONAL_ID_BYTES = 249
"""The length limit of our transactional ids; the ids are also parts of group names."""

_LEAST = -(1 << 17)
"""The lowest compression level of any codec: the lowest level of zstd."""
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
MODES = ("auto", "direct", "staged")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHARED = _names("""
    kafka.bootstrap.servers kafka.client.id kafka.default.api.timeout.ms
""")
_KAFKA = "kafka."
_OF_SECURITY = tuple(f"{_KAFKA}{prefix}" for prefix in PREFIXES)
_PROTOCOL = "kafka.security.protocol"
"""Without this option the other security options have no effect, as in Kafka's clients."""
_OF_SOURCE = _names("""
    subscribe subscribepattern assign startingoffsets endingoffsets startingtimestamp
    endingtimestamp startingoffsetsbytimestamp endingoffsetsbytimestamp
    startingoffsetsbytimestampstrategy maxoffsetspertrigger minoffsetspertrigger maxtriggerdelay
    minpartitions maxrecordsperpartition failondataloss includeheaders kafka.isolation.level
    kafka.fetch.max.bytes kafka.max.partition.fetch.bytes
""")
_OF_SINK = _names("""
    topic mode progress.topic checkpointlocation includeheaders includetimestamp
    kafka.transactional.id kafka.transaction.timeout.ms kafka.compression.type
    kafka.compression.level kafka.compression.gzip.level kafka.compression.lz4.level
    kafka.compression.zstd.level kafka.max.request.size kafka.delivery.timeout.ms
""")
_OF_SPARK = frozenset({"path", "queryname", "__partition_columns"})
"""Options that Spark itself may add to a sink's."""

_UNITS_MS = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
"""The units of times in Spark's options; a plain number is in milliseconds."""


class _Reader:
    """Typed access to the options; errors name the option and its value."""

    def __init__(self, options: Mapping[str, str], names: Iterable[str], what: str) -> None:
        self.options = {key.lower(): value for key, value in options.items() if value is not None}
        allowed = {*_SHARED, *names}
        others = sorted(set(self.options) - allowed - _OF_SPARK)
        if _PROTOCOL in self.options:
            others = [name for name in others if not name.startswith(_OF_SECURITY)]
        for name in others:
            if name in client_options.INSTEAD:
                raise OptionError(f"{name} can't be set: {client_options.INSTEAD[name]}")
        idle = [
            name
            for name in others
            if name in client_options.OF_CONNECTOR
            or client_options.is_known(name)
            or name.startswith(_OF_SECURITY)
        ]
        unknown = [name for name in others if name not in idle]
        if unknown:
            raise OptionError(
                f"the {what} has no option {', '.join(map(repr, unknown))}; it knows"
                f" {', '.join(sorted(allowed))}, kafka.security.protocol, kafka.sasl.* and"
                " kafka.ssl.*, and ignores the other options of Kafka's clients"
            )
        for name in idle:
            client_options.warn_once(f"the {what}'s option {name} has no effect")

    def get(self, name: str) -> str | None:
        return self.options.get(name.lower())

    def text(self, name: str, default: str) -> str:
        value = self.get(name)
        return default if value is None else value.strip()

    def number(self, name: str, default: int, lowest: int = 1) -> int:
        value = self.optional_number(name, lowest)
        return default if value is None else value

    def optional_number(self, name: str, lowest: int = 1) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        try:
            number = int(value)
        except ValueError:
            raise OptionError(f"{name} is a whole number, not {value!r}") from None
        if number < lowest:
            raise OptionError(f"{name} is at least {lowest}, not {number}")
        return number

    def duration_ms(self, name: str, default_ms: int) -> int:
        value = self.get(name)
        if value is None:
            return default_ms
        match = re.fullmatch(r"(\d+)\s*([a-z]*)", value.strip().lower())
        if match is None or match[2] not in _UNITS_MS:
            raise OptionError(
                f"{name} is a time such as 90s, with one of {', '.join(filter(None, _UNITS_MS))},"
                f" not {value!r}"
            )
        return int(match[1]) * _UNITS_MS[match[2]]

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.text(name, str(default)).lower()
        if value not in {"true", "false"}:
            raise OptionError(f"{name} is true or false, not {value!r}")
        return value == "true"

    def choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        value = self.text(name, default).lower()
        if value not in choices:
            raise OptionError(f"{name} is one of {', '.join(choices)}, not {value!r}")
        return value

    def bootstrap(self) -> str:
        value = self.get("kafka.bootstrap.servers")
        if not value:
            raise OptionError("the option kafka.bootstrap.servers is missing")
        try:
            parse_bootstrap(value)
        except ValueError as error:
            raise OptionError(f"kafka.bootstrap.servers: {error}") from None
        return value


def security_of(options: Mapping[str, str]) -> Security:
    """Return TLS and login from lower-case options. Raises :class:`OptionError`.

    The error quotes no value.
    """
    if _PROTOCOL not in options:
        return PLAINTEXT
    try:
        return Security.of({name.removeprefix(_KAFKA): options[name] for name in options})
    except SecurityError as error:
        raise OptionError(f"{_KAFKA}{error}") from None


@dataclass(frozen=True, slots=True)
class PositionBound:
    """A start or an end position, before the broker has resolved it.

    ``everywhere`` is LATEST, EARLIEST or a timestamp, or None if ``by_partition`` lists all
    partitions. With ``is_timestamp`` the numbers are milliseconds to look up, else offsets (or −1,
    −2).
    """

    everywhere: int | None
    by_partition: tuple[tuple[Partition, int], ...] = ()
    is_timestamp: bool = False


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The cluster's address, and the login."""

    bootstrap: str
    client_id: str
    timeout_ms: int
    security: Security

    @property
    def link(self) -> ClusterConnection:
        """This thread's connection to the cluster."""
        return connection(self.bootstrap, self.client_id, self.timeout_ms, self.security)


@dataclass(frozen=True, slots=True)
class SourceOptions(ClusterOptions):
    """The parsed options of a source."""

    topics: tuple[str, ...]
    pattern: str | None
    assigned: tuple[Partition, ...]
    starting: PositionBound
    ending: PositionBound
    latest_when_no_record: bool
    """``startingOffsetsByTimestampStrategy=latest``: a partition without a later record starts
    at its end."""
    max_offsets: int | None
    min_offsets: int | None
    max_trigger_delay_ms: int
    """The longest delay of a batch because of ``min_offsets``."""
    min_partitions: int | None
    max_records_per_partition: int | None
    fail_on_data_loss: bool
    include_headers: bool
    isolation: int
    fetch_bytes: int


@dataclass(frozen=True, slots=True)
class SinkOptions(ClusterOptions):
    """The parsed options of a sink."""

    topic: str | None
    progress_topic: str | None
    mode: str
    checkpoint: str | None
    transactional_id: str | None
    transaction_timeout_ms: int
    codec: str
    level: int | None
    batch_bytes: int
    include_timestamp: bool
    """Whether a column ``timestamp`` becomes the record's time; the stock sink ignores it."""

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the sink writes; a query may have others."""
        names = {"key", "value", "topic", "partition", "headers"}
        return frozenset(names | {"timestamp"} if self.include_timestamp else names)


def source_options(options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Check the options of a source. Raises :class:`OptionError`."""
    read = _Reader(options, _OF_SOURCE, "source")
    topics, pattern, assigned = _subscription(read)
    starting = _bound(read, "starting", "latest" if streaming else "earliest")
    if not streaming and starting.everywhere == LATEST:
        raise OptionError("startingOffsets can't be latest in a batch query")
    if not streaming and any(
        offset == LATEST for _, offset in starting.by_partition if not starting.is_timestamp
    ):
        raise OptionError("startingOffsets can't hold -1 (latest) in a batch query")
    if streaming and any(
        read.get(name) for name in ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
    ):
        raise OptionError("a streaming query has no ending offsets")
    ending = _bound(read, "ending", "latest")
    if ending.everywhere == EARLIEST or (
        not ending.is_timestamp and any(offset == EARLIEST for _, offset in ending.by_partition)
    ):
        raise OptionError("endingOffsets can't be earliest")
    isolation = read.choice(
        "kafka.isolation.level", "read_committed", ("read_committed", "read_uncommitted")
    )
    least, most = (
        read.optional_number("minOffsetsPerTrigger"),
        read.optional_number("maxOffsetsPerTrigger"),
    )
    if least is not None and most is not None and least > most:
        raise OptionError(f"minOffsetsPerTrigger {least} is above maxOffsetsPerTrigger {most}")
    strategy = read.choice("startingOffsetsByTimestampStrategy", "error", ("error", "latest"))
    return SourceOptions(
        bootstrap=read.bootstrap(),
        client_id=read.text("kafka.client.id", "fencepost-spark-source"),
        timeout_ms=read.number("kafka.default.api.timeout.ms", DEFAULT_TIMEOUT_MS),
        security=security_of(read.options),
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        starting=starting,
        ending=ending,
        latest_when_no_record=strategy == "latest",
        max_offsets=most,
        min_offsets=least,
        max_trigger_delay_ms=read.duration_ms("maxTriggerDelay", DEFAULT_TRIGGER_DELAY_MS),
        min_partitions=read.optional_number("minPartitions"),
        max_records_per_partition=read.optional_number("maxRecordsPerPartition"),
        fail_on_data_loss=read.flag("failOnDataLoss", default=True),
        include_headers=read.flag("includeHeaders", default=False),
        isolation=READ_COMMITTED if isolation == "read_committed" else READ_UNCOMMITTED,
        fetch_bytes=min(
            read.number("kafka.fetch.max.bytes", DEFAULT_FETCH_BYTES, 1024),
            read.number("kafka.max.partition.fetch.bytes", DEFAULT_FETCH_BYTES, 1024),
        ),
    )


def _subscription(
    read: _Reader,
) -> tuple[tuple[str, ...], str | None, tuple[Partition, ...]]:
    names = ("subscribe", "subscribePattern", "assign")
    given = [name for name in names if read.get(name)]
    if len(given) != 1:
        raise OptionError(
            f"set exactly one of {', '.join(names)}; given: {', '.join(given) or 'none'}"
        )
    text = read.text(given[0], "")
    if given[0] == "subscribe":
        topics = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        if not topics:
            raise OptionError(f"subscribe names no topic: {text!r}")
        return topics, None, ()
    if given[0] == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise OptionError(f"subscribePattern {text!r}: {error}") from None
        return (), text, ()
    subscriptions = []
    for topic, indexes in _json_object("assign", text).items():
        if not isinstance(indexes, list) or not all(_is_index(index) for index in indexes):
            raise OptionError(f'assign is {{"topic": [0, 1]}}, not {text!r}')
        subscriptions += [(topic, index) for index in indexes]
    if not subscriptions:
        raise OptionError(f"assign names no partition: {text!r}")
    return (), None, tuple(dict.fromkeys(subscriptions))


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _json_object(name: str, text: str) -> dict[str, object]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{name} is not JSON ({error}): {text!r}") from None
    if not isinstance(parsed, dict):
        raise OptionError(f"{name} is a JSON object by topic, not {text!r}")
    return parsed


def offsets_from_json(name: str, text: str) -> Offsets:
    """Read ``{"topic": {"0": 12}}``. Raises :class:`OptionError`."""
    offsets: Offsets = {}
    for topic, rows in _json_object(name, text).items():
        if not isinstance(rows, dict):
            raise OptionError(f'{name} is {{"topic": {{"0": 12}}}}, not {text!r}')
        for index, offset in rows.items():
            is_number = isinstance(offset, int) and not isinstance(offset, bool)
            if not index.isdecimal() or not is_number:
                raise OptionError(f"{name}: {topic} {index!r}: {offset!r} is not an offset")
            offsets[topic, int(index)] = offset
    return offsets


def _bound(read: _Reader, which: str, default: str) -> PositionBound:
    """Read a bound. As in the stock connector, a timestamp for all partitions takes precedence."""
    timestamp = read.optional_number(f"{which}Timestamp", 0)
    if timestamp is not None:
        return PositionBound(timestamp, is_timestamp=True)
    name = f"{which}OffsetsByTimestamp"
    text = read.get(name)
    if text:
        stamps = offsets_from_json(name, text)
        if any(stamp < 0 for stamp in stamps.values()):
            raise OptionError(f"{name} holds a negative timestamp: {text!r}")
        return PositionBound(None, tuple(stamps.items()), is_timestamp=True)
    name = f"{which}Offsets"
    text = read.text(name, default)
    if text.lower() in {"earliest", "latest"}:
        return PositionBound(EARLIEST if text.lower() == "earliest" else LATEST)
    offsets = offsets_from_json(name, text)
    if any(offset < EARLIEST for offset in offsets.values()):
        raise OptionError(f"{name} holds an offset below -2: {text!r}")
    return PositionBound(None, tuple(offsets.items()))


def sink_options(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Check the options of a sink. Raises :class:`OptionError`."""
    lowered = {key.lower(): value for key, value in options.items() if value is not None}
    if lowered.pop("asyncprogresstrackingenabled", "false").lower() == "true":
        raise OptionError(
            "asyncProgressTrackingEnabled writes Spark's commit log late and not for every batch:"
            " the exactly-once sink can't rely on it"
        )
    lowered.pop("asyncprogresstrackingcheckpointintervalms", None)
    read = _Reader(lowered, _OF_SINK, "sink")
    codec = read.choice("kafka.compression.type", "none", CODECS)
    level_name = f"kafka.compression.{codec}.level"
    transactional_id = read.get("kafka.transactional.id")
    if transactional_id is not None:
        size = len(transactional_id.encode())
        if not 0 < size <= MAX_TRANSACTIONAL_ID_BYTES:
            raise OptionError(
                f"kafka.transactional.id has 1 to {MAX_TRANSACTIONAL_ID_BYTES} bytes, not {size}"
            )
    topic = read.get("topic")
    progress = read.get("progress.topic") or topic
    if streaming and progress is None:
        raise OptionError(
            "the sink keeps its progress with a topic: set the option topic, or progress.topic if"
            " a column names each row's topic"
        )
    return SinkOptions(
        bootstrap=read.bootstrap(),
        client_id=read.text("kafka.client.id", "fencepost-spark-sink"),
        timeout_ms=read.number("kafka.delivery.timeout.ms", DEFAULT_TIMEOUT_MS),
        security=security_of(read.options),
        topic=topic,
        progress_topic=progress,
        mode=read.choice("mode", "auto", MODES),
        checkpoint=read.get("checkpointLocation"),
        transactional_id=transactional_id,
        transaction_timeout_ms=read.number(
            "kafka.transaction.timeout.ms", DEFAULT_TRANSACTION_TIMEOUT_MS
        ),
        codec=codec,
        level=read.optional_number(
            level_name if read.get(level_name) else "kafka.compression.level", _LEAST
        ),
        batch_bytes=min(
            read.number("kafka.max.request.size", DEFAULT_BATCH_BYTES), DEFAULT_BATCH_BYTES
        ),
        include_timestamp=read.flag("includeTimestamp", default=False),
    )
