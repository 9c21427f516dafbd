"""Common operations with confluent-kafka, and requests that are encoded in advance.

confluent-kafka (librdkafka) is the fastest Kafka client for Python, so it hides as little of the
broker as possible. If even that would be the bottleneck, the same frames are sent repeatedly over
plain sockets (:class:`Burst`).
"""

from __future__ import annotations

import select
import socket
import struct
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.cluster import Cluster
from tests.support.raw import Answer, encode

VALUE = bytes(range(256)) * 4
"""1 KiB of payload."""

PREFIX = "bench-"
"""What :func:`create_topic` and :func:`delete_topics` have in common: topic names begin with it."""


def create_topic(
    bootstrap: str,
    partitions: int,
    *,
    replicas: int = 1,
    assignment: Sequence[Sequence[int]] | None = None,
) -> str:
    """Create a topic of ``partitions`` partitions, and return its name once it is writable.

    ``assignment``, the brokers of each partition, replaces ``replicas``.
    """
    name = f"{PREFIX}{uuid.uuid4().hex[:12]}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    if assignment is None:
        new = NewTopic(name, partitions, replicas)
    else:
        new = NewTopic(
            name, partitions, replica_assignment=[list(broker_ids) for broker_ids in assignment]
        )
    admin.create_topics([new])[name].result(30)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        topic = admin.list_topics(name, timeout=5).topics[name]
        if len(topic.partitions) == partitions and all(
            partition.leader >= 0 for partition in topic.partitions.values()
        ):
            return name
    raise TimeoutError(name)


def delete_topics(bootstrap: str) -> None:
    """Delete all topics of workloads, so that the next one finds disk and page cache free."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    topics = [name for name in admin.list_topics(timeout=30).topics if name.startswith(PREFIX)]
    if topics:
        for deleted in admin.delete_topics(topics, operation_timeout=30).values():
            deleted.result(30)


def fill(
    bootstrap: str, topic: str, records: int, settings: Mapping[str, str] | None = None
) -> float:
    """Produce ``records`` of 1 KiB with acks=all; return the seconds until all are acknowledged.

    ``settings`` are additional settings of the client, such as its login.
    """
    failed: list[object] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "linger.ms": 5,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 200_000,
            **(settings or {}),
        }
    )
    producer.list_topics(topic, timeout=10)
    begin = time.perf_counter()
    for _ in range(records):
        while True:
            try:
                producer.produce(
                    topic, VALUE, on_delivery=lambda error, _: error and failed.append(error)
                )
                break
            except BufferError:
                producer.poll(0.05)
    producer.flush(60)
    seconds = time.perf_counter() - begin
    if failed:
        raise RuntimeError(f"{len(failed)} records failed, the first with {failed[0]}")
    return seconds


def drain(
    bootstrap: str,
    topic: str,
    partitions: int,
    records: int,
    settings: Mapping[str, str] | None = None,
) -> float:
    """Read ``records`` from the beginning; return the seconds from the first to the last."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": uuid.uuid4().hex,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.max.bytes": 52_428_800,
            "max.partition.fetch.bytes": 10_485_760,
            "queued.min.messages": 1_000_000,
            # With 64 MiB unread librdkafka stops fetching for a second (fetch.queue.backoff.ms),
            # which would happen to the faster broker more often.
            "queued.max.messages.kbytes": 2_000_000,
            **(settings or {}),
        }
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
    got, begin = 0, 0.0
    try:
        while got < records:
            messages = consumer.consume(10_000, timeout=30)
            if not messages:
                raise TimeoutError(f"{got} of {records} records after 30 s")
            begin = begin or time.perf_counter()
            got += len(messages)
        return time.perf_counter() - begin
    finally:
        consumer.close()


def expect_no_error(answer: Answer) -> None:
    """Raise RuntimeError with the error of a response, if it has one."""
    if (error := answer["error_code"]) != "none":
        raise RuntimeError(error)


def joined_group(members: Sequence[Cluster], group: str) -> list[Answer]:
    """Form a group of the classic protocol; return each member's JoinGroup response.

    Raises RuntimeError if they do not all join its first generation.
    """
    for member in members:
        member.send(
            "join_group",
            3,
            group_id=group,
            session_timeout=300_000,
            rebalance_timeout=300_000,
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": b""}],
        )
    joined = [member.receive() for member in members]
    ids = [each["member_id"] for answer in joined for each in answer["members"]]
    if len(ids) != len(members):
        raise RuntimeError(f"{len(ids)} of {len(members)} members in the first generation")
    for member, answer in zip(members, joined, strict=True):
        leads = answer["member_id"] == answer["leader"]
        member.send(
            "sync_group",
            3,
            group_id=group,
            member_id=answer["member_id"],
            generation_id=answer["generation_id"],
            assignments=[{"member_id": each, "assignment": b"x"} for each in ids if leads],
        )
    for member in members:
        expect_no_error(member.receive())
    return joined


def until(probe: Callable[[], bool], what: str, deadline_s: float = 60.0) -> None:
    """Poll until ``probe`` is true; TimeoutError names ``what``."""
    end = time.monotonic() + deadline_s
    while not probe():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {deadline_s} s")
        time.sleep(0.002)


class Burst:
    """Sends pre-encoded frames over several connections, and counts the responses.

    Each connection has up to :attr:`AHEAD` requests in flight; the next one is sent when a response
    has arrived, so that a broker never waits for its client. Errors in responses are not checked: a
    caller that sends a frame a thousand times should check a first response.
    """

    AHEAD = 32

    def __init__(self, bootstrap: str, connections: int) -> None:
        host, port = bootstrap.rsplit(":", 1)
        self._sockets = [
            socket.create_connection((host, int(port)), 20) for _ in range(connections)
        ]
        for sock in self._sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, frames: Sequence[Sequence[bytes]], deadline_s: float = 120.0) -> float:
        """Send each connection's frames (with their lengths); return the seconds until the end."""
        left = [list(reversed(own)) for own in frames]
        waiting = [0] * len(left)
        unread = [bytearray() for _ in left]
        places = {sock.fileno(): place for place, sock in enumerate(self._sockets[: len(left)])}
        begin = time.perf_counter()
        poller = select.poll()
        for fileno in places:
            poller.register(fileno, select.POLLIN)
        for place in places.values():
            waiting[place] += self._send(place, left[place], self.AHEAD)
        while any(waiting):
            if time.perf_counter() - begin > deadline_s:
                raise TimeoutError(f"{sum(waiting)} answers did not come in {deadline_s} s")
            for fileno, _ in poller.poll(1000):
                place = places[fileno]
                data = self._sockets[place].recv(1 << 18)
                if not data:
                    raise ConnectionError("the broker closed the connection")
                answers = _take_frames(unread[place], data)
                waiting[place] += self._send(place, left[place], answers) - answers
        return time.perf_counter() - begin

    def _send(self, place: int, left: list[bytes], count: int) -> int:
        chosen = [left.pop() for _ in range(min(count, len(left)))]
        if chosen:
            self._sockets[place].sendall(b"".join(chosen))
        return len(chosen)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


def _take_frames(unread: bytearray, data: bytes) -> int:
    """Add ``data``, remove the complete frames at the front, and count them."""
    unread += data
    at = count = 0
    while len(unread) - at >= 4:
        (size,) = struct.unpack_from(">i", unread, at)
        if len(unread) - at < 4 + size:
            break
        at += 4 + size
        count += 1
    del unread[:at]
    return count


def framed(api: str, version: int, **body: object) -> bytes:
    """Return a request as sent over the socket."""
    frame = encode(api, version, 1, "bench", body)
    return struct.pack(">i", len(frame)) + frame
