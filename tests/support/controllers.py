"""A simulated broker, which only sends the requests of a test to a controller."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Any

from kio.schema.default_principal_data.v0.data import DefaultPrincipalData
from kio.serial import entity_writer

from fencepost.cluster.record_codec import decode as decode_record
from fencepost.cluster.records import MetadataRecord
from fencepost.logcore.batch import decode_records, iter_headers
from tests.support.raw import Answer, RawClient, decode, encode
from tests.support.waits import until

METADATA_ID = uuid.UUID(int=1)
FEATURES = {
    "metadata.version": (7, 33),
    "eligible.leader.replicas.version": (0, 1),
    "group.version": (0, 1),
    "kraft.version": (0, 1),
    "share.version": (0, 2),
    "streams.version": (0, 1),
    "transaction.version": (0, 2),
}
"""The supported feature levels of an Apache Kafka 4.4 broker."""

NEVER_WAKE = (1 << 63) - 1


class Pretender:
    """The simulated broker ``broker_id``, which a controller treats like a real broker."""

    def __init__(self, controller: str, broker_id: int, cluster_id: str) -> None:
        self.controller = RawClient(controller, client_id=f"broker-{broker_id}")
        self.broker_id = broker_id
        self.cluster_id = cluster_id
        self.incarnation_id = uuid.uuid4()
        self.directory_id = uuid.uuid4()
        self.broker_epoch = -1
        self.quorum_epoch = 0

    def close(self) -> None:
        self.controller.close()

    # --- registration ---

    def register(self, **changes: Any) -> Answer:
        """Register, and keep the broker epoch of the response."""
        fields = {
            "broker_id": self.broker_id,
            "cluster_id": self.cluster_id,
            "incarnation_id": self.incarnation_id,
            "listeners": [
                {"name": "PLAINTEXT", "host": "127.0.0.1", "port": 1, "security_protocol": 0}
            ],
            "features": [
                {"name": name, "min_supported_version": low, "max_supported_version": high}
                for name, (low, high) in FEATURES.items()
            ],
            "log_dirs": [self.directory_id],
            "previous_broker_epoch": -1,
            **changes,
        }
        answer = self.controller.call("broker_registration", 4, **fields)
        if answer["error_code"] == "none":
            self.broker_epoch = answer["broker_epoch"]
        return answer

    def heartbeat(self, offset: int | None = None, **changes: Any) -> Answer:
        """Send a heartbeat with the metadata offset ``offset``, by default the log's end."""
        fields = {
            "broker_id": self.broker_id,
            "broker_epoch": self.broker_epoch,
            "current_metadata_offset": self.end() - 1 if offset is None else offset,
            "cordoned_log_dirs": None,
            **changes,
        }
        return self.controller.call("broker_heartbeat", 2, **fields)

    def join(self) -> None:
        """Register, and wait until the broker is unfenced."""
        assert self.register()["error_code"] == "none"
        until(lambda: not self.heartbeat()["is_fenced"], "the broker is unfenced")

    # --- the metadata log ---

    def fetch(self, offset: int = 0, last_epoch: int = 0, **changes: Any) -> Answer:
        """Fetch the metadata log; ``changes`` override fields of the partition or the request."""
        part = {
            "partition": 0,
            "current_leader_epoch": self.quorum_epoch,
            "fetch_offset": offset,
            "last_fetched_epoch": last_epoch,
            "log_start_offset": -1,
            "partition_max_bytes": 0,
            "high_watermark": NEVER_WAKE,
        }
        request: dict[str, Any] = {
            "cluster_id": self.cluster_id,
            "replica_state": {"replica_id": self.broker_id, "replica_epoch": -1},
            "max_wait": 0,
            "min_bytes": 0,
            "max_bytes": 1 << 20,
            "session_epoch": -1,
        }
        topic_id = changes.pop("topic_id", METADATA_ID)
        for name, value in changes.items():
            (part if name in part else request)[name] = value
        topics = [{"topic_id": topic_id, "partitions": [part]}]
        return self.controller.call("fetch", 18, **request, topics=topics)

    def part(self, *arguments: Any, **changes: Any) -> Answer:
        """Return the partition of the response to :meth:`fetch`."""
        answer = self.fetch(*arguments, **changes)
        assert answer["error_code"] == "none", answer
        part: Answer = answer["responses"][0]["partitions"][0]
        return part

    def learn_epoch(self) -> Answer:
        """Learn the quorum's epoch as a new observer does; return the partition of the response."""
        self.quorum_epoch = 0
        part = self.part()
        if part["error_code"] == "fenced_leader_epoch":
            self.quorum_epoch = part["current_leader"]["leader_epoch"]
        return part

    def end(self) -> int:
        """Return the end offset of the metadata log."""
        if not self.quorum_epoch:
            self.learn_epoch()
        return int(self.part(1 << 40, self.quorum_epoch)["diverging_epoch"]["end_offset"])

    def records(self, begin: int) -> list[MetadataRecord]:
        """Return the records of the metadata log from an offset on."""
        records: list[MetadataRecord] = []
        end = self.end()
        while begin < end:
            part = self.part(begin, self.quorum_epoch)
            assert part["error_code"] == "none", part
            records += records_of(part["records"], begin)
            begin = max(header.next_offset for _, header in iter_headers(part["records"]))
        return records

    # --- requests ---

    def topic(self, name: str, *assignment: Iterable[int]) -> uuid.UUID:
        """Create a topic whose partitions have these replicas; return its id."""
        made = self.controller.call(
            "create_topics",
            7,
            timeout=10_000,
            topics=[
                {
                    "name": name,
                    "num_partitions": -1,
                    "replication_factor": -1,
                    "assignments": [
                        {"partition_index": index, "broker_ids": list(replicas)}
                        for index, replicas in enumerate(assignment)
                    ],
                }
            ],
        )["topics"][0]
        assert made["error_code"] == "none", made
        return uuid.UUID(made["topic_id"])

    def alter_partition(
        self,
        topic_id: uuid.UUID,
        leader_epoch: int,
        partition_epoch: int,
        isr: Iterable[tuple[int, int]],
        *,
        index: int = 0,
        **changes: Any,
    ) -> Answer:
        """Send AlterPartition; return the partition's response, or the top-level error."""
        part = {
            "partition_index": index,
            "leader_epoch": leader_epoch,
            "partition_epoch": partition_epoch,
            "new_isr_with_epochs": [
                {"broker_id": broker_id, "broker_epoch": epoch} for broker_id, epoch in isr
            ],
        }
        fields = {"broker_id": self.broker_id, "broker_epoch": self.broker_epoch, **changes}
        answer = self.controller.call(
            "alter_partition", 3, **fields, topics=[{"topic_id": topic_id, "partitions": [part]}]
        )
        if answer["error_code"] != "none":
            return answer
        row: Answer = answer["topics"][0]["partitions"][0]
        return row

    def envelope(
        self,
        api: str,
        version: int,
        *,
        principal: bytes | None = None,
        host: bytes = b"\x7f\0\0\1",
        data: bytes | None = None,
        **body: Any,
    ) -> tuple[str, Answer | None]:
        """Forward a client's request; return the envelope's error and the inner response."""
        request = encode(api, version, 77, "client", body) if data is None else data
        answer = self.controller.call(
            "envelope",
            0,
            request_data=request,
            request_principal=anonymous() if principal is None else principal,
            client_host_address=host,
        )
        inside = answer["response_data"]
        return answer["error_code"], None if inside is None else decode(api, version, inside)[1]


def anonymous(name: str = "ANONYMOUS") -> bytes:
    """Return the encoded principal of an envelope."""
    out = BytesIO()
    write: Callable[[Any, Any], None] = entity_writer(DefaultPrincipalData)
    write(out, DefaultPrincipalData(type_="User", name=name, token_authenticated=False))
    return struct.pack(">h", 0) + out.getvalue()


def records_of(data: bytes, begin: int = 0) -> list[MetadataRecord]:
    """Return the metadata records in fetched bytes, without control records."""
    records: list[MetadataRecord] = []
    view = memoryview(data)
    for position, header in iter_headers(view):
        if header.is_control:
            continue
        batch = decode_records(view[position : position + header.size], 0, header)
        records += [
            decode_record(record.value or b"") for record in batch if record.offset >= begin
        ]
    return records
