"""Entries of which several brokers wrote one each: what they learned of their cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Final

from fencepost.coordinator.history.entries import CLUSTER, Entry

_IDENTITY: Final = ("broker_epoch", "topic_id", "from", "to")
"""What tells two events of one kind and subject apart; the causes may be put differently."""


class Repeats:
    """Drops what another broker has told already.

    The n-th entry of its kind, subject and epoch that one broker wrote is the n-th one of each
    other broker. A broker that was away has fewer, and adds none.
    """

    def __init__(self) -> None:
        self._told: Counter[Hashable] = Counter()
        self._of_broker: Counter[Hashable] = Counter()

    def is_new(self, entry: Entry) -> bool:
        """Whether no other broker has told this; to be asked once for each entry."""
        if entry.scope != CLUSTER:
            return True
        identity = tuple(entry.detail.get(name) for name in _IDENTITY)
        key = entry.subject, entry.what, identity
        self._of_broker[key, entry.shard] += 1
        if self._of_broker[key, entry.shard] <= self._told[key]:
            return False
        self._told[key] += 1
        return True
