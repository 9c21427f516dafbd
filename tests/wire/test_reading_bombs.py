"""Fencepost's own readers, with batches of some kilobytes that decompress to 100 MB."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cramjam
import pytest

from fencepost.cli.dump_log import TABLE_CHARACTERS, TABLE_ROWS, runs
from tests.support.batches import batch, seal
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.targets import SETTINGS

pytestmark = pytest.mark.slow

MOST_MEGABYTES = 200
"""Memory limit. Python and the commands take about 50 MB; copies of a 1 MB record come on top."""

MOST_SECONDS = 5
"""Limit of the processor time of a command that decompresses and shows one record."""

ZSTD = 4
EMPTY, LARGE = "empty", "large"
RECORDS, LARGE_RECORDS, BATCHES = 1_000_000, 100, 3

MEASURED = """
import sys, time
from fencepost.cli import main
try:
    main.main(sys.argv[1:], prog_name="fencepost")
except SystemExit as end:
    status = end.code
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("measured", int(peak.split()[1]) // 1024, time.process_time(), file=sys.stderr)
sys.exit(status)
"""

SEARCHED = """
import sys, time
from fencepost.console.messages import Search
from fencepost.client.queries.session import ClusterSession
with ClusterSession(sys.argv[1], 10.0) as session:
    params = {"topic": sys.argv[2], "from": "earliest", "limit": "1"}
    search = Search.of(params)
    search.begin(session, params)
    (row,) = search.step(session)
    print(row["offset"])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("measured", int(peak.split()[1]) // 1024, time.process_time(), file=sys.stderr)
"""


@dataclass(frozen=True)
class Measured:
    output: bytes
    megabytes: int
    seconds: float


def zigzag(value: int) -> bytes:
    value = value * 2 if value >= 0 else -value * 2 - 1
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def empty_records(count: int) -> bytes:
    parts = []
    for delta in range(count):
        body = b"\0\0" + zigzag(delta) + b"\1\1\0"
        parts.append(zigzag(len(body)) + body)
    return b"".join(parts)


def bomb(records: bytes, count: int) -> bytes:
    packed = bytes(cramjam.zstd.compress(records, level=3))
    return seal(packed, count=count, attributes=ZSTD)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    data = tmp_path_factory.mktemp("bombs") / "data"
    daemon = Daemon(data, {**SETTINGS, "message.max.bytes": "10000000"}).start()
    with Cluster(daemon.bootstrap) as client:
        for topic in (EMPTY, LARGE):
            client.create_topic(topic)
        few = bomb(empty_records(RECORDS), RECORDS)
        assert client.produce(EMPTY, few)["error_code"] == "none"
        values = [b"a" * 1_000_000] * LARGE_RECORDS
        plain = batch(values)[61:]
        for _ in range(BATCHES):
            assert client.produce(LARGE, bomb(plain, LARGE_RECORDS))["error_code"] == "none"
        yield daemon
    daemon.stop()


def measured(script: str, *arguments: str, status: int = 0) -> Measured:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, check=False, timeout=300
    )
    assert done.returncode == status, done.stderr[-2000:]
    *_, megabytes, seconds = done.stderr.split()
    return Measured(done.stdout, int(megabytes), float(seconds))


@pytest.mark.parametrize("topic", [EMPTY, LARGE])
def test_one_record_is_consumed_in_bounded_memory_and_time(broker: Daemon, topic: str) -> None:
    for arguments in (["-n", "1"], ["-n", "1", "--format", "json"]):
        found = measured(MEASURED, "consume", topic, *arguments, "-b", broker.bootstrap)
        assert found.output.count(b"\n") == 1
        assert found.megabytes < MOST_MEGABYTES
        assert found.seconds < MOST_SECONDS


@pytest.mark.parametrize(("topic", "last"), [(EMPTY, RECORDS), (LARGE, BATCHES * LARGE_RECORDS)])
def test_last_record_is_found_in_bounded_memory(broker: Daemon, topic: str, last: int) -> None:
    wanted = ["consume", topic, "--tail", "1", "--format", "%o %S\\n", "-b", broker.bootstrap]
    found = measured(MEASURED, *wanted)
    assert found.output.split()[0] == b"%d" % (last - 1)
    assert found.megabytes < MOST_MEGABYTES


def test_all_records_are_read_in_bounded_memory(broker: Daemon) -> None:
    wanted = ["consume", LARGE, "--format", "%o\\n", "-b", broker.bootstrap]
    found = measured(MEASURED, *wanted)
    assert found.output.split() == [b"%d" % number for number in range(BATCHES * LARGE_RECORDS)]
    assert found.megabytes < MOST_MEGABYTES


@pytest.mark.parametrize("topic", [EMPTY, LARGE])
def test_console_shows_a_page_in_bounded_memory(broker: Daemon, topic: str) -> None:
    found = measured(SEARCHED, broker.bootstrap, topic)
    assert found.output == b"0\n"
    assert found.megabytes < MOST_MEGABYTES
    assert found.seconds < MOST_SECONDS


@pytest.mark.parametrize("topic", [EMPTY, LARGE])
def test_files_are_verified_in_bounded_memory(broker: Daemon, topic: str, tmp_path: Path) -> None:
    path = tmp_path / f"{topic}-0"
    shutil.copytree(broker.data_dir / path.name, path)
    # The status is 1 because a running broker has not yet written the leader epochs.
    found = measured(MEASURED, "log", "verify", str(path), status=1)
    assert found.megabytes < MOST_MEGABYTES
    log = str(path / f"{0:020}.log")
    assert measured(MEASURED, "dump-log", "--verify", log).megabytes < MOST_MEGABYTES


def test_records_of_a_file_are_dumped_in_bounded_memory(broker: Daemon) -> None:
    log = str(broker.data_dir / f"{LARGE}-0" / f"{0:020}.log")
    found = measured(MEASURED, "dump-log", "--records", "--format", "json", log)
    assert found.output.count(b"a" * 1_000_000) == BATCHES * LARGE_RECORDS
    assert found.megabytes < MOST_MEGABYTES


def test_rows_of_a_table_are_bounded_by_number_and_by_size() -> None:
    rows = [{"kind": "record", "value": "v"}] * (2 * TABLE_ROWS + 1)
    assert [len(some) for _, some in runs(rows)] == [TABLE_ROWS, TABLE_ROWS, 1]
    large: list[dict[str, object]] = [{"kind": "record", "value": "v" * TABLE_CHARACTERS}] * 3
    assert [len(some) for _, some in runs(large)] == [1, 1, 1]
