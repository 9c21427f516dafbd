"""The installed wheel works with other versions of Python: state machines and real clients."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.package.test_installed import NO_SOURCE, Built, built, run  # noqa: F401 - a fixture
from tests.support.daemon import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VERSIONS = ("3.12", "3.13", "3.14")
CHOSEN = (
    "tests/unit/txn/test_end_txn.py",
    "tests/unit/txn/test_init_producer.py",
    "tests/unit/logcore/test_batch.py",
    "tests/wire/test_groups.py",
    "tests/wire/test_service.py",
    "tests/wire/test_transactions.py",
)
"""Tests of state machines, of the bytes of logs, and of real clients."""


def interpreter(version: str) -> Path | None:
    """Find Python of this version on the PATH, or in pyenv's directory."""
    found = [shutil.which(f"python{version}")]
    found += map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    for path in filter(None, found):
        asked = subprocess.run([path, "-V"], capture_output=True, text=True, check=False)
        if asked.stdout.startswith(f"Python {version}."):
            return Path(path)
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_scenarios_pass_on_python(version: str, built: Built, tmp_path: Path) -> None:  # noqa: F811
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    run(python, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    there = tmp_path / "venv" / "bin" / "python"
    wheel = built.dists["wheel"]
    run(there, "-m", "pip", "install", "--quiet", f"{wheel}[dev]", cwd=tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=NO_SOURCE)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run(
        there, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHOSEN, cwd=tmp_path, env=env
    )
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
