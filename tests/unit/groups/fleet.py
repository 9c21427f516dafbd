"""A simulated fleet of consumers of both protocols, with the failures of real fleets.

Each member commits the offsets that it has read from its partitions. A ledger holds the last
accepted commit of each partition and detects three errors: two owners that may both commit the same
partition, an accepted commit below an earlier commit, and a lost committed offset. At times the
faults pause; then every partition must get an owner.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter

from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.commands import (
    CommitOffsets,
    FetchOffsets,
    FetchTopic,
    OffsetToCommit,
    TopicsDeleted,
    TopicVisibility,
)
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.logcore.machine import DomainError
from tests.unit.groups.consumer_driver import (
    CONSUMER_SESSION,
    Client,
    ConsumerDriver,
    TopicsImage,
    changed,
    settings,
)
from tests.unit.groups.group_driver import REBALANCE, SESSION, G
from tests.unit.groups.mixed_driver import COOPERATIVE, ClassicClient
from tests.unit.groups.telling import GONE

Partition = tuple[bytes, int]
REBALANCES = ("group-epoch-bumped", "generation-started")
MAX_MEMBERS = 7
TOPICS = (("t",), ("t", "u"), ("u", "w"))
OFFERS = (
    (("range",), ("range", COOPERATIVE)),
    ((COOPERATIVE,), (COOPERATIVE, "range")),
)
"""The assignors that classic members support: the two lists of a pair share an assignor.

Members with only the cooperative assignor keep reading during a rebalance.
"""
EXPRESSION = "t|w.*"
HOUR_MS = 3_600_000
PATIENCE_S = 400
"""The simulated seconds within which every partition must get an owner.

The JoinGroup of a dead client may be waiting. The join phase completes after one rebalance timeout,
and the member is removed after the next rebalance timeout.
"""


class Member:
    """A client of either protocol, and its positions."""

    def __init__(self, client: Client | ClassicClient) -> None:
        self.client = client
        self.read: dict[Partition, int] = {}
        self.times_lost = 0
        self.paused_until = 0
        self.is_out = False
        """Whether an error ended its membership, so that it must rejoin."""

    @property
    def is_classic(self) -> bool:
        return isinstance(self.client, ClassicClient)

    @property
    def epoch(self) -> int:
        client = self.client
        return client.generation if isinstance(client, ClassicClient) else client.epoch


class Fleet:
    """The members of one group, its topics, and the ledger."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        image = TopicsImage({"t": (b"t" * 16, 6), "u": (b"u" * 16, 3)}, 1)
        self.driver = ConsumerDriver(
            image=image, consumer=settings(assignment_interval_ms=self.rng.choice((0, 100)))
        )
        self.driver.watch_every = 50
        self.members: list[Member] = []
        self.ledger: dict[Partition, int] = {}
        self.counts: Counter[str] = Counter()
        self.hidden: set[str] = set()
        """Topics that no client may see, so that regular expressions do not match them."""
        self.made = 0
        self.topics_made = 0
        self.rebalances = 0
        self.events_seen = 0
        self.removed: set[str] = set()
        """Members that the coordinator removed and that have no new assignment yet."""
        self.offers = self.rng.choice(OFFERS)
        self.classic_share = 0.5
        """The probability that a new member is classic. It varies, so that groups migrate."""

    # --- actions ----------------------------------------------------------------------------------

    def step(self) -> None:
        """Perform one action; most often, a member reads and commits."""
        if self.rng.random() < 0.008:
            self.classic_share = self.rng.choice((0.0, 0.5, 1.0))
        actions = {
            self.work: 90,
            self.tick: 16,
            self.join: 8,
            self.leave: 6,
            self.kill: 1,
            self.pause: 2,
            self.take_place: 2,
            self.change_topics: 1,
            self.change_rights: 0.5,
            self.crash: 1,
            self.set_clock: 0.5,
            self.be_left_in_peace: 0.4,
        }
        self.rng.choices(list(actions), list(actions.values()))[0]()
        self.look()

    def tick(self) -> None:
        self.driver.advance(self.rng.choice((20, 150, 1_000, 3_000)))

    def new(self, *, is_static: bool) -> Member:
        self.made += 1
        place = self.rng.randrange(2) if is_static else None
        instance = None if place is None else f"i{place}"
        names = self.rng.choice(TOPICS)
        if self.rng.random() < self.classic_share:
            if place is not None:
                # A static member that returns to a Stable group keeps its predecessor's assignment,
                # even with another subscription (KIP-345).
                names = TOPICS[place]
            offers = self.rng.choice(self.offers)
            client = ClassicClient(self.driver, f"c{self.made}", names, instance, offers)
            client.is_slow = self.rng.random() < 0.3
            return Member(client)
        fields = {"rebalance_timeout_ms": 20_000}
        if instance is not None:
            fields["instance_id"] = instance
        if self.rng.random() < 0.2:
            fields["subscribed_topic_regex"] = EXPRESSION
        member = Member(Client(self.driver, f"m{self.made}", names, fields))
        member.is_out = True
        return member

    def join(self) -> None:
        if len(self.members) < MAX_MEMBERS:
            member = self.new(is_static=False)
            self.members.append(member)
            self.advance_member(member)

    def take_place(self) -> None:
        """Add a static member, perhaps in place of a member that uses the other protocol."""
        member = self.new(is_static=True)
        instance = self.instance(member)
        before = [other for other in self.members if self.instance(other) == instance]
        for other in before:
            if not other.is_classic and not member.is_classic:
                with contextlib.suppress(DomainError):
                    other.client.leave(-2)
            self.members.remove(other)
        self.members.append(member)
        self.advance_member(member)
        if self.rng.random() < 0.3:
            # Pause all faults here: the group must also recover from this state.
            self.be_left_in_peace()

    def leave(self) -> None:
        if self.members:
            # Members of the protocol that is being phased out leave first.
            self.members.sort(
                key=lambda candidate: candidate.is_classic == (self.classic_share > 0.5)
            )
            member = self.members.pop(self.rng.randrange(min(3, len(self.members))))
            with contextlib.suppress(DomainError):
                member.client.leave()

    def kill(self) -> None:
        if self.members:
            self.members.pop(self.rng.randrange(len(self.members)))

    def pause(self) -> None:
        if self.members:
            member = self.rng.choice(self.members)
            member.paused_until = self.driver.now + self.rng.choice(
                (SESSION // 2, SESSION * 2, CONSUMER_SESSION + 1, REBALANCE + 1)
            )

    def work(self) -> None:
        awake = [other for other in self.members if other.paused_until <= self.driver.now]
        if awake:
            member = self.rng.choice(awake)
            # The member may work with an outdated assignment until its next heartbeat.
            self.read_and_commit(member)
            self.advance_member(member)

    def change_topics(self) -> None:
        topics = self.driver.image.topics
        name = self.rng.choice(("t", "u", "w"))
        known = topics.get(name)
        if known is None:
            self.topics_made += 1
            entry = (self.topics_made.to_bytes(16), 2)
        elif name == "w" or known[1] > 8:
            self.driver.image = changed(self.driver.image, **{name: None})
            self.driver.ask(TopicsDeleted(((name, known[0]),)))
            self.ledger = {tp: at for tp, at in self.ledger.items() if tp[0] != known[0]}
            return
        else:
            entry = (known[0], known[1] + 1)
        self.driver.image = changed(self.driver.image, **{name: entry})

    def change_rights(self) -> None:
        """Toggle whether clients may see a topic."""
        self.hidden ^= {self.rng.choice("tw")}
        visibility = self.driver.visibility
        hidden = frozenset(self.hidden)
        self.driver.visibility = TopicVisibility(
            1 if visibility is None else visibility.version + 1, lambda name: name not in hidden
        )

    def crash(self) -> None:
        self.count_events()
        self.driver.reload()
        self.driver.log = self.driver.log[:]
        for (topic_id, index), offset in self.ledger.items():
            assert self.committed(topic_id, index) == offset, "a committed offset is lost"

    def set_clock(self) -> None:
        self.driver.jump(self.rng.choice((-HOUR_MS, HOUR_MS)))
        for member in self.members:
            member.paused_until = min(member.paused_until, self.driver.now)

    def be_left_in_peace(self) -> None:
        """Pause the faults: after a while an owner must read every subscribed partition."""
        for _ in range(PATIENCE_S):
            for member in self.members:
                member.paused_until = 0
                self.advance_member(member, calm=True)
                self.look()
            self.driver.advance(1_000)
            if not (self.unread() or self.found_what_is_hidden()):
                self.counts["peace"] += 1
                return
        raise AssertionError(f"nobody reads {sorted(self.unread())}")

    def unread(self) -> set[Partition]:
        """Return subscribed partitions without an owner in the group."""
        group, topics = self.driver.groups.get(G), self.driver.image.topics
        wanted: set[Partition] = set()
        read: set[Partition] = set()
        for member in self.members:
            if group is not None and member.client.member_id in group.members:
                read |= self.rightly_owned(member)
            for name in self.subscribed(member) & topics.keys():
                topic_id, count = topics[name]
                wanted |= {(topic_id, index) for index in range(count)}
        return wanted - read

    def found_what_is_hidden(self) -> set[str]:
        """Return hidden topics that the last evaluation of an expression matched."""
        group = self.driver.groups.get(G)
        found = group.regexes.values() if isinstance(group, ConsumerGroup) else ()
        return {name for regex in found for name in regex.topics} & self.hidden

    def subscribed(self, member: Member) -> set[str]:
        client = member.client
        if isinstance(client, ClassicClient):
            return set(client.topics)
        matched = {"t", "w"} if "subscribed_topic_regex" in client.fields else set()
        return {*client.names, *(matched - self.hidden)}

    # --- a member's work --------------------------------------------------------------------------

    def advance_member(self, member: Member, *, calm: bool = False) -> None:
        client = member.client
        try:
            if isinstance(client, ClassicClient):
                client.step()
            elif member.is_out:
                client.rejoin()
                member.is_out = False
            else:
                client.beat(lost=not calm and self.rng.random() < 0.05)
                if calm or self.rng.random() < 0.7:
                    client.catch_up()
        except DomainError:
            client.owned = frozenset()
            member.is_out = True
            if isinstance(client, Client):
                client.told = frozenset()
        self.take_up(member)

    def take_up(self, member: Member) -> None:
        """Start reading new partitions at the committed offsets, and forget revoked partitions."""
        owned = member.client.owned
        if member.times_lost != member.client.times_lost:
            # Another member may have read and committed further, so start at the committed offsets.
            member.times_lost = member.client.times_lost
            member.read.clear()
        member.read = {tp: at for tp, at in member.read.items() if tp in owned}
        for topic_id, index in sorted(owned - member.read.keys()):
            member.read[topic_id, index] = max(self.committed(topic_id, index), 0)

    def read_and_commit(self, member: Member) -> None:
        if isinstance(member.client, ClassicClient) and not member.client.is_stable:
            return
        names = self.driver.image.names()
        for partition, at in list(member.read.items()):
            topic_id, index = partition
            if topic_id not in names or self.rng.random() < 0.4:
                continue
            member.read[partition] = at + self.rng.randrange(1, 5)
            command = CommitOffsets(
                G,
                member.epoch,
                member.client.member_id,
                self.instance(member),
                (
                    OffsetToCommit(
                        names[topic_id], index, member.read[partition], topic_id=topic_id
                    ),
                ),
                knows_member_epochs=True,
            )
            try:
                result = self.driver.ask(command)
            except DomainError:
                return
            assert result.partitions[0][2] is None
            before = self.ledger.get(partition, -1)
            assert member.read[partition] >= before, f"{partition} went back from {before}"
            self.ledger[partition] = member.read[partition]
            self.counts["commits"] += 1

    # --- the ledger -------------------------------------------------------------------------------

    def instance(self, member: Member) -> str | None:
        client = member.client
        if isinstance(client, ClassicClient):
            return client.instance_id
        instance = client.fields.get("instance_id")
        return None if instance is None else str(instance)

    def committed(self, topic_id: bytes, index: int) -> int:
        name = self.driver.image.names().get(topic_id)
        if name is None:
            return -1
        asked = FetchTopic(name, (index,), topic_id)
        found = self.driver.ask(FetchOffsets(G, (asked,)))
        return int(found.topics[0][1][0].offset)

    def look(self) -> None:
        """Check that no partition has two owners with valid membership."""
        for event in self.driver.events[self.events_seen :]:
            if event.kind in GONE:
                self.removed.add(str(event.detail["member"]))
        self.events_seen = len(self.driver.events)
        owners: dict[Partition, str] = {}
        for member in self.members:
            for partition in self.rightly_owned(member):
                other = owners.setdefault(partition, member.client.member_id)
                assert other == member.client.member_id, (partition, other, member.client.member_id)
        if len(self.driver.events) > 1_000:
            self.count_events()

    def rightly_owned(self, member: Member) -> frozenset[Partition]:
        group, client = self.driver.groups.get(G), member.client
        if member.is_out or group is None or client.member_id not in group.members:
            return frozenset()
        if isinstance(client, ClassicClient):
            if client.is_stable:
                self.removed.discard(client.member_id)
            elif client.reads_on:
                # During a rebalance the client may still be in the previous generation.
                return frozenset() if client.member_id in self.removed else client.owned
        if isinstance(group, ClassicGroup):
            is_current = member.is_classic and member.epoch == group.generation_id
        else:
            assert isinstance(group, ConsumerGroup)
            current = group.current(client.member_id)
            speaks = (group.members[client.member_id].classic is not None) == member.is_classic
            is_current = speaks and member.epoch in {
                current.member_epoch,
                current.previous_member_epoch,
            }
        return client.owned if is_current else frozenset()

    def count_events(self) -> None:
        for event in self.driver.events:
            self.counts[event.kind] += 1
        self.rebalances = sum(self.counts[kind] for kind in REBALANCES)
        self.driver.events.clear()
        self.events_seen = 0

    def finish(self) -> None:
        self.crash()
        self.driver.machine.check()
        self.count_events()
