"""A seed that is played again, for tests that it is one history."""

from __future__ import annotations

import os
import subprocess
import sys


def stories(world: str, seed: int) -> set[bytes]:
    """Play a seed twice, with other orders of sets of strings; returns the different stories."""
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
