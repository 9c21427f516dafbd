"""Checks for librdkafka's idempotent producer, which may duplicate records with any broker.

The producer may resend unacknowledged batches with new sequence numbers under another epoch.
``docs/cluster-tests.md`` explains the cause. Within one epoch no record may be duplicated, missing
or out of order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

from fencepost.logcore.batch import BatchHeader

T = TypeVar("T")

FAULTS_AN_EPOCH = 10
"""The producer may change its epoch once, and once more for every ten faults."""


def runs_of(batches: Iterable[tuple[BatchHeader, Sequence[T]]]) -> dict[tuple[int, int], list[T]]:
    """Return the values of each producer id and epoch, in the order of their first batches."""
    runs: dict[tuple[int, int], list[T]] = {}
    for header, values in batches:
        runs.setdefault((header.producer_id, header.producer_epoch), []).extend(values)
    return runs


def check_runs(where: str, runs: Collection[Sequence[T]], sent: Sequence[T]) -> None:
    """Check that each epoch has consecutive values of ``sent``, and that no value is missing.

    An epoch may repeat the last values of the previous epoch. AssertionError otherwise.
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
    """Raise AssertionError if the producer has changed its epoch too often."""
    assert epochs <= 2 + faults // FAULTS_AN_EPOCH, f"{where}: {epochs} epochs, {faults} faults"
