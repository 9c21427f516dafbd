"""Lag as the number of records that a consumer can still read, on any Kafka broker."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from confluent_kafka import TopicPartition

from fencepost.client.queries import lag as lag_module
from fencepost.client.queries.lag import EXACT_OFFSETS, ConsumerLags
from fencepost.client.queries.session import ClusterSession
from fencepost.pipelines.spark.progress import Progress
from tests.support.cluster import Cluster, unique
from tests.support.own_broker import own_broker
from tests.support.processes import Child
from tests.support.waits import until
from tests.wire.clients import confluent_consumer, confluent_producer
from tests.wire.command_line import cli
from tests.wire.test_cli_groups import execute, rows, run


@pytest.fixture
def session(bootstrap: str) -> Iterator[ClusterSession]:
    with ClusterSession(bootstrap, 30) as opened:
        yield opened


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return cluster.create_topic(unique("lag"))


def write(stack: ExitStack, bootstrap: str, topic: str, draw: random.Random) -> int:
    """Write interleaved records of a plain producer and of two transactional producers.

    The first letter of each value is the outcome of its record: p(lain), c(ommitted) or a(borted),
    unless its transaction stays open. Return the number of transactions that have ended.
    """
    producers = [stack.enter_context(confluent_producer(bootstrap))]
    for _ in range(2):
        conf = {"transactional_id": unique("lag")}
        producers.append(stack.enter_context(confluent_producer(bootstrap, **conf)))
        producers[-1].init_transactions(60)
    fates: dict[int, str] = {}
    ended = 0
    for _ in range(60):
        who = draw.randrange(3)
        producer = producers[who]
        if who and who not in fates:
            producer.begin_transaction()
            fates[who] = draw.choice("ca")
        for _ in range(draw.randint(1, 3)):
            producer.produce(topic, fates.get(who, "p"), partition=0)
        producer.flush(60)
        if who and draw.random() < 0.5:
            is_commit = fates.pop(who) == "c"
            (producer.commit_transaction if is_commit else producer.abort_transaction)(60)
            ended += 1
    for who in fates:
        stack.callback(producers[who].abort_transaction, 60)
    return ended


def delete_records(cluster: Cluster, topic: str, offset: int) -> None:
    partition = {"partition_index": 0, "offset": offset}
    asked = [{"name": topic, "partitions": [partition]}]
    answer = cluster.call("delete_records", 1, timeout=10_000, topics=asked)
    assert answer["topics"][0]["partitions"][0]["error_code"] == "none", answer


@pytest.mark.parametrize("seed", range(3))
def test_lag_counts_the_records_a_consumer_can_still_read(cluster, bootstrap, session, topic, seed):
    with ExitStack() as stack:
        ended = write(stack, bootstrap, topic, random.Random(seed))

        def markers() -> int:
            return sum(batch.is_control for batch in cluster.read(topic, controls=True))

        until(lambda: markers() == ended, "all markers")
        kinds = {
            batch.base_offset + number: value
            for batch in cluster.read(topic)
            for number, value in enumerate(batch.values)
        }
        cut = sorted(kinds)[len(kinds) // 5]
        delete_records(cluster, topic, cut)
        stable, end = cluster.lso(topic), cluster.offset(topic)
        lags = ConsumerLags(session, [(topic, 0)])
        for committed in range(end + 3):
            at = max(cut, committed)
            seen = lags.of((topic, 0), committed)
            assert seen is not None
            assert (seen.is_exact, seen.readable, seen.held_back, seen.uncommitted) == (
                True,
                sum(at <= offset < stable and kind != b"a" for offset, kind in kinds.items()),
                sum(max(at, stable) <= offset for offset in kinds),
                sum(at <= offset for offset in kinds),
            ), committed
        assert (lags.held_since((topic, 0)) is None) == (stable == end)


def test_lag_beyond_the_exact_limit_is_counted_in_offsets(cluster, bootstrap, session, topic):
    cluster.produce(topic, [b""] * EXACT_OFFSETS)
    with confluent_producer(bootstrap, transactional_id=unique("lag")) as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic, b"", partition=0)
        producer.commit_transaction(60)
    cluster.settle(topic)
    assert cluster.offset(topic) == EXACT_OFFSETS + 2
    lags = ConsumerLags(session, [(topic, 0), (topic, 1)])
    larger, smaller = lags.of((topic, 0), 1), lags.of((topic, 0), 2)
    assert larger is not None
    assert smaller is not None
    assert (larger.is_exact, larger.readable) == (False, EXACT_OFFSETS + 1)
    assert (smaller.is_exact, smaller.readable) == (True, EXACT_OFFSETS - 1)
    assert lags.of((topic, 0), None) is None
    assert lags.of((topic, 1), 0) is None, "there is no such partition"


def test_lag_is_inexact_once_the_byte_budget_is_spent(cluster, session, topic, monkeypatch):
    cluster.produce(topic, [b"one"])
    size = len(cluster.fetch(topic)["records"])
    for budget, is_exact in ((size, False), (size + 1, True)):
        monkeypatch.setattr(lag_module, "EXACT_BYTES", budget)
        cluster.produce(topic, [b"two"])
        lags = ConsumerLags(session, [(topic, 0)])
        # The first call takes the size of one batch from the budget, the second call the remainder.
        end = lags.bounds[topic, 0].end
        lags.of((topic, 0), end - 1)
        again = lags.of((topic, 0), end - 2)
        assert again is not None
        assert (again.readable, again.is_exact) == (2, is_exact)


def test_lag_of_a_group_reaches_zero_after_a_transaction(cluster, bootstrap, topic, tmp_path):
    with confluent_producer(bootstrap, transactional_id=unique("lag")) as producer:
        producer.init_transactions(60)
        for is_commit in (True, False):
            producer.begin_transaction()
            producer.produce(topic, b"x", partition=0)
            producer.flush(60)
            (producer.commit_transaction if is_commit else producer.abort_transaction)(60)
        cluster.settle(topic)
        group, other, seed = unique("lag"), unique("lag"), tmp_path / "seed.csv"
        for name, offset in ((group, 1), (other, 0)):
            seed.write_text(f"{topic},0,{offset}\n")
            run(bootstrap, "reset-offsets", name, "--from-file", str(seed), *execute(tmp_path))
        first, second = rows(run(bootstrap, "describe", group, other))
        assert (first["group"], first["committed"], first["end"], first["lag"]) == (group, 1, 4, 0)
        assert (second["group"], second["lag"], second["held_back"]) == (other, 1, 0)
        producer.begin_transaction()
        producer.produce(topic, b"x", partition=0)
        producer.flush(60)
        summary = rows(run(bootstrap, "describe", "--all", "--summary"))
        found = {row["group"]: row for row in summary}
        assert (found[group]["lag"], found[group]["held_back"]) == (0, 1)
        assert (found[other]["lag"], found[other]["lag_uncommitted"]) == (1, 3)
        table = cli(bootstrap, "groups", "describe", other, group).stdout
        assert f"{other}: Empty, 0 members, lag 1, held back 1\n" in table
        assert f"\n{group}: Empty, 0 members, lag 0, held back 1\n" in table
        producer.abort_transaction(60)


def test_lag_without_committed_offset_is_unknown_unless_log_is_empty(cluster, bootstrap):
    topic, group = cluster.create_topic(unique("lag"), 3), unique("lag")
    cluster.produce(topic, [b"x"] * 3)
    cluster.produce(topic, [b"x"] * 2, partition=1)
    with confluent_consumer(bootstrap, group_id=group) as consumer:
        consumer.subscribe([topic])
        until(lambda: consumer.poll(0.1) is None and len(consumer.assignment()) == 3, "assigned")
        told = rows(run(bootstrap, "describe", group))
        assert [(row["lag"], row["lag_at_most"], row["unknown"]) for row in told] == [
            (None, 3, True),
            (None, 2, True),
            (0, 0, False),
        ]
        (total,) = rows(run(bootstrap, "describe", group, "--summary"))
        assert (total["lag"], total["lag_known"], total["lag_at_most"]) == (None, 0, 5)
        assert (total["unknown"], total["partitions"]) == (2, 3)
        done = cli(bootstrap, "groups", "describe", group)
        assert ", lag unknown in 2 of 3 partitions\n" in done.stdout
        assert "auto.offset.reset" in done.stderr
        assert "5 records" in done.stderr
        done = cli(bootstrap, "groups", "offsets", group)
        assert done.stdout.count("unknown") == 2
        consumer.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
        done = cli(bootstrap, "groups", "describe", group, "--summary")
        assert " 2 and unknown " in done.stdout


def test_progress_of_a_spark_query_is_no_lag(cluster, bootstrap, topic):
    group = f"{unique('query')}-progress"
    cluster.produce(topic, [b"x"])
    commit = TopicPartition(topic, 0, 0, Progress(1, "query", "digest").to_text())
    with confluent_consumer(bootstrap, group_id=group) as consumer:
        consumer.commit(offsets=[commit], asynchronous=False)
    (row,) = rows(run(bootstrap, "describe", group))
    assert (row["committed"], row["lag"], row["progress"], row["unknown"]) == (0, None, True, False)
    (total,) = rows(run(bootstrap, "describe", group, "--summary"))
    assert (total["lag"], total["progress"]) == (None, True)
    for more in ((), ("--summary",)):
        told = cli(bootstrap, "groups", "describe", group, *more).stdout
        assert "none (progress of a Spark query)" in told
    with confluent_producer(bootstrap, transactional_id=unique("lag")) as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic, b"x", partition=0)
        producer.flush(60)
        (held,) = rows(cli(bootstrap, "txns", "blame", topic, "--format", "json"))
        assert (held["behind"], held["groups"]) == (1, [])
        producer.abort_transaction(60)


def test_lag_of_records_deleted_meanwhile_is_inexact_and_no_error(
    cluster, bootstrap, session, topic
):
    with confluent_producer(bootstrap, transactional_id=unique("lag")) as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic, b"x", partition=0)
        producer.flush(60)
        lags = ConsumerLags(session, [(topic, 0)])
        assert lags.held_since((topic, 0)) is not None
        delete_records(cluster, topic, 1)
        assert lags.held_since((topic, 0)) is None
        lag = lags.of((topic, 0), 0)
        assert lag is not None
        assert (lag.held_back, lag.is_exact) == (1, False)
        producer.abort_transaction(60)


def test_invalid_groups_describe_is_refused(bootstrap):
    assert "--all" in run(bootstrap, "describe", status=2).stderr
    assert "--all" in run(bootstrap, "describe", "g", "--all", status=2).stderr
    assert "either" in run(bootstrap, "describe", "g", "--summary", "--members", status=2).stderr
    assert "no group" in run(bootstrap, "describe", unique("none"), status=1).stderr


def test_watch_refreshes_until_ctrl_c(cluster, bootstrap, topic, tmp_path):
    group, seed = unique("watched"), tmp_path / "seed.csv"
    seed.write_text(f"{topic},0,0\n")
    run(bootstrap, "reset-offsets", group, "--from-file", str(seed), *execute(tmp_path))
    asked = [sys.executable, "-m", "fencepost", "groups", "describe", group, "--watch", "0.1"]
    with subprocess.Popen(
        [*asked, "--bootstrap", bootstrap],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        heads = (line for line in watching.stdout if line.startswith(group))
        assert "lag 0" in next(heads)
        cluster.produce(topic, [b"new"])
        assert any("lag 1" in head for head in heads)
        watching.send_signal(signal.SIGINT)
        rest, said = watching.communicate(timeout=30)
        assert (watching.returncode, said) == (0, "")
        assert "\033" not in rest


@pytest.mark.slow
def test_watch_resumes_after_a_broker_restart(request, tmp_path):
    with own_broker(request, tmp_path) as broker:
        with Cluster(broker.bootstrap) as cluster:
            topic = cluster.create_topic("t")
        group, seed = "watched", tmp_path / "seed.csv"
        seed.write_text(f"{topic},0,0\n")
        where = ("--from-file", str(seed), *execute(tmp_path))
        run(broker.bootstrap, "reset-offsets", group, *where)
        asked = ["groups", "describe", group, "--watch", "0.1", "--timeout", "1"]
        child = Child([sys.executable, "-m", "fencepost", *asked, "-b", broker.bootstrap])
        child.wait_for_line(f"^{group}: Empty", deadline_s=60)
        broker.kill()
        child.wait_for_line("^Error: ", deadline_s=60)
        broker.start()
        with Cluster(broker.bootstrap) as cluster:
            cluster.produce(topic, [b"new"])
        child.wait_for_line(f"^{group}: Empty.*lag 1", deadline_s=60)
        child.kill()
