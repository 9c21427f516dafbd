"""A worker of ``pipelines.two_phase`` that is killed, or loses its database, at a chosen step.

    python -m tests.crash.two_phase_worker

A step is a write request to the broker or the database. Environment variables name the broker, the
database and the fault. FAULT=app kills this process, and FAULT=database kills all processes of
PostgreSQL. AT=N is the moment of the kill: an odd number is before a step, an even number after a
step. If the database is killed after a step, it has done the step, but this process gets no
response. When the worker ends, it prints ``steps`` and the number and names of the steps.

BUG=kafka-first commits in Kafka before the database has decided, which the sweep must detect.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
from aiokafka import AIOKafkaProducer
from aiokafka.client import AIOKafkaClient

from fencepost.client.client import AsyncWireClient
from fencepost.pipelines.batching import Limits
from fencepost.pipelines.exactly_once import Options
from fencepost.pipelines.postgres import Postgres
from fencepost.pipelines.records import Batch, Output
from fencepost.pipelines.two_phase import TwoPhase
from tests.support.postgres import children_of, kill_all

SOURCE, TARGET, GROUP, TABLE = "source", "target", "copier", "copied"
BATCH = 2

WRITES = {
    *("InitProducerId", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn"),
    *("ProduceRequest", "AddPartitionsToTxnRequest"),
}
"""Requests that change a broker's state. The names of aiokafka's requests are their classes."""


class Steps:
    """Counts the steps, and causes the fault at one of them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._fault = os.environ.get("FAULT", "")
        self._at = int(os.environ.get("AT", "0"))
        self._moments = 0

    async def around(self, name: str, work: Callable[[], Awaitable[Any]], connection: Any) -> Any:
        self.names.append(name)
        if self._is_due():
            await self._strike()
        answer = await work()
        if self._is_due():
            await self._strike()
            if self._fault == "database" and connection is not None:
                await connection.close()
                raise psycopg.OperationalError("the answer is lost")
        return answer

    def _is_due(self) -> bool:
        self._moments += 1
        return bool(self._fault) and self._moments == self._at

    async def _strike(self) -> None:
        if self._fault == "app":
            os.kill(os.getpid(), signal.SIGKILL)
        print("killed the database", flush=True)
        postmaster = int(os.environ["POSTMASTER"])
        await asyncio.to_thread(kill_all, [postmaster, *children_of(postmaster)])


def count(steps: Steps) -> None:
    """Replace methods of the clients, so that every step is counted."""

    def wrap(owner: Any, method: str, named: Callable[..., str], *, is_database: bool) -> None:
        plain = getattr(owner, method)

        async def counted(self: Any, *args: Any, **how: Any) -> Any:
            name = named(*args)
            if not name:
                return await plain(self, *args, **how)
            connection = self if is_database else None
            return await steps.around(name, lambda: plain(self, *args, **how), connection)

        setattr(owner, method, counted)

    wrap(
        AsyncWireClient,
        "call",
        lambda api, *_: api if api in WRITES else "",
        is_database=False,
    )
    wrap(
        AIOKafkaClient,
        "send",
        lambda _, request: name if (name := type(request).__name__) in WRITES else "",
        is_database=False,
    )
    for method in ("tpc_begin", "tpc_prepare", "tpc_commit", "tpc_rollback"):
        wrap(psycopg.AsyncConnection, method, lambda *_, name=method: name, is_database=True)
    wrap(
        psycopg.AsyncConnection,
        "execute",
        lambda query, *_: " ".join(str(query).split()[:2]) if "select" not in query else "",
        is_database=True,
    )


class KafkaFirst(TwoPhase[Any]):
    """Commits in Kafka, and then in the database."""

    async def _commit(self, producer: AIOKafkaProducer) -> None:
        await producer.commit_transaction()
        await self._partner.decide()
        await self._partner.finish(self._owner.key, self._owner.identity)


async def write(batch: Batch, connection: psycopg.AsyncConnection[Any]) -> list[Output]:
    """Write each value into the table and to both partitions of the target."""
    for record in batch:
        await connection.execute(f"insert into {TABLE} values (%s)", (int(record.value or b""),))
    return [
        Output(TARGET, record.value, partition=partition)
        for record in batch
        for partition in range(2)
    ]


async def run() -> None:
    steps = Steps()
    count(steps)
    worker = KafkaFirst if os.environ.get("BUG") == "kafka-first" else TwoPhase
    pipeline = worker(
        os.environ["BOOTSTRAP"],
        group=GROUP,
        topics=[SOURCE],
        handler=write,
        transactional_id=GROUP,
        partner=Postgres(os.environ["CONNINFO"], prepare=os.environ.get("PREPARE") == "1"),
        options=Options(
            limits=Limits(max_records=BATCH, max_ms=20),
            # A static member, so that its successor need not wait until the group removes the
            # member.
            group_instance_id="copier",
            producer={"retry_backoff_ms": 20, "linger_ms": 0},
            consumer={"fetch_max_wait_ms": 20},
        ),
    )
    async with pipeline:
        await pipeline.run(to_end=True)
    print("steps", len(steps.names), *steps.names, sep="\n", flush=True)


if __name__ == "__main__":
    asyncio.run(run())
