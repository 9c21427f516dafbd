"""Flink is killed between checkpoint and commit; an operator commits, and the job continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.cli.flink_checkpoint import METADATA, CheckpointError, read_flink_checkpoint
from fencepost.testing import Kafka
from tests.ecosystem.flink_checkpoints import complete_checkpoint
from tests.ecosystem.programs import (
    DEADLINE_S,
    PARTITIONS,
    assert_exactly_once,
    compiled,
    fed,
    jars,
    java,
)
from tests.support.cluster import Cluster, unique
from tests.support.processes import Child
from tests.support.waits import until
from tests.unit.cli.test_flink_checkpoint import FOLDER, with_absolute_paths
from tests.wire.command_line import cli
from tests.wire.test_cli import rows

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]

TOTAL = 4_000


def test_operator_commits_the_transactions_of_a_checkpoint_and_flink_continues(
    tmp_path: Path,
) -> None:
    """The broker refuses the commits, so that Flink repeats them until it is killed."""
    libs = jars("flink", "flink-connector-kafka-*.jar")
    classes = compiled("FlinkCopy.java", libs, tmp_path / "classes")
    source, target, folder = unique("numbers"), unique("copies"), tmp_path / "checkpoints"
    with Kafka(tmp_path / "data") as broker:

        def start() -> Child:
            arguments = (broker.bootstrap, source, target, str(folder))
            return java(libs, "FlinkCopy", *arguments, classes=classes)

        def resolved(*more: str) -> list[dict[str, object]]:
            named = ("txns", "resolve", "--from-checkpoint", str(complete_checkpoint(folder)))
            return rows(cli(broker.bootstrap, *named, *more, "--json"))

        def is_named() -> bool:
            found = complete_checkpoint(folder)
            try:
                return found is not None and bool(read_flink_checkpoint(found))
            except (CheckpointError, OSError):  # the checkpoint is incomplete, or was replaced
                return False

        with Cluster(broker.bootstrap) as cluster:
            for topic in (source, target):
                cluster.create_topic(topic, PARTITIONS)
        refusal = broker.faults.add(
            api="EndTxn",
            error="COORDINATOR_NOT_AVAILABLE",
            times=None,
            match={"committed": True},
        )
        with fed(broker.bootstrap, source, TOTAL):
            child = start()
            try:
                until(is_named, f"a checkpoint: {child.tail(20)}", deadline_s=DEADLINE_S)
            finally:
                child.kill()
        refusal.remove()
        opened = resolved()
        assert opened
        for transaction in opened:
            assert (transaction["verdict"], transaction["proof"]) == ("open", True)
            assert transaction["transaction_version"] == 2
        done = resolved("--commit", "--execute")
        assert {transaction["action"] for transaction in done} == {"committed"}
        assert {(transaction["verdict"], transaction["proof"]) for transaction in resolved()} == {
            ("committed", True)
        }
        child = start()
        try:
            assert_exactly_once(broker.bootstrap, target, TOTAL, child)
        finally:
            child.kill()


def test_flink_reads_absolute_paths_written_by_the_unit_tests(tmp_path: Path) -> None:
    libs = jars("flink", "flink-connector-kafka-*.jar")
    classes = compiled("FlinkPaths.java", libs, tmp_path / "classes")
    parent, folder = "file:/entropy/jobs/chk-3", FOLDER / "files"
    changed = tmp_path / METADATA
    changed.write_bytes(with_absolute_paths((folder / METADATA).read_bytes(), parent))
    child = java(libs, "FlinkPaths", str(changed), classes=classes)
    assert child.wait(DEADLINE_S) == 0, child.tail()
    wanted = {
        f"{parent}/{path.name} {path.stat().st_size}"
        for path in folder.iterdir()
        if path.name != METADATA
    }
    assert wanted == {line for line in child.lines if line.startswith(parent)}
