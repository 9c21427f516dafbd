"""Rules about the responses that the clients of a share group get from all leaders.

``SharePartition.check``, in contrast, only checks the current state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class BrokenRuleError(AssertionError):
    """A rule is broken."""


class Ledger:
    """Deliveries and acknowledgement results that clients saw, from all leaders."""

    def __init__(self, delivery_count_limit: int) -> None:
        self.limit = delivery_count_limit
        self.delivered: dict[int, int] = {}
        """Offset → the delivery count of its last delivery by the current leader."""
        self.persisted: dict[int, int] = {}
        """Offset → the delivery count that the current leader read at first."""
        self.finished: set[int] = set()
        """Offsets whose acknowledgement (accept, reject or gap) got NONE."""
        self.start_offset = 0
        self.persisted_start = 0

    def leader_changed(self, persisted: Mapping[int, int]) -> None:
        self.delivered.clear()
        self.persisted = dict(persisted)
        self.start_offset = 0

    def deliver(
        self,
        acquired: Iterable[tuple[int, int, int]],
        *,
        start_offset: int,
        bound: int,
        aborted: frozenset[int],
    ) -> None:
        """Record the ranges in a ShareFetch response; ``bound`` is the first unreadable offset."""
        previous_last = -1
        for first, last, count in acquired:
            if first <= previous_last or last < first:
                raise BrokenRuleError(
                    f"{first}-{last} follows {previous_last}: twice (KAFKA-19789)"
                )
            previous_last = last
            for offset in range(first, last + 1):
                if offset < start_offset or offset >= bound:
                    raise BrokenRuleError(f"{offset} outside {start_offset}-{bound} (rule 7)")
                if offset in aborted:
                    raise BrokenRuleError(f"{offset} belongs to an aborted transaction (rule 7)")
                if offset in self.finished:
                    raise BrokenRuleError(f"{offset} delivered after its end (rule 3)")
                known = self.delivered.get(offset, self.persisted.get(offset, 0))
                if count != known + 1:
                    raise BrokenRuleError(f"{offset}: count {count} after {known} (rule 4)")
                if count > self.limit:
                    raise BrokenRuleError(f"{offset}: count {count} of {self.limit} (rule 5)")
                self.delivered[offset] = count

    def finish(self, offsets: Iterable[int]) -> None:
        """Record offsets for which the owner's acknowledgement got NONE."""
        for offset in offsets:
            if offset in self.finished:
                raise BrokenRuleError(f"{offset} finished twice (rule 2)")
            self.finished.add(offset)

    def observe(self, start_offset: int, persisted_start: int) -> None:
        """Record the start offsets after a step."""
        if start_offset < self.start_offset:
            raise BrokenRuleError(f"start offset {self.start_offset} to {start_offset} (rule 6)")
        if persisted_start < self.persisted_start or persisted_start > start_offset:
            raise BrokenRuleError(
                f"persisted {self.persisted_start} to {persisted_start}, {start_offset} (rule 6)"
            )
        self.start_offset, self.persisted_start = start_offset, persisted_start
