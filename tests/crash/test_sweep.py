"""``fencepost crash-sweep`` as a user runs it: a good pipeline passes, bad ones fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
COPIER = f"{sys.executable} -m tests.crash.copier"
POINTS = 120
"""How many of some 300 points, which include responses, are tried: two minutes on two cores."""


def sweep(tmp_path: Path, mode: str, *options: str, status: int) -> dict[str, Any]:
    """Sweep the copier in one of its modes and return the JSON verdict."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fencepost", "crash-sweep", "--format", "json"),
            *("--directory", str(tmp_path / "sweep"), "--setup", f"{COPIER} fill"),
            *("--config", "offsets.topic.num.partitions=2"),
            *("--config", "transaction.state.log.num.partitions=2"),
            *options,
            *("--", *COPIER.split(), mode),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(done.stdout)


def test_exactly_once_pipeline_passes_at_every_kill_point(tmp_path):
    verdict = sweep(
        tmp_path,
        "copy",
        *("--points", str(POINTS), "--every-answer", "--jobs", "4"),
        *("--verify", f"{COPIER} verify"),
        status=0,
    )
    assert verdict["points"] == POINTS
    assert verdict["failures"] == verdict["skipped"] == 0
    # The number of operations varies with the client's batching.
    assert verdict["kills"] >= POINTS * 0.8
    assert verdict["candidates"] > POINTS
    where = Counter(row["point"].split()[0] for row in verdict["results"] if row["killed"])
    assert where.keys() >= {"before", "after", "torn", "answer"}
    # With --every-answer, each response is a kill point, even if nothing was written since the
    # previous response, because the client may have acted on the previous response.
    assert where["answer"] > verdict["answers"] * POINTS / verdict["candidates"] / 2
    assert list((tmp_path / "sweep").iterdir()) == []


def test_command_killed_with_the_broker_resumes_at_its_offset(tmp_path):
    verdict = sweep(
        tmp_path,
        "copy",
        *("--points", "12", "--jobs", "4", "--kill-command", "--verify", f"{COPIER} verify"),
        status=0,
    )
    assert max(row["attempts"] for row in verdict["results"]) > 1


def test_pipeline_without_transactions_fails_the_sweep(tmp_path):
    verdict = sweep(tmp_path, "sloppy", "--points", "24", "--jobs", "4", "--kill-command", status=1)
    assert 0 < verdict["failures"] < verdict["points"]
    text = json.dumps(verdict["results"])
    assert "torn: 8 of 4 records" in text or "torn: 6 of 4 records" in text
    assert list((tmp_path / "sweep").iterdir()) != []


def test_open_transaction_is_found_before_the_first_kill(tmp_path):
    verdict = sweep(tmp_path, "forget", "--points", "2", "--settle", "0.2", status=1)
    assert verdict["points"] == verdict["kills"] == 0
    (only,) = verdict["results"]
    assert "held by copier" in only["failures"][0]


def test_time_limit_ends_the_sweep_and_counts_skipped_points(tmp_path):
    verdict = sweep(tmp_path, "copy", "--points", "all", "--time-limit", "6", status=0)
    assert verdict["points"] == verdict["candidates"]
    assert verdict["skipped"] > 0
    assert verdict["kills"] + verdict["not_reached"] + verdict["skipped"] == verdict["points"]
