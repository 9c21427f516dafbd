"""Groups of every kind on one partition of ``__consumer_offsets``, by raw requests.

When the coordinator moves, members keep their ids, epochs and generations.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

from tests.oracle.traces_migration import assignment, subscription
from tests.support.cluster import Cluster
from tests.support.pair import KAFKAS, Pair
from tests.support.raw import Answer, errors_in
from tests.support.waits import until

TOPIC, TABLE = "orders", "other"
PARTITIONS: Final = 4
SESSION_MS: Final = 600_000


class Classic:
    """A classic group of two dynamic members and a static member, each with its own connection."""

    def __init__(self, pair: Pair, name: str, node_id: int, protocols: tuple[str, ...]) -> None:
        self.pair, self.name, self.protocols = pair, name, protocols
        self.members: dict[str, str | None] = {}
        clients = [Cluster(pair.node(node_id).bootstrap) for _ in range(3)]
        instances = [None, None, f"{name}-static"]
        for client, instance in zip(clients, instances, strict=True):
            # Up to v3 a new member joins at once, without a MEMBER_ID_REQUIRED response.
            client.send("join_group", 9 if instance else 3, **self.request("", instance))
        joined = [client.receive() for client in clients]
        assert {answer["error_code"] for answer in joined} == {"none"}, joined
        (self.generation,) = {answer["generation_id"] for answer in joined}
        (self.protocol,) = {answer["protocol_name"] for answer in joined}
        for instance, answer in zip(instances, joined, strict=True):
            self.members[answer["member_id"]] = instance
        plan = [
            {"member_id": member_id, "assignment": assignment(TOPIC, at)}
            for at, member_id in enumerate(self.members)
        ]
        for client, answer in zip(clients, joined, strict=True):
            client.send(
                "sync_group",
                5,
                group_id=name,
                generation_id=self.generation,
                member_id=answer["member_id"],
                group_instance_id=self.members[answer["member_id"]],
                protocol_type="consumer",
                protocol_name=self.protocol,
                assignments=plan if answer["leader"] == answer["member_id"] else [],
            )
        synced = [client.receive() for client in clients]
        assert {answer["error_code"] for answer in synced} == {"none"}, synced
        for client in clients:
            client.close()

    def request(self, member_id: str, instance: str | None) -> dict[str, Any]:
        static = {} if instance is None else {"group_instance_id": instance}
        return {
            **static,
            "group_id": self.name,
            "session_timeout": SESSION_MS,
            "rebalance_timeout": SESSION_MS,
            "member_id": member_id,
            "protocol_type": "consumer",
            "protocols": [
                {"name": name, "metadata": subscription(TOPIC, version=1)}
                for name in self.protocols
            ],
        }

    def go_on(self, node_id: int, offset: int) -> None:
        """Send a heartbeat and a commit of every member in the current generation."""
        for at, (member_id, instance) in enumerate(self.members.items()):
            who = {
                "group_id": self.name,
                "member_id": member_id,
                "group_instance_id": instance,
            }
            beat = self.pair.call(node_id, "heartbeat", 4, generation_id=self.generation, **who)
            assert beat["error_code"] == "none", (self.name, member_id, beat)
            committed = self.pair.call(
                node_id,
                "offset_commit",
                8,
                generation_id_or_member_epoch=self.generation,
                topics=rows(TOPIC, at, offset),
                **who,
            )
            assert errors(committed) == {"none"}, committed


def rows(topic: str, partition: int, offset: int, text: str = "") -> list[dict[str, Any]]:
    return [
        {
            "name": topic,
            "partitions": [
                {
                    "partition_index": partition,
                    "committed_offset": offset,
                    "committed_leader_epoch": 0,
                    "committed_metadata": text,
                }
            ],
        }
    ]


def errors(answer: Answer) -> set[str]:
    return {part["error_code"] for topic in answer["topics"] for part in topic["partitions"]}


class Modern:
    """A group of the consumer protocol whose members have different subscriptions."""

    def __init__(
        self, pair: Pair, name: str, node_id: int, *wants: dict[str, Any], partitions: int
    ) -> None:
        self.pair, self.name = pair, name
        self.epochs = dict.fromkeys((f"{name}-{at}" for at in range(len(wants))), 0)
        self.owned: dict[str, list[Any]] = {member_id: [] for member_id in self.epochs}
        for member_id, want in zip(self.epochs, wants, strict=True):
            more = {"rebalance_timeout": SESSION_MS, "topic_partitions": [], **want}
            self.beat(node_id, member_id, **more)
        until(lambda: self.settles(node_id, partitions), f"{name} is stable", poll_s=0.1)

    def beat(self, node_id: int, member_id: str, **more: Any) -> Answer:
        answer = self.pair.call(
            node_id,
            "consumer_group_heartbeat",
            1,
            **{
                "group_id": self.name,
                "member_id": member_id,
                "member_epoch": self.epochs[member_id],
                "rebalance_timeout": -1,
                "topic_partitions": None,
                **more,
            },
        )
        assert answer["error_code"] == "none", (self.name, member_id, answer)
        self.epochs[member_id] = answer["member_epoch"]
        if answer["assignment"] is not None:
            self.owned[member_id] = [
                {"topic_id": uuid.UUID(topic["topic_id"]), "partitions": topic["partitions"]}
                for topic in answer["assignment"]["topic_partitions"]
            ]
        return answer

    def settles(self, node_id: int, partitions: int) -> bool:
        """Return whether all partitions are assigned; Kafka resolves regexes after the join."""
        for member_id in self.epochs:
            self.beat(node_id, member_id, topic_partitions=self.owned[member_id])
        held = sum(len(topic["partitions"]) for own in self.owned.values() for topic in own)
        return (
            held == partitions
            and described(self.pair, node_id, self.name)["group_state"] == "Stable"
        )

    def go_on(self, node_id: int, offset: int) -> None:
        """Send a heartbeat and a commit of every member; epochs and assignments must not change."""
        for at, member_id in enumerate(self.epochs):
            epoch = self.epochs[member_id]
            answer = self.beat(node_id, member_id)
            assert answer["member_epoch"] == epoch, (self.name, answer)
            committed = self.pair.call(
                node_id,
                "offset_commit",
                9,
                group_id=self.name,
                member_id=member_id,
                generation_id_or_member_epoch=epoch,
                topics=rows(TOPIC, at, offset),
            )
            assert errors(committed) == {"none"}, committed


def described(pair: Pair, node_id: int, name: str) -> Answer:
    answer = pair.call(node_id, "consumer_group_describe", 1, group_ids=[name])
    found: Answer = answer["groups"][0]
    return found


CLASSICS: Final = {
    "eager": ("range",),
    "cooperative": ("cooperative-sticky", "range"),
}
MODERNS: Final[dict[str, tuple[dict[str, Any], ...]]] = {
    "by-name": (
        {"subscribed_topic_names": [TOPIC]},
        {"subscribed_topic_names": [TOPIC], "instance_id": "static"},
        {"subscribed_topic_names": [TOPIC, TABLE], "server_assignor": "range"},
    ),
    "by-regex": ({"subscribed_topic_regex": "ord.*|other"},) * 2,
}


def commit(pair: Pair, node_id: int, group: str, offset: int, **more: Any) -> None:
    version = 4 if "retention_time" in more else 8
    answer = pair.call(
        node_id,
        "offset_commit",
        version,
        group_id=group,
        generation_id_or_member_epoch=-1,
        topics=rows(TABLE, 0, offset, "told") if version == 8 else rows4(offset),
        **more,
    )
    assert errors(answer) == {"none"}, answer


def rows4(offset: int) -> list[dict[str, Any]]:
    part = {"partition_index": 0, "committed_offset": offset, "committed_metadata": "short"}
    return [{"name": TABLE, "partitions": [part]}]


class Parked:
    """A group whose second member waits in JoinGroup until the first member rejoins."""

    def __init__(self, pair: Pair, name: str, node_id: int) -> None:
        self.pair, self.node_id = pair, node_id
        address = pair.node(node_id).bootstrap
        self.first, self.second = Cluster(address), Cluster(address)
        self.group = {"group_id": name}
        self.request = {
            **self.group,
            "session_timeout": SESSION_MS,
            "rebalance_timeout": SESSION_MS,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": subscription(TOPIC)}],
        }
        joined = self.first.call("join_group", 3, **self.request)
        self.member = {**self.group, "member_id": joined["member_id"]}
        given = [{"member_id": joined["member_id"], "assignment": assignment(TOPIC, 0)}]
        self.first.call("sync_group", 3, **self.member, generation_id=1, assignments=given)
        self.second.send("join_group", 3, **self.request)

        def rebalances() -> bool:
            beat = self.first.call("heartbeat", 3, **self.member, generation_id=1)
            return bool(beat["error_code"] == "rebalance_in_progress")

        until(rebalances, "the second member waits")

    def resume(self) -> None:
        """Rejoin the first member, check that both are in the next generation, and leave."""
        self.first.send("join_group", 3, **{**self.request, **self.member})
        joined = self.first.receive(), self.second.receive()
        found = [(answer["error_code"], answer["generation_id"]) for answer in joined]
        assert found == [("none", 2)] * 2, joined
        members = [{"member_id": answer["member_id"]} for answer in joined]
        self.first.call("leave_group", 3, **self.group, members=members)
        name = self.group["group_id"]
        deleted = self.first.call("delete_groups", 2, groups_names=[name])
        assert set(errors_in(deleted)) <= {"none", "group_id_not_found"}, deleted
        self.first.close()
        self.second.close()


class Foreign:
    """A share group and a streams group of one member each, which only Apache Kafka coordinates."""

    def __init__(self, pair: Pair, mark: str) -> None:
        self.pair = pair
        self.names = {"share": f"share-{mark}", "streams": f"streams-{mark}"}
        self.epochs = dict.fromkeys(self.names, 0)
        self.share(subscribed_topic_names=[TOPIC])
        subtopology = {"subtopology_id": "0", "source_topics": [TOPIC]}
        empty: dict[str, Any] = dict.fromkeys(
            ("active_tasks", "standby_tasks", "warmup_tasks", "client_tags"), ()
        )
        self.streams(
            rebalance_timeout=SESSION_MS,
            topology={"epoch": 0, "subtopologies": [subtopology]},
            process_id="process",
            **empty,
        )
        until(self.settles, "share and streams groups are stable", poll_s=0.1)
        answer = pair.call(
            KAFKAS,
            "offset_commit",
            9,
            group_id=self.names["streams"],
            member_id=self.names["streams"],
            generation_id_or_member_epoch=self.epochs["streams"],
            topics=rows(TOPIC, 0, 3),
        )
        assert errors(answer) == {"none"}, answer

    def share(self, **more: Any) -> Answer:
        return self._beat("share", 1, subscribed_topic_names=more.get("subscribed_topic_names"))

    def streams(self, **more: Any) -> Answer:
        return self._beat("streams", 0, **{"rebalance_timeout": -1, **more})

    def _beat(self, kind: str, version: int, **more: Any) -> Answer:
        name = self.names[kind]
        answer = self.pair.call(
            KAFKAS,
            f"{kind}_group_heartbeat",
            version,
            group_id=name,
            member_id=name,
            member_epoch=self.epochs[kind],
            **more,
        )
        assert answer["error_code"] == "none", answer
        self.epochs[kind] = answer["member_epoch"]
        self.tasks = answer.get("active_tasks") or getattr(self, "tasks", None)
        return answer

    def settles(self) -> bool:
        self.share()
        own = [
            {"subtopology_id": task["subtopology_id"], "partitions": task["partitions"]}
            for task in self.tasks or ()
        ]
        self.streams(active_tasks=own, standby_tasks=(), warmup_tasks=())
        told = self.told()
        return [group["group_state"] for group in told] == ["Stable", "Stable"]

    def told(self) -> list[Answer]:
        """Return Apache Kafka's descriptions of both groups."""
        return [
            self.pair.call(KAFKAS, f"{kind}_group_describe", version, group_ids=[name])["groups"][0]
            for (kind, name), version in zip(self.names.items(), (1, 0), strict=True)
        ]

    def go_on(self) -> None:
        """Check that both members can continue when Apache Kafka coordinates their groups again.

        The streams member must have its former epoch. The epoch of the share group may be higher,
        because Kafka raises it after it has initialized the partitions.
        """
        epochs = dict(self.epochs)
        assert self.share()["member_epoch"] >= epochs["share"]
        assert self.streams()["member_epoch"] == epochs["streams"]

    def strangers(self, node_id: int) -> dict[str, list[str]]:
        """Return the errors of requests that only groups of other kinds accept."""
        return {kind: self._stranger(node_id, name) for kind, name in self.names.items()}

    def _stranger(self, node_id: int, name: str) -> list[str]:
        def ask(api: str, version: int, **body: Any) -> set[str]:
            return set(errors_in(self.pair.call(node_id, api, version, **body))) - {"none"}

        group, member = {"group_id": name}, {"group_id": name, "member_id": "stranger"}
        topics = rows(TOPIC, 0, 9)
        deleted = [{"name": TOPIC, "partitions": [{"partition_index": 0}]}]
        protocols = [{"name": "range", "metadata": subscription(TOPIC)}]
        join = {"session_timeout": 10_000, "protocol_type": "consumer", "protocols": protocols}
        modern = {"rebalance_timeout": 10_000, "subscribed_topic_names": [TOPIC]}
        found = (
            ask("join_group", 3, **group, rebalance_timeout=10_000, **join),
            ask("sync_group", 3, **member, generation_id=1),
            ask("heartbeat", 3, **member, generation_id=1),
            ask("leave_group", 3, **group, members=[{"member_id": "stranger"}]),
            ask("consumer_group_heartbeat", 1, **member, topic_partitions=[], **modern),
            ask("consumer_group_heartbeat", 1, **member, member_epoch=3),
            ask("offset_commit", 8, **group, generation_id_or_member_epoch=-1, topics=topics),
            ask("offset_commit", 9, **member, generation_id_or_member_epoch=3, topics=topics),
            ask("offset_fetch", 7, **group, topics=None),
            ask("offset_delete", 0, **group, topics=deleted),
            ask("describe_groups", 5, groups=[name]),
            ask("consumer_group_describe", 1, group_ids=[name]),
            ask("delete_groups", 2, groups_names=[name]),
        )
        return [", ".join(sorted(codes)) for codes in found]


class Zoo:
    """Groups of every kind; share and streams groups only if Apache Kafka coordinates them."""

    def __init__(self, pair: Pair, node_id: int, mark: str) -> None:
        self.pair, self.mark = pair, mark
        self.classics = {
            name: Classic(pair, f"{name}-{mark}", node_id, protocols)
            for name, protocols in CLASSICS.items()
        }
        self.moderns = {
            name: Modern(pair, f"{name}-{mark}", node_id, *wants, partitions=2 * PARTITIONS)
            for name, wants in MODERNS.items()
        }
        for name in ("simple", "gone", "forgotten"):
            commit(pair, node_id, f"{name}-{mark}", 5)
        commit(pair, node_id, f"expires-{mark}", 5, retention_time=1)
        gone = pair.call(node_id, "delete_groups", 2, groups_names=[f"gone-{mark}"])
        assert gone["results"][0]["error_code"] == "none"
        pair.call(
            node_id,
            "offset_delete",
            0,
            group_id=f"forgotten-{mark}",
            topics=[{"name": TABLE, "partitions": [{"partition_index": 0}]}],
        )
        self.empty(node_id)
        until(lambda: not self.has_expired(node_id), "the offset has expired")

    def has_expired(self, node_id: int) -> bool:
        return f"expires-{self.mark}" in groups_of(self.pair, node_id)

    def empty(self, node_id: int) -> None:
        """Create a group of each protocol, and let all members leave."""
        group = Classic(self.pair, f"left-{self.mark}", node_id, ("range",))
        group.go_on(node_id, 7)
        answer = self.pair.call(
            node_id,
            "leave_group",
            5,
            group_id=group.name,
            members=[
                {"member_id": member_id, "group_instance_id": instance}
                for member_id, instance in group.members.items()
            ],
        )
        assert answer["error_code"] == "none", answer
        wants = {"subscribed_topic_names": [TOPIC]}
        two = Modern(self.pair, f"quit-{self.mark}", node_id, wants, partitions=PARTITIONS)
        two.go_on(node_id, 8)
        two.epochs = dict.fromkeys(two.epochs, -1)
        two.beat(node_id, f"{two.name}-0")

    @property
    def all(self) -> list[Classic | Modern]:
        return [*self.classics.values(), *self.moderns.values()]

    def go_on(self, node_id: int, offset: int) -> None:
        for group in self.all:
            group.go_on(node_id, offset)


def groups_of(pair: Pair, node_id: int) -> dict[str, tuple[str, str, str]]:
    answer = pair.call(node_id, "list_groups", 5)
    assert answer["error_code"] == "none", answer
    return {
        group["group_id"]: (group["group_type"], state_of(group), group["protocol_type"])
        for group in answer["groups"]
    }


def state_of(listed: Answer) -> str:
    """Return the state of a group, simplified for kinds that Fencepost does not support."""
    has_members = listed["group_state"] != "Empty"
    is_foreign = listed["group_type"] in {"share", "streams"}
    return "has members" if is_foreign and has_members else str(listed["group_state"])


def picture(pair: Pair, node_id: int) -> dict[str, Any]:
    """Return a coordinator's descriptions of all groups."""
    listed = groups_of(pair, node_id)
    names = sorted(listed)
    classic = [name for name in names if listed[name][0] == "classic"]
    consumer = [name for name in names if listed[name][0] == "consumer"]
    one = pair.call(node_id, "describe_groups", 5, groups=classic)["groups"]
    two = pair.call(node_id, "consumer_group_describe", 1, group_ids=consumer)["groups"]
    asked = [{"group_id": name, "topics": None} for name in names]
    offsets = pair.call(node_id, "offset_fetch", 8, groups=asked)["groups"]
    return {
        "listed": listed,
        "classic": in_order(one),
        "consumer": in_order(two),
        "offsets": {
            group["group_id"]: {
                (topic["name"], part["partition_index"]): (
                    part["committed_offset"],
                    part["committed_leader_epoch"],
                    part["metadata"],
                )
                for topic in group["topics"]
                for part in topic["partitions"]
            }
            for group in offsets
        },
    }


def in_order(value: Any) -> Any:
    """Return ``value`` with all its lists sorted."""
    if isinstance(value, dict):
        return {key: in_order(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted(map(in_order, value), key=repr)
    return value
