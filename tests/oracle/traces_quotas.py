"""Request sequences of a client that exceeds its quotas: throttle times and responses.

Only the length of a throttle time depends on timing; everything else is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.oracle.tracer import Tracer
from tests.support import requests
from tests.support.batches import batch
from tests.support.cluster import unique
from tests.support.raw import Answer, errors_in
from tests.support.waits import until


def _change(t: Tracer, kind: str = "client-id", /, **values: float | None) -> None:
    """Set quotas for the client id or the user, and wait until the broker has applied them."""
    name = t.client_id if kind == "client-id" else "ANONYMOUS"
    entry = requests.quota_entry({kind: name}, **values)
    t.quietly("alter_client_quotas", 1, **requests.alter_client_quotas(entry))
    wanted = {key: value for key, value in values.items() if value is not None}
    component = requests.quota_component(kind, 0, name)
    asked = requests.describe_client_quotas(component, strict=True)

    def heard() -> bool:
        t.close()  # a throttled connection is muted, so open another one
        answer = t.quietly("describe_client_quotas", 1, **asked)
        told = {v["key"]: v["value"] for row in answer["entries"] for v in row["values"]}
        return told == wanted

    until(heard, "the broker has heard of the quotas")
    t.close()


@contextmanager
def _limited(t: Tracer, kind: str = "client-id", /, **values: float) -> Iterator[None]:
    # A client id without earlier traffic. Apache Kafka keeps old usage for a time that depends on
    # the kinds of quotas that were ever set, and other traces have set some.
    t.close()
    t.client_id = unique("limited")
    _change(t, kind, **values)
    yield
    _change(t, kind, **dict.fromkeys(values))


def _asks(t: Tracer, api: str, version: int, /, **body: Any) -> Answer:
    """Send a request on a new connection; record the errors and whether the client is throttled."""
    t.close()
    answer = t.quietly(api, version, **body)
    t.note(
        f"{api} v{version}",
        {"waits": answer["throttle_time"] > 0, "errors": sorted(errors_in(answer))},
    )
    t.close()
    return answer


def _created(t: Tracer, version: int, *names: str, validate_only: bool = False) -> None:
    rows = [requests.new_topic(name, 2) for name in names]
    body = requests.create_topics(*rows, validate_only=validate_only)
    _asks(t, "create_topics", version, **body)


def _deleted(t: Tracer, version: int, *names: str) -> None:
    _asks(t, "delete_topics", version, **requests.delete_topics(*names))


def _grown(t: Tracer, version: int, *names: str) -> None:
    rows = [requests.grown_topic(name, 4) for name in names]
    _asks(t, "create_partitions", version, **requests.create_partitions(*rows))


SLOW = 0.001
"""Partitions per second: one mutation exceeds this rate for a quarter of an hour."""


def changes_of_topics(t: Tracer) -> None:
    """The quota allows a first request; new versions refuse a second, old versions throttle it."""
    for number, (change, strict) in enumerate(((_created, 6), (_grown, 3), (_deleted, 5))):
        for version in (strict - 1, strict):
            names = [f"limited-{number}-{version}-{each}" for each in range(3)]
            if change is not _created:
                for name in names:
                    t.cluster.create_topic(name, 2)
            with _limited(t, controller_mutation_rate=SLOW):
                change(t, version, names[0])
                change(t, version, names[1])
                change(t, version, "no such topic !", names[2])
            change(t, strict, names[1])


def changes_that_are_only_checked(t: Tracer) -> None:
    with _limited(t, controller_mutation_rate=SLOW):
        _created(t, 7, "checked", validate_only=True)
        _created(t, 7, "checked", validate_only=True)
        _created(t, 5, "checked", validate_only=True)


def bytes_of_records(t: Tracer) -> None:
    t.cluster.create_topic("bytes")
    sent = requests.produce_topic("bytes", batch([b"x" * 100]))
    for acks in (1, -1):
        produce = requests.produce(sent, acks=acks)
        with _limited(t, producer_byte_rate=1):
            _asks(t, "produce", 9, **produce)
            _asks(t, "produce", 11, **produce)
            _asks(t, "metadata", 12, topics=[])
        _asks(t, "produce", 9, **produce)
    row = requests.fetch_topic("bytes", 0, partition_max_bytes=200)
    with _limited(t, consumer_byte_rate=30):
        for epoch in (-1, -1, 0):
            fetch = requests.fetch(row, max_bytes=200, session_epoch=epoch)
            answer = _asks(t, "fetch", 11, **fetch)
            t.note("told", [len(answer["responses"]), answer["session_id"]])


def a_batch_above_the_quota_of_a_window(t: Tracer) -> None:
    t.cluster.create_topic("large")
    t.cluster.produce("large", [b"x" * 1000])
    row = requests.fetch_topic("large", 0, partition_max_bytes=2000)
    # A quota of the user, who has no earlier usage.
    with _limited(t, "user", consumer_byte_rate=50):
        answer = t.quietly("fetch", 11, **requests.fetch(row, max_bytes=2000))
        t.note("waits", answer["throttle_time"] > 0)
        t.note("told", len(answer["responses"]))
        t.close()


def time_of_the_broker(t: Tracer) -> None:
    """Every response has a throttle time because of ``request_percentage``."""
    t.cluster.create_topic("timed")
    row = requests.list_offsets_topic("timed", 0)
    with _limited(t, request_percentage=0.000_001):
        _asks(t, "api_versions", 3, **requests.api_versions())
        _asks(t, "metadata", 12, topics=[])
        _asks(t, "list_offsets", 7, **requests.list_offsets(row))
        _asks(t, "find_coordinator", 4, **requests.find_coordinator("g"))
        _asks(t, "list_groups", 4)
        _asks(t, "describe_groups", 5, groups=["nobody"])
        _asks(t, "heartbeat", 4, **requests.heartbeat("nobody", 1, "m"))
        _asks(t, "offset_fetch", 7, **requests.offset_fetch("nobody"))
        _asks(t, "describe_cluster", 1)
        configs = requests.described_resource(2, "timed", configuration_keys=[])
        _asks(t, "describe_configs", 4, **requests.describe_configs(configs))
        _asks(t, "list_transactions", 1)
        _asks(t, "describe_producers", 0, topics=[])
        _asks(t, "describe_user_scram_credentials", 0, users=[])
        _asks(t, "describe_client_quotas", 1, components=[], strict=True)
        _created(t, 7)
        _asks(t, "incremental_alter_configs", 1, resources=[], validate_only=True)
    _asks(t, "metadata", 12, topics=[])


TRACES = [
    changes_of_topics,
    changes_that_are_only_checked,
    bytes_of_records,
    a_batch_above_the_quota_of_a_window,
    time_of_the_broker,
]
