"""Pipelines with TLS, logins and ACLs, whose rights are minimal, missing or revoked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.client.client import AuthenticationError
from fencepost.client.security import Security
from fencepost.pipelines.batching import Limits
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.failures import NotAuthorizedError
from fencepost.pipelines.metrics import Metrics
from fencepost.pipelines.records import Batch, Output
from tests.support.certificates import Authority
from tests.support.cluster import READ_COMMITTED, unique
from tests.support.realm import BRIEF_MS, OAUTH, Realm, Right, realm
from tests.support.waits import until_async

SMALL = Limits(max_records=50, max_ms=50)


@pytest.fixture(scope="module")
def owner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Realm]:
    with realm(request, tmp_path_factory.mktemp("realm")) as found:
        yield found


class Copier:
    """Two topics, and a user's pipeline that copies the first topic to the second."""

    def __init__(self, owner: Realm) -> None:
        self.owner = owner
        self.source = owner.operator.create_topic(unique("in"))
        self.target = owner.operator.create_topic(unique("out"))
        self.group, self.name = unique("group"), unique("worker")
        self.count = 0

    @property
    def rights(self) -> list[Right]:
        """All rights that the pipeline needs; pipelines/README.md lists them."""
        return [
            Right("READ", "TOPIC", self.source),
            Right("WRITE", "TOPIC", self.target),
            Right("READ", "GROUP", self.group),
            Right("WRITE", "TRANSACTIONAL_ID", self.name),
        ]

    def fill(self, count: int) -> None:
        values = [b"%d" % number for number in range(self.count, self.count + count)]
        assert self.owner.operator.produce(self.source, values)["error_code"] == "none"
        self.count += count

    def pipeline(self, security: Security, *, bootstrap: str = "", **options: Any) -> ExactlyOnce:
        def copy(batch: Batch) -> list[Output]:
            return [Output(self.target, record.value) for record in batch]

        return ExactlyOnce(
            bootstrap or self.owner.bootstrap,
            group=self.group,
            topics=[self.source],
            handler=copy,
            transactional_id=self.name,
            options=Options(limits=SMALL, security=security, session_timeout_ms=1_000, **options),
        )

    async def run_to_end(self, security: Security, **where: str) -> Metrics:
        async with self.pipeline(security, **where) as pipeline:
            await asyncio.wait_for(pipeline.run(to_end=True, handle_signals=False), 60)
            return pipeline.metrics

    @contextlib.asynccontextmanager
    async def running(self, security: Security, **more: Any) -> AsyncIterator[asyncio.Task[None]]:
        async with self.pipeline(security, **more) as pipeline:
            task = asyncio.create_task(pipeline.run(handle_signals=False))
            try:
                yield task
            finally:
                pipeline.stop()
                await asyncio.wait([task], timeout=60)

    def copied(self) -> Counter[bytes | None]:
        return Counter(self.owner.operator.values(self.target, isolation=READ_COMMITTED))

    def assert_exact(self) -> None:
        self.owner.operator.settle(self.target)
        assert self.copied() == Counter(b"%d" % number for number in range(self.count))

    async def until_copied(self) -> None:
        async def is_copied() -> bool:
            return len(self.copied()) == self.count

        await until_async(is_copied, f"{self.count} records copied")


@pytest.fixture
def copier(owner: Realm) -> Copier:
    found = Copier(owner)
    found.fill(20)
    return found


async def test_rights_listed_in_the_readme_suffice_for_a_pipeline(
    owner: Realm, copier: Copier, caplog: pytest.LogCaptureFixture
) -> None:
    user = owner.new_user(*copier.rights)
    with caplog.at_level(logging.DEBUG):
        metrics = await copier.run_to_end(owner.security(user))
    copier.assert_exact()
    assert metrics.aborts == 0
    assert "Authenticated as" in caplog.text  # at DEBUG, aiokafka logs every request
    assert owner.properties(user)["sasl.password"] not in caplog.text


MISSING = [
    ("READ", "TOPIC", "the right READ on the topic"),
    ("WRITE", "TOPIC", "the right WRITE on the topic"),
    ("READ", "GROUP", "the right READ on the group"),
    ("WRITE", "TRANSACTIONAL_ID", "the right WRITE on the transactional id"),
]


@pytest.mark.parametrize(("operation", "kind", "told"), MISSING)
async def test_missing_right_is_named_by_the_pipeline(
    owner: Realm, copier: Copier, operation: str, kind: str, told: str
) -> None:
    rights = [right for right in copier.rights if right[:2] != (operation, kind)]
    user = owner.new_user(*rights)
    with pytest.raises(NotAuthorizedError, match=f"{told} .*is missing to user '{user}'"):
        await copier.run_to_end(owner.security(user))
    assert not copier.copied()


@pytest.mark.parametrize(
    ("operation", "kind", "told"),
    [MISSING[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in MISSING[1:])],
)
async def test_revoked_right_ends_the_pipeline_without_loss_or_duplicates(
    owner: Realm, copier: Copier, operation: str, kind: str, told: str
) -> None:
    user = owner.new_user(*copier.rights)
    security = owner.security(user)
    async with copier.running(security) as task:
        await copier.until_copied()
        lost = [right for right in copier.rights if right[:2] == (operation, kind)]
        owner.revoke(user, lost)
        copier.fill(20)
        with pytest.raises(NotAuthorizedError, match=f"{told}.* is missing"):
            await asyncio.wait_for(asyncio.shield(task), 60)
    owner.allow(user, lost)
    await copier.run_to_end(security)
    copier.assert_exact()


async def test_refused_login_ends_the_pipeline_at_once(
    owner: Realm, copier: Copier, tmp_path: Path
) -> None:
    user = owner.new_user(*copier.rights)
    with pytest.raises(AuthenticationError, match=f"user '{user}' cannot log in") as refused:
        await copier.run_to_end(owner.security(user, "not the password"))
    assert "not the password" not in str(refused.value)
    others = Authority(tmp_path)
    stranger = {**owner.properties(user), "ssl.truststore.location": str(others.truststore)}
    with pytest.raises(AuthenticationError, match="not signed by an authority"):
        await copier.run_to_end(Security.of(stranger))


async def test_pipeline_logs_in_with_a_certificate(owner: Realm, copier: Copier) -> None:
    user = unique("worker")
    security = Security.of(owner.certified(user))
    mutual = owner.addresses["MUTUAL"]
    owner.allow(user, copier.rights[1:])
    with pytest.raises(NotAuthorizedError, match="the right READ on the topic"):
        await copier.run_to_end(security, bootstrap=mutual)
    owner.allow(user, copier.rights[:1])
    await copier.run_to_end(security, bootstrap=mutual)
    copier.assert_exact()


async def test_pipeline_logs_in_with_a_token(owner: Realm, copier: Copier) -> None:
    user = unique("worker")
    owner.allow(user, copier.rights)
    settings = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.jaas.config": f'{OAUTH} required unsecuredLoginStringClaim_sub="{user}";',
        "ssl.truststore.location": str(owner.authority.truststore),
    }
    await copier.run_to_end(Security.of(settings))
    copier.assert_exact()


@pytest.mark.slow
async def test_pipeline_survives_expired_sessions(owner: Realm, copier: Copier) -> None:
    """aiokafka does not reauthenticate: it loses the connection, and opens another connection."""
    security = owner.security(owner.new_user(*copier.rights))
    async with copier.running(security, bootstrap=owner.addresses["BRIEF"]) as task:
        until = time.monotonic() + 3 * BRIEF_MS / 1000
        while time.monotonic() < until:
            copier.fill(20)
            await copier.until_copied()
        assert not task.done()
    copier.assert_exact()


@pytest.mark.slow
async def test_changed_password_ends_the_pipeline_at_its_next_connection(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with realm(request, tmp_path) as owner:
        copier = Copier(owner)
        copier.fill(20)
        user = owner.new_user(*copier.rights)
        async with copier.running(owner.security(user)) as task:
            await copier.until_copied()
            owner.set_password(user, "another")
            await asyncio.to_thread(owner.restart)
            with pytest.raises(AuthenticationError, match="cannot log in"):
                await asyncio.wait_for(asyncio.shield(task), 60)
        copier.fill(20)
        await copier.run_to_end(owner.security(user))
        copier.assert_exact()
