"""Removal of duplicate entries: every broker records the same changes of the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Final

from fencepost.coordinator.history.entries import CLUSTER, Entry

_IDENTITY: Final = ("broker_epoch", "topic_id", "from", "to")
"""Details that distinguish two events of one kind and subject. Causes do not distinguish events,
because their wording varies."""


class Repeats:
    """Drops entries that another broker has already written.

    Among the entries with the same kind, subject and details, the n-th entry of each broker reports
    the same change. A broker that was down has fewer such entries than the others.
    """

    def __init__(self) -> None:
        self._written: Counter[Hashable] = Counter()
        self._of_broker: Counter[Hashable] = Counter()

    def is_new(self, entry: Entry) -> bool:
        """Return whether no other broker has written this entry; call once for each entry."""
        if entry.scope != CLUSTER:
            return True
        identity = tuple(entry.detail.get(name) for name in _IDENTITY)
        key = entry.subject, entry.what, identity
        self._of_broker[key, entry.shard] += 1
        if self._of_broker[key, entry.shard] <= self._written[key]:
            return False
        self._written[key] += 1
        return True
