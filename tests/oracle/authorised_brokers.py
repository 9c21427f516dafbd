"""Two brokers with authentication, and the operations that the matrix needs on each broker."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from fencepost.cluster.acl import Acl, ResourceType
from fencepost.tools.ports import hold_port
from tests.lives.lockstep import CLOSED, LifeMasks
from tests.oracle.authorisation import (
    HERE,
    INTERNALS,
    ME,
    NOBODYS,
    SLOTS,
    STEM,
    Body,
    Case,
    Request,
    all_but_one,
    rule,
)
from tests.oracle.deliberate import Kind
from tests.oracle.tracer import PASSING, leaves
from tests.support import requests
from tests.support.cluster import GROUP, TRANSACTION, Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka, required
from tests.support.raw import Answer, ConnectionLostError, errors_in, fitted
from tests.support.share import FULL, initialize
from tests.support.share import Member as ShareMember
from tests.support.targets import SETTINGS
from tests.support.waits import until

T = TypeVar("T")

USERS: Final = 100
"""Number of concurrent clients, each of which has its own ACLs."""

PASSWORD: Final = "no secret"
LISTENER: Final = "clients"
LONG_MS: Final = 600_000
PASSING_S: Final = 5.0
LEFT_S: Final = 20.0
"""The deadline for both brokers to reach the same state."""

SILENT: Final = "no answer"
ANSWER_S: Final = 20.0
RULES_AT_ONCE: Final = 1000
MARKER: Final = f"{STEM}marker"
ANY: Final = 1
EVERY_RULE: Final = {
    "resource_type_filter": ANY,
    "pattern_type_filter": ANY,
    "operation": ANY,
    "permission_type": ANY,
}

GUARDED: Final[Mapping[str, str]] = {
    **SETTINGS,
    "auto.create.topics.enable": "true",
    "super.users": "User:ANONYMOUS;User:admin",
    "group.consumer.session.timeout.ms": str(LONG_MS),
    "group.consumer.max.session.timeout.ms": str(LONG_MS),
    "transaction.max.timeout.ms": str(LONG_MS),
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "sasl.enabled.mechanisms": "PLAIN",
    f"listener.name.{LISTENER}.plain.sasl.jaas.config": (
        "org.apache.kafka.common.security.plain.PlainLoginModule required "
        + " ".join(f'user_u{number}="{PASSWORD}"' for number in range(USERS))
        + f' user_admin="{PASSWORD}";'
    ),
}
"""Clients of the PLAINTEXT listener are super users, and prepare the cases."""


class GuardedKafka(Kafka):
    """A broker of Apache Kafka with an authorizer and a second listener, which uses SASL."""

    def __init__(self, directory: Path, settings: Mapping[str, str] = GUARDED) -> None:
        super().__init__(directory, settings)
        held = hold_port()
        weakref.finalize(self, held.close)
        self._guarded_port = held.getsockname()[1]
        self.guarded = f"127.0.0.1:{self._guarded_port}"

    def _properties(self) -> dict[str, str]:
        known, clients = super()._properties(), f"CLIENTS://{self.guarded}"
        return {
            **known,
            "listeners": f"{known['listeners']},{clients}",
            "advertised.listeners": f"{known['advertised.listeners']},{clients}",
            "listener.security.protocol.map": (
                "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,CLIENTS:SASL_PLAINTEXT"
            ),
        }


class GuardedDaemon(Daemon):
    """A broker of Fencepost with the same configuration."""

    def __init__(self, data_dir: Path, settings: Mapping[str, str] = GUARDED) -> None:
        held = [hold_port(), hold_port()]
        for port in held:
            weakref.finalize(self, port.close)
        plain, self.guarded = (f"127.0.0.1:{port.getsockname()[1]}" for port in held)
        listeners = {
            "listeners": f"PLAINTEXT://{plain},CLIENTS://{self.guarded}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CLIENTS:SASL_PLAINTEXT",
        }
        super().__init__(data_dir, {**settings, **listeners})


class Member(Cluster):
    """A connection that logs in as a user."""

    def login(self, user: str) -> None:
        """Authenticate by PLAIN; AssertionError if the broker refuses."""
        answer = self.call("sasl_handshake", 1, mechanism="PLAIN")
        assert answer["error_code"] == "none", answer
        token = f"\0{user}\0{PASSWORD}".encode()
        answer = self.call("sasl_authenticate", 2, auth_bytes=token)
        assert answer["error_code"] == "none", answer

    def tell(self, api: str, version: int, body: Mapping[str, Any]) -> None:
        """Send a request without a response, and wait until the broker has processed it."""
        self.send(api, version, **body)
        self._waiting.clear()
        self.call("api_versions", 0)


class MatrixMasks(LifeMasks):
    """Removes the resources of other cases from a response."""

    unordered = LifeMasks.unordered | {
        "acls",
        "matching_acls",
        "brokers",
        "entries",
        "coordinators",
    }
    moved = frozenset({"base_offset", "log_start_offset", "high_watermark", "last_stable_offset"})
    listing: Mapping[str, tuple[str, str]] = {
        "describe_topic_partitions": ("topics", "name"),
        "list_groups": ("groups", "group_id"),
        "list_transactions": ("transaction_states", "transactional_id"),
        "metadata": ("topics", "name"),
    }

    def __init__(self, broker: Broker, case: Case) -> None:
        super().__init__(STEM)
        self._known = {*case.names.values(), *INTERNALS.values(), "", None}
        self._known |= {f"{STEM}{slot}" for slot in SLOTS}
        self._ids = {str(found): name for name, found in broker.topic_ids.items()}
        self._ids[str(NOBODYS)] = "nothing"
        self.names = {("topic", found): f"the id of {name}" for found, name in self._ids.items()}

    def answered(self, api: str, answer: Answer | str | None) -> Any:
        """Return the masked response, or the text of the error if there is none."""
        if api in self.listing and isinstance(answer, dict):
            rows, name = self.listing[api]
            kept = [row for row in answer[rows] if row[name] in self._known]
            answer = {**answer, rows: sorted(kept, key=lambda row: str(row[name]))}
        if api == "describe_topic_partitions" and isinstance(answer, dict):
            # The cursor's position depends on topics of other cases.
            answer = {**answer, "next_cursor": answer["next_cursor"] is not None}
        return super().answered(api, answer)

    def _is_ours(self, row: Mapping[str, Any]) -> bool:
        return row["name"] in self._known

    def shown(self, value: Any, name: str | None = None) -> Any:
        if name in self.moved and isinstance(value, int):
            return "an offset" if value >= 0 else "none"
        if name == "key" and isinstance(value, str):
            for found, topic in self._ids.items():
                value = value.replace(found, topic)
            return value
        return super().shown(value, name)


class OnOneBroker:
    """The names of one case's resources, with their ids on one broker."""

    def __init__(self, broker: Broker, names: Mapping[str, str]) -> None:
        self._broker = broker
        self._names = names

    def __getitem__(self, slot: str) -> str:
        return self._names[slot]

    def id(self, slot: str) -> uuid.UUID:
        return self._broker.topic_ids.get(self._names[slot], NOBODYS)

    def producer(self, slot: str) -> tuple[int, int]:
        return self._broker.producers.get(self._names[slot], (4711, 0))

    @property
    def member(self) -> str:
        return self._broker.member


class Broker:
    """One of the two brokers, with its administrator's and its users' connections."""

    def __init__(self, plain: str, guarded: str) -> None:
        self.guarded = guarded
        self.admin = Cluster(plain)
        self.topic_ids: dict[str, uuid.UUID] = {}
        self.producers: dict[str, tuple[int, int]] = {}
        self.member = ""
        self._connections: dict[str, Member] = {}
        self._markers = itertools.count()

    def close(self) -> None:
        for connection in (self.admin, *self._connections.values()):
            connection.close()

    def connect(self, user: str) -> Member:
        """Return a new connection on which ``user`` is logged in."""
        found = Member(self.guarded, client_id=user, deadline_s=ANSWER_S)
        found.login(user)
        return found

    def of(self, user: str) -> Member:
        """Return the connection of ``user``, which stays open while the user's ACLs change."""
        if user not in self._connections:
            self._connections[user] = self.connect(user)
        return self._connections[user]

    # --- rules ---

    def set_rules(self, rules: Iterable[Acl]) -> None:
        """Replace all ACLs by ``rules``."""
        self.admin.call("delete_acls", 3, filters=[EVERY_RULE])
        self._create_rules(list(rules))
        self.await_rules()

    def _create_rules(self, rules: Sequence[Acl]) -> None:
        for at in range(0, len(rules), RULES_AT_ONCE):
            rows = [
                {
                    "resource_type": acl.resource_type,
                    "resource_name": acl.resource_name,
                    "resource_pattern_type": acl.pattern_type,
                    "principal": acl.principal,
                    "host": acl.host,
                    "operation": acl.operation,
                    "permission_type": acl.permission,
                }
                for acl in rules[at : at + RULES_AT_ONCE]
            ]
            answer = self.admin.call("create_acls", 3, creations=rows)
            assert set(errors_in(answer)) == {"none"}, answer

    def await_rules(self) -> None:
        """Wait until the broker has applied all preceding ACL changes.

        Apache Kafka responds before its brokers have replayed a change. Brokers replay changes in
        order, so this method adds a rule as a marker, and waits until the broker describes it.
        """
        marker = f"User:marker-{next(self._markers)}"
        self._create_rules([replace(rule("read", ResourceType.GROUP, MARKER), principal=marker)])
        wanted = {**EVERY_RULE, "resource_name_filter": MARKER, "principal_filter": marker}
        until(lambda: self.admin.call("describe_acls", 3, **wanted)["resources"], "the rules")

    # --- resources ---

    def prepare(self) -> None:
        """Create the resources that all cases share."""
        admin = self.admin
        # UnregisterController needs the metadata.version of a new Apache Kafka 4.4.
        latest = requests.update_features(requests.feature_update("metadata.version", 33))
        updated = admin.call("update_features", 2, **fitted("update_features", 2, latest))
        assert updated["error_code"] == "none"
        for topic, partitions in (("t", 2), ("u", 1), ("v", 1), ("w", 1)):
            admin.create_topic(f"{STEM}{topic}", partitions)
            self._learn(f"{STEM}{topic}")
        admin.produce(f"{STEM}t", [b"1", b"2", b"3"])
        admin.coordinator(f"{STEM}g", GROUP)
        admin.coordinator(f"{STEM}x", TRANSACTION)
        for group in "gh":
            self._commit(f"{STEM}{group}")
        for name in "xy":
            self._begin(f"{STEM}{name}")
        admin.call(
            "add_partitions_to_txn",
            3,
            **_in_transaction(f"{STEM}x", self.producers[f"{STEM}x"]),
            v3_and_below_topics=[{"name": f"{STEM}{t}", "partitions": [0]} for t in "vw"],
        )
        self._join_classic(f"{STEM}c")
        self._join(f"{STEM}k")
        self._share(f"{STEM}g", {f"{STEM}t": 3, f"{STEM}u": 0})
        for internal in ("__consumer_offsets", "__transaction_state"):
            self._learn(internal)

    def _learn(self, topic: str) -> None:
        self.topic_ids[topic] = self.admin.topic_id(topic)

    def _commit(self, group: str) -> None:
        rows = [
            {
                "name": f"{STEM}{topic}",
                "partitions": [{"partition_index": 0, "committed_offset": 1}],
            }
            for topic in "tu"
        ]
        answer = self._patiently(
            "offset_commit", 8, group_id=group, generation_id_or_member_epoch=-1, topics=rows
        )
        assert set(errors_in(answer)) == {"none"}, answer

    def _begin(self, transactional_id: str) -> None:
        answer = self._patiently(
            "init_producer_id",
            4,
            transactional_id=transactional_id,
            transaction_timeout=LONG_MS,
            producer_id=-1,
            producer_epoch=-1,
        )
        self.producers[transactional_id] = answer["producer_id"], answer["producer_epoch"]

    def _join_classic(self, group: str) -> None:
        asked = {"group_id": group, "session_timeout": LONG_MS, "rebalance_timeout": LONG_MS}
        asked |= {"protocol_type": "consumer", "protocols": [{"name": "p", "metadata": b"m"}]}
        member = self._patiently("join_group", 4, **asked)["member_id"]
        joined = self._patiently("join_group", 4, **asked, member_id=member)
        self._patiently(
            "sync_group",
            3,
            group_id=group,
            generation_id=joined["generation_id"],
            member_id=member,
            assignments=[{"member_id": member, "assignment": b"a"}],
        )

    def _join(self, group: str) -> None:
        self.member = str(uuid.uuid4())
        answer = self._patiently(
            "consumer_group_heartbeat",
            1,
            group_id=group,
            member_id=self.member,
            rebalance_timeout=LONG_MS,
            subscribed_topic_names=[f"{STEM}t", f"{STEM}u"],
            topic_partitions=[],
        )
        assert answer["error_code"] == "none", answer

    def _share(self, group: str, ends: Mapping[str, int]) -> None:
        """Have the broker load the share partitions of topics, so that no case has to wait for it.

        Apache Kafka leaves a share partition out of responses until it has read the state.
        """
        for topic, end in ends.items():
            initialize(self.admin, group, self.topic_ids[topic], start_offset=end)
        member = ShareMember(self.admin, group)
        ids = {self.topic_ids[topic]: {0: ()} for topic in ends}

        def is_read() -> bool:
            member.epoch = FULL
            answer = member.fetch(ids, max_wait=100)
            return len(answer["responses"]) == len(ends) and "none" in errors_in(answer)

        until(is_read, f"share partitions of {group}")

    def _patiently(self, api: str, version: int, **body: Any) -> Answer:
        return until(
            lambda: (
                None
                if PASSING.intersection(errors_in(answer := self.admin.call(api, version, **body)))
                else answer
            ),
            f"{api} of {body}",
        )

    def make_fresh(self, cases: Sequence[Case]) -> None:
        """Create the resources that belong to single cases."""
        own = [
            (SLOTS[slot], case.names[slot])
            for case in cases
            if case.request.is_fresh
            for slot, kind in case.kinds.items()
            if kind == HERE
        ]
        if topics := [name for its, name in own if its is ResourceType.TOPIC]:
            self._create(topics)
        for its, name in own:
            if its is ResourceType.GROUP:
                self._commit(name)
            elif its is ResourceType.TRANSACTIONAL_ID:
                self._begin(name)

    def _create(self, names: Sequence[str]) -> None:
        rows = [{"name": name, "num_partitions": 1, "replication_factor": 1} for name in names]
        answer = self.admin.call("create_topics", 7, timeout=60_000, topics=rows)
        assert set(errors_in(answer)) == {"none"}, answer
        self.topic_ids |= {row["name"]: uuid.UUID(row["topic_id"]) for row in answer["topics"]}
        asked = [
            {
                "name": name,
                "partitions": [{"partition_index": 0, "timestamp": -1, "current_leader_epoch": -1}],
            }
            for name in names
        ]
        until(
            lambda: (
                set(errors_in(self.admin.call("list_offsets", 7, replica_id=-1, topics=asked)))
                == {"none"}
            ),
            f"leaders of {len(names)} topics",
        )

    # --- asking ---

    def answer(self, case: Case, user: str) -> Any:
        """Return the broker's masked response to a case."""
        answer = self._asked(case, user, self.body(case))
        return MatrixMasks(self, case).answered(case.request.api, answer)

    def body(self, case: Case) -> Body:
        """Return the request body of a case with the ids of this broker."""
        api = case.request.api
        body = case.request.body(OnOneBroker(self, case.names))
        found: Body = fitted(api, case.version, body)
        return found

    def told(self, case: Case, user: str) -> str:
        """Return the whole response with its messages; the slots replace the resources' names."""
        told = repr(_in_one_order(self._asked(case, user, self.body(case))))
        for known in (str(NOBODYS), *map(str, self.topic_ids.values())):
            told = told.replace(known, "an id")
        for slot, name in sorted(case.names.items(), key=lambda pair: -len(pair[1])):
            told = told.replace(name, slot) if name else told
        return told

    def _asked(self, case: Case, user: str, body: Mapping[str, Any]) -> Answer | str:
        end = time.monotonic() + PASSING_S
        while True:
            try:
                connection = self.of(user)
                if case.request.is_silent:
                    connection.tell(case.request.api, case.version, body)
                    return SILENT
                answer = connection.call(case.request.api, case.version, **body)
            except (ConnectionLostError, BrokenPipeError, TimeoutError) as end_of_it:
                self._connections.pop(user).close()
                return SILENT if isinstance(end_of_it, TimeoutError) else CLOSED
            if not PASSING.intersection(errors_in(answer)) or time.monotonic() > end:
                return answer
            time.sleep(0.02)

    def seen(self, cases: Sequence[Case]) -> dict[str, Any]:
        """Return the state of the resources that the cases do not share."""
        own = {
            f"{slot} of {case}": (SLOTS[slot], name)
            for case in cases
            if case.request.is_fresh
            for slot, name in case.names.items()
        }
        kinds = {
            ResourceType.TOPIC: self._topics_seen,
            ResourceType.GROUP: self._groups_seen,
            ResourceType.TRANSACTIONAL_ID: self._transactions_seen,
        }
        found = {
            kind: look(names)
            for kind, look in kinds.items()
            if (names := sorted({name for its, name in own.values() if its is kind}))
        }
        return {what: found[kind][name] for what, (kind, name) in own.items()}

    def _topics_seen(self, names: Sequence[str]) -> dict[str, Any]:
        asked = {"topics": [{"name": name} for name in names], "allow_auto_topic_creation": False}
        rows = self.admin.call("metadata", 8, **asked)["topics"]
        return {row["name"]: (row["error_code"], len(row["partitions"])) for row in rows}

    def _groups_seen(self, names: Sequence[str]) -> dict[str, Any]:
        described = self.admin.call("describe_groups", 5, groups=names)["groups"]
        asked = [{"group_id": name, "topics": None} for name in names]
        kept = {
            group["group_id"]: sorted(
                (topic["name"], part["partition_index"], part["committed_offset"])
                for topic in group["topics"]
                for part in topic["partitions"]
            )
            for group in self.admin.call("offset_fetch", 8, groups=asked)["groups"]
        }
        return {
            row["group_id"]: (row["error_code"], row["group_state"], kept[row["group_id"]])
            for row in described
        }

    def _transactions_seen(self, names: Sequence[str]) -> dict[str, Any]:
        rows = self.admin.call("describe_transactions", 0, transactional_ids=names)
        return {
            row["transactional_id"]: (
                row["error_code"],
                row["transaction_state"],
                len(row["topics"]),
            )
            for row in rows["transaction_states"]
        }


def _in_one_order(value: Any) -> Any:
    """Return ``value`` with its rows sorted, because the order of a hash table may differ."""
    if isinstance(value, Mapping):
        return {name: _in_one_order(item) for name, item in value.items()}
    if isinstance(value, list):
        return sorted(map(_in_one_order, value), key=repr)
    return value


def _in_transaction(name: str, producer: tuple[int, int]) -> dict[str, Any]:
    return {
        "v3_and_below_transactional_id": name,
        "v3_and_below_producer_id": producer[0],
        "v3_and_below_producer_epoch": producer[1],
    }


@dataclass(frozen=True)
class Difference:
    """One leaf in which the two responses to a case differ."""

    api: str
    case: str
    where: str
    ours: Any
    theirs: Any
    request: Body
    """The body that Fencepost received."""

    def __str__(self) -> str:
        return f"{self.case}{self.where}: {self.ours!r} instead of {self.theirs!r}"


class Pair:
    """Both brokers, and the comparison of their responses."""

    def __init__(self, ours: Broker, theirs: Broker) -> None:
        self.ours, self.theirs = ours, theirs
        self.compared: Counter[str] = Counter()
        self.meant: Counter[Kind] = Counter()
        self._threads = ThreadPoolExecutor(2)
        self.at_once(Broker.prepare)

    @property
    def both(self) -> tuple[Broker, Broker]:
        return self.ours, self.theirs

    def close(self) -> None:
        self._threads.shutdown()
        for broker in self.both:
            broker.close()

    def at_once(self, play: Callable[[Broker], T]) -> tuple[T, T]:
        """Call ``play`` for both brokers concurrently; return Fencepost's and Kafka's result."""
        ours, theirs = self._threads.map(play, self.both)
        return ours, theirs

    def idle_rights(self, request: Request, number: Iterator[int]) -> Iterator[Case]:
        """Yield the cases in which a missing right does not change Apache Kafka's response."""
        cases = list(all_but_one(request, number))
        answers = _led(self.theirs, cases)
        whole, *others = (
            re.sub(r"-\d+-", "-", repr(answer))
            for answer in answers  # the number of a case in the names of its resources
        )
        for case, answer in zip(cases[1:], others, strict=True):
            if answer == whole:
                yield case

    def telling(self, cases: Sequence[tuple[Case, Case]]) -> tuple[list[str], list[str]]:
        """Return for each broker the cases whose responses reveal that a resource is missing."""

        def told_apart(broker: Broker) -> list[str]:
            broker.make_fresh([case for pair in cases for case in pair])
            broker.set_rules([])
            return [
                str(other)
                for here, other in cases
                if broker.told(here, "u1") != broker.told(other, "u1")
            ]

        return self.at_once(told_apart)

    def _left(self, cases: Sequence[Case]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states of both brokers once they agree, or after ``LEFT_S`` seconds.

        Apache Kafka creates topics and writes transaction markers after its response.
        """
        end = time.monotonic() + LEFT_S
        while True:
            here, there = self.at_once(partial(Broker.seen, cases=cases))
            if here == there or time.monotonic() > end:
                return here, there

    def differences(self, cases: Iterable[Case]) -> Iterator[Difference]:
        """Send all cases to both brokers, and yield the differences between the responses."""
        every = list(cases)
        for at in range(0, len(every), USERS):
            some = every[at : at + USERS]
            ours, theirs = self.at_once(partial(_led, cases=some))
            for case, our, their in zip(some, ours, theirs, strict=True):
                self.compared[case.request.api] += 1
                for where, left, right in leaves(our, their):
                    yield Difference(
                        case.request.api, str(case), where, left, right, self.ours.body(case)
                    )
            here, there = self._left(some)
            for name in here:
                if here[name] != there[name]:
                    yield Difference(
                        some[0].request.api, name, " then", here[name], there[name], {}
                    )


def _led(broker: Broker, cases: Sequence[Case]) -> list[Any]:
    broker.make_fresh(cases)
    users = [f"u{number}" for number in range(len(cases))]
    asked = list(zip(cases, users, strict=True))
    broker.set_rules(_by(acl, user) for case, user in asked for acl in case.rules)
    return [broker.answer(case, user) for case, user in asked]


def _by(acl: Acl, user: str) -> Acl:
    principal = acl.principal
    if principal.endswith(ME.removeprefix("User")):
        principal = principal.replace("me", user)
    return replace(acl, principal=principal.replace("ME", user.upper()))


@contextlib.contextmanager
def pair_of_brokers(root: Path, settings: Mapping[str, str] = GUARDED) -> Iterator[Pair]:
    """Yield both brokers, with an authorizer and a listener with PLAIN."""
    (root / "kafka").mkdir()
    kafka = GuardedKafka(root / "kafka", settings)
    with required():
        kafka.start()
    try:
        daemon = GuardedDaemon(root / "fencepost", settings)
        daemon.start()
        try:
            pair = Pair(
                Broker(daemon.bootstrap, daemon.guarded), Broker(kafka.bootstrap, kafka.guarded)
            )
            try:
                yield pair
            finally:
                pair.close()
        finally:
            daemon.stop()
    finally:
        kafka.stop()
