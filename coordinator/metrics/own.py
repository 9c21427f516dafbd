"""Fencepost's own metrics: all families by name, and how to collect their samples."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

from fencepost.coordinator.history.causes import REBALANCES
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS, SHARE_SCOPE, TRANSACTION_STATE
from fencepost.coordinator.metrics.client_telemetry import FAMILIES as CLIENT_TELEMETRY
from fencepost.coordinator.metrics.families import Sample, Series, labels, read_families
from fencepost.coordinator.metrics.snapshot import PartitionRow, Snapshot
from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.coordinator.server.connection_limits import REASONS
from fencepost.groups.share.states import AcknowledgeType
from fencepost.logcore.clock import time_of_day_ns
from fencepost.logcore.system import (
    age_s,
    cpu_seconds,
    descriptor_limit,
    open_descriptors,
    resident_bytes,
)
from fencepost.protocol.api import KNOWN_APIS

if TYPE_CHECKING:
    from fencepost.coordinator.broker_services import Services
    from fencepost.coordinator.security.logins import Logins
    from fencepost.coordinator.server.server import Server

MAX_CLIENTS: Final = 500
"""The maximum number of users and clients shown per quota: the most recently active ones."""

FAMILIES: Final = CLIENT_TELEMETRY | read_families("""
fencepost_info gauge version cluster_id node_id
    Always 1; its labels say which broker this is.
fencepost_ready gauge
    1 while /readyz answers 200, else 0.
process_start_time_seconds gauge
    When the process began, in seconds since 1970.
process_cpu_seconds_total counter
    Processor time of the process.
process_resident_memory_bytes gauge
    Memory of the process that is in RAM.
process_open_fds gauge
    Open file descriptors.
process_max_fds gauge
    The limit of open file descriptors.
fencepost_event_loop_lag_seconds histogram
    Delay of a timer set ten times a second: how long a turn of the loop keeps connections waiting.
fencepost_connections gauge
    Open connections of clients.
fencepost_connections_accepted_total counter
    Connections that were accepted.
fencepost_connections_refused_total counter limit
    Connections that were refused, or closed for others, by the limit that was the reason.
fencepost_connections_waiting gauge
    Clients that wait for a free connection or for the rate limit; their listener accepts no others.
fencepost_connection_throttle_seconds_total counter listener limit
    How long connections were held up because they came too fast.
fencepost_client_quota gauge quota user client_id
    What a user or a client id may take, of those who did lately; a label is empty where the quota
    is shared by all that have the other.
fencepost_client_rate gauge quota user client_id
    What they take: bytes, percents of the loop's time, or partitions, per second.
fencepost_client_throttles_total counter quota user client_id
    How often they were told to wait.
fencepost_client_throttle_seconds_total counter quota user client_id
    How long, all together.
fencepost_logins_total counter listener mechanism
    Logins by SASL that succeeded.
fencepost_login_failures_total counter listener mechanism
    Logins that failed; without a mechanism where none was agreed on.
fencepost_logins_under_way gauge
    Connections that have not logged in yet.
fencepost_logins_expired_total counter
    Connections that were closed because they went on with a login that had ended.
fencepost_authorizations_total counter result
    How often rules allowed a client something, or denied it; lists ask for each thing in them.
fencepost_acls gauge
    ACLs.
fencepost_handshake_failures_total counter listener
    Clients with which a listener that encrypts could not come to terms.
fencepost_certificate_not_after_seconds gauge listener
    Until when the certificate of a listener is good, in seconds since 1970.
fencepost_certificate_stale gauge listener
    1 while changed files or settings of a listener's certificate cannot be used: the log says why,
    and the listener keeps the former certificate.
fencepost_requests_total counter api version
    Requests that were answered.
fencepost_request_seconds histogram api
    From a decoded request to its encoded answer, the waits of long polls and joins among it.
fencepost_request_memory_bytes gauge
    What large requests hold together of queued.max.request.bytes.
fencepost_request_memory_waiting gauge
    Connections that wait for room there.
fencepost_response_memory_bytes gauge
    Responses in memory that clients have not taken, of queued.max.response.bytes.
fencepost_response_memory_waiting gauge
    Requests with large answers that wait for room there, or for their turn.
fencepost_fetches_waiting gauge
    Fetches that wait for records.
fencepost_fetch_sessions gauge
    Fetch sessions that are kept.
fencepost_share_sessions gauge
    Share sessions, in which members of share groups fetch.
fencepost_share_session_evictions_total counter
    Share sessions that ended with their connections.
fencepost_share_partitions gauge
    Share partitions in memory, one for each share group and partition that is fetched.
fencepost_share_in_flight_records gauge group
    Offsets between the start and the end offsets of a share group's partitions that this broker
    leads: acquired, available again, or complete behind others that are not.
fencepost_share_in_flight_batches gauge group
    The batches in which they were acquired.
fencepost_share_lock_timeouts_total counter
    Offsets whose acquisition locks ended before their owners acknowledged them.
fencepost_share_events_total counter event cause
    Records of share groups that are delivered again or given up, and share partitions that began or
    ended, as fencepost groups history tells it.
fencepost_share_fetches_expired_total counter
    ShareFetch requests that waited for the whole of MaxWaitMs.
fencepost_share_fetches_waiting gauge
    ShareFetch requests that wait for records.
fencepost_dead_letter_records_total counter group
    Records that this broker has put into the dead-letter queues of share groups.
fencepost_dead_letter_requests_total counter group
    Batches for dead-letter queues that were sent to a leader, again after each failure.
fencepost_dead_letter_failures_total counter group
    Batches for dead-letter queues that were given up: their records were archived without it.
fencepost_share_acknowledgements_total counter type
    Offsets that members of share groups have acknowledged with success, by the type.
fencepost_fsync_seconds histogram of
    Flushes of a log to the disk: of records whose producers wait (appends), or of sealed segments.
fencepost_disk_free_bytes gauge
    Free bytes in the file system of the data directory.
fencepost_disk_size_bytes gauge
    Size of the file system of the data directory.
fencepost_producers gauge
    Producers that partitions remember, of max.producer.ids.
fencepost_topics gauge
    Topics, internal ones too.
fencepost_partitions gauge
    Their partitions.
fencepost_partitions_offline gauge
    Partitions whose log is off line.
fencepost_partitions_leaderless gauge
    Partitions without a leader, in the metadata that this broker has.
fencepost_partitions_under_replicated gauge
    Partitions led by this broker that have a replica outside the ISR.
fencepost_partitions_under_min_isr gauge
    Partitions led by this broker that refuse writes with acks=all.
fencepost_isr_changes_total counter change
    Changes of the ISR of partitions led by this broker: replicas left (shrink) or joined (expand).
fencepost_bytes_in_total counter
    Bytes of record batches that were appended, by clients or by the broker.
fencepost_records_in_total counter
    Records in them, markers among them.
fencepost_bytes_out_total counter
    Bytes of record batches that fetches were answered with.
fencepost_replicated_in_bytes_total counter
    Bytes of record batches that were fetched from leaders.
fencepost_topic_bytes_in_total counter topic
    The same of a topic.
fencepost_topic_records_in_total counter topic
    The same of a topic.
fencepost_topic_bytes_out_total counter topic
    The same of a topic.
fencepost_topic_markers_total counter topic
    Transaction markers appended to a topic.
fencepost_partition_log_start_offset gauge topic partition
    The first offset that can be read.
fencepost_partition_last_stable_offset gauge topic partition
    The end for read_committed.
fencepost_partition_high_watermark gauge topic partition
    The end for read_uncommitted.
fencepost_partition_log_end_offset gauge topic partition
    The offset of the next record.
fencepost_partition_size_bytes gauge topic partition
    Bytes of its log files.
fencepost_partition_segments gauge topic partition
    Segments of its log.
fencepost_partition_open_transactions gauge topic partition
    Transactions without a marker, where there are any.
fencepost_partition_open_transaction_seconds gauge topic partition
    Since when a transaction holds the last stable offset back, where one does.
fencepost_partition_hanging_transactions gauge topic partition
    Open transactions that their coordinator knows nothing of, where there are any: only `fencepost
    txns abort` ends them.
fencepost_groups gauge type state
    Consumer groups.
fencepost_group_members gauge group
    Members of a group.
fencepost_group_info gauge group type state protocol
    Always 1; its labels say how the group is.
fencepost_group_committed_offset gauge group topic partition
    The committed offset.
fencepost_group_lag_offsets gauge group topic partition
    High watermark minus committed offset: what other tools call lag.
fencepost_group_lag_records gauge group topic partition
    Records that a read_committed reader can get now. Markers, records of aborted transactions and
    what retention or compaction has removed are not among them.
fencepost_group_lag_uncommitted_records gauge group topic partition
    Records that a read_uncommitted reader can get now.
fencepost_group_held_back_records gauge group topic partition
    Records behind the last stable offset: an open transaction decides when they can be read.
fencepost_group_lag_seconds gauge group topic partition
    Age of the first record of fencepost_group_lag_records; 0 where there is no such record, and no
    sample where it has no time.
fencepost_group_lag_unknown_partitions gauge group
    Partitions whose lag is not known, and has no sample: a member owns them, nothing is committed
    and there are records, or this broker has no replica in sync.
fencepost_group_lag_unseen_offsets gauge
    Offsets of all partitions that count as records without having been read: lags may be smaller by
    as much. Each scrape reads more of them.
fencepost_group_rebalances_total counter cause
    Rebalances that began, of both protocols.
fencepost_group_events_total counter event cause
    Everything else that happened to groups, as `fencepost groups history` tells it.
fencepost_transactions gauge state
    Transactional ids by the state of their last transaction: Ongoing is open, Prepare… prepared.
fencepost_transaction_oldest_seconds gauge
    Since when the longest open transaction is; 0 without one.
fencepost_transactions_hanging gauge
    Transactions that are open in a partition and unknown to their coordinator.
fencepost_transactions_ended_total counter outcome
    Transactions that were ended.
fencepost_transaction_aborts_total counter cause
    Aborts: by the client, for their timeout, or by a new producer with the same id.
fencepost_producer_fences_total counter cause
    Producers that lost their transactional id while a transaction of theirs was open.
fencepost_producer_refusals_total counter
    Requests that were refused because their producer had lost its id.
fencepost_transaction_events_total counter event cause
    Everything else that happened to transactions, as `fencepost txns history` tells it.
fencepost_shards gauge topic state
    Partitions of the coordinators' topics by state: all Active when nothing loads or has failed.
fencepost_history_waiting gauge
    Events that are not in the history's topic yet.
fencepost_history_dropped_total counter
    Events that never got there.
fencepost_scrapes_total counter
    Scrapes so far.
fencepost_scrape_seconds gauge
    How long the last one took, waits for others' turns among it.
fencepost_metrics_series gauge
    Samples of this scrape, less those about itself.
fencepost_metrics_dropped_series gauge
    Samples that fencepost.metrics.max.series left no room for.
""")


def of_process(start_time: float) -> Iterator[Series]:
    """Yield the process metrics, by the names that all exporters use."""
    yield unlabelled("process_start_time_seconds", start_time)
    yield unlabelled("process_cpu_seconds_total", cpu_seconds())
    if (resident := resident_bytes()) is not None:
        yield unlabelled("process_resident_memory_bytes", resident)
    if (used := open_descriptors()) is not None:
        yield unlabelled("process_open_fds", used)
    yield unlabelled("process_max_fds", descriptor_limit())


def unlabelled(name: str, value: float) -> Series:
    """Return a family with one sample and no labels."""
    return FAMILIES[name], [("", value)]


def labelled(name: str, *samples: Sample | tuple[str, Histogram]) -> Series:
    """Return a family with these samples."""
    return FAMILIES[name], samples


def of_server(server: Server) -> Iterator[Series]:
    """Yield connections, requests, and the memory of requests and responses."""
    yield unlabelled("fencepost_connections", len(server.connections))
    yield unlabelled("fencepost_connections_accepted_total", server.accepted)
    refused = {limit: server.refusals[limit] for limit in REASONS}
    if server.logins is not None:
        refused["fencepost.unauthenticated.connections.per.ip"] = server.logins.refused
    yield labelled(
        "fencepost_connections_refused_total",
        *((labels(limit=limit), count) for limit, count in refused.items()),
    )
    yield from _of_logins(server.logins)
    encrypted = [(labels(listener=name), tls) for name, tls in server.tls.items()]
    yield labelled(
        "fencepost_handshake_failures_total",
        *((name, tls.handshake_failures) for name, tls in encrypted),
    )
    yield labelled(
        "fencepost_certificate_not_after_seconds",
        *((name, tls.not_after_s) for name, tls in encrypted),
    )
    yield labelled(
        "fencepost_certificate_stale", *((name, int(tls.is_stale)) for name, tls in encrypted)
    )
    yield unlabelled(
        "fencepost_connections_waiting", 0 if server.acceptor is None else server.acceptor.waiting
    )
    yield labelled(
        "fencepost_connection_throttle_seconds_total",
        *(
            (labels(listener=listener, limit=limit), waited_ms / 1000)
            for (listener, limit), waited_ms in sorted(server.admission.throttled_ms.items())
        ),
    )
    if server.watch is not None:
        yield labelled(
            "fencepost_requests_total",
            *(
                (labels(api=KNOWN_APIS[key].name, version=version), count)
                for (key, version), count in sorted(server.watch.answered.items())
            ),
        )
        yield labelled(
            "fencepost_request_seconds",
            *(
                (labels(api=KNOWN_APIS[key].name), seconds)
                for key, seconds in sorted(server.watch.seconds.items())
            ),
        )
    for what, budget in (("request", server.budget), ("response", server.responses)):
        yield unlabelled(f"fencepost_{what}_memory_bytes", budget.held_bytes)
        yield unlabelled(f"fencepost_{what}_memory_waiting", budget.waiting)


def _of_logins(logins: Logins | None) -> Iterator[Series]:
    kinds = {"logins": "succeeded", "login_failures": "failed"}
    for name, kind in kinds.items():
        counts: Counter[tuple[str, str]] = Counter() if logins is None else getattr(logins, kind)
        yield labelled(
            f"fencepost_{name}_total",
            *(
                (labels(listener=listener, mechanism=mechanism), count)
                for (listener, mechanism), count in sorted(counts.items())
            ),
        )
    yield unlabelled("fencepost_logins_under_way", 0 if logins is None else logins.trying)
    yield unlabelled("fencepost_logins_expired_total", 0 if logins is None else logins.expired)


def _named(name: str | None) -> str:
    """Return the label value of a user or client; a default entity, None, is ``<default>``."""
    return "<default>" if name is None else name


def of_quotas(services: Services) -> Iterator[Series]:
    """Yield the quota use of each user and client."""
    services.quotas.forget()
    quotas = [
        (labels(quota=key, user=_named(names[0]), client_id=_named(names[1])), budget)
        for key, budgets in services.quotas.budgets.items()
        for names, budget in islice(reversed(budgets.items()), MAX_CLIENTS)
    ]
    now_ms = services.clock.monotonic_ms()
    values: dict[str, list[Sample]] = {
        "quota": [(text, quota.limit) for text, quota in quotas],
        "rate": [(text, quota.rate.per_second(now_ms)) for text, quota in quotas],
        "throttles_total": [(text, quota.throttles) for text, quota in quotas],
        "throttle_seconds_total": [(text, quota.throttled_ms / 1000) for text, quota in quotas],
    }
    for name, samples in values.items():
        yield FAMILIES[f"fencepost_client_{name}"], samples


def of_broker(services: Services, version: str) -> Iterator[Series]:
    """Yield the broker's metrics that do not concern a topic, group or transaction."""
    who = labels(version=version, cluster_id=services.cluster_id, node_id=services.node_id)
    yield labelled("fencepost_info", (who, 1))
    authorizer = services.authorizer
    yield labelled(
        "fencepost_authorizations_total",
        (labels(result="allowed"), 0 if authorizer is None else authorizer.allowed),
        (labels(result="denied"), 0 if authorizer is None else authorizer.denied),
    )
    yield unlabelled("fencepost_acls", 0 if authorizer is None else authorizer.rules.count)
    yield unlabelled("fencepost_fetches_waiting", len(services.fetches.delayed))
    yield unlabelled("fencepost_fetch_sessions", len(services.fetches.sessions))
    yield from _of_shares(services)
    yield labelled(
        "fencepost_fsync_seconds",
        (labels(of="appends"), services.flusher.seconds),
        (labels(of="sealed"), services.flusher.sealed.seconds),
    )
    with suppress(OSError):
        disk = shutil.disk_usage(services.storage.directory)
        yield unlabelled("fencepost_disk_free_bytes", disk.free)
        yield unlabelled("fencepost_disk_size_bytes", disk.total)
    yield unlabelled("fencepost_producers", services.logs.producer_limit.count)
    replicas = services.replicas
    counts = replicas.counts(offline=0)
    yield unlabelled("fencepost_partitions_under_replicated", counts.under_replicated)
    yield unlabelled("fencepost_partitions_under_min_isr", counts.under_min_isr)
    yield labelled(
        "fencepost_isr_changes_total",
        (labels(change="shrink"), replicas.isr_shrinks),
        (labels(change="expand"), replicas.isr_expands),
    )
    yield unlabelled("fencepost_history_waiting", services.history.waiting)
    yield unlabelled("fencepost_history_dropped_total", services.history.dropped)


def _of_shares(services: Services) -> Iterator[Series]:
    shares = services.shares if services.has_shares else None
    sessions = None if shares is None else shares.sessions
    yield unlabelled("fencepost_share_sessions", 0 if sessions is None else len(sessions))
    evictions = 0 if sessions is None else sessions.evictions
    yield unlabelled("fencepost_share_session_evictions_total", evictions)
    yield unlabelled("fencepost_share_partitions", 0 if shares is None else len(shares))
    records, batches = Counter[str](), Counter[str]()
    for served in () if shares is None else shares:
        records[served.share.key.group_id] += served.share.in_flight_count
        batches[served.share.key.group_id] += len(served.share.records)
    for name, counts in (("records", records), ("batches", batches)):
        family = f"fencepost_share_in_flight_{name}"
        yield labelled(family, *((labels(group=group), n) for group, n in sorted(counts.items())))
    timeouts = 0 if shares is None else shares.lock_timeouts
    yield unlabelled("fencepost_share_lock_timeouts_total", timeouts)
    samples = (
        (labels(event=event, cause=cause), count)
        for (scope, event, cause), count in services.history.counts.items()
        if scope == SHARE_SCOPE
    )
    yield labelled("fencepost_share_events_total", *samples)
    waiting, expired = 0, 0
    if shares is not None:
        waiting, expired = services.share_fetches.waiting, services.share_fetches.expired
    yield unlabelled("fencepost_share_fetches_waiting", waiting)
    yield unlabelled("fencepost_share_fetches_expired_total", expired)
    for name in ("records", "requests", "failures"):
        sent = Counter[str]() if shares is None else getattr(shares.dead_letters, name)
        family = f"fencepost_dead_letter_{name}_total"
        yield labelled(family, *((labels(group=group), sent[group]) for group in sorted(sent)))
    acknowledged = Counter[int]() if shares is None else shares.acknowledged
    yield labelled(
        "fencepost_share_acknowledgements_total",
        *((labels(type=kind.name.lower()), acknowledged[kind]) for kind in AcknowledgeType),
    )


def of_transactions(services: Services, snapshot: Snapshot) -> Iterator[Series]:
    """Yield transactions by state, and the counts of their outcomes and causes."""
    yield labelled(
        "fencepost_transactions",
        *((labels(state=state), count) for state, count in sorted(snapshot.transactions.items())),
    )
    since = snapshot.oldest_ms
    oldest = 0 if since is None else max(0, snapshot.now_ms - since) / 1000
    yield unlabelled("fencepost_transaction_oldest_seconds", oldest)
    hanging = sum(row.hanging for row in snapshot.partitions.values())
    yield unlabelled("fencepost_transactions_hanging", hanging)
    yield labelled(
        "fencepost_transactions_ended_total",
        (labels(outcome="commit"), services.txns.commits),
        (labels(outcome="abort"), services.txns.aborts),
    )
    counts = services.history.counts
    families = {
        "transaction-aborted": ("fencepost_transaction_aborts_total", Counter[str]()),
        "producer-fenced": ("fencepost_producer_fences_total", Counter[str]()),
    }
    refusals, rest = 0, Counter[tuple[str, str]]()
    for (topic, kind, cause), count in counts.items():
        if topic != TRANSACTION_STATE:
            continue
        if kind in families:
            families[kind][1][cause] += count
        elif kind == "producer-refused":
            refusals += count
        else:
            rest[kind, cause] += count
    for name, causes in families.values():
        yield labelled(name, *((labels(cause=cause), n) for cause, n in sorted(causes.items())))
    yield unlabelled("fencepost_producer_refusals_total", refusals)
    yield labelled("fencepost_transaction_events_total", *_events(rest))


def _events(counts: Counter[tuple[str, str]]) -> Iterator[Sample]:
    for (kind, cause), count in sorted(counts.items()):
        yield labels(event=kind, cause=cause), count


def of_groups(services: Services, snapshot: Snapshot, unseen: int) -> Iterator[Series]:
    """Yield counts of groups by state and of rebalances by cause, then each group's metrics."""
    rebalances, rest = Counter[str](), Counter[tuple[str, str]]()
    for (topic, kind, cause), count in services.history.counts.items():
        if topic != CONSUMER_OFFSETS:
            continue
        if kind in REBALANCES:
            rebalances[cause] += count
        else:
            rest[kind, cause] += count
    yield labelled(
        "fencepost_shards",
        *((labels(topic=topic, state=state), n) for (topic, state), n in snapshot.shards.items()),
    )
    yield labelled(
        "fencepost_group_rebalances_total",
        *((labels(cause=cause), count) for cause, count in sorted(rebalances.items())),
    )
    yield labelled("fencepost_group_events_total", *_events(rest))
    states = Counter((group.kind, group.state) for group in snapshot.groups)
    yield labelled(
        "fencepost_groups",
        *((labels(type=kind, state=state), n) for (kind, state), n in sorted(states.items())),
    )
    yield unlabelled("fencepost_group_lag_unseen_offsets", unseen)
    yield (
        FAMILIES["fencepost_group_lag_unknown_partitions"],
        ((group.written, group.unknown) for group in snapshot.groups),
    )
    yield (
        FAMILIES["fencepost_group_members"],
        ((group.written, group.members) for group in snapshot.groups),
    )
    yield (
        FAMILIES["fencepost_group_info"],
        (
            (f"{row.written},{labels(type=row.kind, state=row.state, protocol=row.protocol)}", 1)
            for row in snapshot.groups
        ),
    )
    yield (
        FAMILIES["fencepost_group_committed_offset"],
        ((row.written, row.committed) for row in snapshot.offsets()),
    )
    for name, value in (
        ("lag_offsets", "offsets"),
        ("lag_records", "records"),
        ("lag_uncommitted_records", "uncommitted"),
        ("held_back_records", "held_back"),
        ("lag_seconds", "seconds"),
    ):
        yield (
            FAMILIES[f"fencepost_group_{name}"],
            (
                (row.written, number)
                for row in snapshot.lags()
                if (number := getattr(row, value)) is not None
            ),
        )


def of_topics(snapshot: Snapshot) -> Iterator[Series]:
    """Yield bytes and records in and out, in total and by topic."""
    yield unlabelled("fencepost_topics", len(snapshot.topics))
    yield unlabelled("fencepost_partitions", len(snapshot.partitions))
    yield unlabelled("fencepost_partitions_offline", snapshot.offline)
    yield unlabelled("fencepost_partitions_leaderless", snapshot.leaderless)
    for name in ("bytes_in", "records_in", "bytes_out"):
        yield unlabelled(f"fencepost_{name}_total", getattr(snapshot.traffic, name))
    yield unlabelled("fencepost_replicated_in_bytes_total", snapshot.traffic.replicated_in)
    for name in ("bytes_in", "records_in", "bytes_out", "markers"):
        yield (
            FAMILIES[f"fencepost_topic_{name}_total"],
            ((row.written, getattr(row.traffic, name)) for row in snapshot.topics),
        )


def of_partitions(snapshot: Snapshot) -> Iterator[Series]:
    """Yield offsets, sizes and open transactions of partitions."""
    for name, value in (
        ("log_start_offset", "start"),
        ("last_stable_offset", "stable"),
        ("high_watermark", "high"),
        ("log_end_offset", "end"),
        ("size_bytes", "size"),
        ("segments", "segments"),
    ):
        yield (
            FAMILIES[f"fencepost_partition_{name}"],
            ((row.written, getattr(row, value)) for row in snapshot.hosted()),
        )
    unwell = [row for row in snapshot.partitions.values() if row.open_transactions]
    for name, value in (
        ("open_transactions", "open_transactions"),
        ("hanging_transactions", "hanging"),
    ):
        yield (
            FAMILIES[f"fencepost_partition_{name}"],
            [(row.written, n) for row in unwell if (n := getattr(row, value))],
        )
    yield (
        FAMILIES["fencepost_partition_open_transaction_seconds"],
        [(row.written, _age(row, snapshot)) for row in unwell if row.held_since_ms is not None],
    )


def _age(row: PartitionRow, snapshot: Snapshot) -> float:
    return max(0, snapshot.now_ms - (row.held_since_ms or 0)) / 1000


def process_start_s() -> float:
    """Return this process's start time in seconds since 1970; if unknown, the current time."""
    return time_of_day_ns() / 1e9 - (age_s() or 0)
