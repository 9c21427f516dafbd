"""A limit on the number of files that this process can still open."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def free_descriptors(count: int, *, collects: bool = True) -> Iterator[None]:
    """Let this process open only ``count`` more files within the block.

    With ``collects`` the garbage collector runs first; in a loop, once is enough.
    """
    if collects:
        gc.collect()  # otherwise leaked files of other tests might be closed at any moment
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    # The kernel assigns the lowest free descriptor, so occupy all free descriptors below the limit.
    taken: list[int] = []
    # Logs that other tests left open must fit into the part of the limit that logs may use.
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * probe + 40 + count, hard))
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        for descriptor in taken[len(taken) - count :]:
            os.close(descriptor)
        del taken[len(taken) - count :]
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
