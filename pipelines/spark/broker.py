"""Requests of source and sink to a cluster, in plain values; they work with any Kafka broker.

A partition is a ``(topic, index)`` pair, offsets and timestamps (milliseconds) are ints. Requests
use the highest version that names topics by name. All calls block, and retry Kafka's retriable
errors for up to ``timeout_ms``.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from kio.schema.errors import ErrorCode

from fencepost.client.access import missing_right
from fencepost.client.client import (
    ApiError,
    AuthenticationError,
    BrokerUnreachable,
    ConnectionLostError,
    RequestFactory,
    SecurityError,
    WireClient,
)
from fencepost.client.cluster import TopicMetadata
from fencepost.client.requests import (
    NAMED,
    fetch_one,
    list_offsets,
    of_group,
    offset_fetch,
    rows_of,
)
from fencepost.client.security import PLAINTEXT, Security
from fencepost.cluster.topic_names import hint
from fencepost.pipelines.spark.errors import AccessError, BrokerError
from fencepost.pipelines.spark.offsets import Offsets, Partition
from fencepost.protocol.api import ApiKey

Build = Callable[[RequestFactory], Any]

LATEST, EARLIEST = -1, -2
READ_UNCOMMITTED, READ_COMMITTED = 0, 1

DEFAULT_TIMEOUT_MS = 60_000
"""The time limit of a call: Kafka's ``default.api.timeout.ms``."""
RETRY_PAUSE_S = 0.05
"""The pause between two attempts after a lost connection."""


class FetchedRecords(NamedTuple):
    """The response to a Fetch of one partition."""

    error: ErrorCode
    records: bytes
    aborted: tuple[tuple[int, int], ...]
    """(first offset, producer id) of each aborted transaction in the range."""
    stable: int
    """The last stable offset."""


T = TypeVar("T")


class ClusterConnection:
    """A blocking connection to a cluster, for one thread at a time."""

    def __init__(
        self,
        bootstrap: str,
        *,
        client_id: str,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        security: Security = PLAINTEXT,
    ) -> None:
        self.timeout_ms = timeout_ms
        self._has_answered = False
        with _refusals():
            self._client = WireClient(
                bootstrap, client_id=client_id, timeout_ms=timeout_ms, security=security
            )

    def close(self) -> None:
        """Close all sockets."""
        self._client.close()

    def call(self, api: str, build: Build, *, at_most: int | None = None, **target: Any) -> Any:
        """Make one call, at the highest suitable version up to ``at_most``.

        Raises :class:`BrokerError` if no broker answers, :class:`AccessError` for a refused login
        or a missing right, ``ApiError`` for another error response.
        """
        at_most = NAMED.get(api) if at_most is None else at_most
        with _refusals(target.get("to_group") or target.get("to_transaction") or ""):
            return self._client.call(api, at_most=at_most, entity=build, **target)

    def call_until_answered(self, api: str, build: Build, **target: Any) -> Any:
        """Make a call that is safe to repeat, and retry it until it is answered.

        Raises :class:`BrokerError` if no broker answers in time, ``ApiError`` for an error answer.
        """
        return self._until_answered(lambda: self.call(api, build, **target))

    def _until_answered(self, ask: Callable[[], T]) -> T:
        deadline = time.monotonic() + self.timeout_ms / 1000
        while True:
            try:
                return ask()
            except BrokerError:
                if time.monotonic() + RETRY_PAUSE_S >= deadline:
                    raise
                time.sleep(RETRY_PAUSE_S)

    def produce_version(self) -> int:
        """Return the Produce version in use; from 12 on it adds partitions to transactions."""
        return min(self._client.versions().get(ApiKey.PRODUCE, (0, 0))[1], NAMED["Produce"])

    def transaction_version(self) -> int:
        """Return the finalized level of ``transaction.version``: 2 means KIP-890's protocol."""
        return self._client.features().get("transaction.version", 0)

    # --- topics and offsets ---

    def topics(self, *, refresh: bool = False) -> Mapping[str, TopicMetadata]:
        """Return every topic of the cluster that this user may DESCRIBE, by name.

        Raises :class:`BrokerError` if no broker answers. If there never was an answer, the error
        comes at once, because the address may be wrong. Later it comes only after the timeout,
        because a broker may be restarting.
        """

        def fetch_metadata() -> Mapping[str, TopicMetadata]:
            with _refusals():
                return self._client.metadata(refresh=refresh).topics

        topics = self._until_answered(fetch_metadata) if self._has_answered else fetch_metadata()
        self._has_answered = True
        return topics

    def check_visible(self, names: Iterable[str]) -> None:
        """Raise :class:`AccessError` for topics that are hidden, as opposed to missing.

        A request for all topics omits topics that this user may not DESCRIBE; a request by name
        reports them.
        """
        answer = self.call(
            "Metadata",
            lambda f: f.message(
                topics=[f.MetadataRequestTopic(name=name) for name in names],
                allow_auto_topic_creation=False,
            ),
            check=False,
        )
        for topic in answer.topics:
            check_right("Metadata", topic.error_code, topic.name)

    def partitions(self, topic: str) -> list[int]:
        """Return the sorted partitions of ``topic``. Raises :class:`BrokerError` without it."""
        metadata = self.topics().get(topic) or self.topics(refresh=True).get(topic)
        if metadata is None or metadata.error:
            self.check_visible([topic])
            raise BrokerError(f"topic {topic!r} does not exist{hint(topic, self.topics())}")
        return sorted(metadata.partitions)

    def leader(self, partition: Partition) -> int:
        """Return the node that leads ``partition``, -1 if unknown."""
        metadata = self.topics().get(partition[0])
        if metadata is None or partition[1] not in metadata.partitions:
            return -1
        return metadata.partitions[partition[1]].leader

    def list_offsets(
        self, timestamps: Mapping[Partition, int], isolation: int = READ_COMMITTED
    ) -> Offsets:
        """Return offsets by timestamp (or LATEST, EARLIEST); −1 if all records are earlier.

        Under READ_COMMITTED, LATEST is the last stable offset.
        """
        deadline = time.monotonic() + self.timeout_ms / 1000
        offsets: Offsets = {}
        missing = dict(timestamps)
        while missing:
            by_node: dict[int, dict[Partition, int]] = defaultdict(dict)
            for partition, timestamp in missing.items():
                by_node[self.leader(partition)][partition] = timestamp
            for node, group in by_node.items():
                if node >= 0:
                    offsets |= self._list_of_node(node, group, isolation)
            missing = {part: stamp for part, stamp in missing.items() if part not in offsets}
            if missing:
                if time.monotonic() > deadline:
                    raise BrokerError(f"no leader returns the offsets of {sorted(missing)}")
                time.sleep(RETRY_PAUSE_S)
                self.topics(refresh=True)
        return offsets

    def _list_of_node(self, node: int, group: Mapping[Partition, int], isolation: int) -> Offsets:
        answer = self.call(
            "ListOffsets",
            lambda f: list_offsets(f, group, isolation_level=isolation, timeout_ms=self.timeout_ms),
            to_node=node,
            check=False,
        )
        offsets: Offsets = {}
        for place, row in rows_of(answer):
            code = ErrorCode(row.error_code)
            if not code:
                offsets[place] = row.offset
            elif not code.retriable:
                check_right("ListOffsets", code, place[0])
                raise ApiError(code, "ListOffsets", f"{place[0]}-{place[1]}")
        return offsets

    def fetch(
        self, partition: Partition, offset: int, *, isolation: int, max_bytes: int, wait_ms: int
    ) -> FetchedRecords:
        """Make one Fetch; an error that a retry cannot fix is returned in the result."""

        def build(f: RequestFactory) -> Any:
            return fetch_one(
                f,
                partition,
                offset,
                isolation_level=isolation,
                max_wait_ms=wait_ms,
                max_bytes=max_bytes,
            )

        try:
            row = self.call("Fetch", build, to_leader=partition).responses[0].partitions[0]
        except ApiError as error:
            if error.code is not ErrorCode.unknown_topic_or_partition:
                raise
            return FetchedRecords(error.code, b"", (), -1)
        check_right("Fetch", row.error_code, partition[0])
        return FetchedRecords(
            ErrorCode(row.error_code),
            row.records or b"",
            tuple((a.first_offset, a.producer_id) for a in row.aborted_transactions or ()),
            row.last_stable_offset,
        )

    def committed(self, group: str, partitions: Collection[Partition]) -> dict[Partition, Any]:
        """Return committed offset rows (``committed_offset``, ``metadata``) of ``group``.

        Waits while an open transaction has pending offsets (``require_stable``).
        """
        answer = self.call(
            "OffsetFetch",
            lambda f: offset_fetch(f, group, partitions, require_stable=True),
            to_group=group,
        )
        of_this = of_group(answer)
        if of_this.error_code:
            check_right("OffsetFetch", of_this.error_code, group)
            raise ApiError(of_this.error_code, "OffsetFetch", f"group {group}")
        rows = dict(rows_of(of_this))
        for (topic, _), row in rows.items():
            if row.error_code:
                check_right("OffsetFetch", row.error_code, topic)
                raise ApiError(row.error_code, "OffsetFetch", f"group {group}")
        return rows


def check_right(api: str, code: int, name: str = "") -> None:
    """Raise :class:`AccessError` for an error code about a missing right."""
    missing = missing_right(api, ErrorCode(code), name)
    if missing:
        raise AccessError(f"{api}: {ErrorCode(code).name.upper()}: {missing} is missing")


@contextmanager
def _refusals(coordinated: str = "") -> Iterator[None]:
    """Translate the wire client's errors into this package's.

    ``coordinated`` is the group or transactional id that a request names.
    """
    try:
        yield
    except (BrokerUnreachable, ConnectionLostError) as error:
        raise BrokerError(str(error)) from error
    except (AuthenticationError, SecurityError) as error:
        raise AccessError(str(error)) from None
    except ApiError as error:
        is_topic = error.code is ErrorCode.topic_authorization_failed
        check_right(error.api, error.code, "" if is_topic else coordinated)
        raise


_open: dict[tuple[str, str, int, Security, int], ClusterConnection] = {}


def connection(
    bootstrap: str, client_id: str, timeout_ms: int, security: Security
) -> ClusterConnection:
    """Return this thread's connection to a cluster: Spark reuses its workers for many tasks."""
    key = bootstrap, client_id, timeout_ms, security, threading.get_ident()
    if key not in _open:
        _open[key] = ClusterConnection(
            bootstrap, client_id=client_id, timeout_ms=timeout_ms, security=security
        )
    return _open[key]
