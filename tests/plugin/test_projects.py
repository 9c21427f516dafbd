"""Whole projects that use the plugin, and are run as their developers would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

SAMPLES = Path(__file__).with_name("samples")


def run(
    project: Path,
    samples: str,
    *options: str,
    mark: str = "",
    ini: str = "",
    environment: Mapping[str, str] | None = None,
) -> tuple[dict[str, int], str]:
    """Run pytest in a project that has these samples; return its counts and its output."""
    for sample in samples.split():
        text = (SAMPLES / f"{sample}.py").read_text(encoding="utf-8")
        (project / f"test_{sample}.py").write_text(text.replace("mark.MARK", f"mark.{mark}"))
    (project / "pytest.ini").write_text(f"[pytest]\naddopts = --strict-markers\n{ini}")
    # With the environment variables of the outer run, the inner run would get its worker ids.
    outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", "base", *options],
        cwd=project,
        env={**outside, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1]
    counted = {what: int(count) for count, what in re.findall(r"(\d+) ([a-z]+)", last)}
    return counted, done.stdout


@pytest.mark.slow
def test_functions_coroutines_and_unittest_style_tests_pass(tmp_path: Path) -> None:
    counted, output = run(
        tmp_path,
        "plain coroutines unittest_style with_faults",
        *("-W", "ignore::DeprecationWarning"),
        mark="asyncio",
    )
    assert counted == {"passed": 8 + 3 + 3 + 7}, output
    assert [path.name for path in (tmp_path / "base").glob("kafka*")] == [], "nothing is kept"


@pytest.mark.slow
def test_anyio_tests_pass_on_each_backend(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n"
    )
    counted, output = run(tmp_path, "coroutines backends", "-p", "no:asyncio", mark="anyio")
    assert counted == {"passed": 3 + 1 + (find_spec("trio") is not None)}, output


@pytest.mark.slow
def test_clients_are_made_and_closed_by_their_fixtures(tmp_path: Path) -> None:
    counted, output = run(tmp_path, "clients", "-W", "ignore::DeprecationWarning")
    assert counted == {"passed": 8}, output
    assert "could not be closed" not in output


@pytest.mark.slow
def test_each_xdist_worker_has_its_own_session_broker(tmp_path: Path) -> None:
    addresses = tmp_path / "addresses"
    environment = {"ADDRESSES": str(addresses)}
    counted, output = run(tmp_path, "shared", "-n", "2", environment=environment)
    assert counted == {"passed": 6}, output
    # Each worker has its own session broker, so topic names do not collide.
    assert len(set(addresses.read_text().split())) == 2, output


@pytest.mark.slow
def test_failure_report_has_history_and_data_directory(tmp_path: Path) -> None:
    counted, output = run(tmp_path, "failing", ini="kafka_config = num.partitions=1\n")
    assert counted == {"failed": 5, "passed": 4, "errors": 14}, output
    reports = re.split(r"^_{3,} (?:ERROR at setup of )?(\w+) _{3,}$", output, flags=re.MULTILINE)
    told = dict(zip(reports[1::2], reports[2::2], strict=True))
    assert re.search(
        r"-+ Kafka at 127\.0\.0\.1:\d+ -+\nTIME +SUBJECT +WHAT.*\n"
        r".* payments +epoch-bumped .* InitProducerId .* cashier\n"
        r"payments is Ongoing since \d+ ms of 60000 ms, producer 0:0 of cashier@127.0.0.1,"
        r" on orders:0\n"
        r"a fault is not used up after 0 requests: api=EndTxn, close=after, times=2\n"
        r"data directory: (.*)\n",
        told["test_fails"],
    ), told["test_fails"]
    down = told["test_fails_without_a_broker"]
    assert "BrokerDownError: the broker is down; kafka.restart() starts it again" in down
    assert re.search(r"-+ Kafka at .* -+\nthe broker is down\ndata directory: ", down), down
    # For a shared broker, events before the test are left out.
    shared = told["test_fails_with_the_shared_one"]
    assert re.search(r" test_fails_with_the_shared_one-\d+-payments +epoch-bumped ", shared), shared
    assert not re.search(r"test_earlier-\d+-payments +epoch-bumped", shared), shared
    assert "orders:0 is None, not 5" in shared
    assert "RuntimeError: broken on purpose" in told["test_fails_to_begin"]
    assert " payments " in told["test_fails_to_begin"]
    for test, complaint in {
        "test_no_partitions": "topic 'orders' has a number of partitions, 1 or more: 0",
        "test_no_name": "topic 'or/ders': CreateTopics: INVALID_TOPIC_EXCEPTION (17)",
        "test_no_such_key": "topic 'orders' has partitions and config, not 'partition'",
        "test_config_of_a_shared_one": "config= is for a broker of the test's own (fixture kafka)",
        "test_by_position": "topics= and config= are given by name, not {'orders': 1}",
        "test_no_such_argument": "the marker has no topic=; did you mean topics?",
        "test_no_such_setting": "num.partition: unknown configuration; did you mean num.partitions",
        "test_config_of_a_module": "in the pytestmark of a module for that of kafka_module",
        "test_rule_of_a_cluster": "not one of the broker's: alice; did you mean alice?",
        "test_setting_of_a_cluster": "num.partition: unknown configuration; did you mean",
        "test_topic_of_a_cluster": "topic 'or/ders': CreateTopics: INVALID_TOPIC_EXCEPTION (17)",
        "test_brokers_of_one": "brokers= is for the fixture kafka_cluster",
        "test_marker_that_no_fixture_reads": "the test has none of the fixtures kafka, kafka_clus",
        "test_no_such_value": "num.partitions",
    }.items():
        assert complaint in told[test], (test, told[test])
        assert "Traceback" not in told[test], told[test]
        assert len(told[test].splitlines()) < 4, told[test]
    assert re.search(
        r"-+ Kafka at 127\.0\.0\.1:\d+,127\.0\.0\.1:\d+ -+\n(.*\n)*broker 2 is down\n"
        r"a fault is not used up after 0 requests: api=EndTxn, close=after, times=1\n",
        told["test_fails_with_a_cluster"],
    ), told["test_fails_with_a_cluster"]
    # The directories of failed tests are kept, and those of passed tests are removed.
    kept = sorted(path.name for path in (tmp_path / "base").glob("kafka*") if path.is_dir())
    named = {Path(found).name for found in re.findall(r"data directory: (.*)", output)}
    assert named <= set(kept), (named, kept)


@pytest.mark.slow
def test_markers_configure_brokers_with_users(tmp_path: Path) -> None:
    counted, output = run(tmp_path, "guarded")
    assert counted == {"passed": 2, "errors": 4}, output
    for complaint in (
        "users= is for a broker of the test's own (fixture kafka)",
        "users are passwords by name, not list",
        "acls are a list of rules, not 'alice READ topic:orders'",
        "there is no resource type 'table'; known are topic, group, cluster",
    ):
        assert complaint in output


def test_invalid_kafka_config_of_the_project_is_named(tmp_path: Path) -> None:
    counted, output = run(tmp_path, "shared", "-x", ini="kafka_config = num.partitions\n")
    assert counted == {"error": 1}, output
    assert "kafka_config: 'num.partitions' is not KEY=VALUE" in output


def test_plugin_imports_nothing_before_its_use(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import sys\n\n"
        "def pytest_unconfigure(config):\n"
        "    assert 'fencepost.testing.plugin' in sys.modules\n"
        "    names = sorted(one for one in sys.modules if one.startswith('fencepost.'))\n"
        "    others = [one for one in ('kio', 'structlog', 'click') if one in sys.modules]\n"
        "    print('IMPORTED', *names, *others)\n"
    )
    # hypothesis has its own pytest plugin, which imports more modules.
    _, output = run(tmp_path, "plain", "--collect-only", "-q", "-s")
    (line,) = (line for line in output.splitlines() if line.startswith("IMPORTED"))
    assert line.split()[1:] == ["fencepost.testing", "fencepost.testing.plugin"], line


def test_clone_runs_a_user_test_with_only_pytest_installed(tmp_path):
    # The repository's own configuration has options of plugins that only its developers install.
    clone = Path(__file__).parents[2]
    (tmp_path / "pyproject.toml").write_bytes((clone / "pyproject.toml").read_bytes())
    (tmp_path / "test_orders.py").write_text("def test_nothing(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "test_orders.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "warning" not in done.stdout
