"""Requests of the commands to a cluster, with results as plain Python values.

Each request uses the highest version known to both sides, so it works against any Kafka broker.
A partition is a ``(topic, index)`` pair; offsets and timestamps are ints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from fencepost.coordinator import light_imports  # noqa: F401  # isort: skip - before anything that imports kio
from kio.schema.errors import ErrorCode

from fencepost.client.client import ApiError, WireClient
from fencepost.client.cluster import TopicMetadata
from fencepost.client.queries.unknown import unknown_topic
from fencepost.client.requests import (
    NAMED,
    Partition,
    fetch_one,
    list_offsets,
    of_group,
    offset_fetch,
    rows_of,
)
from fencepost.client.security import PLAINTEXT, Security

MAX_FETCH_BYTES = 4 * 1024 * 1024
"""The maximum size of a fetch response in bytes, which bounds the memory of a fetch."""

NO_EPOCH = -1
"""The value of a commit's leader epoch if there is none."""


class OffsetAndMetadata(NamedTuple):
    """A committed offset of one partition; ``metadata`` is the client's own text."""

    offset: int
    leader_epoch: int = NO_EPOCH
    metadata: str = ""


class ClusterSession:
    """A connection to a cluster for the duration of one command."""

    def __init__(
        self,
        bootstrap: str,
        timeout_s: float,
        *,
        client_id: str = "fencepost-cli",
        security: Security = PLAINTEXT,
    ) -> None:
        self.bootstrap = bootstrap
        self.security = security
        self.timeout_ms = int(timeout_s * 1000)
        self.client = WireClient(
            bootstrap, client_id=client_id, timeout_ms=self.timeout_ms, security=security
        )

    def limit(self, timeout_s: float) -> None:
        """Set the timeout of each later request, including its retries."""
        self.timeout_ms = int(timeout_s * 1000)
        self.client.limit(self.timeout_ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.client.close()

    @property
    def controller(self) -> int:
        """The broker to which changes of topics are sent; -1 stands for any broker."""
        return self.client.metadata().controller_id

    @property
    def some_broker(self) -> int:
        """A broker to ask for its settings: the controller if it is known."""
        metadata = self.client.metadata()
        return (
            metadata.controller_id
            if metadata.controller_id in metadata.brokers
            else min(metadata.brokers)
        )

    def topics(self, names: Iterable[str] | None = None) -> list[TopicMetadata]:
        """Describe ``names``, or all topics, sorted. Raises ApiError for an unknown name."""
        topics = self.client.metadata(refresh=True).topics
        described = []
        for name in sorted(topics) if names is None else names:
            if name not in topics:
                raise unknown_topic(name, topics)
            check(topics[name].error, "Metadata", name)
            described.append(topics[name])
        return described

    def create_topic(
        self,
        name: str,
        partitions: int = -1,
        configs: Iterable[tuple[str, str]] = (),
        *,
        replication_factor: int = -1,
        validate_only: bool = False,
    ) -> Any:
        """Create a topic and return its row of the response; -1 is the broker's default.

        Raises :class:`ApiError`.
        """
        answer = self.client.call(
            "CreateTopics",
            to_node=self.controller,
            check=False,
            entity=lambda f: f.message(
                topics=[
                    f.CreatableTopic(
                        name=name,
                        num_partitions=partitions,
                        replication_factor=replication_factor,
                        configs=[
                            f.CreatableTopicConfig(name=key, value=value) for key, value in configs
                        ],
                    )
                ],
                timeout_ms=self.timeout_ms,
                validate_only=validate_only,
            ),
        )
        row = answer.topics[0]
        check(row.error_code, "CreateTopics", name, row.error_message)
        return row

    def offsets(
        self, partitions: Iterable[Partition], timestamp: int, *, committed: bool = False
    ) -> dict[Partition, int]:
        """Look up an offset per partition; ``committed`` makes LATEST the last stable offset."""
        offsets: dict[Partition, int] = {}
        for node, places in self.by_leader(partitions).items():
            timestamps = dict.fromkeys(places, timestamp)
            build = partial(list_offsets, isolation_level=committed, timeout_ms=self.timeout_ms)
            answer = self.client.call(
                "ListOffsets", to_node=node, entity=partial(build, timestamps=timestamps)
            )
            for (topic, index), row in rows_of(answer):
                check(row.error_code, "ListOffsets", f"{topic}-{index}")
                offsets[topic, index] = row.offset
        return offsets

    def by_leader(self, partitions: Iterable[Partition]) -> dict[int, list[Partition]]:
        """Group partitions by leader. Raises :class:`ApiError` for an unknown partition."""
        cluster = self.client.metadata()
        by_leader: dict[int, list[Partition]] = defaultdict(list)
        for topic, index in partitions:
            leader = cluster.leader(topic, index)
            if topic not in cluster.topics:
                raise unknown_topic(topic, cluster.topics)
            if leader is None:
                code = ErrorCode.unknown_topic_or_partition
                raise ApiError(code, "Metadata", f"{topic}-{index}")
            by_leader[leader].append((topic, index))
        return by_leader

    def fetch(
        self,
        topic: str,
        index: int,
        offset: int,
        *,
        committed: bool,
        max_wait_ms: int = 0,
        max_bytes: int = MAX_FETCH_BYTES,
    ) -> Any:
        """Fetch from one partition. Raises :class:`ApiError` if the broker returns an error.

        The first batch is returned whole, even if it exceeds ``max_bytes``.
        """
        answer = self.client.call(
            "Fetch",
            at_most=NAMED["Fetch"],
            to_leader=(topic, index),
            check=False,
            entity=lambda f: fetch_one(
                f,
                (topic, index),
                offset,
                isolation_level=int(committed),
                max_wait_ms=max_wait_ms,
                max_bytes=max_bytes,
            ),
        )
        check(answer.error_code, "Fetch", topic)
        row = answer.responses[0].partitions[0]
        check(row.error_code, "Fetch", f"{topic}-{index} at offset {offset}")
        return row

    def call_all_brokers(self, api: str, **fields: Any) -> list[Any]:
        """Ask every broker; each lists the groups and transactions that it coordinates."""
        nodes = self.client.metadata().brokers
        return [self.client.call(api, to_node=node, **fields) for node in sorted(nodes)]

    def groups(self, states: Sequence[str] = (), types: Sequence[str] = ()) -> list[Any]:
        """Return the groups of all brokers with any of ``states`` and ``types``, by name."""
        groups: list[Any] = []
        for answer in self.call_all_brokers("ListGroups", states_filter=states, types_filter=types):
            check(answer.error_code, "ListGroups")
            groups += answer.groups
        return sorted(groups, key=lambda row: str(row.group_id))

    def committed(self, group: str) -> dict[Partition, OffsetAndMetadata]:
        """Return all committed offsets of ``group``, sorted by partition."""
        response = self._offset_fetch(group, None, require_stable=False)
        check(getattr(response, "error_code", 0), "OffsetFetch", group)
        positions = {
            place: OffsetAndMetadata(
                row.committed_offset,
                getattr(row, "committed_leader_epoch", NO_EPOCH),
                row.metadata or "",
            )
            for place, row in rows_of(response)
        }
        return dict(sorted(positions.items()))

    def has_pending_offsets(self, group: str, partitions: Collection[Partition]) -> bool:
        """Return whether ``group`` has transactional offsets pending for ``partitions``."""
        response = self._offset_fetch(group, partitions, require_stable=True)
        codes = [row.error_code for _, row in rows_of(response)]
        codes.append(getattr(response, "error_code", ErrorCode.none))
        return ErrorCode.unstable_offset_commit in codes

    def _offset_fetch(
        self, group: str, partitions: Collection[Partition] | None, *, require_stable: bool
    ) -> Any:
        """Return the part of an OffsetFetch response about ``group``; None means all partitions."""
        answer = self.client.call(
            "OffsetFetch",
            at_most=NAMED["OffsetFetch"],
            to_group=group,
            # UNSTABLE_OFFSET_COMMIT is a result here, not a reason to retry.
            check=not require_stable,
            entity=lambda f: offset_fetch(f, group, partitions, require_stable=require_stable),
        )
        return of_group(answer)


def check(code: Any, api: str, subject: object = None, message: str | None = None) -> None:
    """Raise :class:`ApiError` unless ``code`` is NONE."""
    if int(code) != 0:
        raise ApiError(code, api, ": ".join(str(part) for part in (subject, message) if part))
