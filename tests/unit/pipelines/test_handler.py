"""Calls of the handler: serdes, refusals, dead letters, threads, and exceptions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from aiokafka import ConsumerRecord

from fencepost.pipelines.failures import HandlerError, RecordRefusedError, RetryBatch
from fencepost.pipelines.handler import HandlerCall
from fencepost.pipelines.records import MAX_REASON_CHARS, OFFSET, REASON, Batch, Output
from fencepost.pipelines.serde import BYTES, JSON, MSGPACK, TEXT, Serde


def consumed(value: bytes | None, offset: int = 7) -> ConsumerRecord:
    return ConsumerRecord("in", 2, offset, 1_000, 0, b"k", value, None, 1, 1, (("h", b"v"),))


async def test_records_are_decoded_and_keep_their_metadata() -> None:
    def handler(batch: Batch) -> list[Output]:
        (record,) = batch
        assert (record.topic, record.partition, record.offset) == ("in", 2, 7)
        return [Output("out", record.value, record.key, None, record.headers, record.timestamp_ms)]

    _, outputs, letters = await HandlerCall(handler, BYTES, JSON, None)([consumed(b'{"a":1}')])
    assert outputs == [Output("out", {"a": 1}, b"k", None, (("h", b"v"),), 1_000)]
    assert letters == []


async def test_plain_handler_runs_in_a_thread_and_coroutine_on_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def plain(_: Batch) -> None:
        threads.append(threading.current_thread())

    async def coroutine(_: Batch) -> None:
        threads.append(threading.current_thread())

    for handler in (plain, coroutine):
        await HandlerCall(handler, BYTES, BYTES, None)([consumed(b"")])
    assert threads[0] is not threading.current_thread()
    assert threads[1] is threading.current_thread()


async def test_generator_handler_runs_in_a_thread() -> None:
    threads: list[threading.Thread] = []

    def one_by_one(batch: Batch) -> Iterator[Output]:
        for record in batch:
            threads.append(threading.current_thread())
            yield Output("out", record.value)

    async def on_the_loop(batch: Batch) -> AsyncIterator[Output]:
        for output in one_by_one(batch):
            yield output

    for handler in (one_by_one, on_the_loop):
        _, outputs, _ = await HandlerCall(handler, BYTES, BYTES, None)([consumed(b"v")])
        assert outputs == [Output("out", b"v")]
    assert threads[0] is not threading.current_thread()
    assert threads[1] is threading.current_thread()


async def test_cancelled_call_is_settled_when_its_thread_has_ended() -> None:
    inside, release = threading.Event(), threading.Event()
    state = []

    def slow(_: Batch) -> None:
        inside.set()
        release.wait(30)
        state.append("changed")

    call = HandlerCall(slow, BYTES, BYTES, None)
    calling = asyncio.create_task(call([consumed(b"")]))
    await asyncio.to_thread(inside.wait, 30)
    calling.cancel()
    await asyncio.wait([calling])
    settling = asyncio.create_task(call.settled())
    await asyncio.sleep(0)
    assert not settling.done()
    assert not state
    release.set()
    await asyncio.wait_for(settling, 60)
    assert state == ["changed"]


async def test_undecodable_record_becomes_a_dead_letter_with_its_bytes() -> None:
    call = HandlerCall(lambda batch: None, BYTES, JSON, "dead")
    batch, outputs, (letter,) = await call([consumed(b"{"), consumed(b"1", 8)])
    assert [record.offset for record in batch] == [8]
    assert outputs == []
    assert (letter.topic, letter.key, letter.value, letter.timestamp_ms) == (
        "dead",
        b"k",
        b"{",
        1_000,
    )
    headers = dict(letter.headers)
    assert headers["h"] == b"v"
    assert headers[OFFSET] == b"7"
    assert headers[REASON].startswith(b"undecodable")


async def test_dead_letter_reason_above_the_limit_is_truncated() -> None:
    def refuse(batch: Batch) -> None:
        for record in batch:
            batch.refuse(record, "x" * (MAX_REASON_CHARS + 1))

    _, _, (letter,) = await HandlerCall(refuse, BYTES, BYTES, "dead")([consumed(b"")])
    assert len(dict(letter.headers)[REASON]) == MAX_REASON_CHARS


async def test_refused_record_without_a_dead_letter_topic_raises() -> None:
    with pytest.raises(RecordRefusedError, match="in-2@7"):
        await HandlerCall(lambda batch: None, BYTES, JSON, None)([consumed(b"{")])


async def test_handler_exception_is_wrapped_and_retry_is_passed_on() -> None:
    def fails(_: Batch) -> None:
        raise KeyError("x")

    def later(_: Batch) -> None:
        raise RetryBatch

    with pytest.raises(HandlerError) as caught:
        await HandlerCall(fails, BYTES, BYTES, None)([consumed(b"")])
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RetryBatch):
        await HandlerCall(later, BYTES, BYTES, None)([consumed(b"")])


@pytest.mark.parametrize("serde", [JSON, MSGPACK], ids=lambda serde: serde.name)
def test_serdes_load_what_they_have_dumped(serde: Serde) -> None:
    for value in ({"a": [1, None, "ü"]}, [], "x", 1.5, None):
        assert serde.load(serde.dump(value)) == value


def test_bytes_serde_accepts_text_and_refuses_other_types() -> None:
    assert BYTES.dump("ü") == "ü".encode()
    assert TEXT.load(TEXT.dump("ü")) == "ü"
    with pytest.raises(TypeError, match="name a serde"):
        BYTES.dump(1)


@pytest.mark.parametrize("broken", [b"\xc1", b"\x81", b""])
def test_malformed_msgpack_is_a_value_error(broken: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgpack's class depends on the damage
        MSGPACK.load(broken)
