"""Makes the checkpoints of Apache Flink that tests in ``tests/unit/cli`` read.

``python -m tests.ecosystem.flink_checkpoints`` runs ``FlinkCopy.java`` on a broker. It copies the
first checkpoint with a number of at least 3 that has transactions: once with the state in
``_metadata``, and once with the state in separate files.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from fencepost.cli.flink_checkpoint import read_flink_checkpoint
from tests.ecosystem.programs import PARTITIONS, compiled, fed, jars, java
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.waits import until

FOLDER = Path(__file__).parents[1] / "unit" / "cli" / "flink_checkpoints"
THRESHOLDS: Mapping[str, tuple[str, ...]] = {"inline": (), "files": ("0b",)}
"""Folder of the copy → option with the size above which state goes into separate files."""

FIRST = 3
TOTAL = 12_000
"""Number of records, more than the job can copy before the checkpoint is complete."""


def complete_checkpoint(folder: Path, least: int = 1) -> Path | None:
    """Return the newest complete checkpoint whose number is at least this."""
    found = [
        (int(file.parent.name.removeprefix("chk-")), file.parent)
        for file in folder.glob("*/chk-*/_metadata")
        if file.stat().st_size
    ]
    number, newest = max(found, default=(0, None))
    return newest if number >= least else None


def _make(home: Path, name: str, run: Callable[..., object]) -> None:
    daemon = Daemon(home / "data").start()
    try:
        with Cluster(daemon.bootstrap) as cluster:
            for topic in ("numbers", "copies"):
                cluster.create_topic(topic, PARTITIONS)
        run(daemon, home / "checkpoints", THRESHOLDS[name], FOLDER / name)
    finally:
        daemon.kill()


def _copy_one(daemon: Daemon, folder: Path, threshold: tuple[str, ...], target: Path) -> None:
    libs = jars("flink", "flink-connector-kafka-*.jar")
    classes = compiled("FlinkCopy.java", libs, folder.parent / "classes")
    arguments = (daemon.bootstrap, "numbers", "copies", str(folder), *threshold)
    child = java(libs, "FlinkCopy", *arguments, classes=classes)

    def copied() -> bool:
        found = complete_checkpoint(folder, FIRST)
        shutil.rmtree(target, ignore_errors=True)
        try:
            # A checkpoint has no transaction if nothing was written since the previous checkpoint.
            return bool(found and read_flink_checkpoint(shutil.copytree(found, target)))
        except (OSError, shutil.Error):  # the next checkpoint has replaced it
            return False

    try:
        with fed(daemon.bootstrap, "numbers", TOTAL):
            until(copied, "a checkpoint", deadline_s=120)
            child.kill()
    finally:
        child.kill()


def main() -> None:
    """Make all checkpoints."""
    for name in THRESHOLDS:
        with tempfile.TemporaryDirectory(prefix="flink-") as home:
            _make(Path(home), name, _copy_one)


if __name__ == "__main__":
    main()
