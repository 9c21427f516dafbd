"""Sends a sequence of requests to a broker, and records the responses in a comparable form.

Values that may differ between two brokers (ids made by the server, addresses, timestamps, messages)
are replaced by names, which are numbered by first occurrence. So the trace still shows whether an
id is *the same id again* or *another id*.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from tests.support.batches import batches
from tests.support.cluster import Cluster
from tests.support.raw import Answer, ConnectionLostError, errors_in, fitted

PASSING = frozenset(
    {
        "concurrent_transactions",
        "coordinator_load_in_progress",
        "coordinator_not_available",
        "not_coordinator",
    }
)
"""Transient errors. They depend on timing, so they are not compared, and the request is retried."""

WORDING = frozenset(
    {"throttle_time", "error_message", "batch_index_error_message", "documentation"}
)
NAMED = {
    "member_id": "member",
    "leader": "member",
    "topic_id": "topic",
    "producer_id": "producer",
    "producer_id_filters": "producer",
    "v3_and_below_producer_id": "producer",
    "cluster_id": "cluster",
    "session_id": "session",
}
INSTANTS = frozenset({"log_append_time", "last_timestamp", "transaction_start_time"})
ADDRESSES = frozenset(
    {"host", "port", "client_host", "finalized_features_epoch", "log_dir"}
    | {"total_bytes", "usable_bytes"}
)

NO_ID = str(uuid.UUID(int=0))
FIRST_MADE_ID = 1 << 64
"""Smaller topic ids are chosen by the traces, and are not masked."""

UNORDERED = frozenset(
    {
        "active_producers",
        "config_resources",
        "configs",
        "entity",
        "entries",
        "groups",
        "members",
        "partitions",
        "responses",
        "results",
        "results_by_topic_v3_and_below",
        "subscribed_topic_names",
        "topic_partitions",
        "topics",
        "transaction_states",
        "values",
    }
)

Step = tuple[str, Any]


class Masks:
    """Makes the responses of different brokers comparable; equal ids get equal names."""

    unordered = UNORDERED

    def __init__(self, names: Mapping[tuple[str, Any], str] | None = None) -> None:
        self.names = dict(names or {})

    def shown(self, value: Any, name: str | None = None) -> Any:
        """Return the value of the field ``name`` with masks for data that a broker chooses."""
        if isinstance(value, Mapping):
            return {k: self.shown(v, k) for k, v in value.items() if k not in WORDING}
        if isinstance(value, list | tuple):
            items = [self.shown(item, name) for item in value]
            # The order in Apache Kafka's response is the order of its hash tables.
            return sorted(items, key=_order) if name in self.unordered else items
        if name == "topic_id" and uuid.UUID(value or NO_ID).int < FIRST_MADE_ID:
            return value
        if name == "session_id" and not value:
            return value
        if name in NAMED and value not in (None, "", -1):
            known = self.names
            kind = NAMED[name]
            count = sum(other == kind for other, _ in known) + 1
            return known.setdefault((kind, value), f"{kind} {count}")
        if name in INSTANTS:
            return "an instant" if value is not None and value > 0 else "none"
        if name in ADDRESSES:
            return "an address"
        if name == "records":
            return [
                (b.base_offset, b.last_offset, b.attributes, b.producer_epoch, b.values)
                for b in batches(value or b"")
            ]
        return value


def leaves(ours: Any, theirs: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path and the values of each leaf in which two responses differ.

    A path is, for example, ``.topics[0].error_code``.
    """
    if ours == theirs:
        return
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        for name in ours:
            yield from leaves(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from leaves(*pair, f"{where}[{number}]")
    else:
        yield where, ours, theirs


class Tracer:
    """Sends requests: ``t("heartbeat", 4, group_id="g")`` records and returns the raw response."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.client_id = "raw"
        """The client id of connections that are opened after it is set."""
        self.steps: list[Step] = []
        self._masks = Masks()
        self._connection: Cluster | None = None

    @property
    def cluster(self) -> Cluster:
        """Return the connection; if the broker has closed it, open a new one."""
        if self._connection is None:
            self._connection = Cluster(self.bootstrap, client_id=self.client_id, deadline_s=60)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def after_a_move(self, bootstrap: str) -> Tracer:
        """Return a tracer for the broker that took over, in which known ids keep their names."""
        moved = Tracer(bootstrap)
        moved._masks = Masks(self._masks.names)
        return moved

    def note(self, what: str, value: Any) -> None:
        """Record a value that is not a response, in a comparable form."""
        self.steps.append((what, self._masks.shown(value)))

    def __call__(self, api: str, version: int, /, **body: Any) -> Answer:
        """Send one request; record and return the response, ``{}`` for a closed connection."""
        answer = self.quietly(api, version, **body)
        shown = self._masks.shown(answer) if answer else "connection closed"
        self.steps.append((f"{api} v{version} {_short(body)}", shown))
        return answer

    def quietly(self, api: str, version: int, /, **body: Any) -> Answer:
        """Send a request that is not recorded; after transient errors, retry for five seconds.

        Fields that the version of the request does not have are left out.
        """
        request = fitted(api, version, body)
        end = time.monotonic() + 5
        while True:
            try:
                answer = self.cluster.call(api, version, **request)
            except ConnectionLostError:
                self.close()
                return {}
            if not PASSING.intersection(errors_in(answer)) or time.monotonic() > end:
                return answer
            time.sleep(0.02)

    def bytes(self, what: str, data: bytes) -> bytes | None:
        """Send raw bytes on a new connection, and record the result.

        Return the response frame, None if there was none.
        """
        answer = None
        with Cluster(self.bootstrap, deadline_s=3) as alone:
            try:
                alone.send_bytes(data)
                answer = alone.receive_frame()
                shown = "an answer"
            except (ConnectionLostError, BrokenPipeError):
                shown = "connection closed"
            except TimeoutError:
                shown = "no answer"
        self.steps.append((what, shown))
        return answer


def _order(item: Any) -> str:
    if not isinstance(item, Mapping):
        return repr(item)
    keys = ("member_id", "producer_id", "group_id", "transactional_id", "name", "topic", "topic_id")
    keys += ("partition_index", "index", "partition", "resource_name", "resource_type")
    keys += ("topic_name", "user", "entity", "entity_type", "key")
    return repr([item.get(key) for key in keys])


def _short(body: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}={value!r}" for name, value in body.items())
    return text if len(text) < 160 else text[:157] + "..."
