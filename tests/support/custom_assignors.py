"""Valid and faulty assignors as users might write them, and their entry points."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from fencepost.coordinator.services.assignors.frames import frame
from fencepost.groups.assignors.range import RangeAssignor


class Reversed(RangeAssignor):
    """A valid assignor: like range, in reverse order."""

    @property
    def name(self) -> str:
        return "reversed"

    def assign(self, group):
        given = list(super().assign(group).values())
        return dict(zip(group.members, reversed(given), strict=True))


class Raising(Reversed):
    def assign(self, group):
        raise RuntimeError("no idea")


class Slow(Reversed):
    """Writes its process id to a file, and is slow the first time."""

    def assign(self, group):
        note = Path(os.environ["SLOW_ASSIGNOR_NOTE"])
        is_first = not note.exists()
        note.write_text(str(os.getpid()))
        if is_first:
            time.sleep(60)
        return super().assign(group)


class Hanging(Reversed):
    def assign(self, group):
        while True:
            time.sleep(0.1)


class Exiting(Reversed):
    def assign(self, group):
        os._exit(3)


class Greedy(Reversed):
    def assign(self, group):
        self.hoard = [bytes(1 << 26) for _ in range(1 << 10)]
        return super().assign(group)


class Doubling(Reversed):
    def assign(self, group):
        everything = frozenset(
            (topic, index)
            for topic, count in group.partition_counts.items()
            for index in range(count)
        )
        return dict.fromkeys([*group.members, "stranger"], everything)


class Printing(Reversed):
    def assign(self, group):
        print("assigning")
        sys.stdout.flush()
        return super().assign(group)


class Forging(Reversed):
    """Forges the daemon's own messages on every channel, and returns an invalid assignment."""

    def assign(self, group):
        for number in range(3, 20):
            with suppress(OSError):
                os.write(number, frame([[1], None]))
        return super().assign(group)


CLASSES = (Reversed, Slow, Raising, Hanging, Exiting, Greedy, Doubling, Printing, Forging)


def install(directory: Path) -> Path:
    """Write a distribution with all entry points; the caller adds ``directory`` to the path."""
    info = directory / "assignors_of_a_user-1.0.dist-info"
    info.mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: assignors-of-a-user\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata)
    lines = [f"{cls.__name__.lower()} = {__name__}:{cls.__name__}\n" for cls in CLASSES]
    missing = "unimportable = tests.support.nothing_there:Thing\n"
    (info / "entry_points.txt").write_text("".join(["[fencepost.assignors]\n", *lines, missing]))
    return directory
