"""What an idempotent producer of librdkafka may write twice, whatever the brokers do.

It may number anew, under another epoch, what it has had no answer to. ``docs/cluster.md`` has how
that comes about ("Clients to look after"). Within one epoch nothing may be there twice, and nothing
may be missing or out of order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

from fencepost.logcore.batch import BatchHeader

T = TypeVar("T")

FAULTS_AN_EPOCH = 10
"""So many faults may make the producer take another epoch once; and once more may happen early."""


def runs_of(batches: Iterable[tuple[BatchHeader, Sequence[T]]]) -> dict[tuple[int, int], list[T]]:
    """What each epoch of each producer wrote, in the order in which they began."""
    found: dict[tuple[int, int], list[T]] = {}
    for header, values in batches:
        found.setdefault((header.producer_id, header.producer_epoch), []).extend(values)
    return found


def check_runs(where: str, runs: Collection[Sequence[T]], sent: Sequence[T]) -> None:
    """Each epoch wrote a part of what was sent, once and in order, and they leave nothing out.

    An epoch may repeat the end of the one before it. AssertionError if anything else is there.
    """
    places = {value: place for place, value in enumerate(sent)}
    unknown = {value for run in runs for value in run} - places.keys()
    assert not unknown, f"{where}: {unknown} was not sent"
    parts = [[places[value] for value in run] for run in runs]
    for part in parts:
        assert part == list(range(part[0], part[0] + len(part))), f"{where}: {part} in one epoch"
    for before, after in pairwise(parts):
        assert before[0] <= after[0] <= before[-1] + 1, f"{where}: {after} after {before}"
    missing = set(range(len(sent))).difference(*parts)
    assert not missing, f"{where}: {[sent[place] for place in sorted(missing)]} of {len(sent)}"


def check_epochs(where: str, epochs: int, faults: int) -> None:
    """The producer has hardly ever taken another epoch. AssertionError if it has too often."""
    assert epochs <= 2 + faults // FAULTS_AN_EPOCH, f"{where}: {epochs} epochs, {faults} faults"
