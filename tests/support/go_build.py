"""Builds of Go programs, and of franz-go's own tests, in the cache of Apache Kafka's jars."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.kafka import CACHE, unavailable

FRANZ_GO = Path(__file__).parents[1] / "oracle" / "franz_go"


def built(package: str, binary: str, module: Path = FRANZ_GO) -> Path:
    """Build the package ``.`` or ``./NAME`` of a module; return its path; skip if Go is missing."""
    return _built(("build",), package, binary, module)


def built_tests(package: str, binary: str) -> Path:
    """Build the tests of a package that the module ``franz_go`` requires, like :func:`built`."""
    return _built(("test", "-c"), package, binary, FRANZ_GO)


def _built(goal: tuple[str, ...], package: str, binary: str, module: Path) -> Path:
    compiler = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if compiler is None:
        unavailable("`go` is not on the PATH", "a Go program")
    done = subprocess.run(
        [str(compiler), *goal, "-buildvcs=false", "-o", str(CACHE / binary), package],
        cwd=module,
        env={**os.environ, "CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        unavailable(f"{module.name} cannot be built: {done.stderr[-500:]}", "a Go program")
    return CACHE / binary
