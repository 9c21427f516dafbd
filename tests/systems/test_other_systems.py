"""Runs tests of other folders without the calls that macOS and Windows lack."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.quick import only

ROOT = Path(__file__).resolve().parents[2]
STARTUP = Path(__file__).parent / "startup"

# One process runs each selection, without workers, and without the variables of this run's worker.
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
OWN_RUN = ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")

WHOLE_RUN_S = 1800
"""One test here runs hundreds of other tests, each of which has its own timeout."""

ASKS_LINUX = {
    "test_system.py": "compares with Linux's calls",
    "test_append_and_fetch_are_refused_if_no_file_can_be_mapped": "limits the address space",
    "test_first_index_entry_caches_only_its_page": "asks what is in the page cache",
}
"""Tests of calls that the emulation removes."""


def emulated(system: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in OWN_RUN}
    return {**kept, "EMULATED_SYSTEM": system, "PYTHONPATH": str(STARTUP)}


def run_tests(system: str, tmp_path: Path, *selection: str) -> int:
    """Return the number of tests that passed; none may fail.

    The tests of single modules use no plugin, and run with the limit of ``ulimit -n 4096``.
    """
    without = [
        f"--deselect={name}" if "::" in name else f"--ignore-glob=*/{name}"
        for name in ASKS_LINUX
        if name.endswith(".py")
    ]
    unwanted = " or ".join(name for name in ASKS_LINUX if not name.endswith(".py"))
    command = [*PYTEST, "-m", "not slow", "-k", f"not ({unwanted})", *without]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'tests'}", *selection],
        cwd=ROOT,
        env={
            **emulated(system),
            "EMULATED_DESCRIPTORS": "4096" if "/unit/" in selection[0] else "256",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-2_000:]}"
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None
    return int(counted[1])


def test_emulated_system_lacks_the_linux_calls() -> None:
    asked = (
        "import os, select, time; from fencepost.logcore import system as s;"
        "print(hasattr(os, 'posix_fallocate'), s.sync_data is s._full_sync,"
        " s.read_at is s._read_at, s.MAPS_FILES, s.descriptor_limit())"
    )
    for system, expected in (
        ("macos", "False True False True 256"),
        ("windows", f"False True True False {sys.maxsize}"),
    ):
        told = subprocess.check_output(
            [sys.executable, "-c", asked], env=emulated(system), cwd=ROOT
        )
        assert told.decode().strip() == expected


@pytest.mark.parametrize("system", only(("macos", "windows"), "windows"))
def test_daemon_on_emulated_system_serves_and_restarts(system: str, tmp_path: Path) -> None:
    env = emulated(system)
    daemon = Daemon(tmp_path / "data", env=env).start()

    def ask(*arguments: str, lines: str = "") -> str:
        command = [sys.executable, "-m", "fencepost", *arguments, "-b", daemon.bootstrap]
        return subprocess.run(
            command, env=env, cwd=ROOT, input=lines, check=True, capture_output=True, text=True
        ).stdout

    try:
        ask("topics", "create", "orders", "--partitions", "2")
        ask("produce", "orders", "--partition", "0", lines="first\nsecond\n")
        assert ask("consume", "orders", "--format", "%o %s\n") == "0 first\n1 second\n"
        daemon.stop()
        daemon.start()
        assert ask("consume", "orders", "--format", "%o %s\n") == "0 first\n1 second\n"
        ask("topics", "delete", "orders", "--yes")
    finally:
        daemon.kill()


@pytest.mark.slow
def test_broker_serves_more_partitions_than_macos_has_descriptors() -> None:
    asked = (
        "from fencepost.testing import Kafka\n"
        "with Kafka() as kafka:\n"
        "    wide = kafka.topic('wide', partitions=200)\n"
        "    for partition in range(200):\n"
        "        kafka.produce(wide, b'tea', partition=partition)\n"
        "    print(len(kafka.records(wide)))"
    )
    told = subprocess.check_output(
        [sys.executable, "-c", asked], env=emulated("macos"), cwd=ROOT, text=True
    )
    assert told.strip() == "200"


@pytest.mark.slow
@pytest.mark.timeout(WHOLE_RUN_S)
@pytest.mark.parametrize(
    ("least", "selection"),
    [
        (1400, ("tests/unit/logcore",)),
        (100, ("tests/unit/coordinator/server", "tests/unit/coordinator/daemon")),
        (50, ("tests/unit/coordinator/storage", "tests/unit/testing")),
        (30, ("tests/plugin",)),
        (10, ("tests/wire/test_produce_consume.py", "tests/wire/test_transactions.py")),
    ],
)
def test_tests_pass_with_the_calls_of_macos(
    least: int, selection: tuple[str, ...], tmp_path: Path
) -> None:
    assert run_tests("macos", tmp_path, *selection) >= least


@pytest.mark.slow
@pytest.mark.timeout(WHOLE_RUN_S)
@pytest.mark.parametrize(
    ("least", "selection"),
    [
        (
            100,
            tuple(f"tests/unit/logcore/test_{name}.py" for name in ("index", "log", "partition")),
        ),
        (40, ("tests/unit/testing/test_broker.py", "tests/plugin/test_methods.py")),
    ],
)
def test_tests_of_a_broker_in_process_pass_with_the_calls_of_windows(
    least: int, selection: tuple[str, ...], tmp_path: Path
) -> None:
    assert run_tests("windows", tmp_path, *selection) >= least
