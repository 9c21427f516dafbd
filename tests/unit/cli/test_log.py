"""``fencepost log`` and ``dump-log`` as commands: their output and exit status."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fencepost import Broker
from fencepost.cli import main
from fencepost.cli.decoding import decoder_of_directory
from fencepost.cli.printing import print_json_array
from fencepost.groups import consumer_records as cr
from fencepost.logcore.batch import LogRecord, iter_headers
from fencepost.logcore.checkpoints import (
    CLEAN_SHUTDOWN,
    CLEANER_CHECKPOINT,
    HIGH_WATERMARK_CHECKPOINT,
    LOG_START_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    read_epochs,
    read_offsets,
    read_partition_metadata,
    write_clean_shutdown,
    write_offsets,
)
from fencepost.logcore.fs import OsFileSystem
from tests.support.batches import batch
from tests.support.cluster import GROUP, READ_COMMITTED, TRANSACTION, Cluster
from tests.wire.test_transactions_v2 import Producer

FS = OsFileSystem()
SETTINGS = {"offsets.topic.num.partitions": "2", "transaction.state.log.num.partitions": "2"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a stopped broker's directory: two topics, a group, ended and open transactions."""
    root = tmp_path_factory.mktemp("written") / "data"
    with Broker.in_thread(root, config=SETTINGS) as broker, Cluster(broker.bootstrap) as cluster:
        cluster.create_topic("orders", 2)
        cluster.create_topic("other")
        for number in range(8):
            assert cluster.produce("orders", [b"%d" % number])["error_code"] == "none"
        cluster.call(
            "delete_records",
            2,
            timeout=10_000,
            topics=[{"name": "orders", "partitions": [{"partition_index": 0, "offset": 2}]}],
        )
        cluster.coordinator("group", GROUP)
        producer = Producer(cluster, "exact").init()
        for commit in (False, True):
            assert producer.produce("orders", b"done", 1) == "none"
            assert producer.commit_offset("group", "orders", 5) == "none"
            producer.end(commit)
        assert producer.produce("orders", b"open", 1) == "none"
    return root


@pytest.fixture
def data(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "source")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def rows(*arguments: object) -> list[dict[str, Any]]:
    result = run(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def directories(data: Path, *topics: str) -> list[Path]:
    return [path for topic in topics for path in sorted(data.glob(f"{topic}-*"))]


EVERYTHING = ("orders", "other", "__consumer_offsets", "__transaction_state")


def test_imported_directories_become_topics(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "data"
    shutil.rmtree(data / "other-0")
    moved = rows("log", "import", *directories(data, *EVERYTHING), "--data-dir", target)
    assert [(partition["topic"], partition["partition"]) for partition in moved[:2]] == [
        ("orders", 0),
        ("orders", 1),
    ]
    assert (moved[0]["log_start_offset"], moved[0]["log_end_offset"]) == (2, 8)
    with Broker.in_thread(target) as broker, Cluster(broker.bootstrap) as cluster:
        assert cluster.values("orders") == [b"%d" % number for number in range(2, 8)]
        assert cluster.values("orders", partition=1, isolation=READ_COMMITTED) == [b"done"]
        assert cluster.lso("orders", 1) < cluster.offset("orders", 1)
        # The broker serves before its coordinators have loaded, so wait for them.
        cluster.coordinator("exact", TRANSACTION)
        cluster.coordinator("group", GROUP)
        known = {
            transaction["producer_id"]
            for transaction in cluster.call("list_transactions", 0)["transaction_states"]
        }
        # New producer ids and leader epochs are above the imported ones.
        assert cluster.init_producer()[0] > max(known)
        assert cluster.produce("orders", [b"new"])["base_offset"] == 8
        *_, last = cluster.read("orders")
        assert last.leader_epoch > moved[0]["leader_epoch"]
        assert cluster.committed("group", "orders", stable=True) == 5
        # The imported transaction state has the open transaction; the id's next producer aborts it.
        cluster.init_producer("exact")
        assert cluster.lso("orders", 1) == cluster.offset("orders", 1)
    assert not list(target.glob("*.import"))


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("orders-1",), "together, from 0 on"),
        (("__cluster_metadata-0",), "keeps its own"),
        (("orders-0", "orders-0"), "together, from 0 on"),
    ],
)
def test_import_of_incomplete_duplicate_or_metadata_directories_is_refused(
    data: Path, tmp_path: Path, names: tuple[str, ...], reason: str
) -> None:
    result = run("log", "import", *(data / name for name in names), "--data-dir", tmp_path / "new")
    assert result.exit_code == 1
    assert reason in result.output


def test_import_without_all_partitions_needs_the_partition_count(
    data: Path, tmp_path: Path
) -> None:
    target = tmp_path / "data"
    alone = run("log", "import", data / "orders-0", "--data-dir", target)
    assert alone.exit_code == 1
    assert "orders-1 of orders was not given" in alone.output
    assert "--partitions" in alone.output
    (moved,) = rows("log", "import", data / "orders-0", "--data-dir", target, "--partitions", 2)
    assert moved["partition"] == 0
    with Broker.in_thread(target) as broker, Cluster(broker.bootstrap) as cluster:
        assert cluster.leaders("orders") == 2


def test_import_of_topics_with_a_common_prefix_needs_the_topic_option(
    data: Path, tmp_path: Path
) -> None:
    target = tmp_path / "data"
    shutil.copytree(data / "other-0", data / "orders-eu-0")
    star = sorted(data.glob("orders-*"))
    both = run("log", "import", *star, "--data-dir", target)
    assert both.exit_code == 1
    assert "directories of orders and of orders-eu" in both.output
    moved = rows("log", "import", *star, "--topic", "orders", "--data-dir", target)
    assert [(partition["topic"], partition["partition"]) for partition in moved] == [
        ("orders", 0),
        ("orders", 1),
    ]
    moved = rows("log", "import", *star, "--topic", "orders-eu", "--data-dir", target)
    assert [partition["topic"] for partition in moved] == ["orders-eu"]
    assert "none of the directories is of order" in (
        run("log", "import", *star, "--topic", "order", "--data-dir", target).output
    )
    moved = rows(
        *("log", "import", *star, "--data-dir", tmp_path / "all"),
        *("--topic", "orders", "--topic", "orders-eu"),
    )
    assert {partition["topic"] for partition in moved} == {"orders", "orders-eu"}


def test_import_with_partition_count_adds_empty_partitions(data: Path, tmp_path: Path) -> None:
    target, last = tmp_path / "data", data / "orders-1"
    # A former topic of the same name was compacted up to offset 5.
    with Broker.in_thread(target):
        pass
    write_offsets(FS, str(target), CLEANER_CHECKPOINT, {("orders", 1): 5}, copied=True)
    assert run("log", "import", last, "--data-dir", target, "--partitions", 1).exit_code == 1
    (moved,) = rows("log", "import", last, "--data-dir", target, "--partitions", 3)
    assert moved["partition"] == 1
    assert read_offsets(FS, str(target), CLEANER_CHECKPOINT) == {}
    with Broker.in_thread(target) as broker, Cluster(broker.bootstrap) as cluster:
        assert [cluster.offset("orders", index) for index in range(3)] == [0, 5, 0]


def holed(directory: Path) -> int:
    """Remove batches from the active segment, as on a follower whose leader compacts.

    Return the log end offset.
    """
    (path,) = directory.glob("*.log")
    raw = path.read_bytes()
    batches = [(at, at + header.size, header) for at, header in iter_headers(raw)]
    assert len(batches) > 4
    path.write_bytes(b"".join(raw[a:b] for at, (a, b, _) in enumerate(batches) if at % 3 != 2))
    for suffix in ("*.index", "*.timeindex", "*.snapshot"):
        for file in directory.glob(suffix):
            file.unlink()
    return batches[-1][2].next_offset


def test_import_keeps_replica_with_offset_gaps_in_its_active_segment(
    data: Path, tmp_path: Path
) -> None:
    end = holed(data / "orders-0")
    (data / RECOVERY_POINT_CHECKPOINT).unlink()
    orders = directories(data, "orders")
    moved, _ = rows("log", "import", *orders, "--data-dir", tmp_path / "data")
    assert (moved["log_end_offset"], moved["cut_bytes"]) == (end, 0)


def test_rebuild_index_keeps_every_record(data: Path) -> None:
    end = holed(data / "orders-0")
    (path,) = (data / "orders-0").glob("*.log")
    before = path.read_bytes()
    assert run("log", "rebuild-index", data / "orders-0", "--execute").exit_code == 0
    assert path.read_bytes() == before
    with Broker.in_thread(data) as broker, Cluster(broker.bootstrap) as cluster:
        assert cluster.offset("orders") == end


def test_import_over_existing_topic_is_refused(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "data"
    orders = directories(data, "orders")
    assert run("log", "import", *orders, "--data-dir", target).exit_code == 0
    result = run("log", "import", *orders, "--data-dir", target)
    assert result.exit_code == 1
    assert "there is a topic orders already" in result.output


def test_import_of_damaged_log_needs_accept_damage(data: Path, tmp_path: Path) -> None:
    log = data / "orders-0" / f"{0:020d}.log"
    raw = bytearray(log.read_bytes())
    raw[len(raw) // 2] ^= 1
    log.write_bytes(raw)
    orders = directories(data, "orders")
    target = tmp_path / "data"
    result = run("log", "import", *orders, "--data-dir", target)
    assert result.exit_code == 1
    assert "--accept-damage" in result.output
    assert not list(target.glob("orders*"))
    moved = rows("log", "import", *orders, "--data-dir", target, "--accept-damage")
    assert 0 < moved[0]["cut_bytes"] < len(raw)
    assert log.read_bytes() == raw


def test_import_accepts_segment_emptied_below_the_cleaner_checkpoint(
    data: Path, tmp_path: Path
) -> None:
    shutil.rmtree(data / "orders-1")
    log = data / "orders-0" / f"{0:020d}.log"
    raw = log.read_bytes()
    starts = [row["position"] for row in rows("dump-log", log) if row["base_offset"] == 4]
    for file in log.parent.glob("0*"):
        file.unlink()
    log.write_bytes(b"")
    log.with_name(f"{4:020d}.log").write_bytes(raw[starts[0] :])
    for checkpoint in data.glob("*-checkpoint"):
        checkpoint.unlink()
    target = tmp_path / "data"
    refused = run("log", "import", log.parent, "--data-dir", target)
    assert refused.exit_code == 1
    assert "offsets 0 to 3 are missing" in refused.output
    (data / "cleaner-offset-checkpoint").write_text("0\n1\norders 0 4\n")
    moved = rows("log", "import", log.parent, "--data-dir", target)
    assert (moved[0]["log_end_offset"], moved[0]["cut_bytes"]) == (8, 0)
    # Recovery after a crash also accepts the log.
    (target / CLEAN_SHUTDOWN).unlink()
    with Broker.in_thread(target) as broker, Cluster(broker.bootstrap) as cluster:
        assert cluster.values("orders") == [b"%d" % number for number in range(4, 8)]


def test_log_commands_on_directory_of_running_broker_are_refused(
    data: Path, tmp_path: Path
) -> None:
    orders = directories(data, "orders")
    with Broker.in_thread(data):
        for command in (
            ("verify", data),
            ("verify", orders[0]),
            ("rebuild-index", orders[0]),
            ("truncate", orders[0], "--to-offset", 3),
            ("import", *orders, "--data-dir", tmp_path / "data"),
            ("export", "orders", "--data-dir", data, "--to", tmp_path),
        ):
            result = run("log", *command)
            assert result.exit_code == 1, command
            assert "in use" in result.output


def kafka_directory(root: Path, name: str, partitions: int) -> Path:
    """Return a directory as Apache Kafka leaves it after a topic is created, with empty logs."""
    with Broker.in_thread(root) as broker, Cluster(broker.bootstrap) as cluster:
        cluster.create_topic(name, partitions)
        for index in range(partitions):
            cluster.produce(name, [b"x"], partition=index)
    for log in root.glob(f"{name}-*/*.log"):
        log.write_bytes(b"")
    return root


def test_export_replaces_the_directories_of_an_empty_topic(data: Path, tmp_path: Path) -> None:
    kafka = kafka_directory(tmp_path / "kafka", "orders", 2)
    write_clean_shutdown(FS, str(kafka))
    topic_id = read_partition_metadata(FS, str(kafka / "orders-0"))
    moved = rows("log", "export", "orders", "--data-dir", data, "--to", kafka)
    assert moved[0]["log_end_offset"] == 8
    key = ("orders", 0)
    assert read_offsets(FS, str(kafka), LOG_START_CHECKPOINT)[key] == 2
    assert read_offsets(FS, str(kafka), HIGH_WATERMARK_CHECKPOINT)[key] == 8
    assert read_offsets(FS, str(kafka), RECOVERY_POINT_CHECKPOINT)[key] == 0
    assert not (kafka / CLEAN_SHUTDOWN).exists()
    for index in range(2):
        path = kafka / f"orders-{index}"
        assert read_partition_metadata(FS, str(path)) == topic_id
        assert [epoch for epoch, _ in read_epochs(FS, str(path)) or ()] == [0]
        shown = rows("dump-log", *sorted(path.glob("*.log")), "--verify")
        assert {row["leader_epoch"] for row in shown} == {0}
    assert len(list(kafka.glob("*-delete"))) == 2
    # The exported directory is unchanged, and a broker can still use it.
    with Broker.in_thread(data) as broker, Cluster(broker.bootstrap) as cluster:
        assert len(cluster.values("orders")) == 6
    refused = run("log", "export", "orders", "--data-dir", data, "--to", kafka)
    assert refused.exit_code == 1
    assert "--replace" in refused.output
    again = ("log", "export", "orders", "--data-dir", data, "--to", kafka, "--replace")
    sizes = {row["directory"]: row["log_bytes"] for row in rows(*again)}
    assert sizes.keys() == {str(kafka / "orders-0"), str(kafka / "orders-1")}
    assert min(sizes.values()) > 0
    assert len(list(kafka.glob("*-delete"))) == 2, "nothing was changed"
    assert len(rows(*again, "--execute")) == 2
    assert len(list(kafka.glob("*-delete"))) == 4


@pytest.mark.parametrize(
    ("topic", "reason"),
    [("nothing", "no topic"), ("orders", "create orders there"), ("__consumer_offsets", "offsets")],
)
def test_export_of_missing_or_internal_topic_is_refused(
    data: Path, tmp_path: Path, topic: str, reason: str
) -> None:
    kafka = tmp_path / "kafka"
    kafka.mkdir()
    result = run("log", "export", topic, "--data-dir", data, "--to", kafka)
    assert result.exit_code == 1
    assert reason in result.output


def test_verify_reports_damaged_index_until_it_is_rebuilt(data: Path) -> None:
    result = run("log", "verify", data)
    assert result.exit_code == 0, result.output
    assert "orders-0" in result.output
    assert rows("log", "verify", data) == []
    (data / "orders-0" / f"{0:020d}.index").write_bytes(b"12345")
    result = run("log", "verify", data / "orders-0", "--format", "json")
    assert result.exit_code == 1
    assert [row["kind"] for row in json.loads(result.stdout)] == ["problem"]
    dry = run("log", "rebuild-index", data / "orders-0", "--dry-run")
    assert dry.exit_code == 0
    assert "would rebuild" in dry.output
    assert run("log", "verify", data / "orders-0").exit_code == 1
    assert run("log", "rebuild-index", data / "orders-0").exit_code == 0
    assert run("log", "verify", data / "orders-0").exit_code == 1
    assert run("log", "rebuild-index", data / "orders-0", "--execute").exit_code == 0
    assert run("log", "verify", data / "orders-0").exit_code == 0


def test_truncate_keeps_the_removed_batches_in_an_undo_directory(data: Path) -> None:
    path = data / "orders-0"
    (dry,) = rows("log", "truncate", path, "--to-offset", 5, "--dry-run")
    assert (dry["new_log_end_offset"], dry["batches"], dry["undo"]) == (5, 3, None)
    asked = run("log", "truncate", path, "--to-offset", 5)
    assert "nothing was changed; --execute makes the change" in asked.stderr
    (done,) = rows("log", "truncate", path, "--to-offset", 5, "--execute")
    assert {**done, "undo": None} == dry
    assert (Path(done["undo"]) / f"{0:020d}.log").exists()
    assert run("log", "truncate", path, "--to-offset", 5, "--execute").exit_code == 1
    (again,) = rows("log", "truncate", path, "--to-offset", 4, "--execute")
    assert again["undo"] != done["undo"]
    with Broker.in_thread(data) as broker, Cluster(broker.bootstrap) as cluster:
        assert cluster.offset("orders") == 4
        assert cluster.produce("orders", batch([b"next"]))["base_offset"] == 4


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        (3, (), {"type": "ConsumerGroup", "kind": 3, "group_id": "g"}),
        (6, (), {"type": "ConsumerGroup", "kind": 6, "group_id": "g"}),
        (7, ("m",), {"type": "ConsumerMember", "kind": 7, "group_id": "g", "member_id": "m"}),
        (16, ("t.*",), {"type": "RegularExpression", "group_id": "g", "regex": "t.*"}),
    ],
)
def test_dump_log_decodes_tombstone_keys_of_consumer_offsets(
    kind: int, name: tuple[str, ...], told: dict[str, object]
) -> None:
    decode = decoder_of_directory("__consumer_offsets-7")
    assert decode is not None
    gone = cr.tombstone(cr.ConsumerRecordType(kind), "g", *name)
    assert decode(LogRecord(0, 0, gone.key, None)) == {**told, "tombstone": True}


def test_dump_log_reads_every_kind_of_file_without_changing_it(data: Path) -> None:
    files = [file for file in sorted(data.glob("*/*")) + sorted(data.glob("*")) if file.is_file()]
    known = [file for file in files if file.name not in {".lock", CLEAN_SHUTDOWN}]
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in known}
    for file in known:
        file.chmod(0o400)
    shown = rows("dump-log", "--records", "--verify", *known)
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in known} == before
    kinds = {str(row["kind"]) for row in shown}
    assert kinds >= {"batch", "record", "txn-index", "producer", "checkpoint", "epoch", "identity"}
    decoded = [row["decoded"] for row in shown if "decoded" in row]
    types = {str(record.get("type")) for record in decoded}
    assert {"TOPIC_RECORD", "REGISTER_BROKER_RECORD", "PRODUCER_IDS_RECORD"} <= types
    assert any(record.get("transactional_id") == "exact" for record in decoded)
    assert any(
        record.get("group") == "group" or record.get("group_id") == "group" for record in decoded
    )
    assert run("dump-log", *known).exit_code == 0


@pytest.mark.parametrize(
    "name",
    [
        "orders-0/00000000000000000000.log",
        "orders-1/00000000000000000000.txnindex",
        "orders-0/leader-epoch-checkpoint",
        "orders-0/partition.metadata",
        "recovery-point-offset-checkpoint",
        "meta.properties",
    ],
)
def test_dump_log_of_damaged_file_exits_with_status_1(data: Path, name: str) -> None:
    path = data / name
    path.write_bytes(path.read_bytes()[:-3])
    result = run("dump-log", "--verify", path, "--format", "json")
    assert result.exit_code == 1
    assert [row for row in json.loads(result.stdout) if row["kind"] == "problem"]


def test_json_array_is_closed_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def rows() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        print_json_array(rows())
    assert json.loads(capsys.readouterr().out) == [1, 2]


def test_dump_log_of_unknown_or_missing_file_is_refused(data: Path) -> None:
    (data / "notes.txt").write_text("mine")
    assert run("dump-log", data / "notes.txt").exit_code == 1
    assert run("dump-log", data / "missing.log").exit_code == 2
