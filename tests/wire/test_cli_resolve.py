"""``fencepost txns resolve``: real clients leave transactions in each state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from fencepost.pipelines.spark.checkpoint import PlannedBatch, read_checkpoint
from fencepost.pipelines.spark.progress import Progress
from fencepost.testing import Kafka
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.daemon import Daemon
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.wire.clients import confluent_producer
from tests.wire.command_line import cli
from tests.wire.test_cli import rows
from tests.wire.test_cli_txns import hang, open_transaction
from tests.wire.test_transactions_v2 import Producer, settled

JSON = ("--format", "json")
UNDECIDED = 5
QUERY = "5b1d3a60-5ba5-4a4f-8a5e-6d4f3c2b1a09"
FLINK = Path(__file__).parents[1] / "unit" / "cli" / "flink_checkpoints" / "inline"


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return cluster.create_topic(unique("resolve"), 2)


def identified(identity: tuple[int, int]) -> tuple[str, ...]:
    return ("--producer-id", str(identity[0]), "--epoch", str(identity[1]))


def resolved(
    bootstrap: str, name: str, identity: tuple[int, int] | None = None, *more: str, status: int = 0
) -> dict[str, Any]:
    """Return the only row of the command."""
    named = () if identity is None else identified(identity)
    done = cli(bootstrap, "txns", "resolve", name, *named, *more, *JSON, status=status)
    (row,) = rows(done)
    return row


@pytest.mark.parametrize("commit", [True, False])
def test_ended_transaction_of_version_2_has_its_outcome_with_offsets(
    bootstrap: str, cluster: Cluster, topic: str, commit: bool
) -> None:
    producer = Producer(cluster, unique("id")).init()
    identity = producer.producer_id, producer.epoch
    assert producer.produce(topic, b"a") == "none"
    producer.end(commit)
    settled(cluster, topic, 2)
    row = resolved(bootstrap, producer.name, identity)
    outcome = "commit" if commit else "abort"
    assert (row["verdict"], row["proof"]) == ("committed" if commit else "aborted", True)
    (marker,) = row["markers"]
    assert (marker["topic"], marker["partition"], marker["offset"]) == (topic, 0, 1)
    assert (marker["outcome"], marker["producer_epoch"]) == (outcome, identity[1] + 1)
    assert (marker["first_offset"], marker["coordinator_epoch"]) == (0, marker["coordinator_epoch"])
    states = [record["state"] for record in row["records"]]
    assert states[:3] == ["Empty", "Ongoing", f"Prepare{outcome.capitalize()}"]
    offsets = [record["offset"] for record in row["records"]]
    assert offsets == sorted(set(offsets))
    # The Complete record already has the producer id and epoch of the next transaction.
    following = resolved(bootstrap, producer.name, (producer.producer_id, producer.epoch))
    assert (following["verdict"], following["proof"]) == ("not begun", True)
    last = resolved(bootstrap, producer.name)
    assert (last["verdict"], last["epoch"]) == (row["verdict"], identity[1])


def test_replaced_producer_epoch_is_named_with_its_successor(
    bootstrap: str, cluster: Cluster
) -> None:
    producer = Producer(cluster, unique("id")).init()
    old = producer.producer_id, producer.epoch
    producer.init()
    row = resolved(bootstrap, producer.name, old)
    assert (row["verdict"], row["proof"]) == ("replaced", True)
    assert f"newer producer {producer.producer_id} epoch {producer.epoch}" in row["because"][0]
    later = resolved(bootstrap, producer.name, (old[0], old[1] + 9), status=UNDECIDED)
    assert later["verdict"] == "no evidence left"
    refused = resolved(bootstrap, producer.name, old, "--commit", "--execute", status=1)
    assert refused["action"].startswith("refused: it is not open (replaced)")


def test_transaction_aborted_by_a_newer_producer_is_aborted(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    producer = Producer(cluster, unique("id")).init()
    old = producer.producer_id, producer.epoch
    assert producer.produce(topic, b"a") == "none"
    producer.init()
    settled(cluster, topic, 2)
    row = resolved(bootstrap, producer.name, old)
    assert (row["verdict"], row["proof"]) == ("aborted", True)


def test_open_transaction_shows_blocked_partitions_and_commands(
    bootstrap: str, topic: str, target: Any, cluster: Cluster
) -> None:
    with open_transaction(bootstrap, topic) as (name, _):
        asked = resolved(bootstrap, name)
        identity = asked["producer_id"], asked["epoch"]
        row = resolved(bootstrap, name, identity)
        assert (row["verdict"], row["proof"], row["transaction_version"]) == ("open", True, 1)
        assert row["since"] is not None
        (waiting,) = row["waiting"]
        assert (waiting["topic"], waiting["partition"]) == (topic, 0)
        assert (waiting["stable"], waiting["end"]) == (0, 3)
        assert [command.partition(":")[0] for command in row["ended_by"]] == ["commits", "aborts"]
        planned = resolved(bootstrap, name, identity, "--abort")
        assert planned["action"].startswith(f"would abort it as producer {identity[0]}")
        assert cluster.lso(topic) == 0


@pytest.mark.parametrize("commit", [True, False])
def test_open_transaction_is_ended_under_its_identity_and_recorded(
    bootstrap: str, cluster: Cluster, topic: str, target: Any, commit: bool
) -> None:
    """The client retries EndTxn, as after a lost response, and gets the same outcome."""
    name, word = unique("pipeline"), "commit" if commit else "abort"
    with confluent_producer(bootstrap, transactional_id=name) as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic, b"v", partition=0)
        producer.flush(60)
        row = resolved(bootstrap, name)
        identity = row["producer_id"], row["epoch"]
        other = resolved(bootstrap, name, identity, f"--{word}", "--execute")
        assert other["action"] == ("committed" if commit else "aborted")
        settled(cluster, topic, 2)
        assert cluster.values(topic, isolation=READ_COMMITTED) == ([b"v"] if commit else [])
        if commit:
            producer.commit_transaction(60)
        else:
            producer.abort_transaction(60)
    again = resolved(bootstrap, name, identity, f"--{word}", "--execute")
    assert again["action"] == f"already {'committed' if commit else 'aborted'}"
    opposite = "abort" if commit else "commit"
    refused = resolved(bootstrap, name, identity, f"--{opposite}", "--execute", status=1)
    assert refused["action"].startswith("refused: it is not open")
    if target.name == "fencepost":

        def recorded() -> list[str]:
            told = rows(cli(bootstrap, "txns", "history", name, *JSON))
            ends = ("transaction-committed", "transaction-aborted")
            return [event["client"] for event in told if event["what"] in ends]

        assert until(recorded, "the history has the decision") == ["fencepost-resolve"]


def test_open_version_2_transaction_is_committed_and_end_txn_succeeds(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    producer = Producer(cluster, unique("id")).init()
    identity = producer.producer_id, producer.epoch
    assert producer.produce(topic, b"a") == "none"
    row = resolved(bootstrap, producer.name, identity, "--commit", "--execute")
    assert (row["action"], row["transaction_version"]) == ("committed", 2)
    settled(cluster, topic, 2)
    assert producer.end(True)["error_code"] == "none"
    assert producer.epoch == identity[1] + 1


def test_one_epoch_with_several_version_1_transactions_proves_nothing(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    name = unique("pipeline")
    with confluent_producer(bootstrap, transactional_id=name) as producer:
        producer.init_transactions(60)
        for number, end in enumerate((producer.commit_transaction, producer.abort_transaction)):
            producer.begin_transaction()
            producer.produce(topic, b"%d" % number, partition=0)
            producer.flush(60)
            if number:
                asked = resolved(bootstrap, name)
                identity = asked["producer_id"], asked["epoch"]
                row = resolved(bootstrap, name, identity, "--commit", status=1)
                assert (row["verdict"], row["proof"]) == ("open", False)
                assert "earlier transactions of this identity" in row["action"]
                forced = resolved(
                    bootstrap, name, identity, "--commit", "--force", status=UNDECIDED
                )
                assert forced["action"].startswith("would commit")
            end(60)
    settled(cluster, topic, 4)
    row = resolved(bootstrap, name, identity, status=UNDECIDED)
    assert (row["verdict"], row["proof"]) == ("mixed", False)
    assert [marker["outcome"] for marker in row["markers"]] == ["commit", "abort"]


def test_unknown_id_has_no_evidence(bootstrap: str) -> None:
    name = unique("nobody")
    row = resolved(bootstrap, name, (12_345_678, 3), status=UNDECIDED)
    assert (row["verdict"], row["proof"]) == ("no evidence left", False)
    assert (row["records"], row["markers"]) == ([], [])
    alone = cli(bootstrap, "txns", "resolve", name, status=1)
    assert f"there is no transactional id '{name}'" in alone.stderr


def planned(folder: Path, batch: int, source: str) -> PlannedBatch:
    """Write the checkpoint folder of a Spark query that has planned ``batch``."""
    (folder / "offsets").mkdir(parents=True, exist_ok=True)
    (folder / "metadata").write_text(json.dumps({"id": QUERY}))
    (folder / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{source}\n")
    found = read_checkpoint(str(folder))
    assert found is not None
    return found


def test_spark_batch_outcome_follows_from_progress_in_its_transaction(
    bootstrap: str, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    """The sink commits the number of a batch in the transaction with the rows of the batch."""
    name, folder = unique("spark"), tmp_path / "checkpoint"
    producer = Producer(cluster, name).init()

    def judged(*more: str, status: int = 0) -> dict[str, Any]:
        named = ("--from-checkpoint", str(folder), *more)
        return resolved(bootstrap, name, None, *named, status=status)

    def write(batch: PlannedBatch) -> None:
        assert producer.produce(topic, b"row") == "none"
        text = Progress(batch.batch_id, batch.query_id, batch.digest).to_text()
        assert producer.commit_offset(f"{name}-progress", topic, 0, metadata=text) == "none"

    first = planned(folder, 0, '{"numbers":{"0":10}}')
    assert (judged(status=UNDECIDED)["verdict"]) == "not begun"
    write(first)
    row = judged()
    assert (row["verdict"], row["proof"]) == ("open", True)
    assert "an attempt at batch 0" in row["because"][0]
    assert "restart the query" in judged("--commit", "--execute", status=1)["action"]
    producer.end(True)
    settled(cluster, topic, 2)
    assert (judged()["verdict"], judged()["proof"]) == ("committed", True)
    second = planned(folder, 1, '{"numbers":{"0":20}}')
    assert (judged()["verdict"], judged()["proof"]) == ("not begun", True)
    write(second)
    assert judged("--abort", "--execute")["action"] == "aborted"
    settled(cluster, topic, 4)
    assert (judged()["verdict"], judged()["proof"]) == ("aborted", True)
    planned(folder, 1, '{"numbers":{"0":30}}')
    (folder / "offsets" / "1").rename(folder / "offsets" / "5")
    rolled = judged(status=UNDECIDED)
    assert rolled["verdict"] == "no evidence left"
    assert "only batch 0 is committed" in rolled["because"][0]


def test_transactional_id_of_a_spark_query_is_read_from_its_checkpoint(
    bootstrap: str, tmp_path: Path
) -> None:
    planned(tmp_path, 0, "{}")
    done = cli(bootstrap, "txns", "resolve", "--from-checkpoint", str(tmp_path), status=UNDECIDED)
    assert f"fencepost-{QUERY}" in done.stdout


@pytest.mark.parametrize("named", [(), ("sink",)])
def test_spark_checkpoint_of_an_unknown_format_is_refused(
    bootstrap: str, tmp_path: Path, named: tuple[str, ...]
) -> None:
    planned(tmp_path, 0, "{}")
    (tmp_path / "offsets" / "0").write_text("v9\n")
    line = ("txns", "resolve", *named, "--from-checkpoint", str(tmp_path))
    assert "only the formats v1 and v2" in cli(bootstrap, *line, status=1).stderr


def test_transactions_of_a_flink_checkpoint_are_resolved(bootstrap: str) -> None:
    """This cluster never allocated the producer ids, as the command reports."""
    named = ("txns", "resolve", "--from-checkpoint", str(FLINK))
    found = rows(cli(bootstrap, *named, *JSON, status=UNDECIDED))
    assert len(found) == 2
    assert {row["verdict"] for row in found} == {"no evidence left"}
    names = [str(row["transactional_id"]) for row in found]
    assert sorted(name.rpartition("-")[0] for name in names) == ["flink-copy-0", "flink-copy-1"]
    result = cli(bootstrap, "txns", "resolve", names[0], *named[2:], *JSON, status=UNDECIDED)
    assert [row["transactional_id"] for row in rows(result)] == names[:1]
    none = cli(bootstrap, "txns", "resolve", "other", *named[2:], status=1)
    assert "names no transaction of 'other'" in none.stderr


def test_contradictory_options_are_refused(bootstrap: str, tmp_path: Path) -> None:
    for line in (
        (),
        ("a", "--producer-id", "1"),
        ("a", "--commit", "--abort"),
        ("a", "--execute"),
        ("--from-checkpoint", str(tmp_path), "--producer-id", "1", "--epoch", "0"),
    ):
        cli(bootstrap, "txns", "resolve", *line, status=2)
    bad = cli(bootstrap, "txns", "resolve", "--from-checkpoint", str(tmp_path), status=1)
    assert "is not a file" in bad.stderr


def test_user_without_read_on_transaction_state_gets_the_missing_right(tmp_path: Path) -> None:
    """Once the user may read the topic, the markers prove the outcome."""
    alice = tmp_path / "alice.properties"
    with Kafka(users={"alice": "secret", "app": "secret"}, acls=[]) as broker:
        broker.acl(
            "app WRITE,DESCRIBE transactional-id:*",
            "app WRITE,READ,DESCRIBE topic:*",
            "alice DESCRIBE transactional-id:*",
        )
        broker.topic("orders")
        settings = broker.client_config("alice", "java").items()
        alice.write_text("".join(f"{key}={value}\n" for key, value in settings))
        name, app = unique("pipeline"), broker.client_config("app", "confluent")
        producer = confluent_kafka.Producer({**app, "transactional.id": name})
        producer.init_transactions(60)
        login = ("--command-config", str(alice))
        begun = resolved(broker.bootstrap, name, None, *login)
        assert begun["verdict"] == "not begun"
        identity = begun["producer_id"], begun["epoch"]
        producer.begin_transaction()
        producer.produce("orders", b"v", partition=0)
        producer.commit_transaction(60)
        search = (*login, "--topic", "orders")

        row = resolved(broker.bootstrap, name, identity, *login, status=UNDECIDED)
        assert (row["verdict"], row["proof"]) == ("no evidence left", False)
        assert "outcome of this identity under transaction version 1" in row["because"][0]
        assert "__transaction_state was not read" in row["because"][-1]
        unknown = cli(
            broker.bootstrap, "txns", "resolve", name, *identified(identity), *search, status=1
        )
        assert "there is no topic 'orders'" in unknown.stderr
        broker.acl("alice DESCRIBE topic:orders")
        unread = resolved(broker.bootstrap, name, identity, *search, status=UNDECIDED)
        assert any("orders:0: Fetch: TOPIC_AUTHORIZATION" in why for why in unread["because"])
        broker.acl("alice READ topic:orders")
        proven = resolved(broker.bootstrap, name, identity, *search)
        assert (proven["verdict"], proven["proof"]) == ("committed", True)
        producer.begin_transaction()
        producer.produce("orders", b"w", partition=0)
        producer.flush(60)
        broker.acl("alice READ,DESCRIBE topic:__transaction_state")
        denied = resolved(broker.bootstrap, name, None, *login, "--abort", "--execute", status=1)
        assert "TRANSACTIONAL_ID_AUTHORIZATION_FAILED" in denied["action"]
        assert "needs WRITE" in denied["action"]
        broker.acl("alice WRITE transactional-id:*")
        broker.faults.add(api="EndTxn", error="PRODUCER_FENCED")
        lost = resolved(broker.bootstrap, name, None, *login, "--abort", "--execute", status=1)
        assert "PRODUCER_FENCED" in lost["action"]
        assert "resolve it again" in lost["action"]
        done = resolved(broker.bootstrap, name, None, *login, "--abort", "--execute")
        assert done["action"] == "aborted"


@pytest.mark.slow
def test_hanging_transaction_cannot_be_ended_by_its_coordinator(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    name, producer_id = hang(cluster, topic)
    row = resolved(bootstrap, name, (producer_id, 0), "--topic", topic, "--abort", status=1)
    assert (row["verdict"], row["proof"]) == ("hanging", True)
    assert "txns abort" in row["action"]
    cli(bootstrap, "txns", "abort", f"{topic}:0", "--producer-id", str(producer_id), "--execute")
    done = resolved(bootstrap, name, (producer_id, 0), "--topic", topic)
    assert (done["verdict"], done["markers"][0]["producer_epoch"]) == ("aborted", 0)


@pytest.mark.slow
@pytest.mark.parametrize("commit", [True, False])
def test_markers_prove_the_outcome_after_the_id_has_expired(tmp_path, commit) -> None:
    expiring = {
        "transactional.id.expiration.ms": "1000",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "100",
    }
    daemon = Daemon(tmp_path / "data", {**SETTINGS, **expiring}).start()
    try:
        with Cluster(daemon.bootstrap) as cluster:
            topic = cluster.create_topic(unique("resolve"))
            producer = Producer(cluster, unique("id")).init()
            identity = producer.producer_id, producer.epoch
            assert producer.produce(topic, b"a") == "none"
            producer.end(commit)
            settled(cluster, topic, 2)

            def is_gone() -> bool:
                listed = cluster.call("list_transactions", 0)["transaction_states"]
                return producer.name not in {
                    transaction["transactional_id"] for transaction in listed
                }

            until(is_gone, "the expiry")
        row = resolved(daemon.bootstrap, producer.name, identity)
        assert (row["verdict"], row["proof"]) == ("committed" if commit else "aborted", True)
        assert row["records"][-1]["state"] == "tombstone"
        # Of another transactional id only the markers are left: its records were deleted.
        bare = resolved(daemon.bootstrap, unique("gone"), identity, "--topic", topic)
        assert (bare["verdict"], bare["proof"]) == (row["verdict"], True)
        assert (bare["records"], len(bare["markers"])) == ([], 1)
        none = resolved(daemon.bootstrap, producer.name, (identity[0] + 1, 0), status=UNDECIDED)
        assert none["verdict"] == "expired"
        assert "name its topics with --topic" in none["because"][1]
    finally:
        daemon.stop()
