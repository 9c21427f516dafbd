"""Repeats the simulation of a seed, for tests that a seed always gives the same run."""

from __future__ import annotations

import os
import subprocess
import sys


def stories(world: str, seed: int) -> set[bytes]:
    """Simulate a seed with two iteration orders of sets of strings; return the distinct traces."""
    command = [sys.executable, "-m", "tests.sim.run", "--world", world, "--seed", str(seed)]
    return {
        subprocess.run(
            [*command, "--verbose"],
            env={**os.environ, "PYTHONHASHSEED": order},
            check=True,
            capture_output=True,
        ).stdout
        for order in ("1", "2")
    }
