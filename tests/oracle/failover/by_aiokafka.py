"""The program with aiokafka: see the package."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from tests.oracle.failover import program
from tests.oracle.failover.program import NAME, PARTITIONS, SOURCE, TARGET, at, say, seen, tell

PAUSE_S = 0.1
"""The pause before a failed copier restarts: a refused connection fails a copier immediately."""


class Told(logging.Handler):
    """Reports the library's warnings and errors: the message template and the exception.

    Loggers are named after the library's modules, so the role comes from the current task.
    """

    def emit(self, record: logging.LogRecord) -> None:
        told = record.args if isinstance(record.args, tuple) else ()
        errors = [value for value in told if isinstance(value, BaseException)]
        if record.exc_info and record.exc_info[1]:
            errors.append(record.exc_info[1])
        kinds = [type(error).__name__ for error in errors]
        kinds += [value.__name__ for value in told if isinstance(value, type)]
        tell("any", f"log {record.levelname}: {record.msg}: {', '.join(kinds)}")


def raised(role: str, where: str, error: BaseException) -> None:
    tell(role, f"{where}: {type(error).__name__}")


async def write() -> None:
    producer = AIOKafkaProducer(bootstrap_servers=program.BOOTSTRAP, enable_idempotence=True)
    await producer.start()
    under_way: set[asyncio.Future[Any]] = set()

    def delivered(future: asyncio.Future[Any]) -> None:
        under_way.discard(future)
        if error := future.exception():
            raised("writer", "delivery", error)
        else:
            at["acknowledged"] += 1

    while not program.STOP.exists():
        for index in range(PARTITIONS):
            future = await producer.send(SOURCE, b"%d" % at["sent"], partition=index)
            under_way.add(future)
            future.add_done_callback(delivered)
            at["sent"] += 1
        await asyncio.sleep(0.06)
    while under_way:
        await asyncio.wait(under_way)
    say(f"SENT {at['sent']}")


def consumer(role: str) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(
        SOURCE,
        bootstrap_servers=program.BOOTSTRAP,
        group_id=f"{role}-{NAME}",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    )


async def read() -> None:
    reader = consumer("reader")
    await reader.start()
    while True:
        try:
            messages = await reader.getmany(timeout_ms=100)
            seen.update(int(record.value) for some in messages.values() for record in some)
            at["read"] = len(seen)
            if messages:
                await reader.commit()
        except Exception as error:  # noqa: BLE001 - every error is reported
            raised("reader", "getmany or commit", error)


async def copy() -> None:
    while True:
        reader = consumer("copier")
        producer = AIOKafkaProducer(
            bootstrap_servers=program.BOOTSTRAP, transactional_id=f"copier-{NAME}"
        )
        where = "start"
        try:
            await reader.start()
            await producer.start()
            while True:
                where = "getmany"
                messages = await reader.getmany(timeout_ms=100, max_records=500)
                if not messages:
                    continue
                where = "begin_transaction"
                await producer.begin_transaction()
                where = "send"
                ends = {}
                for place, some in messages.items():
                    for record in some:
                        await producer.send(TARGET, record.value, partition=record.partition)
                    ends[TopicPartition(*place)] = some[-1].offset + 1
                where = "send_offsets_to_transaction"
                await producer.send_offsets_to_transaction(ends, f"copier-{NAME}")
                where = "commit_transaction"
                await producer.commit_transaction()
                at["copied"] += sum(len(some) for some in messages.values())
        except Exception as error:  # noqa: BLE001 - every error is reported
            raised("copier", where, error)
        for client in (producer, reader):
            with contextlib.suppress(Exception):
                await client.stop()
        await asyncio.sleep(PAUSE_S)


async def main() -> None:
    logger = logging.getLogger("aiokafka")
    logger.setLevel(logging.WARNING)
    logger.addHandler(Told())
    logger.propagate = False
    work = [asyncio.create_task(coroutine) for coroutine in (write(), read(), copy())]
    while not any(task.done() and task.exception() for task in work):
        await asyncio.sleep(0.1)
        program.say_where()
    await asyncio.gather(*work)


asyncio.run(main())
