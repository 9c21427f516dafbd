"""``fencepost log verify`` reports the truncations of the next start, and changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from structlog.testing import capture_logs

from fencepost import Broker
from fencepost.cli import main
from fencepost.coordinator.storage.log_manager import WHAT_A_START_DID
from fencepost.logcore.batch import iter_headers
from fencepost.logcore.checkpoints import CLEAN_SHUTDOWN
from tests.support.batches import batch
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon

CUT = "log cut"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory after ``kill -9``: two partitions, offsets 0 to 3 flushed, then four more.

    It also has offsets of a group, transactions, and a deleted topic.
    """
    daemon = Daemon(tmp_path_factory.mktemp("killed") / "data")
    for _ in range(2):
        daemon.start()
        with Cluster(daemon.bootstrap) as cluster:
            if not daemon.data_dir.joinpath("orders-0").exists():
                cluster.create_topic("orders", 2)
                cluster.create_topic("gone")
                cluster.produce("gone", [b"x"])
                cluster.coordinator("group", 0)
            for number in range(4):
                for index in (0, 1):
                    answer = cluster.produce("orders", batch([b"%d" % number]), partition=index)
                    assert answer["error_code"] == "none"
            cluster.init_producer("exact")
        if (daemon.data_dir / "gone-0").exists():
            with Cluster(daemon.bootstrap) as cluster:
                cluster.call("delete_topics", 3, topic_names=["gone"], timeout=10_000)
            daemon.stop()
    daemon.kill()
    assert not (daemon.data_dir / CLEAN_SHUTDOWN).exists()
    return daemon.data_dir


@pytest.fixture
def data(killed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(killed, tmp_path / "data")


def log_of(data: Path) -> Path:
    (path,) = (data / "orders-0").glob("*.log")
    return path


def flip(data: Path, *offsets: int) -> None:
    """Flip a bit in the records of the batches at these offsets."""
    raw = bytearray(log_of(data).read_bytes())
    for at, header in list(iter_headers(bytes(raw))):
        if header.base_offset in offsets:
            raw[at + 65] ^= 1
    log_of(data).write_bytes(raw)


def tear(data: Path) -> None:
    """Append half a batch, like a torn write."""
    raw = log_of(data).read_bytes()
    log_of(data).write_bytes(raw + raw[:65])


def shorten(data: Path, batches: int) -> None:
    """Keep only the first batches."""
    raw = log_of(data).read_bytes()
    ends = [at + header.size for at, header in iter_headers(raw)]
    log_of(data).write_bytes(raw[: ends[batches - 1]])


def state(data: Path) -> dict[str, tuple[int, bytes]]:
    """Return the modification time and the contents of every path in the directory."""
    return {
        str(path.relative_to(data)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in [data, *data.rglob("*")]
    }


def verify(data: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["log", "verify", str(data), *arguments])


def told_before(data: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the report about the next start and the exit status; check the table against them."""
    before = state(data)
    result, table = verify(data, "--format", "json"), verify(data)
    assert state(data) == before
    rows = [row for row in json.loads(result.stdout) if row.pop("kind") == "start"]
    assert table.exit_code == result.exit_code
    assert ("the next start will say" in table.stdout) == bool(rows)
    for row in rows:
        assert row["event"] in table.stdout
        assert row["cause"] in table.stdout
    return rows, result.exit_code


def told_by_the_start(data: Path) -> list[dict[str, Any]]:
    with capture_logs() as lines, Broker.in_thread(data):
        pass
    found = [dict(line) for line in lines if line["event"] in WHAT_A_START_DID]
    return [{"level": line.pop("log_level"), **line} for line in found]


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        pytest.param(lambda _data: None, [], id="healthy"),
        pytest.param(
            tear, [("warning", CUT, {"bytes": 65, "acknowledged_offsets_lost": 0})], id="torn tail"
        ),
        pytest.param(
            lambda data: flip(data, 5),
            [("error", CUT, {"records": 3, "log_end_offset": 5})],
            id="a bit behind the recovery point",
        ),
        pytest.param(
            lambda data: flip(data, 1),
            [("error", "damage left in the log", {"offset": 1, "next_offset": 2})],
            id="a bit below it",
        ),
        pytest.param(
            lambda data: flip(data, 1, 6),
            [
                ("error", "damage left in the log", {"offset": 1}),
                ("error", CUT, {"records": 2, "log_end_offset": 6}),
            ],
            id="both",
        ),
        pytest.param(
            lambda data: shorten(data, 3),
            [("error", "log shorter than it was", {"acknowledged_offsets_lost": 1})],
            id="its end is gone",
        ),
    ],
)
def test_verify_reports_what_the_next_start_logs(
    data: Path, harm: Callable[[Path], object], told: list[tuple[str, str, dict[str, object]]]
) -> None:
    harm(data)
    rows, status = told_before(data)
    assert status == (1 if told else 0)
    assert [(row["level"], row["event"]) for row in rows] == [line[:2] for line in told]
    for row, (_, event, fields) in zip(rows, told, strict=True):
        assert {**row, **fields} == row
        assert row["partition"] == "orders-0"
        if event == CUT:
            (kept,) = row["kept"]
            assert not Path(kept).exists()
    assert told_by_the_start(data) == rows
    for row in rows:
        assert all(Path(path).exists() for path in row.get("kept", ()))
    # The broker that started has repaired the reported damage and has closed the logs.
    assert told_before(data)[0] == []


def test_verify_with_preallocate_does_not_report_zeros_at_the_end(data: Path) -> None:
    """With ``log.preallocate`` the file ends with zeros, and trimming them is not reported."""
    log = log_of(data)
    log.write_bytes(log.read_bytes() + bytes(100_000))
    blank, status = told_before(data)
    assert (blank[0]["event"], blank[0]["bytes"], status) == (CUT, 100_000, 1)
    result = verify(data, "--config", "log.preallocate=true", "--format", "json")
    assert [row for row in json.loads(result.stdout) if row["kind"] == "start"] == []


def test_verify_reports_a_start_that_would_be_refused(data: Path) -> None:
    rows, status = told_before(data)
    assert (rows, status) == ([], 0)
    before = state(data)
    result = verify(data, "--config", "node.id=77", "--format", "json")
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)
    assert (row["event"], row["level"]) == ("start refused", "error")
    assert "node.id" in row["cause"]
    assert state(data) == before
