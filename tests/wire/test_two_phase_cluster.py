"""``pipelines.two_phase`` on three failing brokers, and on a broker with TLS, logins and ACLs.

The scenarios of a single broker are in ``test_two_phase_pipeline.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from fencepost.client.client import AuthenticationError
from fencepost.client.security import PLAINTEXT, Security
from fencepost.coordinator.runtime.key_partition import partition_for
from fencepost.pipelines.batching import Limits
from fencepost.pipelines.exactly_once import Options
from fencepost.pipelines.failures import NotAuthorizedError
from fencepost.pipelines.records import Batch, Output
from fencepost.pipelines.two_phase import TwoPhase, resolve
from fencepost.testing import Cluster, Kafka
from tests.support.cluster import unique
from tests.support.postgres import PostgresServer
from tests.support.targets import SETTINGS
from tests.wire.test_two_phase_pipeline import MODES, SWITCH

USERS = {"teller": "te11er", "guest": "gu3st"}
TRANSACTIONS = "__transaction_state"
PER_TRANSACTION = 2

Hook = Callable[[int], Awaitable[None]]
"""Called with the number of the transaction."""


async def nothing(_: int) -> None:
    """Do nothing with the transaction."""


class Branch:
    """A group, a table, two topics of one partition each, and pipelines between them."""

    def __init__(self, kafka: Kafka | Cluster, server: PostgresServer) -> None:
        self.kafka, self.server = kafka, server
        self.name = unique("branch")
        self.source, self.target = kafka.topic(f"{self.name}-in", 1), f"{self.name}-out"
        kafka.topic(self.target, 1)
        self.table = self.name.replace("-", "_")
        self.count = 0
        self.sql(f"create table {self.table} (value bigint unique)")

    def sql(self, text: str) -> list[Any]:
        import psycopg

        with psycopg.connect(self.server.conninfo, autocommit=True) as connection:
            cursor = connection.execute(text)
            return cursor.fetchall() if cursor.description else []

    def fill(self, count: int) -> None:
        values = [b"%d" % number for number in range(self.count, self.count + count)]
        self.kafka.produce(self.source, *values)
        self.count += count

    def partner(self, *, prepare: bool = False, decided: Hook = nothing) -> Any:
        """Return a partner that calls ``decided`` after each decision, before EndTxn."""
        from fencepost.pipelines.postgres import Postgres

        class Watched(Postgres):
            number = 0

            async def decide(self) -> None:
                await super().decide()
                self.number += 1
                await decided(self.number - 1)

        return Watched(self.server.conninfo, prepare=prepare)

    async def run(
        self,
        partner: Any,
        *,
        security: Security = PLAINTEXT,
        written: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run a worker until it ends; call ``written`` once a transaction's records are sent."""

        async def book(batch: Batch, connection: Any) -> list[Output]:
            query = f"insert into {self.table} values (%s)"
            for record in batch:
                await connection.execute(query, (int(record.value or b""),))
            return [Output(self.target, record.value) for record in batch]

        async def before_commit(_: Batch) -> None:
            if written is not None:
                await written()

        async with TwoPhase(
            self.kafka.bootstrap,
            group=self.name,
            topics=[self.source],
            handler=book,
            transactional_id=self.name,
            partner=partner,
            options=Options(
                limits=Limits(max_records=PER_TRANSACTION, max_ms=20),
                before_commit=before_commit,
                group_instance_id="teller",
                security=security,
            ),
        ) as pipeline:
            await pipeline.run(to_end=True, handle_signals=False)

    def check(self) -> None:
        wanted = [*range(self.count)]
        rows = [row[0] for row in self.sql(f"select value from {self.table} order by 1")]
        found = self.kafka.records(self.target, isolation="read_committed", at_least=self.count)
        assert (rows, [int(record.value or b"") for record in found]) == (wanted, wanted)
        self.kafka.assert_committed(self.name, {self.source: {0: self.count}})
        assert not self.kafka.transactions()
        assert not self.sql("select gid from pg_prepared_xacts")


@pytest.fixture(scope="module")
def brokers() -> Iterator[Cluster]:
    with Cluster(3, config=SWITCH) as cluster:
        yield cluster


class Faults:
    """Kills a broker in each of the first transactions, and restarts it before the next kill."""

    def __init__(self, cluster: Cluster, branch: Branch) -> None:
        self._cluster, self._branch = cluster, branch
        self._down: int | None = None
        self.killed: list[str] = []

    def leader(self) -> int:
        return self._cluster.leader(self._branch.target)

    def coordinator(self) -> int:
        count = len(self._cluster.image.topics[TRANSACTIONS].partitions)
        return self._cluster.leader(TRANSACTIONS, partition_for(self._branch.name, count))

    def restart(self) -> None:
        if self._down is not None:
            self._cluster.restart(self._down)
            self._down = None
            for name, topic in self._cluster.image.topics.items():
                for index in range(len(topic.partitions)):
                    self._cluster.wait_for_isr(name, index)

    def kill(self, victim: Callable[[], int], when: str) -> None:
        self.restart()
        self._down = victim()
        self._cluster.kill(self._down)
        self.killed.append(f"{victim.__name__} {when}")


@pytest.mark.slow
@MODES
async def test_killed_leader_and_coordinator_tear_no_transaction(
    brokers: Cluster, postgres: PostgresServer, prepare: bool
) -> None:
    branch = Branch(brokers, postgres)
    faults = Faults(brokers, branch)
    due = [
        (victim, when)
        for victim in (faults.leader, faults.coordinator)
        for when in ("written", "decided")
    ]

    async def strike(when: str) -> None:
        if due and due[0][1] == when:
            await asyncio.to_thread(faults.kill, *due.pop(0))

    async def decided(_: int) -> None:
        await strike("decided")

    async def written() -> None:
        await strike("written")

    branch.fill(PER_TRANSACTION * (len(due) + 2))
    await branch.run(branch.partner(prepare=prepare, decided=decided), written=written)
    assert faults.killed == [
        *("leader written", "leader decided"),
        *("coordinator written", "coordinator decided"),
    ]
    await asyncio.to_thread(faults.restart)
    branch.check()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Yield a broker that only users with rights may use, over SASL_SSL."""
    config = {**SETTINGS, **SWITCH}
    folder = tmp_path_factory.mktemp("secured")
    with Kafka(folder, config, users=USERS, tls=True, acls=[]) as kafka:
        yield kafka


def granted(branch: Branch, user: str, *on_id: str) -> None:
    """Give a user the rights of docs/two-phase-commit.md; ``on_id`` are the rights on the id."""
    branch.kafka.acl(
        f"{user} read topic:{branch.source}",
        f"{user} write topic:{branch.target}",
        f"{user} read group:{branch.name}",
        *(f"{user} {operation} transactional-id:{branch.name}" for operation in on_id),
    )


def security(kafka: Kafka, user: str, **more: str) -> Security:
    """Return a user's settings for SASL_SSL with SCRAM-SHA-512."""
    found = Security.of({**kafka.client_config(user, style="confluent"), **more})
    assert (found.protocol, found.mechanism) == ("SASL_SSL", "SCRAM-SHA-512")
    return found


@pytest.mark.slow
@MODES
async def test_secured_worker_resolves_its_in_doubt_transaction(
    secured: Kafka, postgres: PostgresServer, prepare: bool
) -> None:
    branch = Branch(secured, postgres)
    granted(branch, "teller", "write", "two_phase_commit")
    login = security(secured, "teller")

    async def lose_the_first(number: int) -> None:
        if not number:
            raise ConnectionError("the answer is lost")

    branch.fill(4)
    await branch.run(branch.partner(prepare=prepare, decided=lose_the_first), security=login)
    branch.check()
    partner = branch.partner()
    assert await resolve(secured.bootstrap, partner, branch.name, security=login) is None


async def test_worker_without_the_right_to_two_phase_commit_names_it(
    secured: Kafka, postgres: PostgresServer
) -> None:
    branch = Branch(secured, postgres)
    granted(branch, "guest", "write")
    branch.fill(1)
    with pytest.raises(NotAuthorizedError, match=r"TWO_PHASE_COMMIT .* to user 'guest'"):
        await branch.run(branch.partner(), security=security(secured, "guest"))


async def test_worker_with_a_wrong_password_ends(secured: Kafka, postgres: PostgresServer) -> None:
    branch = Branch(secured, postgres)
    wrong = security(secured, "teller", **{"sasl.password": "guessed"})
    with pytest.raises(AuthenticationError):
        await branch.run(branch.partner(), security=wrong)
