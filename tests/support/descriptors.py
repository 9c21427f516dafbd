"""A process that may open only so many more files."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def free_descriptors(count: int, *, collects: bool = True) -> Iterator[None]:
    """This process may open ``count`` more files. Who asks thousands of times ``collects`` once."""
    if collects:
        gc.collect()  # what other tests left would be closed at any moment, and make room
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    # Descriptors are given out from the lowest: all below the limit that are free now, are taken.
    taken: list[int] = []
    # The logs of other tests, which may be open still, are well below the share that logs have.
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * probe + 40 + count, hard))
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        for one in taken[len(taken) - count :]:
            os.close(one)
        del taken[len(taken) - count :]
        yield
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
