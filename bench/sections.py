"""The time that each part of a small request takes: ``python -m bench.sections [--write PAGE]``.

A broker runs in a thread of this process, with clocks around the parts that a request passes. A
separate process sends each kind of request, 32 ahead, and reads the responses. A part's time is the
median of its calls, without the parts that it calls, times its calls per request; ``total`` is the
broker's processor time per request in a run without clocks, and ``rest`` is the difference: the
loop, the kernel's share of wake-ups, and the connection's work between the parts.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import statistics
import tempfile
import time
from asyncio import selector_events
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import GeneratorType
from typing import Any

from bench.clients import Burst, framed
from docs.generate import between
from fencepost import Broker
from fencepost.coordinator.handlers import Handler, Registry
from fencepost.coordinator.runtime.shard import ShardRuntime
from fencepost.coordinator.server import connection, request_stream
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import LogReader
from fencepost.protocol.frames import FrameBuffer
from tests.support.cluster import GROUP, TRANSACTION, Cluster

REQUESTS, ROUNDS = 2_000, 5
"""Requests per run, and runs with clocks and without, in turn; the median of the runs counts."""

PARTS = "receive", "frame", "decode", "handler", "coordinator", "log", "encode", "send"

Frames = Sequence[bytes]
Samples = dict[str, list[int]]


class Clocks:
    """Clocks around the parts. While ``running`` is false, they measure nothing."""

    def __init__(self) -> None:
        self.samples: Samples = defaultdict(list)
        self.running = False
        self._inside = [0]
        """Nanoseconds spent in nested calls, for each of the parts in progress."""
        self._handlers: dict[int, Handler] = {}

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call with a clock for ``part``."""
        inside, samples = self._inside, self.samples[part]

        def timed(*args: Any, **named: Any) -> Any:
            if not self.running:
                return call(*args, **named)
            inside.append(0)
            begin = time.perf_counter_ns()
            try:
                return call(*args, **named)
            finally:
                spent = time.perf_counter_ns() - begin
                samples.append(spent - inside.pop())
                inside[-1] += spent

        return timed

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Install the clocks during the context."""
        places: list[tuple[str, Any, str]] = [
            ("receive", selector_events._SelectorSocketTransport, "_read_ready__get_buffer"),
            ("connection", connection.Connection, "buffer_updated"),
            ("frame", FrameBuffer, "next_frame"),
            ("decode", request_stream, "decode_request"),
            ("coordinator", ShardRuntime, "submit"),
            *(("log", Partition, f"append_{what}") for what in ("records", "validated", "marker")),
            ("log", LogReader, "fetch"),
            ("encode", request_stream.RequestStream, "answer"),
            ("send", connection, "send_next"),
        ]
        former = [(owner, name, getattr(owner, name)) for _, owner, name in places]
        former.append((Registry, "handler", Registry.handler))
        for part, owner, name in places:
            setattr(owner, name, self.around(part, getattr(owner, name)))
        find = Registry.handler
        setattr(Registry, "handler", lambda registry, key: self._handler(find(registry, key)))  # noqa: B010 - it is a method
        try:
            yield
        finally:
            for owner, name, call in former:
                setattr(owner, name, call)

    def _handler(self, found: Handler) -> Handler:
        known = self._handlers.get(found.api.key)
        if known is None:
            begun, step = self.around("handler", found.run), self.around("handler", next)

            def run(context: Any) -> Any:
                result = begun(context)
                return _in_steps(result, step) if isinstance(result, GeneratorType) else result

            known = self._handlers[found.api.key] = dataclasses.replace(found, run=run)
        return known


def _in_steps(work: Any, step: Callable[..., Any]) -> Any:
    """Run a handler's generator; ``step`` is ``next`` with a clock."""
    while True:
        try:
            wait = step(work)
        except StopIteration as over:
            return over.value
        yield wait


def kinds(bootstrap: str) -> dict[str, Frames]:
    """Return the frames of each kind of request, which are repeated in this order."""
    with Cluster(bootstrap) as cluster:
        written, empty = cluster.create_topic("bench-written"), cluster.create_topic("bench-empty")
        cluster.coordinator("bench", GROUP)
        record = encode_batch([LogRecord(0, int(time.time() * 1000), None, bytes(100))])
        group = _classic_member(cluster)
        member, epoch = _member(cluster, empty)
        cluster.coordinator("bench", TRANSACTION)
        made = cluster.call("init_producer_id", 4, transactional_id="bench", **_NEW_PRODUCER)
        who = {"producer_id": made["producer_id"], "producer_epoch": made["producer_epoch"]}
        txn = {"transactional_id": "bench", **who}
        add = framed(
            "add_partitions_to_txn",
            3,
            v3_and_below_transactional_id="bench",
            v3_and_below_topics=[{"name": empty, "partitions": [0]}],
            **{f"v3_and_below_{name}": value for name, value in who.items()},
        )
        end = framed("end_txn", 3, committed=True, **txn)
        offsets = [{"name": empty, "partitions": [_OFFSET]}]
        cluster.call("produce", 9, **_produce(written, record))
        return {
            "Heartbeat": [framed("heartbeat", 3, **group)],
            "ConsumerGroupHeartbeat": [
                framed("consumer_group_heartbeat", 1, **_again(member, epoch))
            ],
            "OffsetCommit of 1 partition": [
                framed(
                    "offset_commit",
                    8,
                    group_id="bench-simple",
                    generation_id_or_member_epoch=-1,
                    topics=offsets,
                )
            ],
            "Fetch without new records": [framed("fetch", 11, **_fetch(empty))],
            "Fetch of 1 record": [framed("fetch", 11, **_fetch(written))],
            "Produce of 1 record": [framed("produce", 9, **_produce(empty, record))],
            "AddPartitionsToTxn + EndTxn": [add, end],
            "AddOffsetsToTxn + TxnOffsetCommit + EndTxn": [
                framed("add_offsets_to_txn", 3, group_id="bench", **txn),
                framed(
                    "txn_offset_commit",
                    3,
                    group_id="bench",
                    generation_id=-1,
                    topics=offsets,
                    **txn,
                ),
                end,
            ],
        }


_NEW_PRODUCER = {"transaction_timeout": 600_000, "producer_id": -1, "producer_epoch": -1}
_OFFSET = {"partition_index": 0, "committed_offset": 7, "committed_leader_epoch": -1}


def _produce(topic: str, records: bytes) -> dict[str, object]:
    part = {"index": 0, "records": records}
    return {"acks": -1, "topic_data": [{"name": topic, "partition_data": [part]}]}


def _fetch(topic: str) -> dict[str, object]:
    part = {"partition": 0, "current_leader_epoch": -1, "partition_max_bytes": 1 << 20}
    topics = [{"topic": topic, "partitions": [part]}]
    return {"replica_id": -1, "session_epoch": -1, "max_bytes": 1 << 20, "topics": topics}


def _classic_member(cluster: Cluster) -> dict[str, object]:
    joined = cluster.call(
        "join_group",
        3,
        group_id="bench",
        session_timeout=300_000,
        rebalance_timeout=300_000,
        protocol_type="consumer",
        protocols=[{"name": "range", "metadata": b""}],
    )
    mine = {"generation_id": joined["generation_id"], "member_id": joined["member_id"]}
    assignment = {"member_id": joined["member_id"], "assignment": b""}
    cluster.call("sync_group", 3, group_id="bench", assignments=[assignment], **mine)
    return {"group_id": "bench", **mine}


def _member(cluster: Cluster, topic: str) -> tuple[str, int]:
    told = cluster.call(
        "consumer_group_heartbeat",
        1,
        **{
            **_again("bench", 0),
            "rebalance_timeout": 300_000,
            "subscribed_topic_names": [topic],
            "topic_partitions": [],
        },
    )
    cluster.call("consumer_group_heartbeat", 1, **_again("bench", told["member_epoch"]))
    return "bench", told["member_epoch"]


def _again(member: str, epoch: int) -> dict[str, object]:
    return {
        "group_id": "bench-new",
        "member_id": member,
        "member_epoch": epoch,
        "rebalance_timeout": -1,
        "subscribed_topic_names": None,
        "topic_partitions": None,
    }


def _send(bootstrap: str, orders: Any) -> None:
    """Send frames on request, in the client's process, and report when all are answered."""
    burst = Burst(bootstrap, 1)
    while (frames := orders.recv()) is not None:
        burst.run([frames])
        orders.send(True)
    burst.close()


def measured(frames: Frames, orders: Any, clocks: Clocks) -> dict[str, float]:
    """Return microseconds per request, by part."""
    count = REQUESTS - REQUESTS % len(frames)
    run = list(frames) * (count // len(frames))
    runs: list[dict[str, float]] = []
    for number in range(1 + 2 * ROUNDS):
        clocks.running = number % 2 == 1
        for samples in clocks.samples.values():
            samples.clear()
        begin = time.process_time()
        orders.send(run)
        orders.recv()
        spent = time.process_time() - begin
        if clocks.running:
            told = clocks.samples.items()
            parts = {
                part: statistics.median(each) * len(each) / count / 1e3
                for part, each in told
                if each
            }
            runs.append(parts)
        elif number:  # the first one warms up
            runs[-1]["total"] = spent / count * 1e6
    found = {
        name: statistics.median(times.get(name, 0.0) for times in runs)
        for name in (*PARTS, "total")
    }
    found["rest"] = found["total"] - sum(found[part] for part in PARTS)
    return found


def table() -> str:
    """Return a table with a row for each kind of request, in µs."""
    columns = (*PARTS, "rest", "total")
    lines = [
        f"| CPU time per request, µs | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    clocks = Clocks()
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory(prefix="fencepost-bench-") as home, clocks.placed():
        settings = {"group.initial.rebalance.delay.ms": "0"}
        with Broker.in_thread(Path(home), config=settings) as broker:
            bootstrap = broker.bootstrap
            client = multiprocessing.get_context("spawn").Process(
                target=_send, args=(bootstrap, theirs)
            )
            client.start()
            for kind, frames in kinds(bootstrap).items():
                found = measured(frames, mine, clocks)
                if len(frames) > 1:
                    found = {part: spent * len(frames) for part, spent in found.items()}
                cells = " | ".join(f"{found[part]:.1f}" for part in columns)
                lines.append(f"| {kind} | {cells} |")
            mine.send(None)
            client.join()
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write to a page if requested."""
    parser = argparse.ArgumentParser(prog="bench.sections", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table in there")
    page: Path | None = parser.parse_args().write
    found = table()
    print(found)
    if page is not None:
        text = page.read_text(encoding="utf-8")
        page.write_text(between(text, "bench-sections", found), encoding="utf-8")


if __name__ == "__main__":
    main()
