"""``python -m tests.sim.run --seed 1 --count 500``: histories of seeds, one after the other."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterable
from functools import partial

from tests.sim.cluster import play

CHUNK = 50
"""Seeds that a process takes at a time."""
TELLS = 20
"""Chunks between two lines that say how far it is."""


def play_all(seeds: Iterable[int], *, keeps_going: bool) -> list[str]:
    """Play seeds; the stories of those that failed, of the first one alone unless it goes on."""
    gc.set_threshold(200_000, 50, 50)  # most of what a history makes lives as long as it
    stories: list[str] = []
    for seed in seeds:
        try:
            play(seed)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            if not keeps_going:
                return [traceback.format_exc()]
            stories.append(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}")
    return stories


def main() -> int:
    """Play them; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--count", type=int, default=1, help="how many")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="tell the whole story of one")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    given = parser.parse_args()
    if given.verbose:
        play(given.seed, lambda line: print(line, end=""))
        return 0
    if given.count == 1:
        print(play(given.seed))
        return 0
    begun = time.perf_counter()
    end = given.seed + given.count
    chunks = [range(one, min(one + CHUNK, end)) for one in range(given.seed, end, CHUNK)]
    failed = 0
    with multiprocessing.Pool(given.processes) as pool:
        work = partial(play_all, keeps_going=given.keep_going)
        for done, stories in enumerate(pool.imap(work, chunks), 1):
            for story in stories:
                print(story)
            failed += len(stories)
            if failed and not given.keep_going:
                break
            if done % TELLS == 0:
                print(f"{done * CHUNK} histories, {failed} failed", flush=True)
    took = time.perf_counter() - begun
    print(
        f"seeds {given.seed} to {end - 1}: {failed} failed, {took:.1f} s,"
        f" {given.count / took:.0f} a second"
    )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
