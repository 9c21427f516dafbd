"""Requests that a client may well send, in any order and with any of the broker's own names.

Every message is whole and every field plausible; together they make no sense. Whatever is answered,
no request makes a shard fail or a handler break, and none changes what only the broker may: it
starts again with the topics it had.
"""

from __future__ import annotations

import datetime as dt
import itertools
import random
import socket
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.wire import APIS, ApiKey, encode_request
from fencepost.coordinator.wire.codec import decode_response
from fencepost.coordinator.wire.schema import FieldInfo, message_class
from tests.fuzz.entities import random_entity, random_leaf
from tests.support.batches import batch
from tests.support.cluster import GROUP, TRANSACTION, Cluster

REQUESTS = 3_000
CONNECTIONS = 6
PATIENCE_S = 0.02
"""What is parked for longer loses its connection."""

CONFIG = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "group.consumer.assignment.interval.ms": "0",
}
TOPICS = (
    *("kept", "kept", "kept", "kept", "kept", "other", "missing"),
    *(
        "__consumer_offsets",
        "__consumer_offsets",
        "__transaction_state",
        "__fencepost_history",
        "__cluster_metadata",
    ),
)
METADATA_TOPIC_ID = uuid.UUID(int=1)
NAMES: Mapping[str, tuple[str, ...]] = {
    "transactional": ("x", "y", "z"),
    "group": ("g", "h", "i"),
    "instance": ("static",),
    "member": ("", "m"),
    "protocol_type": ("consumer",),
    "topic": TOPICS,
    "name": TOPICS,
    "key": ("g", "x"),
    "assignor": ("uniform", "range"),
}
"""By what the name of a text field holds, the first that fits."""

USUAL: Mapping[str, tuple[int, ...]] = {
    "partition_max_bytes": (1, 1 << 20),
    "partition": (0, 0, 0, 0, 1, 2),
    "index": (0, 0, 0, 0, 1, 2),
    "acks": (-1, -1, -1, 0, 1, 2),
    "generation": (-1, -1, -1, 0, 1, 2),
    "coordinator_epoch": (0, 0, 0, 0, 0, 1),
    "leader_epoch": (-1, -1, -1, 0, 1),
}
"""By what the name of a number holds, the first that fits."""

INTEGERS = {"int16", "int32", "int64"}
SMALL = (-1, -1, 0, 0, 0, 1, 1, 2, 3)
DURATIONS_MS = (0, 1, 30_000, 60_000)
IN_TRANSACTIONS = (
    *(ApiKey.INIT_PRODUCER_ID, ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN),
    *(ApiKey.TXN_OFFSET_COMMIT, ApiKey.END_TXN, ApiKey.WRITE_TXN_MARKERS, ApiKey.PRODUCE),
)
UNDISTURBED = {ApiKey.UPDATE_FEATURES, ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS}
"""Orders of an operator, who may well make the broker refuse the rest."""


class Traffic:
    """Makes requests; learns the ids that the answers tell."""

    def __init__(self, rng: random.Random, topic_id: uuid.UUID) -> None:
        self.rng = rng
        self.apis = [one for one in APIS.values() if one.key not in UNDISTURBED]
        self.apis += [APIS[key] for key in IN_TRANSACTIONS] * 3
        self.owners = {name: (name, -1, -1) for name in NAMES["transactional"]}
        self.zombies = list(self.owners.values())
        self.who = self.zombies[0]
        self.api = self.apis[0]
        self.members = ["", "m"]
        self.topic_ids = [None, topic_id, topic_id, METADATA_TOPIC_ID, uuid.UUID(int=4711)]

    def request(self) -> tuple[int, int, Any]:
        self.api = api = self.rng.choice(self.apis)
        if self.rng.random() < 0.2:
            who = self.zombies if self.rng.random() < 0.1 else list(self.owners.values())
            self.who = self.rng.choice(who)
        version = self.rng.randint(api.min_version, api.stable_max)
        entity = random_entity(
            message_class(api.key, version, "request"), self.rng, width=2, draw=self.draw
        )
        return api.key, version, entity

    def draw(self, field: FieldInfo, rng: random.Random) -> Any:
        kind = field.kafka_type
        name, producer_id, epoch = self.who
        if field.name == "producer_id":
            return producer_id if rng.random() < 0.9 else rng.choice(SMALL)
        if field.name == "producer_epoch":
            is_marker = self.api.key is ApiKey.WRITE_TXN_MARKERS
            return epoch + (rng.random() < (0.5 if is_marker else 0.1))
        if kind == "string":
            if "member" in field.name:
                return rng.choice(self.members)
            if "transactional" in field.name and rng.random() < 0.95:
                return name
            if self.api.key is ApiKey.JOIN_GROUP and field.name == "name":
                return "range"
            fitting = (names for part, names in NAMES.items() if part in field.name)
            found = rng.choice(next(fitting, ("range", "kept", "g")))
            return "other" if found == "kept" and self.is_deletion else found
        if kind == "uuid":
            return None if self.is_deletion else rng.choice(self.topic_ids)
        if kind == "records":
            return self.records()
        if kind == "timedelta_i32":
            return dt.timedelta(milliseconds=rng.choice(DURATIONS_MS))
        if kind in INTEGERS:
            usual = next((few for part, few in USUAL.items() if part in field.name), SMALL)
            return rng.choice(usual)
        return random_leaf(field, rng)

    @property
    def is_deletion(self) -> bool:
        """Whether the request may make an end of a topic; one of them has to stay."""
        return self.api.key is ApiKey.DELETE_TOPICS

    def records(self) -> bytes:
        rng, (_, producer_id, epoch) = self.rng, self.who
        return batch(
            [b"v"] * rng.randint(1, 3),
            key=rng.choice((None, b"k")),
            producer_id=producer_id,
            producer_epoch=epoch,
            sequence=rng.choice(SMALL),
            transactional=rng.random() < 0.5,
        )

    def learn(self, request: Any, answer: Any) -> None:
        member_id = getattr(answer, "member_id", None)
        if member_id:
            self.members = [*self.members[:2], *self.members[-3:], member_id]
        name = getattr(request, "transactional_id", None)
        producer_id = getattr(answer, "producer_id", -1)
        if name is not None and producer_id >= 0:
            self.zombies = [*self.zombies[-2:], self.owners[name]]
            self.who = self.owners[name] = name, producer_id, answer.producer_epoch


class Line:
    """A connection that is made anew whenever the broker or our patience ends it."""

    def __init__(self, bootstrap: str) -> None:
        host, port = bootstrap.split(":")
        self._address = host, int(port)
        self._socket: socket.socket | None = None
        self._numbers = itertools.count(1)

    def ask(self, key: int, version: int, entity: Any) -> Any:
        """The answer; None if there is none in time, or ever."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, 20)
            self._socket.settimeout(PATIENCE_S)
        try:
            chunks = encode_request(key, version, next(self._numbers), "fuzz", entity)
            self._socket.sendall(b"".join(bytes(chunk) for chunk in chunks))
            (size,) = struct.unpack(">i", self._exactly(4))
            return decode_response(key, version, self._exactly(size))[1]
        except OSError:
            self.close()
            return None

    def _exactly(self, size: int) -> bytes:
        assert self._socket is not None
        found = b""
        while len(found) < size:
            part = self._socket.recv(size - len(found))
            if not part:
                raise ConnectionResetError
            found += part
        return found

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@pytest.mark.parametrize("verifies", [True, False], ids=["verified", "not verified"])
def test_no_request_breaks_a_shard_or_the_next_start(tmp_path: Path, verifies: bool) -> None:
    rng = random.Random(verifies)
    config = {**CONFIG, "transaction.partition.verification.enable": str(verifies).lower()}
    with capture_logs() as said:
        with Broker.in_thread(tmp_path, config=config) as broker:
            with Cluster(broker.bootstrap) as cluster:
                topic_id = cluster.topic_id(cluster.create_topic("kept", 2))
                cluster.coordinator("g", GROUP)
                cluster.coordinator("x", TRANSACTION)
            traffic = Traffic(rng, topic_id)
            lines = [Line(broker.bootstrap) for _ in range(CONNECTIONS)]
            answered = 0
            for _ in range(REQUESTS):
                key, version, entity = traffic.request()
                answer = rng.choice(lines).ask(key, version, entity)
                answered += answer is not None
                traffic.learn(entity, answer)
            for line in lines:
                line.close()
            with Cluster(broker.bootstrap) as cluster:
                before = cluster.call("metadata", 12, topics=None)["topics"]
        with (
            Broker.in_thread(tmp_path, config=config) as broker,
            Cluster(broker.bootstrap) as again,
        ):
            after = again.call("metadata", 12, topics=None)["topics"]
    broken = [one for one in said if one["event"] in {"shard_failed", "handler failed"}]
    assert not broken, broken
    assert answered > REQUESTS / 2
    assert [one["name"] for one in after] == [one["name"] for one in before]
