"""Builds of franz-go, its programs here and its own tests, in the cache of Apache Kafka's jars."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.kafka import CACHE, unavailable

GO = Path(__file__).with_name("franz_go")


def built(package: str, binary: str) -> Path:
    """Build the package ``.`` or ``./NAME`` of the module; return its path, skip without Go."""
    return _built(("build",), package, binary)


def built_tests(package: str, binary: str) -> Path:
    """Build the tests of a package that the module requires, like :func:`built`."""
    return _built(("test", "-c"), package, binary)


def _built(goal: tuple[str, ...], package: str, binary: str) -> Path:
    compiler = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if compiler is None:
        unavailable("`go` is not on the PATH", "a client of another language")
    done = subprocess.run(
        [str(compiler), *goal, "-buildvcs=false", "-o", str(CACHE / binary), package],
        cwd=GO,
        env={**os.environ, "CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        unavailable(f"franz-go cannot be built: {done.stderr[-500:]}", "a client")
    return CACHE / binary
