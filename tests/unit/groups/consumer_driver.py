"""Clients of consumer groups that heartbeat, revoke and adopt partitions like Kafka's client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fencepost.groups.commands import TopicVisibility
from fencepost.groups.consumer_commands import (
    ConsumerHeartbeat,
    ConsumerHeartbeatResult,
    ConsumerSettings,
    DescribeConsumerGroup,
    Environment,
    TopicsImage,
)
from fencepost.groups.consumer_group import ConsumerGroup, flat
from fencepost.groups.errors import FencedMemberEpochError, UnknownMemberIdError
from fencepost.groups.regex import reason_against
from fencepost.logcore.steps import finish
from tests.unit.groups.group_driver import Driver, G

T, U, V = b"t" * 16, b"u" * 16, b"v" * 16
CONSUMER_SESSION = 45_000
REBALANCE = 60_000
IMAGE = TopicsImage({"t": (T, 4), "u": (U, 2)}, 1)
SETTINGS = ConsumerSettings(assignment_interval_ms=0)


class ConsumerDriver(Driver):
    """A driver with topics."""

    def __init__(self, *args: Any, image: TopicsImage = IMAGE, **settings: Any) -> None:
        self.image = image
        self.consumer: ConsumerSettings = settings.pop("consumer", SETTINGS)
        self.visibility: TopicVisibility | None = None
        """The visibility of topics to all clients; None if they may see every topic."""
        self.own: dict[str, ConsumerSettings] = {}
        """Group id → settings of this group instead of ``consumer``."""
        super().__init__(*args, environment=self.environment, **settings)

    def environment(self, group_id: str) -> Environment:
        return Environment(self.image, self.own.get(group_id, self.consumer))

    def beat(self, member_id: str, epoch: int, **fields: Any) -> ConsumerHeartbeatResult:
        regex = fields.get("subscribed_topic_regex")
        result = self.ask(
            ConsumerHeartbeat(
                **{
                    "group_id": G,
                    "member_id": member_id,
                    "member_epoch": epoch,
                    "client_id": "c",
                    "client_host": "/127.0.0.1",
                    "visibility": self.visibility,
                    "reason_against_regex": finish(reason_against(regex)) if regex else None,
                    **fields,
                }
            )
        )
        assert isinstance(result, ConsumerHeartbeatResult)
        return result

    def join(self, member_id: str, *names: str, **fields: Any) -> ConsumerHeartbeatResult:  # type: ignore[override]
        asked = {
            "rebalance_timeout_ms": REBALANCE,
            "subscribed_topic_names": names or ("t",),
            "owned": (),
            **fields,
        }
        return self.beat(member_id, 0, **asked)

    def consumer_group(self) -> ConsumerGroup:
        group = self.groups[G]
        assert isinstance(group, ConsumerGroup)
        return group

    def describe(self) -> Any:
        return self.ask(DescribeConsumerGroup(G))

    def state_of_consumers(self) -> str:
        return str(self.describe().state)

    def client(self, member_id: str, *names: str, **fields: Any) -> Client:
        """Return a client that has joined."""
        client = Client(self, member_id, names or ("t",), fields)
        client.rejoin()
        return client


class Client:
    """A consumer: ``told`` is the last assignment, ``owned`` are the adopted partitions."""

    def __init__(
        self, driver: ConsumerDriver, member_id: str, names: tuple[str, ...], fields: dict[str, Any]
    ) -> None:
        self.driver, self.member_id, self.names, self.fields = driver, member_id, names, fields
        self.epoch = 0
        self.owned: frozenset[tuple[bytes, int]] = frozenset()
        self.told: frozenset[tuple[bytes, int]] = frozenset()
        self.unsure = False
        self.said: frozenset[tuple[bytes, int]] | None = None
        """The last reported owned partitions; the client reports them only if they changed."""
        self.times_lost = 0
        """The number of times that the client has lost all its partitions."""

    def rejoin(self) -> None:
        self.owned = self.told = frozenset()
        self.times_lost += 1
        self.unsure = False
        self.said = None
        self._take(self.driver.join(self.member_id, *self.names, **self.fields))
        self.owned = self.told

    def beat(self, *, lost: bool = False, **fields: Any) -> None:
        """Send a heartbeat; on a fencing error drop all partitions and rejoin."""
        if self.unsure:
            # Like Kafka's client after a timeout: send all fields, to get a full response.
            fields = {
                "rebalance_timeout_ms": REBALANCE,
                "subscribed_topic_names": self.names,
                **self.fields,
                **fields,
            }
        if self.unsure or self.said != self.owned == self.told:
            self.said = self.owned
            grouped: dict[bytes, tuple[int, ...]] = {}
            for topic_id, index in sorted(self.owned):
                grouped[topic_id] = (*grouped.get(topic_id, ()), index)
            fields["owned"] = tuple(grouped.items())
        instance = {k: v for k, v in self.fields.items() if k == "instance_id"}
        try:
            result = self.driver.beat(self.member_id, self.epoch, **{**instance, **fields})
        except (FencedMemberEpochError, UnknownMemberIdError):
            self.rejoin()
            return
        self.unsure = lost
        if not lost:
            self._take(result)

    def _take(self, result: ConsumerHeartbeatResult) -> None:
        self.epoch = result.member_epoch
        if result.assignment is not None:
            self.told = flat(result.assignment)

    def catch_up(self) -> None:
        """Revoke and adopt partitions until the client owns exactly its last assignment."""
        self.owned = self.told

    def leave(self, epoch: int = -1) -> None:
        instance = {k: v for k, v in self.fields.items() if k == "instance_id"}
        self.driver.beat(self.member_id, epoch, **instance)
        self.owned = self.told = frozenset()


def settle(*clients: Client, rounds: int = 4) -> None:
    """Let all clients heartbeat and adopt their assignments, ``rounds`` times."""
    for _ in range(rounds):
        for client in clients:
            client.beat()
            client.catch_up()


def changed(image: TopicsImage, **topics: tuple[bytes, int] | None) -> TopicsImage:
    """Return the topics after a change; None deletes a topic."""
    merged = {**image.topics, **topics}
    kept = {name: entry for name, entry in merged.items() if entry is not None}
    return TopicsImage(kept, image.version + 1)


def settings(**fields: Any) -> ConsumerSettings:
    return replace(SETTINGS, **fields)
