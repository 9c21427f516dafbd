"""Bookings go into both PostgreSQL and Kafka or into neither, even if a worker fails half-way.

The database is the one that libpq's environment names (PGHOST, PGPORT, PGUSER, PGDATABASE).
"""

from __future__ import annotations

import sys
from typing import Any

from psycopg import AsyncConnection

from examples.broker import create_topics, fresh, produce, read_topic, run
from fencepost.pipelines.batching import Limits
from fencepost.pipelines.exactly_once import Options
from fencepost.pipelines.failures import HandlerError
from fencepost.pipelines.postgres import Postgres
from fencepost.pipelines.records import Batch, Output
from fencepost.pipelines.serde import JSON
from fencepost.pipelines.two_phase import TwoPhase

PAYMENTS, ACCOUNTS = 1_000, 7
SETTINGS = ("transaction.two.phase.commit.enable=true",)


async def example(bootstrap: str) -> str | None:
    """Book payments, send each account's new balance, and fail once half-way."""
    source, target, group = fresh("payments"), fresh("balances"), fresh("bookkeeper")
    table = group.replace("-", "_")
    await create_topics(bootstrap, (source, 1), (target, 1))
    payments = [JSON.encode({"account": n % ACCOUNTS, "amount": n}) for n in range(PAYMENTS)]
    await produce(bootstrap, source, [(b"", payment, None) for payment in payments])
    async with await AsyncConnection.connect("", autocommit=True) as connection:
        await connection.execute(f"create table {table} (account int primary key, balance bigint)")
    crashed = False

    async def book(batch: Batch, database: AsyncConnection[Any]) -> list[Output]:
        nonlocal crashed
        balances = []
        for record in batch:
            cursor = await database.execute(
                f"insert into {table} values (%(account)s, %(amount)s) on conflict (account)"
                f" do update set balance = {table}.balance + %(amount)s returning *",
                record.value,
            )
            account, balance = await cursor.fetchone() or (0, 0)
            balances.append(Output(target, {"balance": balance}, b"%d" % account))
            if record.offset > PAYMENTS // 2 and not crashed:
                crashed = True
                raise MemoryError("half-way")
        return balances

    for attempt in (1, 2):
        async with TwoPhase(
            bootstrap,
            group=group,
            topics=[source],
            handler=book,
            transactional_id=group,
            partner=Postgres(""),
            options=Options(limits=Limits(max_records=100), value_serde=JSON),
        ) as pipeline:
            try:
                await pipeline.run(to_end=True)
            except HandlerError as error:
                print(f"attempt {attempt} failed after {pipeline.metrics.records_in}: {error}")
            else:
                print(f"attempt {attempt} booked the remaining {pipeline.metrics.records_in}")
    async with await AsyncConnection.connect("") as connection:
        cursor = await connection.execute(f"select account, balance from {table}")
        booked = dict(await cursor.fetchall())
    sent = await read_topic(bootstrap, target)
    last = {int(record.key): JSON.load(record.value)["balance"] for record in sent}
    wanted = {n: sum(range(n, PAYMENTS, ACCOUNTS)) for n in range(ACCOUNTS)}
    if not crashed or len(sent) != PAYMENTS:
        return f"{len(sent)} of {PAYMENTS} records, crashed: {crashed}"
    return None if booked == last == wanted else f"booked {booked}, sent {last}, not {wanted}"


if __name__ == "__main__":
    sys.exit(run(__doc__, example, SETTINGS))
