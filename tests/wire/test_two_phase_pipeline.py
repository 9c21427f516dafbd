"""``pipelines.two_phase`` on a broker and a PostgreSQL server: both commit, or neither does.

The sweep over all steps is ``crash/test_two_phase_sweep.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from fencepost.pipelines.batching import Limits
from fencepost.pipelines.exactly_once import Options
from fencepost.pipelines.failures import (
    FencedTooOftenError,
    GaveUpError,
    HandlerError,
    MixedOutcomeError,
    PipelineError,
    RetryPolicy,
)
from fencepost.pipelines.records import Batch, Output
from fencepost.pipelines.two_phase import Outcome, TransactionOwner, TwoPhase, resolve
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.daemon import ROOT, Daemon
from tests.support.postgres import USER, PostgresServer
from tests.support.processes import Child
from tests.support.targets import SETTINGS
from tests.support.waits import DEADLINE_S, until, until_async
from tests.wire.command_line import cli
from tests.wire.test_cli import rows

SWITCH = {"transaction.two.phase.commit.enable": "true"}
MODES = pytest.mark.parametrize("prepare", [False, True], ids=["row", "prepared"])


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    started = Daemon(tmp_path_factory.mktemp("two-phase"), {**SETTINGS, **SWITCH}).start()
    yield started
    started.stop()


class Bench:
    """Topics, a group, a table, and pipelines between them."""

    def __init__(self, daemon: Daemon, server: PostgresServer) -> None:
        self.daemon, self.server = daemon, server
        self.name = unique("orders")
        with Cluster(daemon.bootstrap) as cluster:
            self.source = cluster.create_topic(f"{self.name}-in")
            self.target = cluster.create_topic(f"{self.name}-out")
        self.table = self.name.replace("-", "_")
        self.sql(f"create table {self.table} (value bigint unique deferrable initially deferred)")

    def sql(self, text: str) -> list[Any]:
        import psycopg

        with psycopg.connect(self.server.conninfo, autocommit=True) as connection:
            cursor = connection.execute(text)
            return cursor.fetchall() if cursor.description else []

    def fill(self, *values: int) -> None:
        with Cluster(self.daemon.bootstrap) as cluster:
            cluster.produce(self.source, [b"%d" % value for value in values])

    def partner(self, **how: Any) -> Any:
        from fencepost.pipelines.postgres import Postgres

        return Postgres(self.server.conninfo, **how)

    async def write(self, batch: Batch, connection: Any) -> list[Output]:
        for record in batch:
            await connection.execute(f"insert into {self.table} values (%s)", (int(record.value),))
        return [Output(self.target, record.value) for record in batch]

    def pipeline(self, handler: Any = None, partner: Any = None, **options: Any) -> TwoPhase[Any]:
        return TwoPhase(
            self.daemon.bootstrap,
            group=self.name,
            topics=[self.source],
            handler=handler or self.write,
            transactional_id=self.name,
            partner=partner or self.partner(),
            options=Options(
                **{
                    "limits": Limits(max_records=2, max_ms=20),
                    "session_timeout_ms": 1_000,
                    "group_instance_id": "worker",
                    **options,
                }
            ),
        )

    async def run(self, *args: Any, **options: Any) -> None:
        async with self.pipeline(*args, **options) as pipeline:
            await pipeline.run(to_end=True, handle_signals=False)

    @contextlib.asynccontextmanager
    async def owner(self, **how: Any) -> AsyncIterator[TransactionOwner]:
        owner = TransactionOwner(self.daemon.bootstrap, self.partner(**how), self.name)
        try:
            yield owner
        finally:
            await owner.close()

    @property
    def rows(self) -> list[int]:
        return [row[0] for row in self.sql(f"select value from {self.table} order by 1")]

    @property
    def records(self) -> list[int]:
        with Cluster(self.daemon.bootstrap) as cluster:
            return [int(value) for value in cluster.values(self.target, isolation=READ_COMMITTED)]

    @property
    def offset(self) -> int:
        with Cluster(self.daemon.bootstrap) as cluster:
            return max(0, cluster.committed(self.name, self.source))

    @property
    def is_open(self) -> bool:
        with Cluster(self.daemon.bootstrap) as cluster:
            return cluster.lso(self.target) < cluster.offset(self.target)

    def check(self, *values: int) -> None:
        """Check that all three places have exactly these values, and nothing is in doubt."""
        assert (self.rows, self.records, self.offset) == ([*values], [*values], len(values))
        assert not self.is_open
        assert not self.sql("select gid from pg_prepared_xacts")


@pytest.fixture
def bench(daemon: Daemon, postgres: PostgresServer) -> Bench:
    return Bench(daemon, postgres)


@MODES
async def test_rows_records_and_offsets_are_committed_together(bench: Bench, prepare: bool) -> None:
    bench.fill(1, 2, 3, 4, 5)
    await bench.run(partner=bench.partner(prepare=prepare))
    bench.check(1, 2, 3, 4, 5)


@MODES
async def test_failing_handler_leaves_no_rows_and_no_records(bench: Bench, prepare: bool) -> None:
    bench.fill(1, 2)

    async def fail(batch: Batch, connection: Any) -> list[Output]:
        await bench.write(batch, connection)
        raise ValueError("no")

    with pytest.raises(HandlerError, match="ValueError: no"):
        await bench.run(fail, partner=bench.partner(prepare=prepare))
    bench.check()
    bench.fill(3)
    await bench.run()
    bench.check(1, 2, 3)


@MODES
async def test_constraint_violated_at_the_decision_aborts_in_kafka(
    bench: Bench, prepare: bool
) -> None:
    """A deferred constraint fails at COMMIT, after records and offsets have reached the broker."""
    bench.sql(f"insert into {bench.table} values (2)")
    bench.fill(1, 2)
    with pytest.raises(PipelineError, match="UniqueViolation"):
        await bench.run(partner=bench.partner(prepare=prepare))
    assert (bench.rows, bench.records, bench.offset, bench.is_open) == ([2], [], 0, False)


@pytest.mark.parametrize("method", ["commit", "rollback"])
async def test_handler_cannot_end_the_transaction_itself(bench: Bench, method: str) -> None:
    bench.fill(1)

    async def end(batch: Batch, connection: Any) -> list[Output]:
        await bench.write(batch, connection)
        await getattr(connection, method)()
        return []

    with pytest.raises(HandlerError, match=rf"{method}\(\) cannot be used during a two-phase"):
        await bench.run(end)
    bench.check()


async def test_handler_may_use_savepoints(bench: Bench) -> None:
    bench.fill(1, 2)

    async def write(batch: Batch, connection: Any) -> list[Output]:
        with contextlib.suppress(ZeroDivisionError):
            async with connection.transaction():
                await connection.execute(f"insert into {bench.table} values (9)")
                raise ZeroDivisionError
        return await bench.write(batch, connection)

    await bench.run(write)
    bench.check(1, 2)


async def prepared_in_kafka(bench: Bench, partner: Any, *, decided: bool) -> Any:
    """Leave a transaction open in Kafka; with ``decided`` the database has decided to commit."""
    owner = TransactionOwner(bench.daemon.bootstrap, partner, bench.name)
    await owner.claim()
    with Cluster(bench.daemon.bootstrap) as cluster:
        from tests.support.batches import batch

        producer_id, epoch = owner.identity
        data = batch(
            [b"1"], producer_id=producer_id, producer_epoch=epoch, sequence=0, transactional=True
        )
        answer = cluster.produce(bench.target, data, version=12, transactional_id=bench.name)
        assert answer["error_code"] == "none"
    async with partner.transaction(owner.key, owner.identity) as connection:
        await connection.execute(f"insert into {bench.table} values (1)")
        if decided:
            await partner.decide()
    return owner


@MODES
@pytest.mark.parametrize("decided", [True, False])
async def test_resolve_ends_a_transaction_as_the_database_has_decided(
    bench: Bench, prepare: bool, decided: bool
) -> None:
    lost = await prepared_in_kafka(bench, bench.partner(prepare=prepare), decided=decided)
    assert bench.is_open
    assert bench.rows == ([1] if decided and not prepare else [])
    found = await resolve(bench.daemon.bootstrap, bench.partner(), bench.name)
    assert found is (Outcome.COMMITTED if decided else Outcome.ABORTED)
    assert bench.rows == bench.records == ([1] if decided else [])
    assert not bench.is_open
    assert not bench.sql("select gid from pg_prepared_xacts")
    assert await resolve(bench.daemon.bootstrap, bench.partner(), bench.name) is None
    await lost.close()


@MODES
async def test_former_owner_cannot_decide_after_a_claim(bench: Bench, prepare: bool) -> None:
    """The worker is paused between its records and its decision, and then continues."""
    from fencepost.pipelines.failures import PartnerFencedError

    partner = bench.partner(prepare=prepare)
    owner = await prepared_in_kafka(bench, partner, decided=False)
    async with partner.transaction(owner.key, owner.identity) as connection:
        await connection.execute(f"insert into {bench.table} values (1)")
        found = await resolve(bench.daemon.bootstrap, bench.partner(), bench.name)
        assert found is Outcome.ABORTED
        with pytest.raises(PartnerFencedError):
            await partner.decide()
    assert bench.rows == bench.records == []
    await owner.close()


async def test_claim_waits_for_a_former_owner_that_is_deciding(bench: Bench) -> None:
    """A transaction that may still commit has locked the row of the decision."""
    partner = bench.partner()
    owner = await prepared_in_kafka(bench, partner, decided=False)
    async with partner.transaction(owner.key, owner.identity) as connection:
        await connection.execute(f"insert into {bench.table} values (1)")
        await connection.execute(
            "update fencepost_transactions set producer_id = %s, producer_epoch = %s"
            " where transactional_id = %s",
            (*owner.identity, bench.name),
        )
        claim = asyncio.create_task(resolve(bench.daemon.bootstrap, bench.partner(), bench.name))

        async def waiting() -> bool:
            return bool(bench.sql("select 1 from pg_locks where not granted"))

        await until_async(waiting, "a claim that waits for the row")
        await partner.decide()
        assert await claim is Outcome.COMMITTED
    assert bench.rows == bench.records == [1]
    await owner.close()


async def test_idle_database_session_is_ended_and_its_transaction_aborted(bench: Bench) -> None:
    partner = bench.partner(idle_ms=1_000)
    owner = await prepared_in_kafka(bench, partner, decided=False)
    with contextlib.suppress(Exception):
        async with partner.transaction(owner.key, owner.identity) as connection:
            await connection.execute("update fencepost_transactions set producer_id = -1")
            assert await resolve(bench.daemon.bootstrap, bench.partner(), bench.name) is (
                Outcome.ABORTED
            )
    assert not bench.is_open
    await owner.close()


async def test_two_workers_with_one_transactional_id_never_tear_a_transaction(
    bench: Bench,
) -> None:
    """Each InitProducerId fences the other worker. Both give up; a third run completes the work."""
    bench.fill(*range(40))
    policy = RetryPolicy(max_fences=2)
    workers = [
        bench.run(retry=policy, group_instance_id=name, partner=bench.partner(prepare=prepare))
        for name, prepare in (("a", False), ("b", True))
    ]
    ended = await asyncio.gather(*workers, return_exceptions=True)
    assert all(isinstance(result, FencedTooOftenError | None) for result in ended), ended
    await bench.run(session_timeout_ms=1_000)
    bench.check(*range(40))


async def test_worker_survives_a_restart_of_the_database(bench: Bench) -> None:
    bench.fill(1, 2)
    killed = False

    async def write(batch: Batch, connection: Any) -> list[Output]:
        nonlocal killed
        if not killed:
            killed = True
            await asyncio.to_thread(bench.server.kill)
            await asyncio.to_thread(bench.server.start)
        return await bench.write(batch, connection)

    await bench.run(write)
    assert killed
    bench.check(1, 2)


async def test_unreachable_database_ends_the_worker_after_give_up_ms(bench: Bench) -> None:
    from fencepost.pipelines.postgres import Postgres

    bench.fill(1)
    with pytest.raises(GaveUpError, match="PostgreSQL: connection failed"):
        await bench.run(
            partner=Postgres("host=127.0.0.1 port=1"), retry=RetryPolicy(give_up_ms=200)
        )


async def test_broker_without_two_phase_commit_is_named(
    fencepost: Daemon, postgres: PostgresServer
) -> None:
    bench = Bench(fencepost, postgres)
    bench.fill(1)
    with pytest.raises(PipelineError, match=r"transaction\.two\.phase\.commit\.enable=true"):
        await bench.run()


async def test_database_without_prepared_transactions_is_named(bench: Bench) -> None:
    bench.sql("alter system set max_prepared_transactions = 0")
    bench.server.kill()
    bench.server.start()
    try:
        with pytest.raises(PipelineError, match="max_prepared_transactions = 0"):
            await bench.run(partner=bench.partner(prepare=True))
    finally:
        bench.sql("alter system reset max_prepared_transactions")
        bench.server.kill()
        bench.server.start()


async def test_decision_is_durable_although_synchronous_commit_is_off(bench: Bench) -> None:
    """A trigger records the setting under which the row of the decision is written."""
    bench.fill(1)
    await bench.run()
    bench.sql("create table settings_seen (value text)")
    bench.sql(
        "create function note_setting() returns trigger language plpgsql as $$ begin"
        " insert into settings_seen values (current_setting('synchronous_commit'));"
        " return null; end $$"
    )
    bench.sql(
        "create trigger note_setting after update on fencepost_transactions"
        " execute function note_setting()"
    )

    async def write(batch: Batch, connection: Any) -> list[Output]:
        await connection.execute("set local synchronous_commit = off")
        return await bench.write(batch, connection)

    bench.fill(2)
    try:
        await bench.run(write)
    finally:
        bench.sql("drop trigger note_setting on fencepost_transactions")
    assert set(bench.sql("select value from settings_seen")) == {("on",)}
    bench.check(1, 2)


@pytest.mark.slow
async def test_two_phase_example_succeeds(daemon: Daemon, postgres: PostgresServer) -> None:
    where = {"PGHOST": "127.0.0.1", "PGPORT": str(postgres.port), "PGUSER": USER}
    command = [sys.executable, "-m", "examples.two_phase", "--bootstrap", daemon.bootstrap]
    example = Child(command, env={**os.environ, **where}, cwd=ROOT)
    assert await asyncio.to_thread(example.wait, DEADLINE_S) == 0, example.tail()
    assert example.lines[-1] == "checked: as it should be"


async def test_handler_whose_database_session_timed_out_is_called_again(bench: Bench) -> None:
    """The database ends the session, because otherwise a claim would wait for the session."""
    bench.fill(1, 2)
    paused = False

    async def write(batch: Batch, connection: Any) -> list[Output]:
        nonlocal paused
        outputs = await bench.write(batch, connection)
        if not paused:
            paused = True
            pid = connection.info.backend_pid
            query = f"select 1 from pg_stat_activity where pid = {pid}"
            await asyncio.to_thread(until, lambda: not bench.sql(query), "the session's end")
            await connection.execute("select 1")
        return outputs

    await bench.run(write, partner=bench.partner(idle_ms=100))
    assert paused
    bench.check(1, 2)


def abort(bench: Bench, *more: str, status: int = 0) -> str:
    """Abort the open transaction as an administrator; return the action or the refusal."""
    named = ("txns", "resolve", bench.name, "--abort", "--execute", *more, "--json")
    (row,) = rows(cli(bench.daemon.bootstrap, *named, status=status))
    return str(row["action"])


def aborted_after(bench: Bench, method: str, *, prepare: bool) -> Any:
    """Return a partner; during its first call of ``method`` an administrator aborts."""
    partner = bench.partner(prepare=prepare)
    plain, calls = getattr(partner, method), []

    async def followed_by_abort() -> None:
        await plain()
        if not calls:
            calls.append(await asyncio.to_thread(abort, bench, "--force"))

    setattr(partner, method, followed_by_abort)
    return partner


async def settle(bench: Bench) -> None:
    """Remove the rows and the decision, as the page about mixed outcomes advises."""
    bench.sql(f"delete from {bench.table}")
    bench.sql(
        "update fencepost_transactions set producer_id = null, producer_epoch = null"
        f" where transactional_id = '{bench.name}'"
    )


async def test_administrators_abort_after_the_commit_is_a_mixed_outcome(bench: Bench) -> None:
    bench.fill(1, 2)
    with pytest.raises(MixedOutcomeError) as caught:
        await bench.run(partner=aborted_after(bench, "decide", prepare=False))
    first, second = str(caught.value).split(", and then ")
    assert "the database committed it at 20" in first
    assert second.startswith("client fencepost-resolve@127.0.0.1 aborted it in Kafka at 20")
    assert (bench.rows, bench.records, bench.offset) == ([1, 2], [], 0)
    for _ in range(2):  # a claim must not hide the mixed outcome from the next claim
        with pytest.raises(MixedOutcomeError, match="aborted it in Kafka"):
            await bench.run()
    await settle(bench)
    await bench.run()
    bench.check(1, 2)


async def test_prepared_rows_are_rolled_back_after_an_administrators_abort(bench: Bench) -> None:
    bench.fill(1, 2)
    await bench.run(partner=aborted_after(bench, "decide", prepare=True))
    bench.check(1, 2)


@MODES
async def test_batch_is_retried_after_an_administrators_abort(bench: Bench, prepare: bool) -> None:
    bench.fill(1, 2)
    calls: list[str] = []

    async def abort_once(batch: Batch) -> None:
        if not calls:
            calls.append(await asyncio.to_thread(abort, bench, "--force"))

    await bench.run(partner=bench.partner(prepare=prepare), before_commit=abort_once)
    assert calls == ["aborted"]
    bench.check(1, 2)


async def test_decision_after_an_administrators_abort_is_a_mixed_outcome(bench: Bench) -> None:
    """A worker that is paused before its decision does not notice the abort."""
    partner = bench.partner()
    owner = await prepared_in_kafka(bench, partner, decided=False)
    abort(bench, "--force")
    async with partner.transaction(owner.key, owner.identity):
        await partner.decide()
    await owner.close()
    with pytest.raises(MixedOutcomeError) as caught:
        await resolve(bench.daemon.bootstrap, bench.partner(), bench.name)
    first, second = str(caught.value).split(", and then ")
    assert "aborted it in Kafka at 20" in first, str(caught.value)
    assert second.startswith("the database committed it at 20")


@MODES
async def test_transaction_kept_by_a_killed_claim_is_committed(bench: Bench, prepare: bool) -> None:
    lost = await prepared_in_kafka(bench, bench.partner(prepare=prepare), decided=True)
    await lost._init_producer()  # like a worker that was killed after its first InitProducerId
    await lost.close()
    found = await resolve(bench.daemon.bootstrap, bench.partner(), bench.name)
    assert found is Outcome.COMMITTED
    assert bench.rows == bench.records == [1]


async def test_administrators_abort_of_a_kept_transaction_rolls_prepared_rows_back(
    bench: Bench,
) -> None:
    lost = await prepared_in_kafka(bench, bench.partner(prepare=True), decided=True)
    await lost._init_producer()
    await lost.close()
    assert abort(bench, "--force") == "aborted"
    found = await resolve(bench.daemon.bootstrap, bench.partner(), bench.name)
    assert found is Outcome.ABORTED
    assert bench.rows == bench.records == []
    assert not bench.sql("select gid from pg_prepared_xacts")


async def test_prepared_rows_with_unknown_kafka_outcome_are_not_resolved(bench: Bench) -> None:
    """An InitProducerId after the abort leaves a state that allows both outcomes."""
    lost = await prepared_in_kafka(bench, bench.partner(prepare=True), decided=True)
    abort(bench, "--force")
    await lost._init_producer()
    with pytest.raises(PipelineError, match="state Empty of the id in Kafka does not show"):
        await resolve(bench.daemon.bootstrap, bench.partner(), bench.name)
    ((gid,),) = bench.sql("select gid from pg_prepared_xacts")
    bench.sql(f"rollback prepared '{gid}'")
    assert await resolve(bench.daemon.bootstrap, bench.partner(), bench.name) is None
    await lost.close()


async def test_commands_do_not_abort_a_two_phase_commit_without_force(bench: Bench) -> None:
    lost = await prepared_in_kafka(bench, bench.partner(), decided=True)
    assert "its database may have decided to commit" in abort(bench, status=1)
    named = ("txns", "terminate", bench.name, "--execute")
    done = cli(bench.daemon.bootstrap, *named, status=1)
    assert "part of a two-phase commit" in done.stderr
    assert await resolve(bench.daemon.bootstrap, bench.partner(), bench.name) is Outcome.COMMITTED
    await lost.close()
