"""Draws values of requests from the pools; some are resolved only when a request is sent.

A drawn value that depends on the broker's responses is a function of :class:`Knowledge`. So the
generated requests depend only on a seed, and the same requests can be sent to two brokers.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fencepost.protocol.api import APIS
from tests.lives.knowledge import Knowledge, Slot
from tests.lives.pools import COMMON_INTERNAL, INTERNAL_TOPICS, ODD, SMALL_INTS, TOO_LONG, Pools

T = TypeVar("T")
Later = Callable[[Knowledge], Any]
Condition = Callable[[Knowledge], bool]
Shape = Mapping[str, Any]
Identity = tuple[int, int]

VERSIONS = {api.module: (api.min_version, api.stable_max) for api in APIS.values()}
SLOTS = 6
"""How many members each group has, and how many producers each transactional id has."""

UNKNOWN_PRODUCER = 10**9
UNKNOWN_ID = uuid.UUID(int=0x5EED)
METADATA_ID = uuid.UUID(int=1)
"""The id of the metadata log. Clients cannot use it as a topic id."""


@dataclass(frozen=True)
class Request:
    """One request with the fields of all versions; some are resolved when it is sent.

    ``about`` is the member or the producer that sends the request. The request is skipped if
    ``only_if`` is false.
    """

    api: str
    version: int
    shape: Shape
    about: Slot | None = None
    only_if: Condition | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Values of the request that :func:`tests.lives.learn.learn` needs besides the response."""


def settled(value: Any, knowledge: Knowledge) -> Any:
    """Return ``value`` with its deferred parts resolved by ``knowledge``."""
    if callable(value):
        return value(knowledge)
    if isinstance(value, Mapping):
        return {name: settled(item, knowledge) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [settled(item, knowledge) for item in value]
    return value


class Draw:
    """A random generator that draws from the pools."""

    def __init__(
        self, seed: str, pools: Pools, *, calm: bool = False, has_shares: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.pools = pools
        self.calm = calm
        """Whether no response may depend on timing, so that two brokers can be compared."""
        self.has_shares = has_shares
        """Whether requests about groups also name the share groups of the pools."""

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def pick(self, items: Sequence[T]) -> T:
        return self.rng.choice(items)

    def weighted(self, pairs: Sequence[tuple[T, float]]) -> T:
        return self.rng.choices([p[0] for p in pairs], [p[1] for p in pairs])[0]

    def some(self, draw: Callable[[], T], most: int = 3) -> list[T]:
        """Draw from 0 to ``most`` values, usually one."""
        count = self.weighted([(1, 8), (0, 0.5), *((n, 1.5) for n in range(2, most + 1))])
        return [draw() for _ in range(count)]

    def versions(self, api: str) -> tuple[int, int]:
        """Return the lowest and the highest version to draw."""
        return VERSIONS[api]

    def version(self, api: str, low: int = 0, high: int = 99) -> int:
        least, most = self.versions(api)
        return self.rng.randint(max(low, least), min(high, most))

    # --- names ------------------------------------------------------------------------------------

    def odd(self) -> str:
        """Draw an unused name, which is often invalid."""
        if self.calm:
            # Fencepost refuses longer ids. The stem keeps the names of several tests on one broker
            # apart.
            name = self.pick(ODD[:-2])
            return name if len(name) < 9 else self.pools.stem + name[len(self.pools.stem) :]
        return TOO_LONG if self.chance(0.03) else self.pick(ODD)

    def topic(self) -> str:
        return self.weighted(
            [
                (self.rng.choices(self.pools.topics, (6, 4, 2, 1))[0], 92),
                (self.pools.missing_topic, 2),
                (self.pick(COMMON_INTERNAL if self.calm else INTERNAL_TOPICS), 4),
                (self.odd(), 2),
            ]
        )

    def readable(self) -> str:
        """Draw a topic to read from. The coordinators' topics differ between two brokers."""
        name = self.topic()
        return self.pools.missing_topic if self.calm and name in COMMON_INTERNAL[:2] else name

    def topic_id(self, name: str) -> Later:
        """Draw the present id of ``name``, a former id of this name, or an id that no topic has."""
        kind = self.rng.random()
        if kind < 0.9:
            return lambda k: k.topic_id(name)
        if kind < 0.96:
            return lambda k: k.topic_ids[name][0] if k.topic_ids.get(name) else UNKNOWN_ID
        nobodys = UNKNOWN_ID if self.calm else self.pick([UNKNOWN_ID, METADATA_ID])
        return lambda _: nobodys

    def partition(self) -> int:
        return self.rng.choices((0, 1, 2, 3, -1, 2**31 - 1), (60, 24, 12, 2, 0.4, 0.4))[0]

    def group(self) -> str:
        if self.has_shares and self.chance(0.2):
            return self.pick(self.pools.share_groups)
        known = self.rng.choices(self.pools.groups, (6, 5, 3, 2, 1, 1))[0]
        return known if self.chance(0.97) else self.odd()

    def share_group(self) -> str:
        """Draw a share group of the pools, sometimes a group of any type."""
        return self.weighted([(name, 6) for name in self.pools.share_groups] + [(self.group(), 1)])

    def txn_id(self) -> str:
        known = self.rng.choices(self.pools.txn_ids, (6, 5, 3, 2, 1, 1))[0]
        return known if self.chance(0.97) else self.odd()

    def slot(self, name: str) -> Slot:
        return name, self.rng.randrange(SLOTS)

    def small(self) -> int:
        return self.pick(SMALL_INTS)

    # --- anything ---------------------------------------------------------------------------------

    def scattered(self, request: Request, share: float = 0.5) -> Request:
        """Return ``request`` with a random ``share`` of its fields redrawn independently."""
        return replace(request, shape=self._scattered(request.shape, "", share))

    def _scattered(self, value: Any, name: str, share: float) -> Any:
        if isinstance(value, Mapping):
            return {key: self._scattered(item, key, share) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._scattered(item, name, share) for item in value]
        return value if self.chance(1 - share) else self._anything(value, name)

    def _anything(self, value: Any, name: str) -> Any:
        """Draw another value of the same type for the field ``name``."""
        if name == "topic_id":
            known = self.topic_id(self.topic())
            return self.pick([known, lambda _: METADATA_ID])
        if name == "member_id":
            return self.member_id(self.slot(self.group()))
        if name in ("producer_id", "producer_epoch"):
            who, place = self.identity(self.slot(self.txn_id())), int(name == "producer_epoch")
            return lambda k: who(k)[place]
        if isinstance(value, str) and name not in ("value", "key"):
            drawn = (self.topic, self.readable, self.group, self.txn_id, self.odd)
            return self.pick(drawn)()
        if isinstance(value, int) and not isinstance(value, bool):
            return self.small()
        return value

    # --- members ----------------------------------------------------------------------------------

    def member_id(self, about: Slot, live: float = 0.85) -> Later:
        kind = self.rng.random()
        if kind < live:
            return lambda k: k.members[about].id
        other = about[0], self.rng.randrange(SLOTS)
        odd = self.odd()
        return self.pick(
            [
                lambda _: "",
                lambda k: k.members[about].ids[0] if k.members[about].ids else "gone",
                lambda k: k.members[other].id,
                lambda _: "made-up",
                lambda _: odd,
            ]
        )

    def instance(self, about: Slot) -> str | None:
        """Draw a group.instance.id; members from slot 2 on are often static in groups 1, 3, 5."""
        group, number = about
        is_static = number >= 2 and group[-1:] in "135"
        if self.chance(0.04):
            return self.pick([None, "", "instance-2", "instance-9", self.odd()])
        return f"instance-{number}" if is_static else None

    def generation(self, about: Slot, live: float = 0.88) -> Later:
        if self.chance(live):
            return lambda k: k.members[about].generation
        other, number = (about[0], self.rng.randrange(SLOTS)), self.small()
        return self.pick(
            [
                lambda k: k.members[about].generation + 1,
                lambda k: (k.members[about].older or [-1])[-1],
                lambda k: k.members[other].generation,
                lambda _: number,
                lambda _: 2**31 - 1,
            ]
        )

    def member_epoch(self, about: Slot, live: float = 0.9) -> Later:
        if self.chance(live):
            return lambda k: k.members[about].epoch
        other, number = (about[0], self.rng.randrange(SLOTS)), self.small()
        return self.pick(
            [
                lambda k: k.members[about].epoch - 1,
                lambda k: k.members[about].epoch + 1,
                lambda k: k.members[other].epoch,
                lambda _: number,
            ]
        )

    # --- producers --------------------------------------------------------------------------------

    def writer(self, about: Slot, live: float = 0.82) -> Callable[[Knowledge], Identity]:
        """Draw the producer id and epoch of a batch.

        Unknown ids are rare, because two brokers treat them differently.
        """
        drawn = self.identity(about, live)
        if not self.calm or self.chance(0.05):
            return drawn

        def somebody(k: Knowledge) -> Identity:
            pid, epoch = drawn(k)
            return (pid if pid >= 0 else UNKNOWN_PRODUCER), max(epoch, 0)

        return somebody

    def identity(self, about: Slot, live: float = 0.82) -> Callable[[Knowledge], Identity]:
        """Draw a producer id and epoch, current with probability ``live``."""
        if self.chance(live):
            return lambda k: k.producers[about].identity
        other = self.slot(self.txn_id()) if self.chance(0.5) else self.slot(about[0])

        def shifted(by: int) -> Callable[[Knowledge], Identity]:
            def give(k: Knowledge) -> Identity:
                pid, epoch = k.producers[about].identity
                return pid, max(-1, min(epoch + by, 2**15 - 1))

            return give

        made_up = self.pick([(-1, -1), (0, 0), (2**62, 3), (-5, 2), (1, -1), (10**6, 2**15 - 1)])
        return self.weighted(
            [
                (shifted(1), 4),
                (shifted(-1), 4),
                (lambda k: (k.producers[about].identities or [(-1, -1)])[0], 4),
                (lambda k: k.producers[other].identity, 4),
                (lambda k: (k.producers[about].identity[0], 2**15 - 1), 0.5),
                (lambda _: made_up, 1),
            ]
        )
