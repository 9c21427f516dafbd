"""The exactly-once pipelines of a cluster, from the observations in the event history.

A pipeline reads topics as a group and writes topics in transactions. The protocol names both sides
together in one request only, TxnOffsetCommit. A group without such a request belongs to the
transactional producer that has the same client id and host. There are two exceptions: the group
reads the producer's output, or the producer has sent the offsets of another group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import field
from functools import cached_property
from typing import Any

from fencepost.coordinator.history.entries import CLIENT, TRANSACTION, Entry, Observed
from fencepost.logcore.values import dataclass

Client = tuple[str | None, str | None]
"""A client id and a host."""


def client_of(entry: Entry) -> Client:
    """Return the client whose request an entry is about."""
    return entry.client_id, entry.client_host


@dataclass(slots=True)
class Pipeline:
    """A group, the transactional producers that belong to it, and their topics.

    Each of these may be missing.
    """

    group: str | None
    transactional_ids: set[str] = field(default_factory=set)
    producers: set[Client] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    commits_outside: bool = False
    """Whether no offsets of the group were observed in a transaction."""

    @property
    def topics(self) -> set[str]:
        """All topics of the pipeline."""
        return self.inputs | self.outputs


class Observations:
    """The entries of the event history that the rules need, by kind."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._by_kind: dict[str, list[Entry]] = defaultdict(list)
        self.transactions: list[Entry] = []
        """The entries about transactional ids."""
        for entry in entries:
            if entry.scope == CLIENT:
                self._by_kind[entry.what].append(entry)
            elif entry.scope == TRANSACTION:
                self.transactions.append(entry)

    def of(self, kind: str, **details: Any) -> Iterator[Entry]:
        """Yield the observations of a kind with these details, oldest first."""
        for entry in self._by_kind[kind]:
            if all(entry.detail.get(name) == value for name, value in details.items()):
                yield entry

    @property
    def dropped(self) -> int:
        """The number of observations that brokers could not record."""
        return sum(
            int(entry.detail["count"]) for entry in self._by_kind[Observed.OBSERVATIONS_DROPPED]
        )

    @cached_property
    def in_transactions(self) -> list[Entry]:
        """The observed Produce requests in transactions."""
        return [
            entry
            for entry in self.of(Observed.PRODUCED)
            if entry.detail["transactional_id"] is not None
        ]

    @cached_property
    def plain(self) -> list[Entry]:
        """The observed Produce requests outside of transactions."""
        return [
            entry
            for entry in self.of(Observed.PRODUCED)
            if entry.detail["transactional_id"] is None
        ]

    @cached_property
    def pipelines(self) -> list[Pipeline]:
        """All pipelines; those without a group come last."""
        of_group: dict[str, Pipeline] = {}
        for entry in self.of(Observed.OFFSETS_ADDED_TO_TRANSACTION):
            group = entry.detail["group"]
            pipeline = of_group.setdefault(group, Pipeline(group))
            pipeline.transactional_ids.add(entry.detail["transactional_id"])
            pipeline.producers.add(client_of(entry))
            pipeline.inputs.add(entry.detail["topic"])
        bound = {client for pipeline in of_group.values() for client in pipeline.producers}
        with_offsets = {
            name for pipeline in of_group.values() for name in pipeline.transactional_ids
        }
        outputs: dict[str, set[str]] = defaultdict(set)
        ids: dict[Client, set[str]] = defaultdict(set)
        for entry in self.in_transactions:
            name = entry.detail["transactional_id"]
            outputs[name].add(entry.detail["topic"])
            if name in with_offsets:
                bound.add(client_of(entry))
            ids[client_of(entry)].add(name)
        for entry in self.of(Observed.OFFSETS_COMMITTED):
            client, topic = client_of(entry), entry.detail["topic"]
            group = entry.detail["group"]
            existing = of_group.get(group)
            if client in bound or client not in ids or (existing and not existing.commits_outside):
                continue
            if any(topic in outputs[name] for name in ids[client]):
                continue
            pipeline = of_group.setdefault(group, Pipeline(group, commits_outside=True))
            pipeline.transactional_ids |= ids[client]
            pipeline.producers.add(client)
            pipeline.inputs.add(topic)
        all_pipelines = list(of_group.values())
        for pipeline in all_pipelines:
            for name in pipeline.transactional_ids:
                pipeline.outputs |= outputs[name]
        with_group = {name for pipeline in all_pipelines for name in pipeline.transactional_ids}
        alone = sorted(outputs.keys() - with_group)
        return [*all_pipelines, *(Pipeline(None, {name}, outputs=outputs[name]) for name in alone)]
