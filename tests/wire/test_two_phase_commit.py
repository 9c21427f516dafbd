"""KIP-939 over the wire, on a separate daemon: raw v6 requests, and kill -9 between the phases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from fencepost.client.client import BrokerUnreachable, WireClient
from fencepost.protocol.errors import WireError
from tests.support.batches import batch
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.daemon import Daemon
from tests.support.quick import only
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.wire.command_line import cli

INIT_PRODUCER_ID = 22
SWITCH = {"transaction.two.phase.commit.enable": "true"}
NOBODY = (-1, -1)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    started = Daemon(tmp_path_factory.mktemp("two-phase"), {**SETTINGS, **SWITCH}).start()
    yield started
    started.stop()


def init(client: WireClient, name: str, *, keep: bool = False, two_phase: bool = True) -> Any:
    return client.call(
        "InitProducerId",
        6,
        to_transaction=name,
        entity=lambda f: f.message(
            transactional_id=name,
            transaction_timeout=1_500,
            producer_id=-1,
            producer_epoch=-1,
            enable2_pc=two_phase,
            keep_prepared_txn=keep,
        ),
    )


def test_two_phase_commit_is_only_terminated_with_force(daemon: Daemon) -> None:
    name = unique("terminated")
    with Cluster(daemon.bootstrap) as cluster, WireClient(daemon.bootstrap) as client:
        topic = cluster.create_topic(unique("two-phase"))
        write(daemon.bootstrap, name, topic, b"prepared", init(client, name))
        order = ("txns", "terminate", name)
        refused = cli(daemon.bootstrap, *order, "--execute", status=1)
        assert "its database may have decided to commit" in refused.stderr
        assert cluster.lso(topic) == 0
        cli(daemon.bootstrap, *order, "--force", "--execute")
        assert cluster.lso(topic) == cluster.offset(topic) == 2
        assert cluster.values(topic, isolation=READ_COMMITTED) == []


def end(client: WireClient, name: str, producer: tuple[int, int], *, commit: bool) -> Any:
    return client.call(
        "EndTxn",
        5,
        to_transaction=name,
        check=False,
        entity=lambda f: f.message(
            transactional_id=name,
            producer_id=producer[0],
            producer_epoch=producer[1],
            committed=commit,
        ),
    )


def write(
    bootstrap: str, name: str, topic: str, value: bytes, claim: Any, *, partition: int = 0
) -> tuple[int, int]:
    """Begin a transaction with the first batch; ``claim`` is the InitProducerId response."""
    producer = claim.producer_id, claim.producer_epoch
    data = batch(
        [value],
        producer_id=producer[0],
        producer_epoch=producer[1],
        sequence=0,
        transactional=True,
    )
    with Cluster(bootstrap) as cluster:
        appended = cluster.produce(
            topic, data, partition=partition, version=12, transactional_id=name
        )
    assert appended["error_code"] == "none"
    return producer


def prepare(client: WireClient, bootstrap: str, name: str, topic: str) -> tuple[int, int]:
    """Begin a transaction, write to it, and abandon it; return its producer id and epoch."""
    answer = init(client, name)
    assert (answer.ongoing_txn_producer_id, answer.ongoing_txn_producer_epoch) == NOBODY
    return write(bootstrap, name, topic, b"prepared", answer)


def test_init_producer_id_v6_is_served_when_two_phase_commit_is_enabled(
    daemon: Daemon, fencepost: Daemon
) -> None:
    for broker, highest in ((daemon, 6), (fencepost, 5)):
        with WireClient(broker.bootstrap) as client:
            assert client.versions()[INIT_PRODUCER_ID] == (0, highest)


@pytest.mark.parametrize("commit", only((True, False), True))
def test_prepared_transaction_survives_a_crash_until_its_decision(
    daemon: Daemon, commit: bool
) -> None:
    name, topic = unique("two-phase"), unique("orders")
    with Cluster(daemon.bootstrap) as cluster:
        cluster.create_topic(topic)
    with WireClient(daemon.bootstrap) as client:
        prepared = prepare(client, daemon.bootstrap, name, topic)
        first = init(client, name, keep=True)
    daemon.kill()
    daemon.start()
    with WireClient(daemon.bootstrap) as client:
        answer = init(client, name, keep=True)
        assert (answer.ongoing_txn_producer_id, answer.ongoing_txn_producer_epoch) == prepared
        successor = answer.producer_id, answer.producer_epoch
        assert successor == (first.producer_id, first.producer_epoch + 1)
        described = client.call(
            "DescribeTransactions", to_transaction=name, transactional_ids=(name,)
        ).transaction_states[0]
        assert described.transaction_state == "Ongoing"
        assert described.transaction_timeout.total_seconds() * 1000 == 2**31 - 1
        for late in (prepared, (first.producer_id, first.producer_epoch)):
            refused = end(client, name, late, commit=not commit)
            assert refused.error_code is ErrorCode.producer_fenced
        done = end(client, name, successor, commit=commit)
        assert done.error_code is ErrorCode.none
        assert (done.producer_id, done.producer_epoch) == (successor[0], successor[1] + 1)
        again = end(client, name, successor, commit=commit)
        assert (again.error_code, again.producer_epoch) == (ErrorCode.none, successor[1] + 1)
    with Cluster(daemon.bootstrap) as cluster:
        found = cluster.values(topic, isolation=READ_COMMITTED)
    assert found == ([b"prepared"] if commit else [])


def test_kept_transaction_is_resolved_only_with_the_successor_epoch(daemon: Daemon) -> None:
    name, topic = unique("two-phase"), unique("orders")
    with Cluster(daemon.bootstrap) as cluster:
        cluster.create_topic(topic)
    with WireClient(daemon.bootstrap) as client:
        prepared = prepare(client, daemon.bootstrap, name, topic)
        kept = init(client, name, keep=True)

    def resolved(identity: tuple[int, int], *more: str, status: int = 0) -> dict[str, Any]:
        named = (name, "--producer-id", str(identity[0]), "--epoch", str(identity[1]))
        done = cli(daemon.bootstrap, "txns", "resolve", *named, *more, "--json", status=status)
        (row,) = json.loads(done.stdout)
        return row

    refused = resolved(prepared, "--commit", "--execute", status=1)
    assert (refused["verdict"], refused["proof"]) == ("open", True)
    assert "PRODUCER_FENCED" in refused["action"]
    assert any("no timeout (two-phase commit)" in line for line in refused["ended_by"])
    successor = kept.producer_id, kept.producer_epoch
    assert resolved(successor, "--commit", "--execute")["action"] == "committed"
    with Cluster(daemon.bootstrap) as cluster:
        until(lambda: cluster.lso(topic) == cluster.offset(topic) == 2, "the marker")
        assert cluster.values(topic, isolation=READ_COMMITTED) == [b"prepared"]
    for identity in (prepared, successor):
        row = resolved(identity)
        assert (row["verdict"], row["proof"]) == ("committed", True)
        assert [marker["producer_epoch"] for marker in row["markers"]] == [prepared[1] + 1]


def state_of(client: WireClient, name: str) -> str:
    asked = client.call("DescribeTransactions", to_transaction=name, transactional_ids=(name,))
    return str(asked.transaction_states[0].transaction_state)


def test_prepared_transaction_outlives_its_timeout_and_a_restart(daemon: Daemon) -> None:
    """Another transaction with the same timeout shows when the timeout has passed."""
    name, topic = unique("two-phase"), unique("orders")
    with Cluster(daemon.bootstrap) as cluster:
        cluster.create_topic(topic, 2)
    for restart in (False, True):
        with WireClient(daemon.bootstrap) as client:
            if not restart:
                prepared = prepare(client, daemon.bootstrap, name, topic)
            other = unique("one-phase")
            answer = init(client, other, two_phase=False)
            write(daemon.bootstrap, other, topic, b"late", answer, partition=1)
            until(lambda other=other: state_of(client, other) == "CompleteAbort", "the timeout")
            assert state_of(client, name) == "Ongoing"
        if not restart:
            daemon.stop()
            daemon.start()
    with WireClient(daemon.bootstrap) as client:
        kept = init(client, name, keep=True)
        assert (kept.ongoing_txn_producer_id, kept.ongoing_txn_producer_epoch) == prepared
        done = end(client, name, (kept.producer_id, kept.producer_epoch), commit=True)
        assert done.error_code is ErrorCode.none
    with Cluster(daemon.bootstrap) as cluster:
        assert cluster.values(topic, isolation=READ_COMMITTED) == [b"prepared"]


@pytest.mark.parametrize("two_phase", [True, False])
def test_init_producer_id_without_keep_aborts_the_prepared_transaction(
    daemon: Daemon, two_phase: bool
) -> None:
    name, topic = unique("two-phase"), unique("orders")
    with Cluster(daemon.bootstrap) as cluster:
        cluster.create_topic(topic)
    with WireClient(daemon.bootstrap) as client:
        prepared = prepare(client, daemon.bootstrap, name, topic)
        kept = init(client, name, keep=True)
        assert (kept.ongoing_txn_producer_id, kept.ongoing_txn_producer_epoch) == prepared
        fresh = init(client, name, two_phase=two_phase)
        assert (fresh.ongoing_txn_producer_id, fresh.ongoing_txn_producer_epoch) == NOBODY
        for late in (prepared, (kept.producer_id, kept.producer_epoch)):
            refused = end(client, name, late, commit=True)
            assert refused.error_code is ErrorCode.producer_fenced
    with Cluster(daemon.bootstrap) as cluster:
        assert cluster.lso(topic) == cluster.offset(topic)
        assert cluster.values(topic, isolation=READ_COMMITTED) == []


def test_disabled_two_phase_commit_closes_the_connection_of_a_v6_request(fencepost: Daemon) -> None:
    with (
        WireClient(fencepost.bootstrap, timeout_ms=1_000) as client,
        pytest.raises((WireError, BrokerUnreachable)),
    ):
        init(client, unique("off"))
