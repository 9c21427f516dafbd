"""For each kind of incident: ``fencepost record``, and a replay of its file in a test."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, ShareConsumer

from fencepost.client.queries.incident import Payload, load
from fencepost.testing import IncidentError, Kafka, Replay, ReplayError, replay
from fencepost.testing.plugin import kafka_replay
from fencepost.testing.replaying import broker_for, replay_on
from tests.support.waits import until
from tests.wire.command_line import cli

__all__ = ["kafka_replay"]

pytestmark = pytest.mark.kafka(
    topics={"orders": 2},
    config={
        "fencepost.history.requests.enable": True,
        "group.consumer.min.session.timeout.ms": 500,
        "group.consumer.session.timeout.ms": 1000,
    },
)

MEMBER = """
import sys
from confluent_kafka import Consumer
member = Consumer(eval(sys.argv[1]))
member.subscribe(["orders"])
while True:
    member.poll(0.05)
    if member.assignment():
        print("assigned", flush=True)
"""

CLASSIC = {"session.timeout.ms": 1000, "heartbeat.interval.ms": 100}
NEWER = {"group.protocol": "consumer"}
PROTOCOLS = pytest.mark.parametrize("protocol", [CLASSIC, NEWER], ids=["classic", "consumer"])


def settings(kafka: Kafka, **more: Any) -> dict[str, Any]:
    named = {key.replace("_", "."): value for key, value in more.items()}
    return {"bootstrap.servers": kafka.bootstrap, "log_level": 0, **named}


def record(kafka: Kafka, path: Path, *subjects: str, **env: Any) -> Path:
    """Record an incident by the command; return the incident's file."""
    kafka.history()  # writes the entries that are queued
    cli(kafka.bootstrap, "record", *subjects, "--out", str(path), **env)
    return path


def causes_of(path: Path, what: str) -> list[str | None]:
    rows = json.loads(path.read_text())["causes"]
    return [row.get("why") for row in rows if row["what"] == what]


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a changed copy of an incident."""
    incident = json.loads(path.read_text())
    change(incident)
    copy = path.with_name("edited.json")
    copy.write_text(json.dumps(incident))
    return copy


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def member_process(
    processes: list[subprocess.Popen[str]], conf: dict[str, Any]
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", MEMBER, repr(conf)], stdout=subprocess.PIPE, text=True
    )
    processes.append(process)
    return process


def polled_until(member: Consumer, reached: Callable[[], bool]) -> None:
    """Poll a consumer until a state is reached; polling also lets it take part in rebalances."""
    until(lambda: (member.poll(0.05), reached())[1], "the group changes")


@PROTOCOLS
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "paused"])
def test_replay_repeats_rebalances_and_a_session_timeout(
    kafka: Kafka,
    processes: list[subprocess.Popen[str]],
    tmp_path: Path,
    protocol: dict[str, Any],
    end: signal.Signals,
    kafka_replay: Callable[[Path], Replay],
) -> None:
    """A member's process is killed or stopped, and the other member gets the partitions."""
    conf = settings(kafka, group_id="shop", client_id="stays") | protocol
    stays = Consumer(conf)
    stays.subscribe(["orders"])
    polled_until(stays, lambda: len(stays.assignment()) == 2)
    victim = member_process(processes, conf | {"client.id": "victim"})
    polled_until(stays, lambda: len(stays.assignment()) == 1)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "assigned\n"
    victim.send_signal(end)
    polled_until(stays, lambda: len(stays.assignment()) == 2)
    stays.close()

    path = record(kafka, tmp_path / "incident.json", "shop")
    result = kafka_replay(path)
    for what in ("member-expired", "rebalance-started", "group-epoch-bumped"):
        assert result.whys(what) == causes_of(path, what)
    is_classic = protocol is CLASSIC
    expired = "session timed out" if is_classic else "no heartbeat came"
    assert result.whys("member-expired") == [expired]
    assert any("Heartbeat" in failure for failure in result.failures) == is_classic


def test_replay_repeats_a_poll_timeout_of_a_classic_member(kafka: Kafka, tmp_path: Path) -> None:
    """A member does not poll for max.poll.interval.ms, leaves, and rejoins."""
    conf = settings(kafka, group_id="slow", client_id="slow", session_timeout_ms=1000)
    member = Consumer(conf | {"max.poll.interval.ms": 1000, "heartbeat.interval.ms": 100})
    member.subscribe(["orders"])
    polled_until(member, lambda: len(member.assignment()) == 2)
    until(lambda: any(event.what == "member-left" for event in kafka.history("slow")), "it leaves")
    path = record(kafka, tmp_path / "incident.json", "slow")
    result = replay(path)
    left = result.whys("member-left")
    assert left == causes_of(path, "member-left")
    assert len(left) == 1
    member.close()


def test_replay_repeats_a_revocation_timeout(kafka: Kafka, tmp_path: Path) -> None:
    """A consumer-protocol member keeps revoked partitions until the rebalance timeout."""
    held: list[object] = []

    def keep(_consumer: Consumer, partitions: object) -> None:
        # Without an unassign, the member still owns its partitions, and sends heartbeats.
        held.append(partitions)
        until(lambda: "did not revoke in time" in reasons(), "the rebalance timeout ends")

    def reasons() -> str:
        return " ".join(str(event.why) for event in kafka.history("keeps"))

    conf = settings(kafka, group_id="keeps", client_id="keeps") | NEWER
    conf["max.poll.interval.ms"] = 1500
    keeps, joins = Consumer(conf), Consumer(conf | {"client.id": "joins"})
    keeps.subscribe(["orders"], on_revoke=keep)
    polled_until(keeps, lambda: len(keeps.assignment()) == 2)
    joins.subscribe(["orders"])
    until(lambda: (joins.poll(0.02), keeps.poll(0.02), held)[2], "a revocation begins")
    path = record(kafka, tmp_path / "incident.json", "keeps")
    assert "did not revoke in time" in replay(path).whys("member-expired")
    keeps.close()
    joins.close()


def test_replay_repeats_the_fencing_of_a_static_member(kafka: Kafka, tmp_path: Path) -> None:
    """A second consumer with the same instance id fences the first consumer."""
    conf = settings(kafka, group_id="static", group_instance_id="one") | CLASSIC
    first = Consumer(conf | {"client.id": "first"})
    first.subscribe(["orders"])
    polled_until(first, lambda: len(first.assignment()) == 2)
    second = Consumer(conf | {"client.id": "second"})
    second.subscribe(["orders"])
    polled_until(second, lambda: len(second.assignment()) == 2)

    def is_fenced() -> bool:
        try:
            message = first.poll(0.05)
        except KafkaException as error:
            return "_FENCED" in str(error) or "FENCED" in str(error)
        return message is not None and message.error() is not None

    until(is_fenced, "the first consumer is fenced")
    path = record(kafka, tmp_path / "incident.json", "static")
    result = replay(path)
    assert result.whys("member-fenced") == causes_of(path, "member-fenced") != []
    assert any("FENCED_INSTANCE_ID" in failure for failure in result.failures)
    second.close()


def producer(kafka: Kafka, **more: Any) -> Producer:
    made = Producer(settings(kafka, transactional_id="payments", **more))
    made.init_transactions(20)
    made.begin_transaction()
    return made


def test_replay_repeats_a_fenced_producer_without_record_contents(
    kafka: Kafka, tmp_path: Path
) -> None:
    """A second producer with the same transactional id fences the first producer."""
    zombie = producer(kafka, client_id="zombie")
    zombie.produce("orders", b"secret value", b"secret key", headers={"secret": b"header"})
    zombie.flush(20)
    successor = producer(kafka, client_id="successor")
    successor.produce("orders", b"tea")
    successor.commit_transaction(20)
    with pytest.raises(KafkaException, match="fenced"):
        zombie.commit_transaction(20)
    path = record(kafka, tmp_path / "incident.json", "payments")
    assert "secret" not in path.read_text()
    result = replay(path)
    assert result.whys("producer-fenced") == causes_of(path, "producer-fenced") != []
    assert result.whys("producer-refused") == ["EndTxn"]
    (failure,) = result.failures
    assert failure.endswith("EndTxn of zombie returned INVALID_PRODUCER_EPOCH")


def test_records_are_in_the_incident_file_on_request(kafka: Kafka, tmp_path: Path) -> None:
    writes = producer(kafka)
    writes.produce("orders", b"tea", b"alice", headers={"trace": b"7"}, partition=1)
    writes.commit_transaction(20)
    path = record(kafka, tmp_path / "incident.json", "payments", "--records")
    incident = load(path)
    with broker_for(incident) as broker:
        replay_on(broker, incident)
        (found,) = broker.records("orders", isolation="read_committed", at_least=1)
    (written,) = kafka.records("orders", isolation="read_committed")
    assert found[:3] == written[:3]
    assert (found.key, found.value, found.headers) == (b"alice", b"tea", (("trace", b"7"),))


def test_replay_repeats_a_transaction_timeout(kafka: Kafka, tmp_path: Path) -> None:
    slow = producer(kafka, transaction_timeout_ms=5_000)
    slow.produce("orders", b"tea")
    slow.flush(20)
    kafka.clock.advance(seconds=6)
    with pytest.raises(KafkaException):
        slow.commit_transaction(20)
    path = record(kafka, tmp_path / "incident.json", "payments")
    result = replay(path)
    assert [cause.what for cause in result.causes if cause.trigger == "timer txn-timeout"] == [
        *("transaction-aborted", "epoch-bumped", "producer-fenced", "transaction-timed-out")
    ]
    assert len(result.failures) == 1


def share_incident(kafka: Kafka, path: Path) -> Path:
    """A worker twice lets a record's acquisition lock expire; then the record is archived."""
    from tests.plugin.test_shares import group

    kafka.topic("jobs")
    kafka.produce("jobs", "earlier", "others")
    group(kafka, "workers", delivery_count_limit="2", auto_offset_reset="latest")
    worker = ShareConsumer(
        settings(kafka, group_id="workers", share_acknowledgement_mode="explicit")
    )
    worker.subscribe(["jobs"])
    loaded = "share-partition-loaded"
    until(
        lambda: (worker.poll(0.1), any(e.what == loaded for e in kafka.history("workers")))[1],
        "the share partition is open",
    )
    kafka.produce("jobs", "poison")
    kafka.clock.auto = False
    for delivery in (1, 2):
        (message,) = until(lambda: list(worker.poll(0.2)), "a delivery")
        assert message.delivery_count() == delivery
        (held,) = kafka.shares("workers")
        assert held.locked_until_ms is not None
        kafka.clock.advance(ms=held.locked_until_ms - kafka.clock.now_ms())
        worker.acknowledge(message)
        worker.commit_sync(10)
    worker.close()
    return record(kafka, path, "workers", "--records")


@pytest.mark.slow
def test_replay_repeats_expired_acquisition_locks(
    kafka: Kafka, tmp_path: Path, kafka_replay: Callable[[Path], Replay]
) -> None:
    path = share_incident(kafka, tmp_path / "incident.json")
    assert list(load(path).records["jobs"][0].values()) == [Payload(None, b"poison", ())]
    result = kafka_replay(path)
    assert result.whys("share-records-returned") == ["acquisition lock expired"]
    assert result.whys("share-records-given-up") == ["acquisition lock expired, delivery limit 2"]
    late = [failure.split(": ")[1] for failure in result.failures if "Acknowledge" in failure][:1]
    assert late == ["ShareAcknowledge of rdkafka returned INVALID_RECORD_STATE"]


def test_replay_names_the_step_that_differs(kafka: Kafka, tmp_path: Path) -> None:
    """A replay must not accept an edited incident."""
    zombie = producer(kafka, client_id="zombie")
    zombie.produce("orders", b"tea")
    zombie.flush(20)
    producer(kafka, client_id="successor")
    with pytest.raises(KafkaException, match="fenced"):
        zombie.commit_transaction(20)
    path = record(kafka, tmp_path / "incident.json", "payments")
    replay(path)
    steps = json.loads(path.read_text())["steps"]
    (end,) = [step for step in steps if step["api"] == "EndTxn"]

    def commits(incident: dict[str, Any]) -> None:
        del incident["steps"][end["number"] - 1]["response"]["error_code"]

    with pytest.raises(
        ReplayError,
        match=rf"step {end['number']} at .* EndTxn of zombie returned INVALID_PRODUCER_EPOCH;"
        " in the incident it returned NONE",
    ):
        replay(edited(path, commits))

    def times_out(incident: dict[str, Any]) -> None:
        (fenced,) = [cause for cause in incident["causes"] if cause["what"] == "producer-fenced"]
        fenced["why"] = "timeout"

    with pytest.raises(
        ReplayError,
        match=r"after step \d+, cause \d of payments is producer-fenced .*InitProducerId.*"
        "in the incident it is producer-fenced .*timeout",
    ):
        replay(edited(path, times_out))

    def class_from_a_file(incident: dict[str, Any]) -> None:
        incident["settings"]["group.consumer.assignors"] = "os.system"

    with pytest.raises(IncidentError, match=r"edited\.json: 'group\.consumer\.assignors' is no"):
        replay(edited(path, class_from_a_file))

    def no_batch(incident: dict[str, Any]) -> None:
        produce = next(step for step in incident["steps"] if step["api"] == "Produce")
        produce["request"]["topic_data"][0]["partition_data"][0]["records"] = "AAAA"

    with pytest.raises(IncidentError, match=r"step \d+ has no batch"):
        replay(edited(path, no_batch))
