"""Pipelines whose topics do not exist, or whose topic names are not allowed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.failures import DataLostError, MissingTopicError, RecordRefusedError
from fencepost.pipelines.records import OFFSET, REASON, TOPIC, Batch, Output
from fencepost.pipelines.topics import MOST_MISSING, Topics
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.own_broker import own_broker
from tests.support.waits import until, until_async
from tests.wire.clients import aio_consumer
from tests.wire.test_exactly_once import Bench

pytestmark = pytest.mark.slow

WAIT_MS = 500

ILLEGAL = ("a b", "", "..", "x" * 250, "ä", "\ud800", "a\0b")


@pytest.fixture(scope="module", params=["auto-create", "no auto-create"])
def asked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    settings = {"auto.create.topics.enable": str(request.param == "auto-create").lower()}
    home: Path = tmp_path_factory.mktemp("topics")
    with own_broker(request, home, settings) as broker, Cluster(broker.bootstrap) as cluster:
        cluster.bootstrap = broker.bootstrap  # type: ignore[attr-defined]
        yield cluster


@pytest.fixture
async def bench(asked: Cluster) -> Bench:
    made = Bench(asked.bootstrap, asked)  # type: ignore[attr-defined]
    await made.fill(9)
    return made


def colliding(cluster: Cluster) -> str:
    """Return a name that no topic can have, because it collides with an existing topic."""
    return cluster.create_topic(unique("there.x")).replace(".", "_")


async def headers(bench: Bench, topic: str, count: int) -> list[dict[str, bytes]]:
    async with aio_consumer(bench.bootstrap, topic, auto_offset_reset="earliest") as consumer:
        found = [await asyncio.wait_for(consumer.getone(), 60) for _ in range(count)]
    return [dict(record.headers) for record in found]


# --- output topics ---


async def test_output_to_an_illegal_topic_ends_the_pipeline(bench: Bench) -> None:
    for name in (*ILLEGAL, colliding(bench.cluster)):
        handler = lambda _, name=name: [Output(name, b"")]  # noqa: E731
        async with bench.pipeline(handler, topic_wait_ms=600_000) as pipeline:
            with pytest.raises(RecordRefusedError, match=r"an output cannot be written: .*topic"):
                await asyncio.wait_for(pipeline.run(to_end=True), 60)
    assert bench.cluster.committed(bench.group, bench.source) == -1


async def test_outputs_to_illegal_topics_become_dead_letters(
    bench: Bench,
) -> None:
    dead = bench.cluster.create_topic(unique("dead"))
    names = [*(name for name in ILLEGAL if name != "\ud800"), colliding(bench.cluster)]

    def handler(batch: Batch) -> list[Output]:
        bad = [Output(name, b"bad", b"key", headers=(("mine", b"1"),)) for name in names]
        return [*bad, *bench.copy(batch)]

    pipeline = bench.pipeline(handler, dead_letter=dead, topic_wait_ms=600_000)
    async with pipeline:
        await asyncio.wait_for(pipeline.run(to_end=True), 60)
    bench.check(9)
    assert pipeline.metrics.refused == len(names) * pipeline.metrics.transactions
    letters = await headers(bench, dead, len(names))
    for name, letter in zip(names, letters, strict=True):
        assert letter["mine"] == b"1"
        assert letter[TOPIC] == name.encode()
        assert letter[REASON]
        assert OFFSET not in letter
    assert b"collides with existing topic" in letters[-1][REASON]


async def test_output_to_a_missing_topic_waits_for_auto_creation(
    request: pytest.FixtureRequest, bench: Bench
) -> None:
    name = unique("new")
    handler = lambda _: [Output(name, b"1")]  # noqa: E731
    is_created = request.node.callspec.params["asked"] == "auto-create"
    dead = bench.cluster.create_topic(unique("dead"))
    wait_ms = 60_000 if is_created else WAIT_MS
    async with bench.pipeline(handler, dead_letter=dead, topic_wait_ms=wait_ms) as pipeline:
        await asyncio.wait_for(pipeline.run(to_end=True), 60)
    written = pipeline.metrics.transactions
    assert pipeline.metrics.refused == (0 if is_created else written)
    topic = name if is_created else dead
    assert len(bench.cluster.values(topic, isolation=READ_COMMITTED)) == written
    if not is_created:
        (letter, *_) = await headers(bench, dead, 1)
        assert letter[REASON] == f"topic {name!r} does not exist: no broker creates it".encode()


async def test_output_waits_for_a_topic_created_meanwhile(bench: Bench) -> None:
    name = unique("late")
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handler(_: Batch) -> list[Output]:
        loop.call_soon_threadsafe(asked.set)
        return [Output(name, b"1")]

    async with bench.pipeline(handler, topic_wait_ms=60_000) as pipeline:
        running = asyncio.create_task(pipeline.run(to_end=True, handle_signals=False))
        await asyncio.wait_for(asked.wait(), 60)
        await asyncio.to_thread(
            bench.cluster.call,
            "create_topics",
            5,
            timeout=10_000,
            topics=[
                {
                    "name": name,
                    "num_partitions": 1,
                    "replication_factor": 1,
                    "assignments": [],
                    "configs": [],
                }
            ],
        )
        await asyncio.wait_for(running, 60)
    assert bench.cluster.values(name, isolation=READ_COMMITTED)


async def test_missing_dead_letter_topic_ends_the_pipeline(bench: Bench) -> None:
    handler = lambda _: [Output("a b", b"")]  # noqa: E731
    async with bench.pipeline(handler, dead_letter="also illegal") as pipeline:
        with pytest.raises(MissingTopicError, match=r"dead letters cannot be written: .*'also ill"):
            await asyncio.wait_for(pipeline.run(to_end=True), 60)


async def test_outputs_to_a_deleted_topic_do_not_stop_other_outputs(
    request: pytest.FixtureRequest, bench: Bench
) -> None:
    if request.node.callspec.params["asked"] == "auto-create":
        pytest.skip("it is created again")
    cluster, dead = bench.cluster, bench.cluster.create_topic(unique("dead"))
    gone = cluster.create_topic(unique("gone"))

    def handler(batch: Batch) -> list[Output]:
        return [*bench.copy(batch), Output(gone, b"late")]

    async with bench.pipeline(handler, dead_letter=dead, topic_wait_ms=WAIT_MS) as pipeline:
        running = asyncio.create_task(pipeline.run(handle_signals=False))
        await bench.all_copied(9)
        await asyncio.to_thread(cluster.call, "delete_topics", 5, topic_names=[gone], timeout=9_000)
        await bench.fill(9, first=9)
        await bench.all_copied(18)
        pipeline.stop()
        await asyncio.wait_for(running, 60)
    bench.check(18)
    assert pipeline.metrics.refused >= 1


async def test_missing_topic_is_awaited_once_and_not_for_each_record(
    request: pytest.FixtureRequest, asked: Cluster
) -> None:
    if request.node.callspec.params["asked"] == "auto-create":
        pytest.skip("it is created")
    topics = Topics(asked.bootstrap, wait_ms=WAIT_MS)  # type: ignore[attr-defined]
    name = unique("never")
    try:
        first = time.monotonic()
        assert name in await topics.unwritable([name])
        assert time.monotonic() - first >= WAIT_MS / 1000
        topics._wait_s = 600.0
        topics._missing[name] -= 600.0
        assert name in await topics.unwritable([name])
        asked.create_topic(name)
        assert await topics.unwritable([name]) == {}
        assert name not in topics._missing
        # The number of remembered names is bounded, because publishers may choose them.
        topics._missing = {f"old-{number}": 0.0 for number in range(MOST_MISSING)}
        topics._note_missing([name], ())
        assert len(topics._missing) == MOST_MISSING
        assert name in topics._missing
        assert "old-0" not in topics._missing
    finally:
        await topics.close()


# --- input topics ---


def reading(bench: Bench, *topics: str, **options: Any) -> ExactlyOnce:
    return ExactlyOnce(
        bench.bootstrap,
        group=bench.group,
        topics=topics,
        handler=bench.copy,
        transactional_id=bench.group,
        options=Options(**{"topic_wait_ms": WAIT_MS, "session_timeout_ms": 6_000, **options}),
    )


async def ends_with(pipeline: ExactlyOnce, told: str) -> None:
    async with pipeline:
        with pytest.raises(MissingTopicError, match=told):
            await asyncio.wait_for(pipeline.run(to_end=True, handle_signals=False), 60)


async def test_missing_input_topic_fails_a_run_to_the_end(bench: Bench) -> None:
    orders = bench.cluster.create_topic(unique("orders"))
    wrong = orders.replace("orders", "ordres")
    await ends_with(reading(bench, wrong), f"'{wrong}' .did you mean '{orders}'")
    await ends_with(reading(bench, bench.source, wrong), f"no such input topic: '{wrong}'")
    await ends_with(reading(bench, "a b"), "no such input topic: 'a b'")
    found = bench.cluster.call(
        "metadata", 9, topics=[{"name": wrong}], allow_auto_topic_creation=False
    )
    assert found["topics"][0]["error_code"] == "unknown_topic_or_partition"
    with pytest.raises(ValueError, match="needs a topic"):
        reading(bench)


async def test_empty_input_topic_completes_a_run_to_the_end(bench: Bench) -> None:
    empty = bench.cluster.create_topic(unique("empty"))
    async with reading(bench, empty) as pipeline:
        await asyncio.wait_for(pipeline.run(to_end=True, handle_signals=False), 60)
    assert pipeline.metrics.records_in == 0


@pytest.mark.parametrize("is_again", [False, True])
async def test_input_topic_deleted_meanwhile_fails_a_run_to_the_end(
    bench: Bench, is_again: bool
) -> None:
    source = bench.cluster.create_topic(unique("source"))
    bench.cluster.produce(source, [b"1", b"2"])

    cluster, before = bench.cluster, bench.cluster.topic_id(source)

    def delete(_: Batch) -> None:
        cluster.call("delete_topics", 5, topic_names=[source], timeout=9_000)

        def is_gone() -> bool:
            ask = {"topics": [{"name": source}], "allow_auto_topic_creation": False}
            return bool(cluster.call("metadata", 12, **ask)["topics"][0]["topic_id"] != str(before))

        until(is_gone, "the topic is deleted")
        if is_again:
            with contextlib.suppress(AssertionError):  # aiokafka may have created it
                cluster.create_topic(source)

    pipeline = reading(bench, source)
    pipeline._call._handler = delete
    async with pipeline:
        # The group's offset is out of range in the recreated topic.
        with pytest.raises((MissingTopicError, DataLostError)):
            await asyncio.wait_for(pipeline.run(to_end=True, handle_signals=False), 60)


async def test_missing_input_topic_is_logged_by_a_continuous_pipeline(bench: Bench) -> None:
    source = unique("later")
    with capture_logs() as logs:
        async with reading(bench, source, consumer={"metadata_max_age_ms": 200}) as pipeline:
            running = asyncio.create_task(pipeline.run(handle_signals=False))

            async def is_told() -> bool:
                return any(f"no such input topic: '{source}'" in log["event"] for log in logs)

            await until_async(is_told, "a warning")
            pipeline.stop()
            await asyncio.wait_for(running, 60)
