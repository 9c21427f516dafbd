"""``python -m tests.sim.run --seed 1 --count 500`` runs the simulations of 500 seeds.

``--world`` selects the kind of cluster: ``daemons`` (a standalone broker, or a controller and its
brokers), ``shares`` (the same with a share group), ``zookeeper`` (brokers that elect their
controller on ZooKeeper), or ``both`` (``daemons`` and ``zookeeper``).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from tests.sim import daemons, shares, zk_history

ZOOKEEPER, BOTH, DAEMONS, SHARES = "zookeeper", "both", "daemons", "shares"
PLAYS: Final[Mapping[str, Callable[..., daemons.Result]]] = {
    DAEMONS: daemons.play,
    SHARES: shares.play,
    ZOOKEEPER: zk_history.play,
}

CHUNK = 50
"""Number of seeds that a worker process simulates per task."""
TELLS = 4
"""Chunks between two lines of progress."""


def play_all(
    part: tuple[str, Iterable[int]], *, keeps_going: bool
) -> tuple[list[str], list[str], float]:
    """Simulate some seeds; return texts of failures, lines ``seed digest``, and user seconds.

    Without ``keeps_going``, stop at the first failure and return its traceback.
    """
    gc.set_threshold(200_000, 50, 50)  # most objects live as long as their simulated run
    gc.collect()
    gc.freeze()  # collections no longer scan modules and caches
    stories: list[str] = []
    digests: list[str] = []
    world, seeds = part
    begun = os.times().user
    for seed in seeds:
        try:
            digests.append(f"{seed} {PLAYS[world](seed).digest}\n")
        except Exception as error:  # noqa: BLE001 - any failure is reported
            if not keeps_going:
                stories.append(traceback.format_exc())
                break
            stories.append(f"{world}, seed {seed}: {type(error).__name__}: {str(error)[:300]}")
    return stories, digests, os.times().user - begun


def main() -> int:
    """Simulate the seeds of the command line; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="the number of seeds")
    parser.add_argument("--world", choices=(DAEMONS, SHARES, ZOOKEEPER, BOTH), default=DAEMONS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print all events of one history")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    given = parser.parse_args()
    worlds = (DAEMONS, ZOOKEEPER) if given.world == BOTH else (given.world,)
    if given.verbose or given.count == 1:
        for world in worlds:
            if given.verbose:
                PLAYS[world](given.seed, lambda line: print(line, end=""))
            else:
                print(PLAYS[world](given.seed))
        return 0
    begun = time.perf_counter()
    end = given.seed + given.count
    chunks = [
        (world, range(first, min(first + CHUNK, end)))
        for first in range(given.seed, end, CHUNK)
        for world in worlds
    ]
    played, failed, user_s, digest = 0, 0, 0.0, hashlib.sha256()
    with multiprocessing.Pool(given.processes) as pool:
        work = partial(play_all, keeps_going=given.keep_going)
        for done, (stories, digests, took_s) in enumerate(pool.imap(work, chunks), 1):
            digest.update("".join(digests).encode())
            user_s += took_s
            for story in stories:
                print(story, flush=True)
            failed += len(stories)
            played += len(digests) + len(stories)
            if failed and not given.keep_going:
                break
            if done % TELLS == 0:
                told = f"{user_s:.0f} s of user time, digest {digest.hexdigest()[:16]}"
                print(f"{played} histories, {failed} failed, {told}", flush=True)
    took = time.perf_counter() - begun
    print(
        f"{' and '.join(worlds)}, seeds {given.seed} to {end - 1}: {failed} failed, {took:.1f} s,"
        f" {user_s / played:.2f} s of user time for each; the SHA-256 of the"
        f" lines `seed digest` of the others begins with {digest.hexdigest()[:16]}"
    )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
