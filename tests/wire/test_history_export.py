"""The history, exported as a topic, as webhooks, and as OpenTelemetry's logs and spans."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fencepost.cli.history_export import Selection
from fencepost.client.queries.session import ClusterSession
from fencepost.coordinator.history.entries import GROUP, GROUP_REQUEST, Entry
from fencepost.coordinator.history.recorded_apis import CONNECTION_CLOSED, REQUEST
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.testing import Cluster as SeveralBrokers
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.processes import Child
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.wire.clients import confluent_consumer, confluent_producer
from tests.wire.command_line import cli
from tests.wire.test_history import command, heartbeat, join, told

SECRET = b"a key of the test"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    more = {"fencepost.history.commits": "true"}
    started = Daemon(tmp_path_factory.mktemp("causes"), {**SETTINGS, **more}).start()
    yield started
    started.stop()


@pytest.fixture
def cluster(daemon: Daemon) -> Iterator[Cluster]:
    with Cluster(daemon.bootstrap) as opened:
        yield opened


class Receiver:
    """A real HTTP server that stores its requests; it first responds with ``statuses``."""

    def __init__(self, statuses: list[int], headers: dict[str, str]) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes, int]] = []
        """Path, headers, body and response of each request."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = statuses.pop(0) if statuses else 200
                fields = {name.lower(): value for name, value in self.headers.items()}
                outer.requests.append((self.path, fields, body, status))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def accepted(self, path: str = "/") -> list[bytes]:
        return [body for at, _, body, status in self.requests if at == path and status == 200]


@contextmanager
def receiving(*statuses: int, **headers: str) -> Iterator[Receiver]:
    receiver = Receiver(list(statuses), headers)
    thread = threading.Thread(target=receiver.server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        thread.join()
        receiver.server.server_close()


def make_history(daemon: Daemon, cluster: Cluster) -> str:
    """Have a member join and leave a group; return the group once the topic has its history."""
    group = unique("causes")
    cluster.coordinator(group, 0)
    member = join(cluster, group)["member_id"]
    assert join(cluster, group, member)["error_code"] == "none"
    assert cluster.call("leave_group", 2, group_id=group, member_id=member)["error_code"] == "none"
    told(daemon, "groups", group, "member-left")
    return group


def export(daemon: Daemon, *words: str, status: int | None = 0) -> Any:
    return cli(
        daemon.bootstrap, "history", "export", "--group", unique("export"), *words, status=status
    )


def of_subject(bodies: list[bytes], subject: str) -> list[dict[str, Any]]:
    return [entry for body in bodies if (entry := json.loads(body))["subject"] == subject]


def test_consumer_reads_entries_that_the_schema_describes(daemon: Daemon, cluster: Cluster) -> None:
    group = make_history(daemon, cluster)
    printed = cli(daemon.bootstrap, "history", "schema").stdout
    schema = Draft202012Validator(json.loads(printed))
    found: list[Any] = []
    with confluent_consumer(daemon.bootstrap, group_id=unique("reader")) as consumer:
        consumer.subscribe([HISTORY_TOPIC])

        def has_left() -> bool:
            found.extend(
                message for message in consumer.consume(100, timeout=0.2) if message.error() is None
            )
            return any(json.loads(message.key()) == ["group", group] for message in found) and any(
                json.loads(message.value())["what"] == "member-left" for message in found
            )

        until(has_left, "the entries")
    for message in found:
        entry = json.loads(message.value())
        assert [error.message for error in schema.iter_errors(entry)] == []
        assert json.loads(message.key()) == [entry["scope"], entry["subject"]]
    mine = of_subject([message.value() for message in found], group)
    causes = {(event["what"], event["cause"]) for event in mine}
    assert ("rebalance-started", "member-joined") in causes
    assert ("rebalance-started", "member-left") in causes


def test_webhook_that_fails_first_gets_each_entry_once(
    daemon: Daemon, cluster: Cluster, tmp_path: Path
) -> None:
    group = make_history(daemon, cluster)
    secret = tmp_path / "key"
    secret.write_bytes(b"whsec_" + base64.b64encode(SECRET) + b"\n")
    with receiving(503, 500) as receiver:
        words = ("--webhook", receiver.url, "--secret-file", str(secret), "--scopes", "group")
        done = export(daemon, *words)
    assert "responded 503" in done.stderr
    assert "trying again" in done.stderr
    (first, second, third, *_) = receiver.requests
    assert [request[3] for request in (first, second, third)] == [503, 500, 200]
    assert first[1]["webhook-id"] == second[1]["webhook-id"] == third[1]["webhook-id"]
    assert first[2] == third[2]
    rows = of_subject(receiver.accepted(), group)
    whats = [row["what"] for row in rows]
    assert whats == [row["what"] for row in told(daemon, "groups", group, "member-left")]
    ids = [fields["webhook-id"] for _, fields, _, status in receiver.requests if status == 200]
    assert len(ids) == len(set(ids))
    for _, fields, body, _ in receiver.requests:
        signed = f"{fields['webhook-id']}.{fields['webhook-timestamp']}.".encode() + body
        mac = base64.b64encode(hmac.digest(SECRET, signed, hashlib.sha256)).decode()
        assert fields["webhook-signature"] == f"v1,{mac}"
        assert fields["content-type"] == "application/json"


def test_next_run_begins_with_the_entry_that_failed(daemon: Daemon, cluster: Cluster) -> None:
    make_history(daemon, cluster)
    name = unique("export")
    with receiving(200, 200, *[503] * 20) as receiver:
        words = ("history", "export", "--webhook", receiver.url, "--group", name, "--retry-for")
        done = cli(daemon.bootstrap, *words, "0.7", status=1)
        assert "gave up (--retry-for is 0.7 s)" in done.stderr
        refused = receiver.requests[-1]
        receiver.requests.clear()
    with receiving() as receiver:
        words = ("history", "export", "--webhook", receiver.url, "--group", name)
        cli(daemon.bootstrap, *words)
        again = [request[1]["webhook-id"] for request in receiver.requests]
        assert refused[1]["webhook-id"] in again
        assert len(again) == len(set(again))
        receiver.requests.clear()
        cli(daemon.bootstrap, *words)
    later = [request[1]["webhook-id"] for request in receiver.requests]
    assert set(later).isdisjoint(again), "their offsets are committed"


@pytest.mark.parametrize("status", [302, 400, 401])
def test_webhook_status_without_retry_is_an_error(
    daemon: Daemon, cluster: Cluster, status: int
) -> None:
    make_history(daemon, cluster)
    with receiving(*[status] * 3, Location="/elsewhere") as receiver:
        done = export(daemon, "--webhook", receiver.url, status=1)
    assert f"responded {status}" in done.stderr
    assert len(receiver.requests) == 1


def test_unreachable_webhook_receiver_is_named(daemon: Daemon, cluster: Cluster) -> None:
    make_history(daemon, cluster)
    with receiving() as receiver:
        pass
    done = export(daemon, "--webhook", receiver.url, "--retry-for", "0", status=1)
    assert f"{receiver.url} cannot be reached" in done.stderr
    assert "refused" in done.stderr


@pytest.mark.slow
def test_killed_export_loses_no_entry(daemon: Daemon, cluster: Cluster) -> None:
    group = unique("export")
    words = ("history", "export", "--group", group, "--scopes", "group", "--follow", "--webhook")
    seen: set[str] = set()
    for is_killed in (True, True, False):
        subject = make_history(daemon, cluster)
        with receiving() as receiver:
            child = Child(command(daemon, *words, receiver.url))
            try:

                def has_left(receiver: Receiver = receiver, subject: str = subject) -> bool:
                    mine = of_subject(receiver.accepted(), subject)
                    return any(event["what"] == "member-left" for event in mine)

                until(has_left, "the last entry of the group")
            finally:
                if is_killed:
                    child.kill()
                else:
                    assert child.terminate() == 0
            seen |= {request[1]["webhook-id"] for request in receiver.requests}
    offsets = {int(entry_id.rpartition("-")[2]) for entry_id in seen}
    values = cluster.values(HISTORY_TOPIC)
    wanted = {
        offset for offset, value in enumerate(values) if json.loads(value)["scope"] == "group"
    }
    assert {offset for offset in wanted if offset <= max(offsets)} <= offsets


def test_export_selects_kinds_and_refuses_invalid_options(daemon: Daemon, cluster: Cluster) -> None:
    group = make_history(daemon, cluster)
    with receiving() as receiver:
        export(daemon, "--webhook", receiver.url, "--kinds", "member-left,group-created")
    rows = of_subject(receiver.accepted(), group)
    assert [row["what"] for row in rows] == ["group-created", "member-left"]
    for words, says in (
        ((), "give either --webhook or --otlp"),
        (("--webhook", "ftp://x"), "not an http or https URL"),
        (("--webhook", "http://x", "--kinds", "member-joint"), "did you mean member-joined?"),
        (("--otlp", "http://x", "--secret-file", "/dev/null"), "needs --webhook"),
        (("--webhook", "http://x", "--from", "half past"), "--from"),
    ):
        assert says in export(daemon, *words, status=2).stderr


@pytest.mark.parametrize(
    ("scopes", "kinds", "selected"),
    [
        ((), (), {"member-left"}),
        ((GROUP_REQUEST,), (), {REQUEST, CONNECTION_CLOSED}),
        ((), (REQUEST,), {REQUEST}),
        ((GROUP,), (REQUEST, "member-left"), {"member-left"}),
    ],
)
def test_recorded_requests_are_selected_by_scope_or_kind(
    scopes: tuple[str, ...], kinds: tuple[str, ...], selected: set[str]
) -> None:
    selection = Selection(frozenset(scopes), frozenset(kinds))
    entries = [
        Entry(1, GROUP, "g", "member-left", "shard"),
        Entry(1, GROUP_REQUEST, "g", REQUEST, "shard"),
        Entry(1, GROUP_REQUEST, "g", CONNECTION_CLOSED, "shard"),
    ]
    assert {entry.what for entry in entries if selection.has(entry)} == selected


def attributes(row: Any) -> dict[str, Any]:
    found = {}
    for attribute in row.attributes:
        kind = attribute.value.WhichOneof("value")
        found[attribute.key] = getattr(attribute.value, kind)
    return found


def test_otlp_receiver_gets_logs_and_spans(daemon: Daemon, cluster: Cluster) -> None:
    """The receiver is an HTTP server that decodes the protobuf messages."""
    group = make_history(daemon, cluster)
    name = unique("told")
    topic = cluster.create_topic(unique("told"), 1)
    with confluent_producer(daemon.bootstrap, transactional_id=name) as producer:
        producer.init_transactions(60)
        for end in (producer.commit_transaction, producer.abort_transaction):
            producer.begin_transaction()
            producer.produce(topic, b"1")
            producer.flush(60)
            end(60)
    told(daemon, "txns", name, "transaction-committed", "transaction-aborted")
    with receiving(503) as receiver:
        done = export(daemon, "--otlp", receiver.url)
    assert "503" in done.stderr or "trying again" not in done.stderr
    spans = [
        (span, attributes(span))
        for body in receiver.accepted("/v1/traces")
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    logs = [
        (log, attributes(log))
        for body in receiver.accepted("/v1/logs")
        for resource in ExportLogsServiceRequest.FromString(body).resource_logs
        for scope in resource.scope_logs
        for log in scope.log_records
    ]
    mine = [span for span in spans if span[1].get("fencepost.transactional_id") == name]
    assert [(span[0].name, span[1]["fencepost.outcome"]) for span in mine] == [
        ("transaction", "commit"),
        ("transaction", "abort"),
    ]
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano > 0 for span, _ in mine)
    rebalances = [
        fields for span, fields in spans if fields.get("messaging.consumer.group.name") == group
    ]
    assert [rebalance["fencepost.cause"] for rebalance in rebalances] == [
        "member-joined",
        "member-left",
    ]
    assert {rebalance["fencepost.outcome"] for rebalance in rebalances} == {"complete"}
    whats = [fields["fencepost.what"] for _, fields in logs if fields["fencepost.subject"] == group]
    assert whats == [row["what"] for row in told(daemon, "groups", group, "member-left")]
    by_trace = {log.trace_id: fields["fencepost.what"] for log, fields in logs if log.trace_id}
    assert by_trace[mine[0][0].trace_id] == "transaction-committed"


def test_rebalance_of_the_consumer_protocol_ends_with_its_last_member(
    daemon: Daemon, cluster: Cluster
) -> None:
    group = unique("causes")
    topic = cluster.create_topic(unique("told"), 2)
    cluster.coordinator(group, 0)
    epoch = heartbeat(cluster, group, "m", 0, subscribed_topic_names=[topic])
    assert epoch > 0
    heartbeat(cluster, group, "m", -1)
    heartbeat(cluster, group, "n", 0, subscribed_topic_names=[topic])

    def joined() -> bool:
        whats = [row["what"] for row in told(daemon, "groups", group, "member-left")]
        return whats.count("member-reconciled") >= 2

    until(joined, "the second member has its partitions")
    with receiving() as receiver:
        export(daemon, "--otlp", receiver.url)
    found = [
        fields
        for body in receiver.accepted("/v1/traces")
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for fields in map(attributes, scope.spans)
        if fields.get("messaging.consumer.group.name") == group
    ]
    assert [
        (rebalance["fencepost.outcome"], rebalance["fencepost.cause"]) for rebalance in found
    ] == [
        ("complete", "member-joined"),
        ("superseded", "member-left"),  # no member is left to complete it
        ("complete", "member-joined"),
    ]


@pytest.mark.slow
def test_entries_of_every_broker_are_delivered_even_after_a_failover() -> None:
    with SeveralBrokers(3) as brokers:
        brokers.topic("t", 3)

        def leaders() -> bool:
            with ClusterSession(brokers.bootstrap, 10) as session:
                known = session.client.metadata(refresh=True).topics
                rows = known[HISTORY_TOPIC].partitions if HISTORY_TOPIC in known else {}
                return {row.leader for row in rows.values()} == {1, 2, 3}

        until(leaders, "each broker leads a partition of the history")
        name = unique("export")
        words = ("history", "export", "--group", name, "--webhook")
        first: set[str] = set()

        def each_has_entries() -> bool:
            with receiving() as receiver:
                cli(brokers.bootstrap, *words, receiver.url)
            first.update(request[1]["webhook-id"] for request in receiver.requests)
            return {entry_id.split("-")[-2] for entry_id in first} == {"0", "1", "2"}

        until(each_has_entries, "an entry of each broker")
        brokers.kill(3)
        seen: set[str] = set()

        def is_told() -> bool:
            with receiving() as receiver:
                done = cli(brokers.bootstrap, *words, receiver.url, status=None)
            entries = [json.loads(body) for body in receiver.accepted()]
            seen.update(request[1]["webhook-id"] for request in receiver.requests)
            return done.exit_code == 0 and any(
                (entry["what"], entry["subject"]) == ("broker-fenced", "broker 3")
                for entry in entries
            )

        until(is_told, "the failover")
        assert seen.isdisjoint(first), "their offsets were committed"
