"""The table of clients and features shows exactly the recorded test runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs.matrix import CLIENTS, FEATURES, cell
from tests.support.pages import ROOT


@pytest.mark.parametrize(
    ("fencepost", "kafka", "told"),
    [
        ("passed", "passed", "both"),
        ("passed", None, "Fencepost"),
        (None, "passed", "Apache Kafka"),
        ("passed", "failed", "Fencepost, Apache Kafka **fails**"),
        ("failed", "passed", "Fencepost **fails**, Apache Kafka"),
        ("skipped", "passed", "Apache Kafka"),
        (None, None, "not run"),
        ("skipped", None, "not run"),
    ],
)
def test_matrix_cell_summarizes_its_scenarios(
    fencepost: str | None, kafka: str | None, told: str
) -> None:
    runs = [
        {"target": target, "outcomes": {"test_it[one]": outcome, "test_other": "failed"}}
        for target, outcome in (("fencepost", fencepost), ("kafka", kafka))
        if outcome
    ]
    assert cell(r"test_it\[", runs) == told
    assert cell(None, runs) == "no scenario"


def test_one_failed_scenario_makes_the_cell_fail() -> None:
    outcomes = {"test_it[1]": "passed", "test_it[2]": "failed"}
    assert cell("test_it", [{"target": "kafka", "outcomes": outcomes}]) == "Apache Kafka **fails**"


def test_every_matrix_pattern_matches_a_recorded_scenario() -> None:
    """If a pattern matched nothing, the cell of a renamed test would keep an old result."""
    wire = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests/wire").glob("test_*.py"))
    runs = json.loads((ROOT / "docs/compatibility.json").read_text("utf-8"))
    for run in runs:
        for test in run["outcomes"]:
            assert f"def {test.partition('::')[2].partition('[')[0]}(" in wire, test
    for feature, patterns in FEATURES.items():
        assert patterns.keys() <= set(CLIENTS), feature
        assert all(cell(pattern, runs) != "not run" for pattern in patterns.values()), feature


@pytest.mark.slow
def test_results_file_has_outcomes_and_client_versions(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\n"
        "from tests.support.results import Results\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(Results(Path('out/results.json'), 'fencepost'))\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert not 'so'\n"
        "def test_left(): pytest.skip('why')\n"
        "@pytest.fixture\n"
        "def broken():\n"
        "    yield\n"
        "    raise RuntimeError\n"
        "def test_late(broken): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:fencepost"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    told = json.loads((tmp_path / "out/results.json").read_text("utf-8"))
    outcomes = {test.partition("::")[2]: outcome for test, outcome in told["outcomes"].items()}
    assert outcomes == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_left": "skipped",
        "test_late": "failed",
    }, done.stdout
    assert told["target"] == "fencepost"
    assert told["clients"].keys() == {"confluent-kafka", "aiokafka", "kafka-python"}
