"""Calls the user's function with decoded records, and collects its outputs."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

from aiokafka import ConsumerRecord

from fencepost.pipelines.failures import HandlerError, PipelineError, RecordRefusedError, RetryBatch
from fencepost.pipelines.records import NO_OFFSET, Batch, Output, Record, Refusal
from fencepost.pipelines.serde import Serde

Outputs: TypeAlias = Iterable[Output] | AsyncIterable[Output] | None
Handler: TypeAlias = Callable[[Batch], Outputs | Awaitable[Outputs]]
DeadLetter: TypeAlias = str | Callable[[Refusal], Output]


class HandlerCall:
    """The handler with its serdes. A plain function runs in a thread, so that heartbeats continue.

    If a plain function is a generator, it is iterated in that thread as well.
    """

    def __init__(
        self, handler: Handler, key_serde: Serde, value_serde: Serde, dead_letter: DeadLetter | None
    ) -> None:
        self._handler = handler
        self._key_serde = key_serde
        self._value_serde = value_serde
        self._dead_letter = dead_letter
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self._thread: asyncio.Future[Outputs | Awaitable[Outputs]] | None = None

    async def settled(self) -> None:
        """Wait for the thread of an earlier, cancelled call.

        A thread cannot be cancelled, and the handler may change its own state until it returns.
        """
        if self._thread is not None and not self._thread.done():
            await asyncio.wait([self._thread])

    async def __call__(
        self, consumed: Sequence[ConsumerRecord]
    ) -> tuple[Batch, list[Output], list[Output]]:
        """Return the batch, the outputs, and the dead letters (which are already encoded).

        Raises HandlerError, RecordRefusedError, RetryBatch.
        """
        batch = Batch([])
        batch.records = [
            record for raw in consumed if (record := self._decode(raw, batch)) is not None
        ]
        try:
            outputs = await self._call(batch) if batch.records else []
        except (RetryBatch, PipelineError):
            raise
        except Exception as error:
            raise HandlerError(f"the handler raised {type(error).__name__}: {error}") from error
        return batch, outputs, [self._letter(refusal) for refusal in batch.refusals]

    async def _call(self, batch: Batch) -> list[Output]:
        await self.settled()  # two calls never run at once
        result: Outputs | Awaitable[Outputs]
        if self._is_async:
            result = self._handler(batch)
        else:
            self._thread = asyncio.ensure_future(asyncio.to_thread(self._call_plain, batch))
            result = await asyncio.shield(self._thread)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, AsyncIterable):
            return [output async for output in result]
        return list(result or ())

    def _call_plain(self, batch: Batch) -> Outputs | Awaitable[Outputs]:
        """Call the handler and iterate its result, which may be a generator; runs in a thread."""
        result = self._handler(batch)
        return list(result) if isinstance(result, Iterable) else result

    def _decode(self, record: ConsumerRecord, batch: Batch) -> Record | None:
        where = (record.topic, record.partition, record.offset, record.timestamp)
        raw = (tuple(record.headers), record.key, record.value)
        try:
            key, value = self._key_serde.load(record.key), self._value_serde.load(record.value)
        except (ValueError, TypeError, RecursionError) as error:
            batch.refuse(
                Record(*where, None, None, *raw), f"undecodable: {type(error).__name__}: {error}"
            )
            return None
        return Record(*where, key, value, *raw)

    def unwritable(
        self, output: Output, key: bytes | None, value: bytes | None, why: str
    ) -> Output:
        """Return the dead letter, with the same bytes, for an output that cannot be written.

        Raises RecordRefusedError without a dead-letter topic.
        """
        if self._dead_letter is None:
            raise RecordRefusedError(
                f"an output cannot be written: {why} (set a dead_letter topic to continue"
                " without it)"
            )
        now_ms = int(time.time() * 1000)
        stamp = now_ms if output.timestamp_ms is None else output.timestamp_ms
        place = output.topic, NO_OFFSET, NO_OFFSET, stamp
        raw = output.headers, key, value
        return self._letter(Refusal(Record(*place, output.key, output.value, *raw), why))

    def _letter(self, refusal: Refusal) -> Output:
        if self._dead_letter is None:
            record = refusal.record
            raise RecordRefusedError(
                f"{record.topic}-{record.partition}@{record.offset}: {refusal.reason} (set a"
                " dead_letter topic to continue without such records)"
            )
        if isinstance(self._dead_letter, str):
            return refusal.letter(self._dead_letter)
        return self._dead_letter(refusal)
