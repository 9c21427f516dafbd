"""Sends the same random requests to two brokers, step by step, and compares the responses.

Each broker's clients have their own knowledge. If one broker parks a request (a JoinGroup that
waits for other members), the other broker must park the request as well, and both brokers must
complete it after the same step. A step begins only when both brokers have completed the changes of
the previous step.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fencepost.coordinator.runtime.key_partition import partition_for
from tests.lives.draw import Request
from tests.lives.knowledge import Knowledge
from tests.lives.learn import learn
from tests.lives.life import Life, Step
from tests.lives.race import frame_of
from tests.oracle.tracer import PASSING, UNORDERED, Masks, leaves
from tests.support.batches import NOW_MS, batches
from tests.support.raw import Answer, RawClient, decode, errors_in

CLOSED = "connection closed"
PARKABLE = frozenset({"join_group", "sync_group"})
PARKED_S = 0.25
"""A request that has no response from either broker after this time is parked."""

PATIENCE_S = 10.0
"""The slower broker must respond within this time after the faster broker."""

RETRY_S = 0.01


class LifeMasks(Masks):
    """Removes the resources of other tests on the same brokers from responses."""

    def __init__(self, stem: str) -> None:
        super().__init__()
        self._stem = stem

    def answered(self, api: str, answer: Answer | str | None) -> Any:
        """Return the masked response, or the text of the error if there is none."""
        if not isinstance(answer, dict):
            return answer
        if api == "api_versions":
            return answer["error_code"]
        if api == "consumer_group_describe":
            # A group without members has no assignment. Only Fencepost also resets its epochs.
            idle = [
                {**g, "assignment_epoch": 0} if not g["members"] else g for g in answer["groups"]
            ]
            answer = {**answer, "groups": idle}
        if api == "metadata":
            known = [row for row in answer["topics"] if not row["name"] or self._is_ours(row)]
            answer = {**answer, "topics": known}
        if api == "fetch":
            answer = {**answer, "responses": joined(answer["responses"])}
        listed, name = LISTS.get(api, ("", ""))
        if listed:
            rows = [row for row in answer[listed] if str(row[name]).startswith(self._stem)]
            answer = {**answer, listed: rows}
        return self.shown(answer)

    def _is_ours(self, row: Mapping[str, Any]) -> bool:
        return row["name"].startswith(self._stem) or row["error_code"] != "none"

    unordered = UNORDERED | {
        "markers",
        "partition_responses",
        "results_by_partition",
        "results_by_transaction",
        "topic_results",
    }

    def shown(self, value: Any, name: str | None = None) -> Any:
        if isinstance(value, uuid.UUID):
            value = str(value)
        if name == "producer_id" and value == 0:
            return 0  # this is also the default of the field
        if name == "topic_partitions" and isinstance(value, list):
            # The assigned partitions vary, because assignors use random ids of members and topics.
            value = [{**row, "partitions": len(row["partitions"])} for row in value]
        if name == "timestamp" and isinstance(value, int) and value > NOW_MS:
            return "an instant"
        if name in ("assignment", "member_assignment") and isinstance(value, bytes):
            return len(value)
        if name == "records" and value:
            try:
                return [
                    (b.base_offset, b.last_offset, b.attributes, b.producer_epoch, b.values)
                    + (("of nobody",) if b.producer_id < 0 else ())
                    for b in batches(value)
                ]
            except (AssertionError, struct.error, IndexError):
                return f"{len(value)} bytes that are no batches"
        return super().shown(value, name)


def joined(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the rows of each topic, because the order of partitions depends on their data."""
    found: dict[Any, dict[str, Any]] = {}
    for row in rows:
        known = found.setdefault(row.get("topic", row.get("topic_id")), {**row, "partitions": []})
        parts = [
            {**partition, "aborted_transactions": aborted_among(partition)}
            for partition in row["partitions"]
        ]
        known["partitions"] = known["partitions"] + parts
    return list(found.values())


def aborted_among(part: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the aborted transactions that begin within the records of a fetched partition.

    Apache Kafka's list extends up to an entry of its sparse offset index, and may have entries even
    if no records are read.
    """
    aborted: list[dict[str, Any]] | None = part["aborted_transactions"]
    if not aborted or not part["records"]:
        return None if not part["records"] else aborted
    try:
        last = max((batch.last_offset for batch in batches(part["records"])), default=-1)
    except (AssertionError, struct.error, IndexError):
        return aborted
    return [transaction for transaction in aborted if transaction["first_offset"] <= last]


LISTS = {
    "list_groups": ("groups", "group_id"),
    "list_transactions": ("transaction_states", "transactional_id"),
}


KEYS = ("name", "topic", "topic_id", "transactional_id", "group_id", "partition_index", "index")
KEYS += ("partition", "resource_name", "producer_id")


REPEATING = frozenset(
    {
        "consumer_group_describe",
        "describe_configs",
        "describe_groups",
        "describe_producers",
        "describe_transactions",
        "list_offsets",
        "write_txn_markers",
    }
)
"""APIs whose requests may name a resource twice. For other APIs duplicates are dropped before the
request is sent, as only Apache Kafka drops them itself.
"""


def distinct(value: Any) -> Any:
    """Return ``value`` without duplicate names in its lists."""
    if isinstance(value, Mapping):
        return {name: distinct(item) for name, item in value.items()}
    if not isinstance(value, list):
        return value
    kept: dict[Any, Any] = {}
    for item in map(distinct, value):
        key = item
        if isinstance(item, Mapping):
            key = tuple(str(item.get(name)) for name in KEYS)
            if all(part == "None" for part in key):
                key = len(kept)
        elif isinstance(item, list):
            key = len(kept)
        kept.setdefault(key, item)
    return list(kept.values())


@dataclass
class UnderWay:
    """A request in flight on one broker."""

    step: Step
    body: Mapping[str, Any]
    frame: bytes
    answer: Answer | str | None = None


class Side:
    """One broker, the clients' connections to it, and what the clients know."""

    def __init__(self, bootstrap: str, stem: str) -> None:
        self.bootstrap = bootstrap
        self.knowledge = Knowledge()
        self.masks = LifeMasks(stem)
        self.parked: dict[int, UnderWay] = {}
        self.admin = RawClient(bootstrap, client_id="settling")
        host, port = bootstrap.rsplit(":", 1)
        self._address = host, int(port)
        self._sockets: dict[int, socket.socket] = {}
        self._received: dict[int, bytearray] = {}

    def close(self) -> None:
        self.admin.close()
        for connected in self._sockets.values():
            connected.close()

    def send(self, step: Step) -> UnderWay | None:
        """Send a step; return None if it is skipped."""
        mend = None if step.request.api in REPEATING else distinct
        made = frame_of(step.request, self.knowledge, step.number, mend)
        if made is None:
            return None
        frame, body = made
        under_way = UnderWay(step, body, frame)
        self._send(under_way)
        self.parked[step.client] = under_way
        return under_way

    def _send(self, under_way: UnderWay) -> None:
        client = under_way.step.client
        if client not in self._sockets:
            connected = socket.create_connection(self._address, 20)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets[client] = connected
            self._received[client] = bytearray()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sockets[client].sendall(under_way.frame)

    def collect(self, wait_s: float) -> None:
        """Receive the responses that have arrived, and retry requests after retriable errors."""
        waiting = {
            self._sockets[c]: c for c, exchange in self.parked.items() if exchange.answer is None
        }
        if not waiting:
            return
        with selectors.DefaultSelector() as selector:
            for connected in waiting:
                selector.register(connected, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(wait_s)]
        for connected in ready:
            self._read(waiting[connected])  # type: ignore[index]

    def _read(self, client: int) -> None:
        under_way = self.parked[client]
        try:
            data = self._sockets[client].recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            self._sockets.pop(client).close()
            under_way.answer = CLOSED
            return
        received = self._received[client]
        received += data
        if len(received) < 4 or len(received) < 4 + struct.unpack_from(">i", received)[0]:
            return
        frame = bytes(received[4:])
        received.clear()
        request = under_way.step.request
        number, answer = decode(request.api, request.version, frame)
        assert number == under_way.step.number
        if PASSING.intersection(errors_in(answer)) and time.monotonic() < self._until:
            time.sleep(RETRY_S)
            self._send(under_way)
        else:
            under_way.answer = answer

    _until = 0.0

    def be_patient(self) -> None:
        """For a limited time from now on, retry requests after retriable errors."""
        self._until = time.monotonic() + PATIENCE_S / 2

    @property
    def answered(self) -> set[int]:
        return {client for client, exchange in self.parked.items() if exchange.answer is not None}

    def name_members(self) -> None:
        """Mask the ids of joined members in client order: a leader's list has no fixed order."""
        for client in sorted(self.answered):
            answer = self.parked[client].answer
            if isinstance(answer, dict) and "member_id" in answer:
                self.masks.shown(answer["member_id"], "member_id")

    def take(self, client: int) -> UnderWay:
        """Remove and return a client's answered request, after learning from the response."""
        under_way = self.parked.pop(client)
        if isinstance(under_way.answer, dict):
            learn(self.knowledge, under_way.step.request, under_way.body, under_way.answer)
        else:
            self.knowledge.sessions.pop(client, None)
        return under_way


@dataclass(frozen=True)
class Difference:
    """One leaf of a response in which the brokers differ."""

    api: str
    version: int
    where: str
    ours: Any
    theirs: Any
    step: int
    request: Any
    """The request to Fencepost, with masked ids."""

    def __str__(self) -> str:
        at = f"step {self.step}: {self.api} v{self.version}{self.where}"
        return f"{at}: {self.ours!r} instead of {self.theirs!r}\n    {self.request}"


class LockStep:
    """Sends all steps to both brokers, and compares the responses."""

    def __init__(self, life: Life, ours: str, theirs: str) -> None:
        self.life = life
        self.ours, self.theirs = (Side(bootstrap, life.pools.stem) for bootstrap in (ours, theirs))
        self.compared = 0
        """How many responses were compared; a missing response counts as well."""

    def close(self) -> None:
        for side in (self.ours, self.theirs):
            side.close()

    def prologue(self) -> list[Difference]:
        """Send the first steps, which create coordinators and topics; return the differences."""
        return [found for step in self.life.prologue() for found in self._one(step)]

    def step(self) -> list[Difference]:
        """Send the next step, unless its client has a parked request; return the differences."""
        step = self.life.step()
        return [] if step.client in self.ours.parked else list(self._one(step))

    def _one(self, step: Step) -> Iterator[Difference]:
        sides = self.ours, self.theirs
        for side in sides:
            side.be_patient()
        sent = [side.send(step) for side in sides]
        if sent[0] is None and sent[1] is None:
            return
        request = step.request
        if sent[0] is None or sent[1] is None:
            said = [exchange and exchange.body for exchange in sent]
            yield Difference(request.api, request.version, " asked", *said, step.number, None)
            return
        self._wait(step)
        yield from self._released(step)
        settle(sides, request, sent[0].body)
        if request.api == "init_producer_id":
            ours, theirs = (transactions("Ongoing", side.admin) for side in sides)
            if ours != theirs:
                body = self.ours.masks.shown(sent[0].body)
                yield Difference(
                    request.api, request.version, " leaves open", ours, theirs, step.number, body
                )

    def _wait(self, step: Step) -> None:
        """Wait until both brokers have responded to the step, or both have parked its request."""
        sides, client = (self.ours, self.theirs), step.client
        begun = time.monotonic()
        while True:
            done = [client in side.answered for side in sides]
            waited = time.monotonic() - begun
            can_park = step.request.api in PARKABLE
            if all(done) or waited > 2 * PATIENCE_S:
                return
            if can_park and not any(done) and waited > PARKED_S:
                return
            for side, has in zip(sides, done, strict=True):
                if not has:
                    side.collect(0.005)

    def _released(self, step: Step) -> Iterator[Difference]:
        """Compare the responses to this step, and to the parked requests that it completed."""
        sides, end = (self.ours, self.theirs), time.monotonic() + PATIENCE_S
        self.ours.collect(0.001)
        while self.ours.answered != self.theirs.answered and time.monotonic() < end:
            for side in sides:
                side.collect(0.005)
        for side in sides:
            side.name_members()
        for client in sorted(self.ours.answered | self.theirs.answered):
            pair = [side.parked[client] for side in sides]
            request = pair[0].step.request
            both = list(zip(sides, pair, strict=True))
            texts = [side.masks.answered(request.api, exchange.answer) for side, exchange in both]
            bodies = [side.masks.shown(exchange.body) for side, exchange in both]
            for at, values in ((" asked", bodies), ("", texts)):
                for where, our, their in leaves(*values, at):
                    yield Difference(
                        request.api, request.version, where, our, their, step.number, bodies[0]
                    )
            self.compared += 1
            for side in sides:
                if side.parked[client].answer is not None:
                    side.take(client)


# --- effects after a response --------------------------------------------------------------------

CHANGES_TOPICS = frozenset({"create_topics", "delete_topics", "create_partitions", "metadata"})
CHANGES_SETTINGS = frozenset({"alter_configs", "incremental_alter_configs"})
ENDS_TRANSACTIONS = frozenset({"end_txn", "init_producer_id"})
PROBES = tuple(
    {partition_for(name, 4): name for name in map("probe-{}".format, range(20))}.values()
)
"""One group for each partition of the coordinators' topic."""

STEADY_S = 3.0
"""For how long the states of two brokers may differ before they become equal by themselves."""


def settle(sides: tuple[Side, Side], request: Request, body: Mapping[str, Any]) -> None:
    """Wait until the request has taken effect on both brokers, or until the deadline."""
    looks: list[Callable[[RawClient], Any]] = []
    if request.api in CHANGES_TOPICS:
        # Include deleted topics, because the deletion must have reached both brokers, too.
        known = sorted({name for side in sides for name in side.knowledge.topic_ids})
        looks = [topics_of, partial(heard_of, known)]
        if request.api == "delete_topics":
            looks.append(committed)
    elif request.api in CHANGES_SETTINGS:
        wanted = [
            (resource["resource_type"], resource["resource_name"]) for resource in body["resources"]
        ]
        looks = [partial(settings_of, wanted)]
    elif request.api in ENDS_TRANSACTIONS:
        looks = [partial(transactions, "Prepare")]
    if request.api == "share_group_heartbeat":
        # The coordinator initializes states after its response.
        for side in sides:
            wait_until_initialized(body["group_id"], side.admin)
    elif request.api in CHANGES_TOPICS and sides[0].knowledge.shares:
        groups = sorted({group for group, _ in sides[0].knowledge.shares})
        looks.append(partial(share_offsets, groups))
    for look in looks:
        end = time.monotonic() + STEADY_S
        while look(sides[0].admin) != look(sides[1].admin) and time.monotonic() < end:
            time.sleep(RETRY_S)


def topics_of(admin: RawClient) -> Any:
    """Return every topic with its partitions, and whether their leaders serve."""
    answer = admin.call("metadata", 12, topics=None)
    found = {}
    for topic in answer["topics"]:
        if topic["name"].startswith("__"):
            continue
        asked = [
            {"partition_index": p["partition_index"], "timestamp": -1, "current_leader_epoch": -1}
            for p in topic["partitions"]
        ]
        row = {"name": topic["name"], "partitions": asked}
        ends = admin.call("list_offsets", 5, replica_id=-1, topics=[row])["topics"]
        found[topic["name"]] = sorted(
            (p["partition_index"], p["error_code"]) for t in ends for p in t["partitions"]
        )
    return found


def heard_of(known: list[str], admin: RawClient) -> Any:
    """Return the topics that each coordinator shard can assign.

    A heartbeat to one group of each shard returns these topics. A shard may learn of a new topic
    later than the broker's Metadata shows it.
    """
    topics = admin.call("metadata", 12, topics=None)["topics"]
    names = {topic["topic_id"]: topic["name"] for topic in topics}
    found = []
    for group in PROBES:
        body = {"group_id": group, "member_id": "probe", "member_epoch": 0}
        body |= {"rebalance_timeout": 60_000, "topic_partitions": []}
        body |= {"subscribed_topic_names": known}
        answer = admin.call("consumer_group_heartbeat", 0, **body)
        given = answer["assignment"] or {"topic_partitions": []}
        found.append(
            sorted(
                (names.get(row["topic_id"], ""), len(row["partitions"]))
                for row in given["topic_partitions"]
            )
        )
    return found


def share_offsets(groups: list[str], admin: RawClient) -> Any:
    """Return the initialized partitions of share groups, by topic name."""
    rows = [{"group_id": name, "topics": None} for name in groups]
    return {
        (group["group_id"], topic["topic_name"]): sorted(
            part["partition_index"] for part in topic["partitions"]
        )
        for group in admin.call("describe_share_group_offsets", 1, groups=rows)["groups"]
        for topic in group["topics"]
    }


def wait_until_initialized(group: str, admin: RawClient) -> None:
    """Wait until a share group's subscribed partitions are initialized, or until the deadline."""
    end = time.monotonic() + STEADY_S
    while time.monotonic() < end:
        (told,) = admin.call("share_group_describe", 1, group_ids=[group])["groups"]
        names = {name for member in told["members"] for name in member["subscribed_topic_names"]}
        topics = admin.call("metadata", 12, topics=None)["topics"]
        wanted = {
            (group, row["name"]): sorted(
                partition["partition_index"] for partition in row["partitions"]
            )
            for row in topics
            if row["name"] in names
        }
        if wanted.items() <= share_offsets([group], admin).items():
            return
        time.sleep(RETRY_S)


def transactions(state: str, admin: RawClient) -> Any:
    """Return the transactional ids whose state begins with ``state``."""
    listed = admin.call("list_transactions", 0)["transaction_states"]
    return sorted(
        transaction["transactional_id"]
        for transaction in listed
        if transaction["transaction_state"].startswith(state)
    )


def committed(admin: RawClient) -> Any:
    """Return all committed offsets."""
    groups = [group["group_id"] for group in admin.call("list_groups", 4)["groups"]]
    asked = [{"group_id": name, "topics": None} for name in sorted(groups)]
    return [
        (group["group_id"], topic["name"], part["partition_index"], part["committed_offset"])
        for group in admin.call("offset_fetch", 8, groups=asked)["groups"]
        for topic in sorted(group["topics"], key=lambda topic: topic["name"])
        for part in sorted(topic["partitions"], key=lambda part: part["partition_index"])
    ]


def settings_of(wanted: list[tuple[int, str]], admin: RawClient) -> Any:
    """Return the settings that were set on the resources themselves."""
    rows = [
        {"resource_type": kind, "resource_name": name, "configuration_keys": None}
        for kind, name in wanted
    ]
    return [
        (
            result["error_code"],
            sorted((c["name"], c["value"]) for c in result["configs"] if c["config_source"] != 5),
        )
        for result in admin.call("describe_configs", 4, resources=rows)["results"]
    ]
