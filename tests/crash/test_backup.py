"""``fencepost backup`` of stopped and of running brokers; interrupted and damaged backups."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Message

from fencepost.cli import main
from fencepost.tools.backup import BackupError, create
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.failover import PARTITIONS, SOURCE, TARGET, Writer
from tests.support.pipeline import QUIET, Clients, Pipeline
from tests.support.targets import SETTINGS
from tests.support.waits import until

pytestmark = pytest.mark.timeout(300)

FEW = {**SETTINGS, "offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}
BRIEF = {**QUIET, "session.timeout.ms": 3000, "heartbeat.interval.ms": 500}
"""After a restore, a group waits for the session timeouts of its members, as after a kill."""
ROLLING = {**FEW, "log.roll.ms": "300"}
"""Segments are rolled all the time."""


def run(*words: object, status: int = 0) -> Result:
    done = CliRunner().invoke(main, ["backup", *map(str, words)])
    assert done.exit_code == status, done.output
    assert "Traceback" not in done.output
    return done


def problems(backup: Path) -> list[str]:
    """Return the paths that `verify` reports, relative to the backup; it must fail."""
    (told,) = json.loads(run("verify", backup, "--json", status=1).stdout)
    return [
        str(problem["file"] or problem["problem"].partition(":")[0]) for problem in told["problems"]
    ]


def fill(daemon: Daemon) -> None:
    """Write records, transactions (committed and open), and offsets."""
    with Cluster(daemon.bootstrap) as cluster:
        for name in (SOURCE, TARGET):
            cluster.create_topic(name, PARTITIONS)
        for index in range(PARTITIONS):
            cluster.produce(SOURCE, [b"%d" % number for number in range(50)], partition=index)
    clients = Clients(daemon.bootstrap)
    pipeline = Pipeline(clients, "pipeline", SOURCE, TARGET)
    pipeline.start()
    until(lambda: len(clients.messages(TARGET, PARTITIONS)) == 150, "all is copied")
    pipeline.stopping.set()
    pipeline.join()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data directory of a broker that was stopped."""
    daemon = Daemon(tmp_path_factory.mktemp("stopped") / "data", FEW).start()
    try:
        fill(daemon)
        daemon.stop()
    finally:
        daemon.kill()
    return daemon.data_dir


@pytest.fixture
def backup(stopped: Path, tmp_path: Path) -> Path:
    target = tmp_path / "backup"
    run("create", target, "--data-dir", stopped)
    return target


def values(messages: list[Message]) -> list[list[int]]:
    """Return the numbers in each partition, in order."""
    found: list[list[int]] = [[] for _ in range(PARTITIONS)]
    for message in messages:
        found[message.partition()].append(int(message.value()))
    return found


# --- a stopped broker ---


def test_restored_broker_has_records_transactions_and_offsets(backup: Path, tmp_path: Path) -> None:
    run("verify", backup)
    run("restore", backup, "--data-dir", tmp_path / "data")
    daemon = Daemon(tmp_path / "data", FEW).start()
    try:
        clients = Clients(daemon.bootstrap)
        assert values(clients.messages(TARGET, PARTITIONS)) == [list(range(50))] * PARTITIONS
        done = CliRunner().invoke(
            main, ["groups", "describe", "pipeline", "--json", "-b", daemon.bootstrap]
        )
        assert [row["lag"] for row in json.loads(done.stdout)] == [0] * PARTITIONS
    finally:
        daemon.stop()


def test_backup_keeps_modes_and_all_files_but_the_lock(stopped: Path, backup: Path) -> None:
    def modes(root: Path) -> dict[str, int]:
        found = (path for path in root.rglob("*") if path.is_file())
        return {str(path.relative_to(root)): path.stat().st_mode for path in found}

    expected = modes(stopped)
    del expected[".lock"]
    assert modes(backup / "data") == expected
    assert backup.stat().st_mode & 0o077 == 0


def test_backup_and_restore_never_overwrite_data(
    stopped: Path, backup: Path, tmp_path: Path
) -> None:
    assert "has a backup already" in run("create", backup, "--data-dir", stopped, status=1).output
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    assert "is not empty" in run("create", full, "--data-dir", stopped, status=1).output
    assert "replaces no data" in run("restore", backup, "--data-dir", full, status=1).output
    assert [path.name for path in full.iterdir()] == ["mine"]
    inside = stopped / "backup"
    assert "is inside" in run("create", inside, "--data-dir", stopped, status=1).output
    assert "not a data directory" in run("create", inside, "--data-dir", full, status=1).output
    assert not inside.exists()


def test_a_second_data_directory_is_refused(stopped: Path, backup: Path, tmp_path: Path) -> None:
    """Otherwise the backup would only have the last data directory."""
    both = ("--data-dir", stopped, "--data-dir", tmp_path / "other")
    for words in (("create", tmp_path / "new", *both), ("restore", backup, *both)):
        assert "a broker has one data directory" in run(*words, status=2).output
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "other").exists()


def test_verify_names_each_changed_file(backup: Path, tmp_path: Path) -> None:
    (log,) = (backup / "data" / f"{SOURCE}-0").glob("*.log")
    raw = log.read_bytes()
    log.write_bytes(raw[:100] + bytes([raw[100] ^ 1]) + raw[101:])
    # Two problems: the file's digest, and the batch's own checksum.
    assert problems(backup).count(str(log)) == 2
    refused = run("restore", backup, "--data-dir", tmp_path / "data", status=1)
    assert "has changed since" in refused.output
    assert not (tmp_path / "data").exists()
    log.write_bytes(raw[:-1])
    assert str(log) in problems(backup)
    log.unlink()
    assert str(log) in problems(backup)
    log.write_bytes(raw)
    run("verify", backup)
    (backup / "data" / "more").touch()
    assert str(backup / "data" / "more") in problems(backup)


@pytest.mark.parametrize("lines", [0, 1, 5, -1])
def test_truncated_manifest_is_refused(backup: Path, tmp_path: Path, lines: int) -> None:
    manifest = backup / "manifest.jsonl"
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[:lines]))
    for words in (("verify", backup), ("restore", backup, "--data-dir", tmp_path / "data")):
        assert "is damaged" in run(*words, status=1).output


def test_manifest_without_its_first_line_is_refused(backup: Path, tmp_path: Path) -> None:
    manifest = backup / "manifest.jsonl"
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[1:]))
    for words in (("verify", backup), ("restore", backup, "--data-dir", tmp_path / "data")):
        assert "is damaged" in run(*words, status=1).output


def test_manifest_cannot_name_a_file_outside(backup: Path, tmp_path: Path) -> None:
    manifest = backup / "manifest.jsonl"
    for name in ("../outside", "/outside", "a/../../outside"):
        row = json.dumps({"name": name, "size": 0, "mode": 0o600, "sha256": ""})
        manifest.write_text(f"{manifest.read_text().splitlines()[0]}\n{row}\n")
        refused = run("restore", backup, "--data-dir", tmp_path / "data", status=1)
        assert "outside of the backup" in refused.output or "damaged" in refused.output
    assert not (tmp_path / "outside").exists()


# --- kill -9 ---

KILLED = """
import os, signal, sys
from pathlib import Path
from fencepost.tools import backup

copy, left = backup._copy, [int(sys.argv[4])]

def interrupted(*arguments):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return copy(*arguments)

backup._copy = interrupted
getattr(backup, sys.argv[1])(Path(sys.argv[2]), Path(sys.argv[3]))
"""
"""Runs `create` or `restore`, and kills itself before it copies one of the files."""


def killed(step: str, source: Path, target: Path, copies: int) -> bool:
    """Return whether the process was killed; otherwise it has finished."""
    command = [sys.executable, "-c", KILLED, step, str(source), str(target), str(copies)]
    status = subprocess.run(command, check=False).returncode
    assert status in {0, -signal.SIGKILL}
    return status != 0


@pytest.mark.parametrize("copies", [0, 1, 7, 20])
def test_killed_backup_is_incomplete_until_it_is_repeated(
    stopped: Path, tmp_path: Path, copies: int
) -> None:
    target = tmp_path / "backup"
    assert killed("create", stopped, target, copies)
    for words in (("verify", target), ("restore", target, "--data-dir", tmp_path / "data")):
        assert "is incomplete" in run(*words, status=1).output
    assert not (tmp_path / "data").exists()
    run("create", target, "--data-dir", stopped)
    run("verify", target)


@pytest.mark.parametrize("copies", [0, 7])
def test_killed_restore_leaves_no_data_directory(backup: Path, tmp_path: Path, copies: int) -> None:
    assert killed("restore", backup, tmp_path / "data", copies)
    assert not (tmp_path / "data").exists()
    run("restore", backup, "--data-dir", tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()].count("data.restoring") == 0
    shutil.rmtree(tmp_path / "data")


# --- a running broker ---


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "data", ROLLING).start()
    yield daemon
    daemon.kill()


def answers(daemon: Daemon) -> bool:
    with Cluster(daemon.bootstrap) as cluster:
        return bool(cluster.call("api_versions", 0).get("error_code") == "none")


@pytest.mark.slow
def test_exactly_once_pipeline_continues_on_a_backup_of_a_running_broker(
    running: Daemon, tmp_path: Path
) -> None:
    """A backup has all records that were acknowledged before it; the copy has no record twice."""
    with Cluster(running.bootstrap) as cluster:
        for name in (SOURCE, TARGET):
            cluster.create_topic(name, PARTITIONS)
    writer = Writer(running.bootstrap)
    pipeline = Pipeline(Clients(running.bootstrap, BRIEF), "pipeline", SOURCE, TARGET)
    writer.start()
    pipeline.start()
    floors: list[list[int]] = []
    try:
        for number in range(3):
            writer.goes_on("records are written")
            floors.append([numbers[-1] for numbers in writer.acknowledged])
            done = run("create", tmp_path / f"backup-{number}", "--data-dir", running.data_dir)
            assert "True" in done.output
        writer.goes_on("the broker continues")
    finally:
        for thread in (writer, pipeline):
            thread.stopping.set()
            thread.join(60)
    assert writer.refused == []
    running.kill()
    for number, floor in enumerate(floors):
        run("verify", tmp_path / f"backup-{number}")
        data = tmp_path / f"restored-{number}"
        run("restore", tmp_path / f"backup-{number}", "--data-dir", data)
        check_pipeline(Daemon(data, ROLLING).start(), floor)


def check_pipeline(daemon: Daemon, floor: list[int]) -> None:
    """Let the pipeline copy the remaining records; the target must have each number once."""
    try:
        clients = Clients(daemon.bootstrap, BRIEF)
        source = values(clients.messages(SOURCE, PARTITIONS))
        for index, numbers in enumerate(source):
            assert numbers == list(range(index, index + PARTITIONS * len(numbers), PARTITIONS))
            assert numbers[-1] >= floor[index]
        pipeline = Pipeline(clients, "pipeline", SOURCE, TARGET)
        pipeline.start()
        count = sum(map(len, source))
        until(lambda: len(clients.messages(TARGET, PARTITIONS)) >= count, "all is copied")
        pipeline.stopping.set()
        pipeline.join(60)
        copied = clients.messages(TARGET, PARTITIONS)
        assert values(copied) == source
        parts = Counter(dict(message.headers())["txn"] for message in copied)
        sizes = {
            dict(message.headers())["txn"]: int(dict(message.headers())["size"])
            for message in copied
        }
        assert parts == sizes
    finally:
        daemon.stop()


SUSPENDED = """
import os, signal, sys
from pathlib import Path
from fencepost.tools import backup

def killed(source, open_files):
    os.kill(os.getpid(), signal.SIGKILL)

backup._opened = killed
backup.create(Path(sys.argv[1]), Path(sys.argv[2]))
"""
"""Runs a backup that is killed while it has suspended the broker."""


def test_broker_continues_if_its_backup_is_killed(running: Daemon, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUSPENDED, str(running.data_dir), str(tmp_path / "backup")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    until(lambda: answers(running), "the broker answers")
    assert "is incomplete" in run("verify", tmp_path / "backup", status=1).output
    run("create", tmp_path / "backup", "--data-dir", running.data_dir)
    run("verify", tmp_path / "backup")


def test_broker_is_not_suspended_for_longer_than_allowed(running: Daemon, tmp_path: Path) -> None:
    with pytest.raises(BackupError, match=r"stop it, or allow a longer pause|cannot be suspended"):
        create(running.data_dir, tmp_path / "backup", max_pause_s=0.0)
    until(lambda: answers(running), "the broker answers")


@pytest.mark.slow
def test_preallocated_log_needs_a_stopped_broker(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "data", {**FEW, "log.preallocate": "true"}).start()
    try:
        with Cluster(daemon.bootstrap) as cluster:
            cluster.produce(cluster.create_topic("t"), [b"x"])
        refused = run("create", tmp_path / "backup", "--data-dir", daemon.data_dir, status=1)
        assert "stop the broker" in refused.output
        assert answers(daemon)
        daemon.stop()
        run("create", tmp_path / "backup", "--data-dir", daemon.data_dir)
        run("verify", tmp_path / "backup")
    finally:
        daemon.kill()
