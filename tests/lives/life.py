"""A random sequence of the requests of several clients, derived from a seed: a *life*.

Each client follows a script for a while: a member joins, syncs and sends heartbeats; a producer
sends InitProducerId, writes and ends its transaction. Then the client begins another script. In
between, every client also sends random requests. Members, producers and resources are drawn from
small pools, so that clients collide.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.lives import admin, data, groups, shares, txns
from tests.lives.draw import SLOTS, Condition, Draw, Request
from tests.lives.knowledge import Slot
from tests.lives.pools import Pools
from tests.support import requests

Script = Iterator[Request]

ROLES = (
    *("classic",) * 3,
    *("consumer",) * 2,
    *("produces",) * 3,
    *("commits", "idempotent", "reads", "administers"),
)
"""The usual roles of every twelve clients."""

SHARE_ROLES = (
    *("shares",) * 6,
    *("produces",) * 2,
    *("idempotent", "classic", "consumer", "administers"),
)
"""The roles of every twelve clients if some are share consumers."""

ERA = 1_500
"""For how many steps the members of a group use one protocol, or both."""


@dataclass(frozen=True)
class Step:
    """Step ``number`` of the sequence: ``client`` sends ``request``."""

    number: int
    client: int
    request: Request


class Life:
    """Generates the steps of the sequence; the same seed gives the same steps."""

    def __init__(
        self,
        seed: int | str,
        *,
        clients: int = 24,
        stem: str = "",
        calm: bool = False,
        roles: Sequence[str] = ROLES,
    ):
        self.pools = Pools(stem)
        self.seed = seed
        self.clients = clients
        self.calm = calm
        self._roles = roles
        self._has_shares = "shares" in roles
        self._draw = Draw(str(seed), self.pools, calm=calm, has_shares=self._has_shares)
        self._scripts: dict[int, Script] = {}
        self._number = 0
        self._wild = self._wild_requests()

    def prologue(self) -> Iterator[Step]:
        """Yield the first steps, which create the coordinators and topics."""
        d = self._draw
        everybody = [
            *(
                Request("find_coordinator", 2, requests.find_coordinator(key_type=kind))
                for kind in (0, 1)
            ),
            *(data.create_topics(d, name) for name in self.pools.topics),
            Request("metadata", 12, requests.metadata(*self.pools.topics)),
            *((shares.configure(self.pools),) if self._has_shares else ()),
        ]
        for request in everybody:
            yield self._step(0, request)

    def step(self) -> Step:
        """Return the next step."""
        d = self._draw
        client = d.rng.randrange(self.clients)
        if d.chance(0.15):
            return self._step(client, self._anything(client))
        script = self._scripts.get(client)
        request = next(script, None) if script is not None else None
        while request is None:
            script = self._scripts[client] = self._new_script(client)
            request = next(script, None)
        return self._step(client, request)

    def _step(self, client: int, request: Request) -> Step:
        self._number += 1
        return Step(self._number, client, request)

    # --- scripts ----------------------------------------------------------------------------------

    def _some_producer(self) -> Slot:
        d = self._draw
        name = d.txn_id()
        return (name, 0) if d.chance(0.8) else d.slot(name)

    def _new_script(self, client: int) -> Script:
        """Begin a script of the client's usual role, or sometimes of another role."""
        d = self._draw
        roles = self._roles
        role = roles[client % len(roles)] if d.chance(0.85) else d.pick(roles)
        script: Script = getattr(self, f"_{role}")(client)
        return script

    def _rank(self, client: int) -> int:
        """Return the index of a client among the clients of its role."""
        roles = self._roles
        rounds, place = divmod(client, len(roles))
        role = roles[place]
        return rounds * roles.count(role) + roles[:place].count(role)

    def _member(self, client: int) -> Slot:
        """Return the usual member of a client, or sometimes another member."""
        d = self._draw
        if d.chance(0.12):
            return d.slot(d.group())
        rank = self._rank(client)
        if self._roles[client % len(self._roles)] == "consumer":
            return self.pools.groups[rank % 2 + 1], 3 + rank // 2 % 3
        return self.pools.groups[rank % 2], rank // 2 % 3

    def _producer(self, client: int) -> Slot:
        """Return the usual transactional id of a client. Of 24 clients, two share the first id."""
        d = self._draw
        if d.chance(0.12):
            return d.slot(d.txn_id())
        rank = self._rank(client)
        return self.pools.txn_ids[rank % 5], rank // 5 % SLOTS

    def _leans(self, group: str) -> str:
        """Return the present protocol of a group's members, or ``both``."""
        era = random.Random(f"{self.seed} {group} {self._number // ERA}")
        return era.choice(("classic", "classic", "consumer", "both"))

    def _classic(self, client: int) -> Script:
        return self._takes_part(self._member(client), "classic")

    def _consumer(self, client: int) -> Script:
        return self._takes_part(self._member(client), "consumer")

    def _takes_part(self, about: Slot, protocol: str) -> Script:
        leans = self._leans(about[0])
        if leans != "both" and self._draw.chance(0.95):
            protocol = leans
        return self._as_classic(about) if protocol == "classic" else self._as_consumer(about)

    def _as_classic(self, about: Slot) -> Script:
        d = self._draw
        for _ in range(d.rng.randint(2, 10)):
            yield groups.join_group(d, about, None if d.chance(0.15) else _is_not_in(about))
            yield groups.join_group(d, about, _has_to_name_itself(about))
            yield groups.sync_group(d, about, _has_joined(about))
            for _ in range(d.rng.randint(0, 3)):
                kinds = [(groups.heartbeat, 5), (_commit_as_classic, 2), (groups.offset_fetch, 1)]
                request = d.weighted(kinds)(d, about)
                yield request if d.chance(0.1) else replace(request, only_if=_is_in(about))
        if d.chance(0.3):
            yield groups.leave_group(d, about)

    def _as_consumer(self, about: Slot) -> Script:
        d = self._draw
        yield groups.consumer_heartbeat(d, about, epoch=0)
        for _ in range(d.rng.randint(1, 12)):
            if d.chance(0.2):
                yield groups.offset_commit(d, about, "consumer")
            else:
                yield groups.consumer_heartbeat(d, about)
        if d.chance(0.4):
            yield groups.consumer_heartbeat(d, about, epoch=d.pick([-1, -1, -2]))

    def _commits(self, client: int) -> Script:
        d = self._draw
        about = d.slot(d.group() if d.chance(0.2) else d.pick(self.pools.groups[4:]))
        for _ in range(d.rng.randint(1, 4)):
            yield groups.offset_commit(d, about, "simple")
            yield groups.offset_fetch(d, about)

    def _produces(self, client: int) -> Script:
        d = self._draw
        about = self._producer(client)
        level = d.pick([1, 2, 1, 2, None])
        for _ in range(d.rng.randint(2, 6)):
            claim = txns.init_producer_id(d, about)
            yield claim if d.chance(0.1) else replace(claim, only_if=_is_nobody(about))
            group = d.group()
            for _ in range(d.rng.randint(0, 3)):
                if level != 2:
                    yield txns.add_partitions(d, about)
                yield txns.produce(d, about, self._number, level)
            if d.chance(0.5):
                if level != 2:
                    yield txns.add_offsets(d, about, group)
                yield txns.txn_offset_commit(d, about, group, level)
            if d.chance(0.05):
                yield txns.write_txn_markers(d, about)
            if d.chance(0.85):
                yield txns.end_txn(d, about, level)

    def _idempotent(self, client: int) -> Script:
        d = self._draw
        about = "", d.rng.randrange(4)
        if d.chance(0.5):
            request = txns.init_producer_id(d, None)
            yield Request(request.api, request.version, request.shape, notes={"slot": about[1]})
        for _ in range(d.rng.randint(1, 5)):
            yield txns.produce(d, about, self._number, None, plain=d.chance(0.4))

    def _reads(self, client: int) -> Script:
        d = self._draw
        for _ in range(d.rng.randint(2, 6)):
            yield data.fetch(d, client)
            if d.chance(0.3):
                yield data.list_offsets(d)

    def _shares(self, client: int) -> Script:
        """Join a share group, fetch and acknowledge; sometimes end the session or membership."""
        d = self._draw
        rank = self._rank(client)
        about = self.pools.share_groups[rank % 2], rank // 2 % shares.MEMBERS
        if d.chance(0.1):
            about = shares.share_slot(d)
        yield shares.share_group_heartbeat(d, about, 0)
        yield shares.share_group_heartbeat(d, about)
        yield shares.share_fetch(d, about, 0)
        steps = [(shares.share_fetch, 5), (shares.share_acknowledge, 5)]
        steps += [(shares.share_group_heartbeat, 1)]
        for _ in range(d.rng.randint(3, 15)):
            yield d.weighted(steps)(d, about)
        if d.chance(0.2):
            yield d.pick([shares.share_fetch, shares.share_acknowledge])(d, about, -1)
        if d.chance(0.3):
            yield shares.share_group_heartbeat(d, about, -1)
            if d.chance(0.5):
                yield d.pick([shares.alter_share_group_offsets, shares.delete_share_group_offsets])(
                    d
                )

    def _administers(self, client: int) -> Script:
        d = self._draw
        yield from self._looks(client)
        if d.chance(0.4):
            yield from self._empties(client)
        if d.chance(0.15):
            yield data.delete_topics(d)
        for name in self.pools.topics:
            if d.chance(0.7):
                yield data.create_topics(d, name)
        yield data.metadata(d)
        for _ in range(d.rng.randint(1, 4)):
            yield self._anything(client)

    def _empties(self, client: int) -> Script:
        """Let all members of a group leave, so that the group can change to the other protocol."""
        d = self._draw
        name = d.group()
        for number in range(SLOTS):
            about = name, number
            yield replace(groups.leave_group(d, about), only_if=_is_in(about))
            yield groups.consumer_heartbeat(d, about, epoch=-1)
        if d.chance(0.5):
            yield groups.delete_groups(d, name)

    def _looks(self, client: int) -> Script:
        d = self._draw
        looks = [groups.describe_groups, groups.consumer_group_describe, groups.list_groups]
        looks += [txns.describe_transactions, txns.list_transactions, txns.describe_producers]
        looks += [data.metadata, data.describe_topic_partitions, data.describe_configs]
        for _ in range(d.rng.randint(1, 6)):
            yield d.pick(looks)(d)

    @property
    def _shares_weight(self) -> float:
        """The relative frequency of random requests about share groups."""
        return 3 if self._has_shares else 0 if self.calm else 0.5

    # --- anything --------------------------------------------------------------------------------

    def _wild_requests(self) -> list[tuple[Callable[[int], Request], float]]:
        d = self._draw

        def member(make: Callable[..., Request]) -> Callable[[int], Request]:
            return lambda _: make(d, d.slot(d.group()))

        def producer(make: Callable[..., Request]) -> Callable[[int], Request]:
            return lambda _: make(d, self._some_producer())

        def beat(_: int) -> Request:
            about = d.slot(d.group())
            is_classic = self._leans(about[0]) == "classic" and d.chance(0.95)
            return (groups.heartbeat if is_classic else groups.consumer_heartbeat)(d, about)

        def anybody(make: Callable[[Draw], Request]) -> Callable[[int], Request]:
            return lambda _: make(d)

        of_members = [groups.join_group, groups.heartbeat, groups.leave_group, groups.offset_commit]
        of_members += [groups.offset_fetch]
        of_anybody = [
            (groups.offset_delete, 2),
            (groups.delete_groups, 2),
            (groups.describe_groups, 1),
            (groups.consumer_group_describe, 1),
            (groups.list_groups, 1),
            (groups.find_coordinator, 1),
            (txns.write_txn_markers, 3),
            (txns.describe_transactions, 1),
            (txns.list_transactions, 1),
            (txns.describe_producers, 1),
            (data.list_offsets, 1),
            (data.offset_for_leader_epoch, 1),
            (data.metadata, 1),
            (data.describe_topic_partitions, 1),
            (data.create_topics, 2),
            (data.delete_topics, 0.7),
            (data.create_partitions, 1),
            (data.delete_records, 2),
            (data.describe_configs, 1),
            (data.alter_configs, 1),
            (data.incremental_alter_configs, 1),
            (data.update_features, 0 if self.calm else 0.3),
            (data.describe_cluster, 0.5),
            (data.api_versions, 0.5),
            # Comparisons of two brokers omit these requests, because their effects are not
            # compared.
            *((make, 0 if self.calm else 0.5) for make in admin.REQUESTS),
            *((make, self._shares_weight) for make in shares.OF_GROUPS),
            *((make, 0 if self.calm else 0.5) for make in shares.OF_STATES),
        ]
        return [
            *((member(make), 2) for make in of_members),
            (beat, 2),
            (lambda _: groups.sync_group(d, d.slot(d.group())), 2),
            *(
                (producer(make), 2)
                for make in (txns.init_producer_id, txns.add_partitions, txns.end_txn)
            ),
            (lambda _: txns.add_offsets(d, self._some_producer(), d.group()), 2),
            (lambda _: txns.txn_offset_commit(d, self._some_producer(), d.group()), 3),
            (lambda _: txns.produce(d, self._some_producer(), self._number), 2),
            (lambda client: data.fetch(d, client), 2),
            *((anybody(make), weight) for make, weight in of_anybody),
        ]

    def _anything(self, client: int) -> Request:
        d = self._draw
        request = d.weighted(self._wild)(client)
        return request if d.calm or d.chance(0.8) else d.scattered(request)


def _last(about: Slot, *errors: str) -> Condition:
    return lambda k: k.members[about].last_error in errors


def _is_in(about: Slot) -> Condition:
    return _last(about, "synced")


def _is_not_in(about: Slot) -> Condition:
    return lambda k: k.members[about].last_error not in ("none", "synced")


def _has_joined(about: Slot) -> Condition:
    return _last(about, "none")


def _has_to_name_itself(about: Slot) -> Condition:
    return _last(about, "member_id_required")


def _is_nobody(about: Slot) -> Condition:
    return lambda k: k.producers[about].is_fenced or k.producers[about].identity[0] < 0


def _commit_as_classic(d: Draw, about: tuple[str, int]) -> Request:
    return groups.offset_commit(d, about, "classic")
