"""Options, offset planning and the sink's progress, without Spark or a broker."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.client.security import PLAINTEXT
from fencepost.pipelines.spark import client_options
from fencepost.pipelines.spark import offsets as plan
from fencepost.pipelines.spark.broker import EARLIEST, LATEST, READ_COMMITTED, READ_UNCOMMITTED
from fencepost.pipelines.spark.checkpoint import PlannedBatch, local_folder, read_checkpoint
from fencepost.pipelines.spark.errors import DataLossError, OptionError, ProgressError
from fencepost.pipelines.spark.lag import behind_latest
from fencepost.pipelines.spark.offsets import OffsetRange
from fencepost.pipelines.spark.options import (
    SinkOptions,
    SourceOptions,
    sink_options,
    source_options,
)
from fencepost.pipelines.spark.progress import BatchState, Progress, batch_state, check_same

BOOTSTRAP = {"kafka.bootstrap.servers": "127.0.0.1:9092"}
SECRET = "hunter2"
SECURE = {
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.mechanism": "SCRAM-SHA-512",
    "kafka.sasl.jaas.config": (
        "org.apache.kafka.common.security.scram.ScramLoginModule required"
        f' username="alice" password="{SECRET}";'
    ),
}


def source(streaming: bool = True, **options: str) -> SourceOptions:
    given_options = BOOTSTRAP | {key.replace("_", "."): value for key, value in options.items()}
    if not {"subscribe", "assign", "subscribePattern"} & given_options.keys():
        given_options["subscribe"] = "t"
    return source_options(given_options, streaming=streaming)


def sink(**options: str) -> SinkOptions:
    given_options = BOOTSTRAP | {"topic": "t"}
    given_options |= {key.replace("_", "."): value for key, value in options.items()}
    return sink_options(given_options, streaming=True)


def test_source_defaults_equal_the_stock_connectors_except_for_isolation() -> None:
    streaming, batch = source(), source(streaming=False)
    assert streaming.starting.everywhere == LATEST
    assert batch.starting.everywhere == EARLIEST
    assert batch.ending.everywhere == LATEST
    assert streaming.fail_on_data_loss
    assert not streaming.include_headers
    assert streaming.isolation == READ_COMMITTED
    assert source(kafka_isolation_level="read_uncommitted").isolation == READ_UNCOMMITTED


def test_security_options_have_the_stock_names_and_hide_secrets() -> None:
    options = {key.upper(): value for key, value in SECURE.items()}
    for found in (source(**options), sink(**options)):
        security = found.security
        assert (security.protocol, security.mechanism) == ("SASL_SSL", "SCRAM-SHA-512")
        assert (security.username, security.password) == ("alice", SECRET)
        assert SECRET not in repr(found)
        assert pickle.loads(pickle.dumps(found)) == found
    assert source().security == PLAINTEXT


@pytest.mark.parametrize(
    "wrong",
    [
        {"kafka.sasl.jaas.config": f'x.PlainLoginModule required password="{SECRET}";'},
        {"kafka.sasl.jaas.config": f'x.ScramLoginModule required password="{SECRET}"'},
        {"kafka.sasl.jaas.confg": SECRET},
        {"kafka.ssl.key.pasword": SECRET},
        {"kafka.ssl.keystore.key": SECRET},
        {"kafka.ssl.truststore.password": SECRET},
        {"kafka.sasl.username": "bob", "kafka.sasl.password": SECRET, "kafka.sasl.mechanism": "X"},
    ],
)
def test_invalid_security_option_is_refused_without_showing_secrets(wrong: dict[str, str]) -> None:
    for read in (source, sink):
        with pytest.raises(OptionError, match=r"kafka\.(sasl|ssl)\.") as refused:
            read(**(SECURE | wrong))
        assert SECRET not in str(refused.value)


def test_option_names_are_case_insensitive() -> None:
    options = {"KAFKA.BOOTSTRAP.SERVERS": "h:1", "SUBSCRIBE": "a, b", "maxoffsetsPERtrigger": "5"}
    found = source_options(options, streaming=True)
    assert found.topics == ("a", "b")
    assert found.max_offsets == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"failOnDataLos": "true"}, "no option 'failondatalos'"),
        ({"subscribe": "a", "assign": '{"a": [0]}'}, "one of subscribe"),
        ({"subscribe": " , "}, "names no topic"),
        ({"subscribePattern": "("}, "subscribePattern"),
        ({"assign": '{"a": 1}'}, "assign is"),
        ({"assign": '{"a": [-1]}'}, "assign is"),
        ({"assign": "{}"}, "names no partition"),
        ({"startingOffsets": "first"}, "not JSON"),
        ({"startingOffsets": '{"a": {"0": -3}}'}, "below -2"),
        ({"startingOffsets": '{"a": {"x": 3}}'}, "is not an offset"),
        ({"startingOffsets": '{"a": {"0": true}}'}, "is not an offset"),
        ({"startingTimestamp": "-1"}, "at least 0"),
        ({"startingOffsetsByTimestamp": '{"a": {"0": -1}}'}, "negative"),
        ({"endingOffsets": "latest"}, "no ending offsets"),
        ({"maxOffsetsPerTrigger": "0"}, "at least 1"),
        ({"minOffsetsPerTrigger": "0"}, "at least 1"),
        ({"minOffsetsPerTrigger": "6", "maxOffsetsPerTrigger": "5"}, "is above"),
        ({"maxTriggerDelay": "soon"}, "is a time"),
        ({"maxTriggerDelay": "5 weeks"}, "is a time"),
        ({"kafka.auto.offset.reset": "earliest"}, "startingOffsets says where"),
        ({"kafka.enable.auto.commit": "true"}, "in Spark's checkpoint"),
        ({"kafka.interceptor.classes": "x.Y"}, "can't be set"),
        ({"kafka.key.deserializer": "x.Y"}, "keys are bytes"),
        ({"kafka.value.deserializer": "x.Y"}, "values are bytes"),
        ({"kafka.fetch.max.byte": "5"}, "no option 'kafka.fetch.max.byte'"),
        ({"topic": "t"}, "no option 'topic'"),
        ({"maxOffsetsPerTrigger": "many"}, "whole number"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"kafka.isolation.level": "serializable"}, "one of read_committed"),
        ({"kafka.security.protocol": "TLS"}, "kafka.security.protocol: it must be one of"),
        ({"kafka.security.protocol": "SASL_SSL"}, "kafka.sasl.mechanism: .* GSSAPI"),
        (
            {"kafka.security.protocol": "SSL", "kafka.ssl.truststore.type": "JKS"},
            "kafka.ssl.truststore.type: only PEM",
        ),
        (SECURE | {"kafka.sasl.jaas.confg": "x"}, "did you mean sasl.jaas.config"),
        (SECURE | {"kafka.sasl.jaas.config": "PlainLoginModule required x;"}, "NAME="),
        ({"kafka.bootstrap.servers": ""}, "is missing"),
        ({"kafka.bootstrap.servers": "host:port"}, "not host:port"),
    ],
)
def test_invalid_source_option_is_refused(options: dict[str, str], message: str) -> None:
    given_options = BOOTSTRAP | options
    if not {"subscribe", "assign", "subscribePattern"} & options.keys():
        given_options["subscribe"] = "t"
    with pytest.raises(OptionError, match=message):
        source_options(given_options, streaming=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": "latest"}, "can't be latest"),
        ({"startingOffsets": '{"t": {"0": -1}}'}, "can't hold -1"),
        ({"endingOffsets": "earliest"}, "can't be earliest"),
        ({"endingOffsets": '{"t": {"0": -2}}'}, "can't be earliest"),
    ],
)
def test_invalid_offsets_of_a_batch_source_are_refused(
    options: dict[str, str], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        source_options(BOOTSTRAP | {"subscribe": "t"} | options, streaming=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topik": "t"}, "no option 'topik'"),
        ({"kafka.key.serializer": "x.Y"}, "keys are bytes"),
        ({"kafka.value.serializer": "x.Y"}, "values are bytes"),
        ({"kafka.partitioner.class": "x.Y"}, "a column partition"),
        ({"asyncProgressTrackingEnabled": "true"}, "asyncProgressTracking"),
        ({"kafka.compression.type": "brotli"}, "one of none"),
        ({"mode": "per-task"}, "one of auto"),
        ({"kafka.transactional.id": ""}, "1 to 249 bytes"),
        ({"kafka.transactional.id": "x" * 250}, "1 to 249 bytes"),
        ({"kafka.transaction.timeout.ms": "0"}, "at least 1"),
    ],
)
def test_invalid_sink_option_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        sink_options(BOOTSTRAP | {"topic": "t"} | options, streaming=True)


def test_streaming_sink_needs_a_topic_for_its_progress() -> None:
    with pytest.raises(OptionError, match="keeps its progress"):
        sink_options(BOOTSTRAP, streaming=True)
    assert sink_options(BOOTSTRAP | {"progress.topic": "p"}, streaming=True).progress_topic == "p"
    assert sink_options(BOOTSTRAP, streaming=False).progress_topic is None
    assert sink(kafka_transactional_id="x" * 249).transactional_id == "x" * 249


@pytest.mark.parametrize(
    ("text", "wanted_ms"),
    [("1500", 1500), ("90s", 90_000), ("2 m", 120_000), ("3min", 180_000), ("1H", 3_600_000)],
)
def test_max_trigger_delay_accepts_sparks_time_units(text: str, wanted_ms: int) -> None:
    assert source(maxTriggerDelay=text).max_trigger_delay_ms == wanted_ms


def test_max_trigger_delay_is_15_minutes_by_default() -> None:
    found = source(minOffsetsPerTrigger="5", maxOffsetsPerTrigger="5")
    assert (found.min_offsets, found.max_offsets) == (5, 5)
    assert found.max_trigger_delay_ms == 15 * 60 * 1000


def test_smaller_of_both_fetch_limits_applies() -> None:
    limits = {"kafka_fetch_max_bytes": "5000", "kafka_max_partition_fetch_bytes": "4000"}
    assert source(**limits).fetch_bytes == 4000
    assert source(kafka_max_partition_fetch_bytes="1024").fetch_bytes == 1024
    with pytest.raises(OptionError, match="at least 1024"):
        source(kafka_max_partition_fetch_bytes="1023")


def test_stock_options_without_effect_are_accepted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client_options.warn_once.cache_clear()
    idle = {"groupIdPrefix": "g", "kafkaConsumer.pollTimeoutMs": "5", "kafka.check.crcs": "false"}
    for _ in range(2):
        assert source_options(BOOTSTRAP | {"subscribe": "t"} | idle, streaming=True).topics == (
            "t",
        )
    assert sorted(caplog.messages) == [
        f"the source's option {name.lower()} has no effect" for name in sorted(idle)
    ]
    caplog.clear()
    assert sink(kafka_acks="all", kafka_ssl_protocol="TLS").topic == "t"
    assert sink(kafka_transactional_id="t").transactional_id == "t"
    assert caplog.messages == [
        "the sink's option kafka.acks has no effect",
        "the sink's option kafka.ssl.protocol has no effect",
    ]


def test_sink_batch_size_is_limited_by_max_request_size() -> None:
    # As in Kafka, batch.size limits the records collected while other batches are in flight.
    assert sink(kafka_batch_size="16384").batch_bytes == 900_000
    assert sink(kafka_max_request_size="500").batch_bytes == 500
    assert sink(kafka_max_request_size="10485760").batch_bytes == 900_000


def test_sink_compression_level_has_kafkas_option_names() -> None:
    levels = {"kafka_compression_zstd_level": "7", "kafka_compression_gzip_level": "1"}
    assert sink(kafka_compression_type="zstd", **levels).level == 7
    assert sink(kafka_compression_type="lz4", **levels).level is None
    assert sink(kafka_compression_type="lz4", kafka_compression_level="3", **levels).level == 3


def test_sink_has_a_timestamp_column_only_if_included() -> None:
    assert "timestamp" not in sink().columns
    assert "timestamp" in sink(includeTimestamp="true").columns


class Told:
    """The progress that PySpark reports for a source."""

    def __init__(self, end: str, latest: str) -> None:
        self.endOffset, self.latestOffset = end, latest


def test_lag_metrics_have_the_stock_connectors_names() -> None:
    found = behind_latest(Told('{"t":{"0":5,"1":7}}', '{"t":{"0":5,"1":10,"2":4}}'))
    assert found == {
        "minOffsetsBehindLatest": "0",
        "maxOffsetsBehindLatest": "4",
        "avgOffsetsBehindLatest": str(7 / 3),
    }
    # PySpark's strings for an absent value.
    for nothing in ("None", "null", "", "{}"):
        assert behind_latest(Told('{"t":{"0":5}}', nothing)) == {}
        assert behind_latest(Told(nothing, '{"t":{"0":5}}')) == {}


T0, T1, T2 = ("t", 0), ("t", 1), ("t", 2)


def test_offsets_survive_the_checkpoint() -> None:
    offsets = {("b", 10): 5, ("b", 9): 1 << 60, ("a", 0): 0}
    text = json.dumps(plan.to_json(offsets))
    assert plan.from_json(json.loads(text)) == offsets
    assert text == json.dumps(plan.to_json(dict(reversed(offsets.items()))))


def test_offset_limit_is_shared_in_proportion_to_the_lags() -> None:
    assert plan.limit({T0: 0, T1: 0}, {T0: 900, T1: 100}, 100) == {T0: 90, T1: 10}
    assert plan.limit({T0: 0, T1: 5}, {T0: 10, T1: 5}, 100) == {T0: 10, T1: 5}
    # A partition with a small lag advances despite a huge lag elsewhere; a new partition starts at
    # 0.
    assert plan.limit({T0: 0, T1: 7}, {T0: 10**9, T1: 8, T2: 0}, 10)[T1] == 8
    assert plan.limit({}, {T2: 100}, 10) == {T2: 10}


@given(
    st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 100), st.integers(0, 500))),
    st.integers(1, 1000),
)
def test_limited_batches_reach_the_latest_offsets(
    lags: dict[int, tuple[int, int]], most: int
) -> None:
    start = {("t", index): begin for index, (begin, _) in lags.items()}
    latest = {("t", index): begin + lag for index, (begin, lag) in lags.items()}
    batches = 0
    while start != latest:
        end = plan.limit(start, latest, most)
        assert plan.lag(start, end) <= most + len(lags)
        assert all(start[part] <= end[part] <= latest[part] for part in start)
        start, batches = end, batches + 1
        assert batches <= 5000


@given(
    st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 100), st.integers(0, 500))),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1, 100),
)
def test_ranges_cover_every_offset_once(
    lags: dict[int, tuple[int, int]], parts: int | None, most: int | None
) -> None:
    start = {("t", index): begin for index, (begin, _) in lags.items()}
    end = {("t", index): begin + lag for index, (begin, lag) in lags.items()}
    found = plan.ranges(start, end, fail_on_data_loss=True, min_partitions=parts, max_records=most)
    covered = [(r.topic, r.partition, at) for r in found for at in range(r.start, r.until)]
    assert sorted(covered) == sorted(
        (*part, at) for part in start for at in range(start[part], end[part])
    )
    assert all(offset_range.size > 0 for offset_range in found)
    if most is not None:
        assert all(offset_range.size <= most for offset_range in found)
    total = sum(offset_range.size for offset_range in found)
    if parts is not None and total >= 20 * parts:
        assert len(found) >= min(parts, total)


def test_only_a_large_backlog_is_split_into_ranges() -> None:
    found = plan.ranges(
        {T0: 0, T1: 0}, {T0: 1000, T1: 10}, fail_on_data_loss=True, min_partitions=5
    )
    assert [offset_range for offset_range in found if offset_range.partition == 1] == [
        OffsetRange("t", 1, 0, 10)
    ]
    assert [offset_range.size for offset_range in found if offset_range.partition == 0] == [200] * 5


def test_lost_partition_or_offsets_raise_data_loss_error() -> None:
    with pytest.raises(DataLossError, match="gone"):
        plan.ranges({T0: 0, T1: 5}, {T0: 1}, fail_on_data_loss=True)
    with pytest.raises(DataLossError, match="went back from 9 to 1"):
        plan.ranges({T0: 9}, {T0: 1}, fail_on_data_loss=True)
    assert plan.ranges({T0: 9, T1: 5}, {T0: 1}, fail_on_data_loss=False) == []


def checkpoint(folder: Path, lines: list[str], batch: int = 3) -> PlannedBatch | None:
    (folder / "offsets").mkdir(parents=True)
    (folder / "metadata").write_text('{"id":"q-1"}')
    (folder / "offsets" / str(batch)).write_text("\n".join(lines))
    (folder / "offsets" / f".{batch}.crc").write_bytes(b"x")
    (folder / "offsets" / str(batch - 1)).write_text("v1\n{}\nolder")
    return read_checkpoint(str(folder))


def test_checkpoint_has_batch_id_query_id_and_offsets(tmp_path: Path) -> None:
    lines = ["v1", "{}", '{"t":{"0":5}}', "-", '{"u":{"1":7}}', "4711"]
    found = checkpoint(tmp_path, lines)
    assert found is not None
    assert (found.query_id, found.batch_id) == ("q-1", 3)
    assert found.offsets() == {("t", 0): 5, ("u", 1): 7}
    lines[1] = '{"batchTimestampMs":5}'
    other = checkpoint(tmp_path / "other", lines)
    assert other is not None
    assert other.digest == found.digest
    lines[2] = '{"t":{"0":6}}'
    third = checkpoint(tmp_path / "third", lines)
    assert third is not None
    assert third.digest != found.digest


def test_offset_log_is_read_in_both_formats(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "v1", ["v1", "{}", '{"t":{"0":5}}', "-", '{"u":{"1":7}}'])
    lines = ["v2", "{}", '2:{"u":{"1":7}}', "1:-", '0:{"t":{"0":5}}']
    second = checkpoint(tmp_path / "v2", lines)
    assert first == second
    assert second is not None
    assert second.offsets() == {("t", 0): 5, ("u", 1): 7}


def test_checkpoint_of_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProgressError, match="formats v1 and v2"):
        checkpoint(tmp_path, ["v9", "{}"])


def test_only_local_checkpoints_can_be_read(tmp_path: Path) -> None:
    assert local_folder("hdfs://nn/x") is None
    assert local_folder(None) is None
    assert local_folder("file:///tmp/a%20b") == Path("/tmp/a b")
    assert local_folder("/tmp/x") == Path("/tmp/x")
    assert local_folder("x") == Path.cwd() / "x"
    # A path without a scheme may be on another file system, and missing or incomplete on this one.
    assert read_checkpoint(str(tmp_path / "nothing")) is None
    (tmp_path / "metadata").write_text('{"id":"q-1"}')
    assert read_checkpoint(str(tmp_path)) is None
    (tmp_path / "offsets").mkdir()
    assert read_checkpoint(str(tmp_path)) is None


def progress(batch: int, query: str = "q", digest: str = "d") -> Progress:
    return Progress(batch, query, digest)


def test_progress_survives_encoding_and_decoding() -> None:
    told = Progress(12, "q", "d", 99, "c")
    assert Progress.from_text(told.to_text(), "g") == told
    assert len(told.to_text()) < 4096
    with pytest.raises(ProgressError, match="did not write"):
        Progress.from_text("aiokafka was here", "g")


def test_progress_of_earlier_versions_can_be_read() -> None:
    found = Progress.from_text('{"b":12,"q":"q","d":"d","rows":99}', "g")
    assert found == Progress(12, "q", "d", 99, "")
    assert Progress.from_text('{"b":12,"q":"q","d":""}', "g") == Progress(12, "q", "")


@pytest.mark.parametrize(
    ("batch", "done", "expected"),
    [
        (0, None, BatchState.NEXT),
        (1, progress(0), BatchState.NEXT),
        (1, progress(0, query="tid"), BatchState.NEXT),
        (0, progress(0), BatchState.DONE),
        (7, progress(7), BatchState.DONE),
        (7, progress(7, digest=""), BatchState.LOOKS_DONE),
        (7, progress(7, query="tid", digest=""), BatchState.LOOKS_DONE),
    ],
)
def test_batch_state_is_next_done_or_looks_done(
    batch: int, done: Progress | None, expected: BatchState
) -> None:
    assert batch_state(progress(batch), done, "tid") is expected


def test_batch_without_offsets_is_compared_by_rows_and_checksum() -> None:
    done = Progress(7, "q", "", 3, "ab")
    check_same(Progress(7, "q", "", 3, "ab"), done)
    check_same(Progress(7, "q", "", 3, "ab"), Progress(7, "tid", "", 3))
    with pytest.raises(ProgressError, match="with 3 rows with other content"):
        check_same(Progress(7, "q", "", 3, "cd"), done)
    with pytest.raises(ProgressError, match="with 3 rows, and now it has 4"):
        check_same(Progress(7, "q", "", 4, "ab"), done)


@pytest.mark.parametrize(
    ("batch", "done", "message"),
    [
        (5, None, "offsets.retention.minutes, 7 days by default: a query that runs less often"),
        (5, progress(5, query="other"), "belongs to query other"),
        (5, progress(6), "rolled back"),
        (5, progress(3), "went elsewhere"),
        (5, progress(5, digest="other"), "planned again"),
    ],
)
def test_progress_of_another_query_or_batch_is_refused(
    batch: int, done: Progress | None, message: str
) -> None:
    with pytest.raises(ProgressError, match=message):
        batch_state(progress(batch), done, "tid")
