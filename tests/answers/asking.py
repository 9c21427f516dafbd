"""Sends the requests of a script to a cluster, and stores the responses in a comparable form.

``tests/oracle/tracer.py`` compares two brokers directly. This module stores the responses in files,
with their error messages and the whole requests.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from tests.oracle.authorised_brokers import Member as LoggedIn
from tests.oracle.tracer import UNORDERED, Masks, Tracer
from tests.support.cluster import Cluster, unique
from tests.support.raw import Answer, ConnectionLostError, decode, fitted
from tests.support.waits import until

OPERATOR, STRANGER = "operator", "stranger"
"""The clients: an operator, who may do everything, and a stranger, who logs in without rights."""

FIRST, OTHER, CONTROLLER = "first", "other", "controller"
"""The nodes that get requests: broker 1, another Fencepost broker, and a separate controller."""

CLOSED: Final = "connection closed"
SILENT: Final = "no answer within"
ANSWER_S: Final = 20.0
CHANGE_S: Final = 10.0
"""Deadline in seconds for a change to reach a broker."""

UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
PORT: Final = re.compile(r"(127\.0\.0\.1|localhost):\d+")
REQUEST: Final = re.compile(r"Request Request\(.*\)", flags=re.DOTALL)
"""The request with its connection id, which Apache Kafka's authorizer includes in errors."""
PATH: Final = re.compile(r"/[^\s,'\"]*/(?:data|logs)\b")
FIRST_MADE_ID: Final = 1 << 64

Step = tuple[str, Any, Any]
"""A request, its body, and the response."""


def compact(value: Any, *, is_sorted: bool = False) -> str:
    """Return ``value`` as JSON on one line; with ``is_sorted``, the fields are sorted by name."""
    return json.dumps(
        value, default=repr, ensure_ascii=False, separators=(",", ":"), sort_keys=is_sorted
    )


@dataclass(frozen=True)
class Place:
    """The addresses of a node."""

    plain: str
    """HOST:PORT for the operator."""
    guarded: str = ""
    """HOST:PORT for clients that log in, "" without such a listener."""


class AnswerMasks(Masks):
    """Replaces values that differ between runs with names."""

    unordered = UNORDERED | {
        "acls",
        "brokers",
        "configurations",
        "credential_infos",
        "finalized_features",
        "matching_acls",
        "nodes",
        "partition_result",
        "replica_election_results",
        "resources",
        "supported_features",
        "synonyms",
    }
    left_out = frozenset({"throttle_time", "documentation"})
    epochs = frozenset(
        {"broker_epoch", "leader_epoch", "finalized_features_epoch", "controller_epoch"}
        | {"producer_id", "producer_id_start"}
    )
    chosen: Mapping[str | None, str] = {
        # In KRaft mode, brokers name a random broker as the controller.
        "controller_id": "a broker",
        "port": "a port",
        "total_bytes": "a size",
        "usable_bytes": "a size",
    }
    directories = frozenset({"replica_directory_id", "directory_id"})
    masked_by_name = frozenset({"cluster_id", "member_id"})

    def shown(self, value: Any, name: str | None = None) -> Any:
        """See :meth:`Masks.shown`; error messages are kept, with ids and addresses replaced."""
        if isinstance(value, Mapping):
            return {k: self.shown(v, k) for k, v in value.items() if k not in self.left_out}
        if isinstance(value, list | tuple):
            if name == "configs":
                value = [config for config in value if not _is_told_elsewhere(config)]
            items = [self.shown(item, name) for item in value]
            return sorted(items, key=repr) if name in self.unordered else items
        if isinstance(value, uuid.UUID):
            return self._id(str(value), "topic")
        if isinstance(value, bytes):
            return f"{len(value)} bytes"
        if isinstance(value, str):
            return self._named_text(value, name)
        if name in self.chosen and isinstance(value, int):
            return self.chosen[name] if value > 0 else value
        if name is not None and name in self.epochs and isinstance(value, int):
            kind = "a producer id" if name.startswith("producer_id") else "an epoch"
            return kind if value >= 0 else "none"
        return value

    def _named_text(self, text: str, name: str | None) -> str:
        if name in self.directories:
            return self._id(text, "directory")
        if name == "topic_id":
            return self._id(text, "topic")
        if name in self.masked_by_name:
            return str(super().shown(text, name))
        return self._text(text)

    def _id(self, text: str, kind: str) -> str:
        if uuid.UUID(text).int < FIRST_MADE_ID:
            return text
        for (_, known), name in self.names.items():
            if known == text:
                return name
        count = sum(other == kind for other, _ in self.names) + 1
        self.names[kind, text] = f"{kind} {count}"
        return self.names[kind, text]

    def _text(self, text: str) -> str:
        for (_, known), name in self.names.items():
            if isinstance(known, str) and UUID.fullmatch(known):
                short = base64.urlsafe_b64encode(uuid.UUID(known).bytes).decode().rstrip("=")
                text = text.replace(known, f"<{name}>").replace(short, f"<{name}>")
        text = UUID.sub(lambda found: self._id(found[0], "id"), text)
        return PATH.sub("a directory", REQUEST.sub("Request", PORT.sub(r"\1:PORT", text)))


DEFAULT: Final = 5
"""The source of a config that has no value of its own."""


def _is_told_elsewhere(row: Any) -> bool:
    """Return whether ``row`` is a default in a CreateTopics response, as DescribeConfigs has it."""
    return (
        isinstance(row, Mapping)
        and "synonyms" not in row
        and row.get("config_source") == DEFAULT
        and "read_only" in row
    )


class Asker(Tracer):
    """Sends requests: ``ask("delete_topics", 6, topics=[...])`` asks broker 1 as the operator."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        super().__init__(places[FIRST].plain)
        self.places = places
        self.steps: list[Step] = []  # type: ignore[assignment]
        self._masks = AnswerMasks()
        self._connections: dict[tuple[str, str], Cluster] = {}
        self.is_settled = False

    @property
    def cluster(self) -> Cluster:
        """The operator's connection to the first broker."""
        return self.connection(FIRST, OPERATOR)

    @property
    def brokers(self) -> list[str]:
        """The brokers that a script may use."""
        return [at for at in (FIRST, OTHER) if at in self.places]

    def topic(self, at: str, name: str) -> Any:
        """Return a topic from the Metadata of a broker."""
        asked = {"topics": [{"name": name}], "allow_auto_topic_creation": False}
        return self.connection(at, OPERATOR).call("metadata", 9, **asked)["topics"][0]

    def connection(self, at: str, who: str) -> Cluster:
        """Return a client's connection to a node, which is opened when it is first needed."""
        found = self._connections.get((at, who))
        if found is None:
            place = self.places[at]
            if who == OPERATOR:
                found = Scene(place.plain, client_id=who, deadline_s=ANSWER_S)
            else:
                stranger = LoggedIn(place.guarded, client_id=who, deadline_s=ANSWER_S)
                stranger.login("u0")
                found = stranger
            self._connections[at, who] = found
        return found

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def __call__(self, api: str, version: int, /, **body: Any) -> Answer:
        """Send a request to the first broker as the operator, and store the response."""
        self.is_settled = False
        return self.asked(api, version, body)

    def asked(
        self,
        api: str,
        version: int,
        body: Mapping[str, Any],
        *,
        who: str = OPERATOR,
        at: str = FIRST,
        when: Callable[[Answer], object] = lambda _: True,
    ) -> Answer:
        """Repeat a request until ``when`` holds for the response, and store the last response."""
        seen: Answer = {}

        def holds() -> bool:
            nonlocal seen
            seen = self._once(api, version, body, who, at)
            return bool(when(seen))

        # If ``when`` never holds, the script continues, because the comparison finds the
        # difference.
        with suppress(TimeoutError):
            until(holds, f"{api} is answered as expected", deadline_s=CHANGE_S, poll_s=0.02)
        told = "" if (who, at) == (OPERATOR, FIRST) else f" by {who} at {at}"
        self.keep(f"{api} v{version}{told}", body, seen or CLOSED)
        return seen

    def keep(self, request: str, body: Mapping[str, Any] | None, answer: Any) -> None:
        """Store a request with its body and its response."""
        shown = None if body is None else self._masks.shown(dict(body))
        self.steps.append((request, shown, self._masks.shown(answer)))

    def begin_part(self) -> None:
        """Forget the stored steps, and the names of the ids that occur in the steps."""
        self.steps.clear()
        self._masks = AnswerMasks()

    def quietly(self, api: str, version: int, /, **body: Any) -> Answer:
        """Send a request to the first broker as the operator, without storing the response."""
        # The scripts of ``tests/oracle`` read configs right after a change, so wait for the change.
        if api == "describe_configs" and not self.is_settled:
            settled(self)
        return self._once(api, version, body, OPERATOR, FIRST)

    def _once(self, api: str, version: int, body: Mapping[str, Any], who: str, at: str) -> Answer:
        request = fitted(api, version, body)
        try:
            return self.connection(at, who).call(api, version, **request)
        except ConnectionLostError:
            self._connections.pop((at, who)).close()
            return {}
        except TimeoutError:
            self._connections.pop((at, who)).close()
            return {SILENT: f"{ANSWER_S:g} s"}

    def versions(
        self, api: str, versions: Sequence[int], /, *, who: str = OPERATOR, **body: Any
    ) -> None:
        """Send one request at several versions."""
        for version in versions:
            self.asked(api, version, body, who=who)

    def refused(self, api: str, version: int, /, **body: Any) -> None:
        """Send a request as a client without rights."""
        self.asked(api, version, body, who=STRANGER)

    def note(self, what: str, value: Any) -> None:
        """Store a value that is not a response."""
        self.keep(what, None, value)


class Scene(Cluster):
    """An operator's connection. All topics that it creates are on broker 1 only."""

    def create_topic(
        self, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> str:
        """See :meth:`Cluster.create_topic`."""
        rows = [{"partition_index": index, "broker_ids": [1]} for index in range(partitions)]
        topic = {
            "name": name,
            "num_partitions": -1,
            "replication_factor": -1,
            "assignments": rows,
            "configs": [{"name": k, "value": v} for k, v in (configs or {}).items()],
        }
        answer = self.call("create_topics", 5, timeout=10_000, topics=[topic])
        assert answer["topics"][0]["error_code"] == "none", answer
        until(lambda: self.leaders(name) == partitions, f"leaders of {name}")
        return name


def inside(api: str, version: int, answer: Answer) -> Answer:
    """Return the response to an Envelope, in which the inner response is decoded."""
    data = answer["response_data"]
    if data is None:
        return answer
    return {**answer, "response_data": decode(api, version, data)[1]}


def settled(ask: Asker) -> None:
    """Wait until every broker has applied all changes so far.

    Because changes are ordered, it is enough to wait for the metadata of a new marker topic.
    """
    ask.is_settled = True
    name = ask.cluster.create_topic(unique("marker"))
    for at in ask.brokers:

        def knows(at: str = at) -> bool:
            return bool(ask.topic(at, name)["error_code"] == "none")

        until(knows, f"the {at} broker has heard of the changes")
