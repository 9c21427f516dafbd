"""Simulated brokers: they are registered and send heartbeats, and a test scripts replication.

A :class:`PlayedFollower` sends a test's fetches to a real leader. A :class:`PlayedLeader` serves
real followers, and records their fetches.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from kio.schema.errors import ErrorCode

from tests.support.batches import batches
from tests.support.controllers import Pretender
from tests.support.raw import API_KEYS, Answer, RawClient, decode_request, encode_answer
from tests.support.waits import until

BEAT_S = 0.3
IDLE_S = 0.05
"""How long a simulated leader without new records delays a fetch response."""

API_NAMES = {API_KEYS[name]: name for name in ("api_versions", "fetch", "list_offsets")}
_HEAD = struct.Struct(">hhi")


class PlayedBroker(Pretender):
    """Registers when entered, and sends heartbeats from a thread until :meth:`fall_silent`."""

    def __init__(self, controller: str, broker_id: int, cluster_id: str, port: int = 1) -> None:
        super().__init__(controller, broker_id, cluster_id)
        self._port = port
        self._silent = threading.Event()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.become_unfenced()
        return self

    def __exit__(self, *_: object) -> None:
        self.fall_silent()
        self.close()

    def become_unfenced(self, *, is_new: bool = True) -> None:
        """Become unfenced; with ``is_new``, register a new incarnation first."""
        if is_new:
            self.incarnation_id = uuid.uuid4()
            until(self._registered, f"{self.broker_id} is registered")
        until(lambda: not self.heartbeat()["is_fenced"], f"{self.broker_id} is unfenced")
        self._silent.clear()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _registered(self) -> bool:
        # A new incarnation cannot register before the session of the former one has expired.
        listener = {"name": "PLAINTEXT", "host": "127.0.0.1", "security_protocol": 0}
        answer = self.register(listeners=[{**listener, "port": self._port}])
        assert answer["error_code"] in {"none", "duplicate_broker_registration"}, answer
        return bool(answer["error_code"] == "none")

    def _beat(self) -> None:
        while not self._silent.wait(BEAT_S):
            with self._turn:
                self.heartbeat()

    def alter_partition(self, *arguments: Any, **changes: Any) -> Answer:
        """See :class:`Pretender`; sends the request between two heartbeats."""
        with self._turn:
            return super().alter_partition(*arguments, **changes)

    def be_fenced(self) -> None:
        """Stop the heartbeats, and ask the controller to fence the broker."""
        self.fall_silent()
        assert self.heartbeat(want_fence=True)["is_fenced"]

    @property
    def is_silent(self) -> bool:
        """Whether the broker has stopped sending heartbeats."""
        return self._silent.is_set()

    def fall_silent(self) -> None:
        """Stop sending heartbeats; the controller fences the broker after its session timeout."""
        self._silent.set()
        if self._thread is not None:
            self._thread.join(60)


class PlayedFollower(PlayedBroker):
    """A follower whose fetches the test sends one by one."""

    def fetch_replica(
        self, leader: RawClient, topic_id: uuid.UUID, offset: int, epoch: int, **how: Any
    ) -> Answer:
        """Fetch once in a leader epoch; return the partition's response.

        ``last_epoch``, ``log_start`` and ``broker_epoch`` are fields that only followers send.
        """
        entry = {
            "partition": 0,
            "fetch_offset": offset,
            "current_leader_epoch": epoch,
            "last_fetched_epoch": how.get("last_epoch", -1),
            "log_start_offset": how.get("log_start", 0),
            "partition_max_bytes": 1 << 20,
        }
        broker_epoch = how.get("broker_epoch", self.broker_epoch)
        answer = leader.call(
            "fetch",
            17,
            replica_state={"replica_id": self.broker_id, "replica_epoch": broker_epoch},
            max_wait=0,
            min_bytes=1,
            max_bytes=1 << 20,
            session_epoch=-1,
            topics=[{"topic_id": topic_id, "partitions": [entry]}],
        )
        part: Answer = answer["responses"][0]["partitions"][0]
        return part


@dataclass
class Script:
    """A partition that a :class:`PlayedLeader` leads: its log, and its responses."""

    epoch: int = 0
    high_watermark: int = 0
    log_start: int = 0
    earliest: int = 0
    latest: int = 0
    batches: list[tuple[int, bytes]] = field(default_factory=list)
    """(base offset, bytes) of each batch, in order."""

    asked: dict[int, list[Answer]] = field(default_factory=dict)
    """Replica → partitions of its fetch requests."""

    once: dict[int, list[Answer]] = field(default_factory=dict)
    """Replica → fields that override an empty response to the replica's next fetches.

    The item ``gate`` is not a field of the response, but an event that the response waits for.
    """

    questions: dict[int, list[int]] = field(default_factory=dict)
    """Replica → timestamps of its ListOffsets requests."""

    def end_of(self, replica: int) -> int:
        """Return the fetch offset of a replica's last fetch, -1 before its first fetch."""
        fetch = self.asked.get(replica)
        return int(fetch[-1]["fetch_offset"]) if fetch else -1

    def answer(self, replica: int, part: Answer) -> Answer:
        """Return the response to a fetch of one partition."""
        self.asked.setdefault(replica, []).append(part)
        base = {
            "partition_index": part["partition"],
            "error_code": ErrorCode.none,
            "high_watermark": self.high_watermark,
            "last_stable_offset": self.high_watermark,
            "log_start_offset": self.log_start,
            "aborted_transactions": None,
            "records": b"",
        }
        if waiting := self.once.get(replica):
            return {**base, **waiting.pop(0)}
        data_from = [data for at, data in self.batches if at >= part["fetch_offset"]]
        return {**base, "records": b"".join(data_from)}

    def append_batch(self, offset: int, data: bytes, epoch: int | None = None) -> int:
        """Append a batch with this base offset and epoch; return the next offset."""
        stamped = bytearray(data)
        struct.pack_into(">q", stamped, 0, offset)
        struct.pack_into(">i", stamped, 12, self.epoch if epoch is None else epoch)
        self.batches.append((offset, bytes(stamped)))
        (batch,) = batches(bytes(stamped))
        return batch.last_offset + 1


class PlayedLeader(PlayedBroker):
    """A broker that followers can fetch from, with a :class:`Script` for each topic it leads."""

    def __init__(self, controller: str, broker_id: int, cluster_id: str) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        super().__init__(controller, broker_id, cluster_id, self._server.getsockname()[1])
        self.scripts: dict[str, Script] = {}
        self.names: dict[str, str] = {}
        """Topic id → name, because followers fetch by id."""
        self.lock = threading.Lock()
        """Held while a script is read; a test holds it for several changes at once."""
        self._stopping = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._stopping.set()
        self._server.close()
        super().close()

    def add_topic(self, name: str, topic_id: uuid.UUID) -> Script:
        """Add a topic that the broker leads; return its script."""
        with self.lock:
            self.scripts[name] = script = Script()
            self.names[str(topic_id)] = name
        return script

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), client:
            while True:
                frame = _frame(client)
                key, version, correlation_id = _HEAD.unpack_from(frame)
                api = API_NAMES[key]
                body = decode_request(api, version, frame)
                with self.lock:
                    answer = _ANSWERS[api](self, body)
                if api == "fetch":
                    self._keep_waiting(answer)
                data = encode_answer(api, version, correlation_id, answer)
                client.sendall(struct.pack(">i", len(data)) + data)

    def _keep_waiting(self, answer: Answer) -> None:
        parts = [part for topic in answer["responses"] for part in topic["partitions"]]
        for part in parts:
            if (gate := part.pop("gate", None)) is not None:
                gate.wait()
        if not any(part["records"] for part in parts):
            # Delay an empty response as a leader does, because followers fetch again at once.
            self._stopping.wait(IDLE_S)

    def _fetched(self, body: Answer) -> Answer:
        replica = body["replica_state"]["replica_id"]
        responses = []
        for topic in body["topics"]:
            script = self.scripts.get(self.names.get(topic["topic_id"], ""))
            parts = [
                {
                    "partition_index": partition["partition"],
                    "error_code": ErrorCode.unknown_topic_id,
                    "high_watermark": -1,
                    "aborted_transactions": None,
                    "records": b"",
                }
                if script is None
                else script.answer(replica, partition)
                for partition in topic["partitions"]
            ]
            responses.append({"topic_id": uuid.UUID(topic["topic_id"]), "partitions": parts})
        return {"error_code": ErrorCode.none, "responses": responses}

    def _offsets(self, body: Answer) -> Answer:
        topics = []
        for topic in body["topics"]:
            script = self.scripts[topic["name"]]
            parts = []
            for partition in topic["partitions"]:
                script.questions.setdefault(body["replica_id"], []).append(partition["timestamp"])
                is_latest = partition["timestamp"] == -1
                offset = script.latest if is_latest else script.earliest
                fields = {
                    "offset": offset,
                    "leader_epoch": script.epoch,
                    "error_code": ErrorCode.none,
                }
                parts.append({"partition_index": partition["partition_index"], **fields})
            topics.append({"name": topic["name"], "partitions": parts})
        return {"topics": topics}

    def _versions(self, _body: Answer) -> Answer:
        keys = [
            {"api_key": API_KEYS[name], "min_version": low, "max_version": high}
            for name, low, high in (("fetch", 13, 18), ("list_offsets", 5, 10))
        ]
        return {"error_code": ErrorCode.none, "api_keys": keys}


_ANSWERS: dict[str, Callable[[PlayedLeader, Answer], Answer]] = {
    "fetch": PlayedLeader._fetched,
    "list_offsets": PlayedLeader._offsets,
    "api_versions": PlayedLeader._versions,
}


def _frame(client: socket.socket) -> bytes:
    (size,) = struct.unpack(">i", _exactly(client, 4))
    return _exactly(client, size)


def _exactly(client: socket.socket, size: int) -> bytes:
    data = client.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data
