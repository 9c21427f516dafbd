"""``fencepost dump-log`` and Apache Kafka's DumpLogSegments agree on metadata logs.

The log and the snapshots of either broker are read.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from fencepost.cluster.controller.features import FeatureUpdate, UpgradeType
from fencepost.cluster.image_records import image_values
from fencepost.cluster.record_codec import encode
from fencepost.cluster.records import MetadataRecord
from fencepost.coordinator.metadata.framing import data_batch
from fencepost.coordinator.metadata.stopped import read_stopped
from fencepost.logcore.fs import OsFileSystem
from fencepost.tools.decisions import decide
from tests.oracle.conftest import Written
from tests.oracle.interchange import fencepost
from tests.support.kafka import Kafka, run_tool
from tests.support.metadata_changes import create_topic, delete_topic, set_broker_configs
from tests.unit.cluster.test_records import random_record
from tests.unit.coordinator.services.coordinators import allocate_producer_ids, storage

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools"), pytest.mark.timeout(1200)]

_RECORD = re.compile(r"\| offset: (\d+) .*? (?:payload: |(\w+):? )(\{.*\})")

Said = list[tuple[int, str, Any]]
"""Offset, type and fields of each record."""


def by_kafka(files: list[Path]) -> dict[str, Said]:
    said = run_tool(
        "org.apache.kafka.tools.DumpLogSegments",
        "--cluster-metadata-decoder",
        "--files",
        ",".join(map(str, files)),
    )
    found: dict[str, Said] = {}
    for line in said.splitlines():
        assert "isvalid: false" not in line, line
        if line.startswith("Dumping "):
            rows = found[line.removeprefix("Dumping ")] = []
        elif line.startswith("| offset"):
            match = _RECORD.fullmatch(line)
            assert match is not None, line
            shown = json.loads(match[3])
            kind = shown["type"] if match[2] is None else _control_name(match[2])
            rows.append((int(match[1]), kind, shown["data"] if match[2] is None else shown))
    return found


def _control_name(shown: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", shown.replace("KRaft", "Kraft")).upper()


def by_fencepost(files: list[Path]) -> dict[str, Said]:
    found: dict[str, Said] = {str(file): [] for file in files}
    for row in json.loads(fencepost("dump-log", "--records", "--format", "json", *files)):
        if row["kind"] == "record":
            decoded = row["decoded"]
            found[row["file"]].append((row["offset"], decoded["type"], decoded["data"]))
    return found


def types(said: dict[str, Said]) -> set[str]:
    return {kind for rows in said.values() for _, kind, _ in rows}


def test_dump_log_prints_every_metadata_record_type_as_kafka_does(tmp_path: Path) -> None:
    draw = random.Random(1)
    directory = tmp_path / "__cluster_metadata-0"
    directory.mkdir()
    kinds = get_args(MetadataRecord)
    values = [encode(random_record(kind, "", draw)) for kind in kinds for _ in range(5)]
    log = directory / f"{0:020}.log"
    log.write_bytes(data_batch(values, 1_700_000_000_000))
    ours = by_fencepost([log])
    assert ours == by_kafka([log])
    assert len(types(ours)) == len(kinds) == 27


def test_dump_log_prints_our_metadata_files_as_kafka_does(tmp_path: Path) -> None:
    lower = FeatureUpdate("transaction.version", 1, UpgradeType.SAFE_DOWNGRADE)
    for _ in range(2):
        now = storage(tmp_path)
        metadata = now.metadata
        create_topic(metadata, f"t{metadata.epoch}", 3, {"retention.ms": "5"})
        create_topic(metadata, "gone", 1, {})
        delete_topic(metadata, "gone")
        set_broker_configs(metadata, "", {"log.retention.ms": "8"})
        decide(now, lambda controller: controller.update_features([lower]))
        allocate_producer_ids(now)
        now.logs.close()
    now = storage(tmp_path)
    now.metadata.write_snapshot()
    create_topic(now.metadata, "behind", 1, {})
    now.logs.close()
    at = tmp_path / "__cluster_metadata-0"
    ours = by_fencepost(sorted(at.glob("*.log")) + list(at.glob("*.checkpoint")))
    assert len(ours) == 3
    assert ours == by_kafka(list(map(Path, ours)))
    assert types(ours) >= {"LEADER_CHANGE", "SNAPSHOT_HEADER", "SNAPSHOT_FOOTER", "TOPIC_RECORD"}
    assert types(ours) >= {"PARTITION_CHANGE_RECORD", "REGISTER_BROKER_RECORD"}
    assert len(list(image_values(now.metadata.image))) > 10


def test_dump_log_prints_kafkas_metadata_files_as_kafka_does(by_kafka_metadata: list[Path]) -> None:
    ours = by_fencepost(by_kafka_metadata)
    assert ours == by_kafka(by_kafka_metadata)
    assert types(ours) >= {"LEADER_CHANGE", "PARTITION_RECORD", "BEGIN_TRANSACTION_RECORD"}
    assert types(ours) >= {"SNAPSHOT_HEADER", "SNAPSHOT_FOOTER"}


def test_zero_checkpoint_of_4_4_has_the_first_records(tmp_path: Path) -> None:
    """``kafka-storage format`` writes the features into the zero checkpoint (KIP-1170)."""
    kafka = Kafka(tmp_path, {}, format_words=["--standalone"])
    kafka.add_settings({"controller.quorum.bootstrap.servers": kafka.controller})
    kafka.format()
    log = kafka.data_dir / "__cluster_metadata-0"
    checkpoint = log / f"{0:020}-{0:010}.checkpoint"
    ours = by_fencepost([checkpoint])
    assert ours == by_kafka([checkpoint])
    assert types(ours) >= {"SNAPSHOT_HEADER", "KRAFT_VOTERS", "FEATURE_LEVEL_RECORD"}
    stopped = read_stopped(OsFileSystem(), str(log))
    assert stopped is not None
    assert stopped.image.features.items() >= {"metadata.version": 33, "share.version": 2}.items()


@pytest.fixture
def by_kafka_metadata(by_kafka: Written) -> list[Path]:
    at = by_kafka.images["stopped"] / "__cluster_metadata-0"
    return [*at.glob("*.log"), *at.glob("*.checkpoint")]
