"""Extreme numbers in imported files are refused with a message, or do no harm."""

from __future__ import annotations

import json
import random
import struct
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from crc32c import crc32c
from structlog.testing import capture_logs

from fencepost.cli import main
from fencepost.cluster.controller.adoption import AdoptedTopic
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.metadata.epoch_checks import MAX_EPOCH
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.stopped import read_stopped
from fencepost.groups import consumer_records, records
from fencepost.logcore.batch import LogRecord
from fencepost.logcore.bounds import (
    MAX_GROUP_EPOCH,
    MAX_LEADER_EPOCH,
    MAX_OFFSET,
    MAX_PRODUCER_ID,
)
from fencepost.logcore.checkpoints import (
    CLEANER_CHECKPOINT,
    LEADER_EPOCH_CHECKPOINT,
    LOG_START_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
)
from fencepost.logcore.config import MAX_INT64
from fencepost.logcore.errors import LogError
from fencepost.logcore.fields import FieldWriter
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.machine import Record
from fencepost.tools.decisions import decide
from fencepost.tools.figures import ID_GAP
from fencepost.tools.transfer import TransferError, import_directories
from tests.support.batches import batch
from tests.support.cluster import Cluster
from tests.support.old_formats import encode_message_set
from tests.support.raw import Answer
from tests.unit.coordinator.services.coordinators import allocate_producer_ids, storage
from tests.wire.test_cli import fencepost

INT16, INT32, INT64 = 1 << 15, 1 << 31, 1 << 63


def near(limit: int) -> list[int]:
    """Return values at both ends and at half of a signed field's range, and around zero."""
    ends = [-limit, -limit + 1, -2, -1, 0, 1, limit // 2 - 1, limit // 2, limit - 2, limit - 1]
    return [*ends, limit - 2_000] if limit > INT16 else ends


FIELDS = {
    "base offset": (0, ">q", INT64),
    "leader epoch": (12, ">i", INT32),
    "last offset delta": (23, ">i", INT32),
    "base timestamp": (27, ">q", INT64),
    "max timestamp": (35, ">q", INT64),
    "producer id": (43, ">q", INT64),
    "producer epoch": (51, ">h", INT16),
    "base sequence": (53, ">i", INT32),
    "record count": (57, ">i", INT32),
}
"""The offset and format of each number in a batch, and the first value that is out of range."""

CHECKPOINTS = (LOG_START_CHECKPOINT, RECOVERY_POINT_CHECKPOINT, CLEANER_CHECKPOINT)


def set_field(data: bytes, name: str, value: int) -> bytes:
    """Return a batch with another number in a field and a valid CRC."""
    position, form, _ = FIELDS[name]
    changed = bytearray(data)
    struct.pack_into(form, changed, position, value)
    struct.pack_into(">I", changed, 17, crc32c(bytes(changed[21:])))
    return bytes(changed)


def source(home: Path, *batches: bytes, topic: str = "t") -> Path:
    """Return a partition's directory as a stopped broker leaves it."""
    path = home / f"{topic}-0"
    path.mkdir(parents=True)
    (path / f"{0:020}.log").write_bytes(b"".join(batches))
    return path


def whole() -> bytes:
    return batch([b"a", b"b"], producer_id=7, producer_epoch=0, sequence=0)


def taken_over(target: Path, path: Path) -> bool:
    """Import ``path``; return whether that succeeded. If not, the target must be unchanged."""
    store = storage(target)
    known = sorted(file.name for file in target.iterdir())
    following = store.metadata.image.next_producer_id
    refused = ""
    try:
        import_directories(store, [path], {})
    except (TransferError, LogError) as refusal:
        refused = str(refusal)
    if refused:
        assert refused.isprintable()
        assert sorted(file.name for file in target.iterdir()) == known
        assert store.metadata.topic("t") is None
        assert store.metadata.image.next_producer_id == following
    store.logs.close()
    return not refused


def goes_on(target: Path, topic: str = "t") -> None:
    """Restart three times: appends must advance the end offset; producer ids must be in range."""
    for _ in range(3):
        store = storage(target)
        partition = store.logs.partition(topic, 0)
        end = partition.log_end_offset
        partition.append_records([Record(b"k", b"v")], now_ms=1)
        assert partition.log_end_offset == end + 1
        for _ in range(10):
            first, length = allocate_producer_ids(store)
            assert 0 <= first <= first + length <= MAX_INT64
        store.logs.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_extreme_batch_fields_are_refused_or_harmless(tmp_path: Path, name: str) -> None:
    done, values = 0, near(FIELDS[name][2])
    for number, value in enumerate(values):
        home = tmp_path / str(number)
        path = source(home / "from", set_field(whole(), name, value))
        if taken_over(home / "to", path):
            done += 1
            goes_on(home / "to")
        look(home / "from")
    assert 0 < done < len(values) or "timestamp" in name


@pytest.mark.parametrize(
    ("name", "most"), [("producer id", MAX_PRODUCER_ID), ("leader epoch", MAX_LEADER_EPOCH)]
)
def test_highest_batch_field_is_imported_and_the_next_one_refused(
    tmp_path: Path, name: str, most: int
) -> None:
    for value, expected in ((most, True), (most + 1, False)):
        home = tmp_path / str(value)
        path = source(home / "from", set_field(whole(), name, value))
        assert taken_over(home / "to", path) is expected


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize(
    ("name", "most"), [("producer id", MAX_PRODUCER_ID), ("leader epoch", MAX_LEADER_EPOCH)]
)
def test_batch_fields_after_old_format_messages_are_bounded(
    tmp_path: Path, name: str, most: int, magic: int
) -> None:
    old = encode_message_set([LogRecord(0, -1, b"k", b"v")], magic)
    for value, expected in ((most, True), (most + 1, False)):
        home = tmp_path / str(value)
        new = set_field(set_field(whole(), "base offset", 1), name, value)
        assert taken_over(home / "to", source(home / "from", old, new)) is expected


@pytest.mark.parametrize("magic", [0, 1])
def test_offsets_of_messages_of_an_older_format_are_bounded(tmp_path: Path, magic: int) -> None:
    for offset, expected in ((MAX_OFFSET, True), (MAX_OFFSET + 1, False)):
        home = tmp_path / str(offset)
        old = encode_message_set([LogRecord(offset, -1, b"k", b"v")], magic)
        assert taken_over(home / "to", source(home / "from", old)) is expected


def look(data: Path) -> None:
    """Read and repair the files with every command; no unexpected exception may occur."""
    path = next(child for child in sorted(data.iterdir()) if child.is_dir())
    logs = [str(child) for child in sorted(path.iterdir()) if child.is_file()]
    for words in (
        ["dump-log", *logs, "--verify", "--records"],
        ["dump-log", *logs, "--verify", "--records", "--format", "json"],
        ["log", "verify", str(path)],
        ["log", "rebuild-index", str(path)],
        ["log", "rebuild-index", str(path), "--execute"],
        ["log", "truncate", str(path), "--to-offset", "0"],
    ):
        ended(words)


def ended(words: Sequence[str]) -> None:
    from click.testing import CliRunner

    done = CliRunner().invoke(main, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, done)
    assert "Traceback" not in done.output


TEXTS = [
    *map(str, sorted({*near(INT64), *near(INT32), MAX_OFFSET + 1, INT64, 10**19, 10**30})),
    *("9" * 4_000, "0x10", "1_0", "٣", "1.0", "nan", "", "-"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CHECKPOINTS, LEADER_EPOCH_CHECKPOINT])
def test_extreme_checkpoint_values_are_refused_or_harmless(tmp_path: Path, name: str) -> None:
    for number, text in enumerate(TEXTS):
        home = tmp_path / str(number)
        path = source(home / "from", whole())
        if name == LEADER_EPOCH_CHECKPOINT:
            rows = (f"{text} 0", f"0 {text}")
            (path / name).write_text(f"0\n1\n{rows[number % 2]}\n")
        else:
            (path.parent / name).write_text(f"0\n1\nt 0 {text}\n")
        if taken_over(home / "to", path):
            goes_on(home / "to")
        look(home / "from")


@pytest.mark.slow
@pytest.mark.parametrize("base", [0, 1, INT32, MAX_OFFSET, INT64 - 1, INT64, 10**20 - 1])
@pytest.mark.parametrize("suffix", [".log", ".index", ".timeindex", ".txnindex", ".snapshot"])
def test_extreme_offsets_in_file_names_are_refused_or_harmless(
    tmp_path: Path, base: int, suffix: str
) -> None:
    path = source(tmp_path / "from", whole())
    (path / f"{base:020}{suffix}").write_bytes(whole() if suffix == ".log" else b"\0" * 12)
    if taken_over(tmp_path / "to", path):
        goes_on(tmp_path / "to")
    look(tmp_path / "from")


def transaction(field: str, value: int) -> Record:
    """Return a record of ``__transaction_state`` with one chosen number."""
    figures = {"producer_id": 7, "producer_epoch": 0, "timeout_ms": 60_000, "time": 1}
    figures[field] = value
    key = FieldWriter(0, flexible=False)
    key.string("tx")
    body = struct.pack(
        ">hqhib", 0, figures["producer_id"], figures["producer_epoch"], figures["timeout_ms"], 0
    )
    body += struct.pack(">iqq", -1, figures["time"], figures["time"])
    return Record(key.done(), body)


def group(field: str, value: int) -> Record:
    """Return a record of ``__consumer_offsets`` with one chosen number."""
    if field == "generation":
        made = records.GroupMetadataValue("consumer", value, None, None, 1, ())
        return records.group_metadata("g", made)
    return consumer_records.group_epoch("g", consumer_records.GroupEpochValue(value))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topic", "make", "field", "limit", "most"),
    [
        ("__transaction_state", transaction, "producer_id", INT64, MAX_PRODUCER_ID),
        ("__transaction_state", transaction, "producer_epoch", INT16, INT16 - 1),
        ("__transaction_state", transaction, "timeout_ms", INT32, INT32 - 1),
        ("__transaction_state", transaction, "time", INT64, INT64 - 1),
        ("__consumer_offsets", group, "generation", INT32, MAX_GROUP_EPOCH),
        ("__consumer_offsets", group, "epoch", INT32, MAX_GROUP_EPOCH),
    ],
)
def test_extreme_coordinator_record_fields_are_refused_or_harmless(
    tmp_path: Path,
    topic: str,
    make: Callable[[str, int], Record],
    field: str,
    limit: int,
    most: int,
) -> None:
    for number, value in enumerate([*near(limit), most]):
        record = make(field, value)
        home = tmp_path / str(number)
        data = batch([record.value], key=record.key)
        done = taken_over(home / "to", source(home / "from", data, topic=topic))
        assert done or value < 0 or value > most, value
        assert not done or value <= most, value
        if done:
            goes_on(home / "to", topic)
        look(home / "from")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_combinations_of_extreme_values_are_refused_or_harmless(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for number in range(20):
        home = tmp_path / str(number)
        parts = []
        for _ in range(rng.randrange(1, 4)):
            data = whole()
            for name in rng.sample(sorted(FIELDS), rng.randrange(1, 4)):
                data = set_field(data, name, rng.choice(near(FIELDS[name][2])))
            parts.append(data)
        path = source(home / "from", *parts)
        for name in rng.sample(CHECKPOINTS, rng.randrange(3)):
            (path.parent / name).write_text(f"0\n1\nt 0 {rng.choice(TEXTS)}\n")
        if taken_over(home / "to", path):
            goes_on(home / "to")
        look(home / "from")


@pytest.mark.slow
def test_exhausted_producer_ids_are_reported_with_a_remedy_at_startup(tmp_path: Path) -> None:
    broker = tmp_path / "broker"
    with Broker.in_thread(broker) as running, Cluster(running.bootstrap) as client:
        client.create_topic("t")
        client.produce("t", batch([b"x"], producer_id=41, producer_epoch=0, sequence=0))
        client.produce("t", batch([b"x"], producer_id=INT64 - 2_000, producer_epoch=0, sequence=0))
    store = storage(broker)
    decide(store, lambda controller: controller.reset_producer_ids(INT64 - 1_999))
    store.logs.close()
    with (
        capture_logs() as lines,
        Broker.in_thread(broker) as running,
        Cluster(running.bootstrap) as client,
    ):
        codes = {ask_for_id(client)["error_code"] for _ in range(1_001)}
        assert "coordinator_load_in_progress" in codes
    told = {line["event"]: line for line in lines if line["log_level"] == "error"}
    assert "fencepost log reset-producer-ids" in told["producer ids run out"]["remedy"]
    assert "fencepost log reset-producer-ids" in told["no producer ids"]["remedy"]
    words = ["log", "reset-producer-ids", "--data-dir", str(broker), "--format", "json"]
    assert json.loads(fencepost(*words).stdout)[0]["executed"] is False
    (row,) = json.loads(fencepost(*words, "--execute").stdout)
    assert (row["highest_in_logs"], row["beyond_bound"]) == (41, 1)
    with (
        capture_logs() as lines,
        Broker.in_thread(broker) as running,
        Cluster(running.bootstrap) as client,
    ):
        assert client.init_producer()[0] == row["following"] == 42 + ID_GAP
    assert not [line for line in lines if line["log_level"] == "error"]


def ask_for_id(client: Cluster) -> Answer:
    return client.call("init_producer_id", 4, transaction_timeout=1_000, producer_id=-1)


@pytest.mark.parametrize("following", [MAX_PRODUCER_ID + 1, MAX_PRODUCER_ID + 2, MAX_INT64, -1])
def test_next_producer_id_of_a_promotion_is_bounded(tmp_path: Path, following: int) -> None:
    store = storage(tmp_path)
    decide(store, lambda controller: controller.reset_producer_ids(following))
    store.logs.close()
    assert_handed_over(tmp_path, 0 <= following <= MAX_PRODUCER_ID + 1)


@pytest.mark.parametrize("epoch", [MAX_LEADER_EPOCH, MAX_LEADER_EPOCH + 1])
def test_leader_epoch_of_a_promotion_is_bounded(tmp_path: Path, epoch: int) -> None:
    store = storage(tmp_path)
    adopted = AdoptedTopic("t", uuid.uuid4(), 1, {}, epoch)
    decide(store, lambda controller: controller.adopt_topic(adopted))
    store.logs.close()
    assert_handed_over(tmp_path, epoch <= MAX_LEADER_EPOCH)


def assert_handed_over(directory: Path, expected: bool) -> None:
    """Check that ``cluster promote`` and ``stand-alone`` accept this metadata if ``expected``."""
    at = f"{directory}/{METADATA_TOPIC}-0"
    if expected:
        assert read_stopped(OsFileSystem(), at) is not None
    else:
        with pytest.raises(MetadataError, match="other nodes only accept"):
            read_stopped(OsFileSystem(), at)


@pytest.mark.parametrize("epoch", [MAX_EPOCH, MAX_EPOCH + 1])
def test_start_after_the_last_leader_epoch_names_the_partition(tmp_path: Path, epoch: int) -> None:
    store = storage(tmp_path)
    adopted = AdoptedTopic("t", uuid.uuid4(), 1, {}, epoch)
    decide(store, lambda controller: controller.adopt_topic(adopted))
    store.logs.close()
    if epoch <= MAX_EPOCH:
        storage(tmp_path).logs.close()
    with pytest.raises(MetadataError, match="t-0 is in epoch 2147483647, the last one: restore"):
        storage(tmp_path)
