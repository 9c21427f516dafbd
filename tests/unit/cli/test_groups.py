"""``fencepost groups`` with an offline partition: one row has an error, other rows are shown."""

from __future__ import annotations

import errno
import json

import pytest

from tests.support.faults import FaultyDisk
from tests.support.waits import until
from tests.unit.coordinator.on_faulty_disk import running
from tests.wire.command_line import cli


@pytest.mark.slow
def test_offline_partition_is_listed_with_unknown_lag(tmp_path):
    disk = FaultyDisk()
    with running(tmp_path / "data", disk) as system:
        client, name = system.client, system.client.create_topic("t", 2)
        for index in (0, 1):
            client.produce(name, [b"v"] * 3, partition=index)
        seed = tmp_path / "seed.csv"
        seed.write_text("t,0,1\nt,1,1\n")
        asked = ("groups", "reset-offsets", "g", "--from-file", str(seed), "--execute")
        cli(system.bootstrap, *asked, "--undo", str(tmp_path / "undo"))
        disk.fails = {"write": errno.EIO}
        assert client.produce(name, [b"v"])["error_code"] == "kafka_storage_error"
        disk.fails = {}
        until(lambda: system.broker.services.logs.is_offline(name, 0), "it is off line")

        def told(*asked: str) -> tuple[str, str]:
            done = cli(system.bootstrap, "groups", *asked)
            return done.stdout, done.stderr

        off_line = "note: 1 partition without a lag: LEADER_NOT_AVAILABLE\n"
        for words in (("describe", "--all"), ("describe", "g"), ("offsets", "g")):
            table, notes = told(*words)
            shown = [line.split() for line in table.splitlines() if line.split()[:1] == ["t"]]
            assert shown == [
                ["t", "0", "1", "-", "-", "unknown", "-", "-"],
                ["t", "1", "1", "3", "3", "2", "0", "-"],
            ]
            assert notes == off_line
            rows = json.loads(told(*words, "--format", "json")[0])
            assert [row["error"] for row in rows] == ["LEADER_NOT_AVAILABLE", None]
        table, notes = told("describe", "--all", "--summary")
        assert table.splitlines()[-1].split()[-6:] == ["2", "2", "and", "unknown", "1", "0"]
        assert notes == off_line.replace(": LEADER_NOT_AVAILABLE", "")
