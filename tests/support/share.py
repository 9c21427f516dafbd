"""A member of a share group by raw requests, without a client library and without heartbeats."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support import requests
from tests.support.batches import batches
from tests.support.cluster import Cluster
from tests.support.raw import Answer
from tests.support.waits import until

GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)
FULL, FINAL = 0, -1
SHARE = 2
GROUP = 32
"""The resource type of a group's settings."""
WAIT_MS = 5_000
"""MaxWaitMs of a fetch: the first fetch must wait until Apache Kafka has read the state of the
share partition."""


def initialize(
    client: Cluster,
    group: str,
    topic: uuid.UUID,
    partitions: Sequence[int] = (0,),
    *,
    start_offset: int = 0,
    state_epoch: int = 1,
) -> None:
    """Begin the state of share partitions, as the group coordinator does."""

    def probe() -> bool:
        # The first FindCoordinator creates the topic.
        keys = [f"{group}:{kafka_id(topic)}:{index}" for index in partitions]
        found = client.call("find_coordinator", 6, key_type=SHARE, coordinator_keys=keys)
        assert {coordinator["error_code"] for coordinator in found["coordinators"]} <= {
            "none",
            "coordinator_not_available",
        }
        answer = client.call(
            "initialize_share_group_state",
            0,
            group_id=group,
            topics=[
                {
                    "topic_id": topic,
                    "partitions": [
                        {
                            "partition": index,
                            "state_epoch": state_epoch,
                            "start_offset": start_offset,
                        }
                        for index in partitions
                    ],
                }
            ],
        )
        parts = answer["results"][0]["partitions"]
        return all(part["error_code"] == "none" for part in parts)

    until(probe, f"share state of {group}")


def kafka_id(topic: uuid.UUID) -> str:
    """Return a topic id as Kafka writes it."""

    return base64.urlsafe_b64encode(topic.bytes).rstrip(b"=").decode()


def configure(client: Cluster, group: str, **settings: str) -> None:
    """Set keys of a group, with underscores for their dots; wait until they are described."""
    texts = {name.replace("_", "."): text for name, text in settings.items()}
    changes = [requests.config_op(*pair) for pair in texts.items()]
    body = requests.incremental_alter_configs(requests.altered_resource(GROUP, group, *changes))
    answer = client.call("incremental_alter_configs", 1, **body)
    assert answer["responses"][0]["error_code"] == "none", answer
    row = requests.described_resource(GROUP, group, *texts)

    def is_set() -> bool:
        (found,) = client.call("describe_configs", 4, **requests.describe_configs(row))["results"]
        return {config["name"]: config["value"] for config in found["configs"]} == texts

    until(is_set, f"settings of {group}")


class Member:
    """A member's share session on one connection."""

    def __init__(self, client: Cluster, group: str, member: str | None = None) -> None:
        self.client, self.group = client, group
        self.member = member or str(uuid.uuid4())
        self.epoch = FULL

    def fetch(
        self,
        topics: Mapping[uuid.UUID, Mapping[int, Sequence[tuple[Any, ...]]]],
        *,
        version: int = 2,
        forget: Mapping[uuid.UUID, Sequence[int]] | None = None,
        **fields: Any,
    ) -> Answer:
        """Send a ShareFetch with acknowledgements (first, last, types) by topic id and index."""
        self.send_fetch(topics, version=version, forget=forget, **fields)
        return self.receive()

    def send_fetch(
        self,
        topics: Mapping[uuid.UUID, Mapping[int, Sequence[tuple[Any, ...]]]],
        *,
        version: int = 2,
        forget: Mapping[uuid.UUID, Sequence[int]] | None = None,
        **fields: Any,
    ) -> None:
        """Send a ShareFetch without receiving the response."""
        body = {
            "group_id": self.group,
            "member_id": self.member,
            "share_session_epoch": self.epoch,
            "max_wait": WAIT_MS,
            "min_bytes": 1,
            "max_bytes": 1 << 20,
            "max_records": 500,
            "batch_size": 500,
            **fields,
        }
        if version >= 2:
            body = {"share_acquire_mode": 0, "is_renew_ack": False, **body}
        self._send("share_fetch", version, topics, forget, body)

    def acknowledge(
        self,
        topics: Mapping[uuid.UUID, Mapping[int, Sequence[tuple[Any, ...]]]],
        *,
        version: int = 2,
        **fields: Any,
    ) -> Answer:
        """Send a ShareAcknowledge."""
        body = {
            "group_id": self.group,
            "member_id": self.member,
            "share_session_epoch": self.epoch,
            **fields,
        }
        if version >= 2:
            body = {"is_renew_ack": False, **body}
        self._send("share_acknowledge", version, topics, None, body)
        return self.receive()

    def _send(
        self,
        api: str,
        version: int,
        topics: Mapping[uuid.UUID, Mapping[int, Sequence[tuple[Any, ...]]]],
        forget: Mapping[uuid.UUID, Sequence[int]] | None,
        body: dict[str, Any],
    ) -> None:
        body["topics"] = [
            {
                "topic_id": topic_id,
                "partitions": [
                    {
                        "partition_index": index,
                        "acknowledgement_batches": [
                            {
                                "first_offset": first,
                                "last_offset": last,
                                "acknowledge_types": list(types),
                            }
                            for first, last, *types in entries
                        ],
                    }
                    for index, entries in parts.items()
                ],
            }
            for topic_id, parts in topics.items()
        ]
        if api == "share_fetch":
            body["forgotten_topics_data"] = [
                {"topic_id": topic_id, "partitions": list(indexes)}
                for topic_id, indexes in (forget or {}).items()
            ]
        self.client.send(api, version, **body)

    def receive(self) -> Answer:
        """Receive a response; a success advances the session's epoch."""
        answer = self.client.receive()
        if answer["error_code"] == "none" and self.epoch != FINAL:
            self.epoch += 1
        return answer


def parts_of(answer: Answer) -> dict[int, Answer]:
    """Return the partitions of a response about one topic, by index."""
    return {
        part["partition_index"]: part
        for topic in answer["responses"]
        for part in topic["partitions"]
    }


def acquired(part: Answer) -> list[tuple[int, int, int]]:
    """Return the acquired ranges: first offset, last offset, delivery count."""
    return [
        (row["first_offset"], row["last_offset"], row["delivery_count"])
        for row in part["acquired_records"]
    ]


def values(part: Answer) -> list[bytes | None]:
    """Return the values of all records in the response."""
    return [value for batch in batches(part["records"] or b"") for value in batch.values]
