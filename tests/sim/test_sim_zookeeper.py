"""Histories of a cluster on ZooKeeper from seeds; ``make sim WORLD=zookeeper SEED=7 N=1``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.zk_cluster import play

SEEDS = 20
SLOW_SEEDS = 150
"""In CI; ``make sim N=10000`` plays more."""


def test_seeds() -> None:
    acknowledged = 0
    for seed in range(1, SEEDS + 1):
        acknowledged += play(seed).acknowledged
    assert acknowledged > 50 * SEEDS, "hardly anything was written"


@pytest.mark.slow
def test_more_seeds() -> None:
    for seed in range(SEEDS + 1, SEEDS + SLOW_SEEDS + 1):
        play(seed)


def test_a_seed_is_one_history() -> None:
    """Also where sets and dictionaries of strings have another order."""
    command = [sys.executable, "-m", "tests.sim.run", "--world", "zookeeper", "--seed", "2"]
    stories = {
        subprocess.run(
            [*command, "--verbose"],
            env={**os.environ, "PYTHONHASHSEED": order},
            check=True,
            capture_output=True,
        ).stdout
        for order in ("1", "2")
    }
    assert len(stories) == 1
    assert b"is elected in epoch" in stories.pop()
