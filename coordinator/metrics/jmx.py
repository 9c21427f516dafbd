"""The names that Prometheus' JMX exporter gives to Apache Kafka's MBeans.

Metrics of queues between threads are 0, because one event loop has no such queues. Metrics that
this broker does not measure are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from fencepost.coordinator.metrics.families import Sample, Series, labels, read_families
from fencepost.coordinator.metrics.view import MetricsView
from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.groups.share.states import AcknowledgeType
from fencepost.protocol.api import KNOWN_APIS, ApiKey

if TYPE_CHECKING:
    from fencepost.groups.share.partition import SharePartition

FAMILIES: Final = read_families("""
kafka_server_brokertopicmetrics_messagesin_total counter topic
    Records that were appended; the series without a label counts all topics.
kafka_server_brokertopicmetrics_bytesin_total counter topic
    Bytes that were appended.
kafka_server_brokertopicmetrics_bytesout_total counter topic
    Bytes that were fetched.
kafka_server_brokertopicmetrics_replicationbytesin_total counter
    Bytes that were fetched from leaders.
kafka_server_brokertopicmetrics_totalproducerequests_total counter
    Produce requests.
kafka_server_brokertopicmetrics_totalfetchrequests_total counter
    Fetch requests.
kafka_server_brokertopicmetrics_totalsharefetchrequests_total counter
    ShareFetch requests.
kafka_server_brokertopicmetrics_failedsharefetchrequests_total counter
    ShareFetch requests with an error for a partition.
kafka_server_brokertopicmetrics_totalshareacknowledgementrequests_total counter
    Requests with acknowledgements of share groups: ShareAcknowledge and ShareFetch.
kafka_server_brokertopicmetrics_failedshareacknowledgementrequests_total counter
    Such requests with an error for the acknowledgements of a partition.
kafka_server_BrokerTopicMetrics_FifteenMinuteRate gauge name topic
    Bytes per second over 15 minutes, under the name that kafbat UI reads.
kafka_network_requestmetrics_requests_total counter request version
    Requests. Fetches are FetchConsumer or FetchFollower.
kafka_network_requestmetrics_totaltimems gauge request quantile
    Milliseconds from request to response.
kafka_network_requestmetrics_totaltimems_count untyped request
    Requests that were timed.
kafka_network_requestmetrics_requestqueuetimems gauge request quantile
    0: there is no queue.
kafka_network_requestmetrics_responsequeuetimems gauge request quantile
    0: there is no queue.
kafka_network_requestchannel_requestqueuesize gauge
    0: there is no queue.
kafka_network_requestchannel_responsequeuesize gauge
    0: there is no queue.
kafka_network_socketserver_expiredconnectionskilledcount gauge
    Connections closed because a request arrived after the login had expired.
kafka_server_replicamanager_partitioncount gauge
    Partitions.
kafka_server_replicamanager_leadercount gauge
    Partitions that this node leads.
kafka_server_replicamanager_underreplicatedpartitions gauge
    Partitions led by this node that have a replica outside the ISR.
kafka_server_replicamanager_underminisrpartitioncount gauge
    Partitions led by this node that refuse writes with acks=all.
kafka_server_replicamanager_atminisrpartitioncount gauge
    Partitions led by this node that would refuse writes with acks=all if the ISR lost a replica.
kafka_server_replicamanager_reassigningpartitions gauge
    Partitions led by this node that are being reassigned.
kafka_server_replicamanager_offlinereplicacount gauge
    Partitions whose log is off line.
kafka_server_replicamanager_produceridcount gauge
    Producer ids that have state in a partition.
kafka_server_replicamanager_isrshrinks_total counter
    Changes by which replicas have left the ISR of a partition led here.
kafka_server_replicamanager_isrexpands_total counter
    Changes by which replicas have joined the ISR of a partition led here.
kafka_server_replicamanager_failedisrupdates_total counter
    ISR changes that the controller has refused.
kafka_server_replicafetchermanager_maxlag gauge clientId
    Records that the replica furthest behind its leader lacks.
kafka_server_delayedoperationpurgatory_purgatorysize gauge delayedOperation
    Requests that wait in this purgatory.
kafka_controller_kafkacontroller_activecontrollercount gauge
    1 if this node is the active controller. Only a controller has the kafka_controller metrics.
kafka_controller_kafkacontroller_activebrokercount gauge
    Brokers that are not fenced.
kafka_controller_kafkacontroller_fencedbrokercount gauge
    Brokers that are fenced.
kafka_controller_kafkacontroller_offlinepartitionscount gauge
    Partitions without a leader, or whose log is off line here.
kafka_controller_kafkacontroller_globaltopiccount gauge
    Topics.
kafka_controller_kafkacontroller_globalpartitioncount gauge
    Partitions.
kafka_controller_kafkacontroller_preferredreplicaimbalancecount gauge
    Partitions that their preferred replica does not lead.
kafka_controller_kafkacontroller_metadataerrorcount gauge
    0: a broker that cannot read its metadata does not start.
kafka_log_log_size gauge topic partition
    Bytes of a log.
kafka_log_log_logstartoffset gauge topic partition
    The first offset that can be read.
kafka_log_log_logendoffset gauge topic partition
    The offset of the next record.
kafka_log_log_numlogsegments gauge topic partition
    Segments.
kafka_log_logmanager_offlinelogdirectorycount gauge
    0: a broker without its directory does not run.
kafka_log_logflushstats_logflushrateandtimems gauge quantile
    Milliseconds that a flush took.
kafka_log_logflushstats_logflushrateandtimems_count untyped
    Flushes.
kafka_coordinator_group_groupmetadatamanager_numoffsets gauge
    Committed offsets.
kafka_coordinator_group_groupmetadatamanager_numgroups gauge
    Groups.
kafka_coordinator_group_groupmetadatamanager_numgroupsstable gauge
    Groups in the state Stable.
kafka_coordinator_group_groupmetadatamanager_numgroupsempty gauge
    Groups in the state Empty.
kafka_coordinator_group_groupmetadatamanager_numgroupsdead gauge
    0: a dead group is gone.
kafka_coordinator_group_groupmetadatamanager_numgroupspreparingrebalance gauge
    Groups in the state PreparingRebalance.
kafka_coordinator_group_groupmetadatamanager_numgroupscompletingrebalance gauge
    Groups in the state CompletingRebalance.
kafka_server_group_coordinator_metrics_group_count gauge protocol
    Groups of each kind that this node coordinates.
kafka_server_group_coordinator_metrics_share_group_count gauge state
    Share groups by their state; Dead is always 0.
kafka_server_group_coordinator_metrics_share_group_rebalance_count untyped
    Heartbeats of share groups that required a new assignment.
kafka_server_sharegroupmetrics_recordacknowledgements_total counter ackType
    Offsets that members of share groups have acknowledged, by the type.
kafka_server_sharegroupmetrics_partitionloadtimems gauge quantile
    Milliseconds from the first fetch of a share partition to its state.
kafka_server_sharegroupmetrics_partitionloadtimems_count untyped
    Share partitions whose state was read.
kafka_server_sharegroupmetrics_topicpartitionsacquiretimems gauge group quantile
    Milliseconds that a ShareFetch waited until it could acquire records of a share partition.
kafka_server_sharegroupmetrics_topicpartitionsacquiretimems_count untyped group
    Such waits.
kafka_server_sharepartitionmetrics_fetchlocktimems gauge group topic partition quantile
    Milliseconds that a ShareFetch kept others from reading a share partition.
kafka_server_sharepartitionmetrics_fetchlocktimems_count untyped group topic partition
    Fetch locks that were released.
kafka_server_sharepartitionmetrics_inflightmessagecount gauge group topic partition
    Offsets in flight of a share partition.
kafka_server_sharepartitionmetrics_inflightbatchcount gauge group topic partition
    Batches in flight of a share partition.
kafka_server_sharepartitionmetrics_acquisitionlocktimeout_total counter group topic partition
    Offsets of a share partition whose acquisition locks ended.
kafka_server_sharesessioncache_sharesessionscount gauge
    Share sessions.
kafka_server_sharesessioncache_sharepartitionscount gauge
    Partitions of all share sessions.
kafka_server_sharesessioncache_sharesessionevictions_total counter
    Share sessions that ended with their connections.
kafka_server_delayedsharefetchmetrics_expires_total counter
    ShareFetch requests that waited for the whole of MaxWaitMs.
kafka_server_sharegroupmetrics_deadletterqueuerecordcount_count untyped group
    Records in the dead-letter queues of share groups, as far as this node has put them there.
kafka_server_sharegroupmetrics_deadletterqueuetotalproducerequests_total counter group
    Batches for dead-letter queues that were sent to a leader.
kafka_server_sharegroupmetrics_deadletterqueuefailedproducerequests_total counter group
    Batches for dead-letter queues that were given up.
kafka_server_socket_server_metrics_connection_count gauge listener networkProcessor
    Open connections; networkProcessor is always 0.
""")

QUANTILES: Final = ("0.50", "0.75", "0.95", "0.98", "0.99", "0.999")
_SHARES: Final = tuple((labels(quantile=at), float(at)) for at in QUANTILES)
"""The label of each quantile, and its value."""

_STATES: Final = ("Stable", "Empty", "Dead", "PreparingRebalance", "CompletingRebalance")
_KINDS: Final = ("classic", "consumer", "share")
_ACKNOWLEDGE_TYPES: Final = (
    AcknowledgeType.ACCEPT,
    AcknowledgeType.RELEASE,
    AcknowledgeType.REJECT,
    AcknowledgeType.RENEW,
)
"""The acknowledge types that Kafka counts: all except gaps."""
_SHARE_STATES: Final = ("Empty", "Stable", "Dead")


def series(view: MetricsView) -> Iterator[Series]:
    """Yield all families."""
    yield from _of_traffic(view)
    yield from _of_requests(view)
    yield from _of_node(view)
    yield from _of_logs(view)
    yield from _of_groups(view)
    yield from _of_shares(view)


def _unlabelled(name: str, value: float) -> Series:
    return FAMILIES[name], [("", value)]


def _of_traffic(view: MetricsView) -> Iterator[Series]:
    snapshot = view.snapshot
    for name, value in (
        ("messagesin", "records_in"),
        ("bytesin", "bytes_in"),
        ("bytesout", "bytes_out"),
    ):
        samples = [("", getattr(snapshot.traffic, value))]
        samples += [(topic.written, getattr(topic.traffic, value)) for topic in snapshot.topics]
        yield FAMILIES[f"kafka_server_brokertopicmetrics_{name}_total"], samples
    yield _unlabelled(
        "kafka_server_brokertopicmetrics_replicationbytesin_total", snapshot.traffic.replicated_in
    )
    fetchers = view.services.replicas.fetchers
    yield (
        FAMILIES["kafka_server_replicafetchermanager_maxlag"],
        [(labels(clientId="Replica"), 0 if fetchers is None else fetchers.max_lag)],
    )
    yield (
        FAMILIES["kafka_server_BrokerTopicMetrics_FifteenMinuteRate"],
        (
            (labels(name=name, **({"topic": topic} if topic else {})), rate)
            for (topic, direction), rate in view.rates.items()
            for name in ("BytesInPerSec" if direction == "bytes_in" else "BytesOutPerSec",)
        ),
    )


def _of_requests(view: MetricsView) -> Iterator[Series]:
    totals: Counter[int] = Counter()
    answered: dict[tuple[str, int], int] = {}
    seconds: dict[str, Histogram] = {}
    watch = view.server.watch
    if watch is not None:
        for (key, version), count in watch.answered.items():
            totals[key] += count
            if key != ApiKey.FETCH:
                answered[KNOWN_APIS[key].name, version] = count
        answered.update(watch.fetches)
        seconds = {
            KNOWN_APIS[key].name: took for key, took in watch.seconds.items() if key != ApiKey.FETCH
        }
        seconds.update(watch.fetch_seconds)
    for name, key in (
        ("produce", ApiKey.PRODUCE),
        ("fetch", ApiKey.FETCH),
        ("sharefetch", ApiKey.SHARE_FETCH),
    ):
        yield _unlabelled(f"kafka_server_brokertopicmetrics_total{name}requests_total", totals[key])
    yield (
        FAMILIES["kafka_network_requestmetrics_requests_total"],
        [
            (labels(request=request, version=version), count)
            for (request, version), count in sorted(answered.items())
        ],
    )
    timed = sorted(seconds.items())
    yield from _timed(
        "kafka_network_requestmetrics_totaltimems",
        [(labels(request=request), took) for request, took in timed],
    )
    for name in ("requestqueuetimems", "responsequeuetimems"):
        yield (
            FAMILIES[f"kafka_network_requestmetrics_{name}"],
            [(labels(request=request, quantile=at), 0) for request, _ in timed for at in QUANTILES],
        )


def _of_node(view: MetricsView) -> Iterator[Series]:
    snapshot = view.snapshot
    replicas, logins = view.services.replicas, view.server.logins
    counts = replicas.counts(snapshot.offline)
    for name, value in (
        ("network_requestchannel_requestqueuesize", 0),
        ("network_requestchannel_responsequeuesize", 0),
        (
            "network_socketserver_expiredconnectionskilledcount",
            0 if logins is None else logins.expired,
        ),
        ("server_replicamanager_partitioncount", counts.partitions),
        ("server_replicamanager_leadercount", counts.leaders),
        ("server_replicamanager_underreplicatedpartitions", counts.under_replicated),
        ("server_replicamanager_underminisrpartitioncount", counts.under_min_isr),
        ("server_replicamanager_atminisrpartitioncount", counts.at_min_isr),
        ("server_replicamanager_reassigningpartitions", counts.reassigning),
        ("server_replicamanager_offlinereplicacount", counts.offline),
        ("server_replicamanager_produceridcount", view.services.logs.producer_limit.count),
        ("server_replicamanager_isrshrinks_total", replicas.isr_shrinks),
        ("server_replicamanager_isrexpands_total", replicas.isr_expands),
        ("server_replicamanager_failedisrupdates_total", replicas.failed_isr_updates),
        ("log_logmanager_offlinelogdirectorycount", 0),
    ):
        yield _unlabelled(f"kafka_{name}", value)
    yield from _of_controller(view)
    waiting: list[Sample] = [
        (labels(delayedOperation="Fetch"), len(view.services.fetches.delayed)),
        (labels(delayedOperation="Produce"), view.services.commits.waiting),
    ]
    yield FAMILIES["kafka_server_delayedoperationpurgatory_purgatorysize"], waiting
    yield (
        FAMILIES["kafka_server_socket_server_metrics_connection_count"],
        [
            (labels(listener=name, networkProcessor=0), view.server.admission.by_listener[name])
            for name in view.server.addresses
        ],
    )


def _of_controller(view: MetricsView) -> Iterator[Series]:
    """Yield the controller's metrics; none on a broker whose controllers are other nodes."""
    if view.controller is None:
        return
    snapshot, (active, fenced) = view.snapshot, view.brokers
    find = view.services.replicas.registration
    partitions = [find(row.topic, row.index) for row in snapshot.partitions.values()]
    registrations = [partition for partition in partitions if partition is not None]
    for name, value in (
        ("activecontrollercount", int(view.controller == view.services.node_id)),
        ("activebrokercount", active),
        ("fencedbrokercount", fenced),
        (
            "offlinepartitionscount",
            snapshot.offline + sum(registration.leader < 0 for registration in registrations),
        ),
        ("globaltopiccount", len(snapshot.topics)),
        ("globalpartitioncount", len(snapshot.partitions)),
        (
            "preferredreplicaimbalancecount",
            sum(registration.leader != registration.replicas[0] for registration in registrations),
        ),
        ("metadataerrorcount", 0),
    ):
        yield _unlabelled(f"kafka_controller_kafkacontroller_{name}", value)


def _of_logs(view: MetricsView) -> Iterator[Series]:
    for name, value in (
        ("size", "size"),
        ("logstartoffset", "start"),
        ("logendoffset", "end"),
        ("numlogsegments", "segments"),
    ):
        yield (
            FAMILIES[f"kafka_log_log_{name}"],
            ((row.written, getattr(row, value)) for row in view.snapshot.hosted()),
        )
    yield from _timed(
        "kafka_log_logflushstats_logflushrateandtimems", [("", view.services.flusher.seconds)]
    )


def _of_shares(view: MetricsView) -> Iterator[Series]:
    services = view.services
    shares = services.shares if services.has_shares else None
    done = Counter[int]() if shares is None else shares.acknowledged
    yield (
        FAMILIES["kafka_server_sharegroupmetrics_recordacknowledgements_total"],
        [
            (labels(ackType=acknowledge_type.name.title()), done[acknowledge_type])
            for acknowledge_type in _ACKNOWLEDGE_TYPES
        ],
    )
    partitions = [] if shares is None else [(_share_labels(share.share), share) for share in shares]
    prefix = "kafka_server_sharepartitionmetrics_"
    yield (
        FAMILIES[f"{prefix}inflightmessagecount"],
        [(where, partition.share.in_flight_count) for where, partition in partitions],
    )
    yield (
        FAMILIES[f"{prefix}inflightbatchcount"],
        [(where, len(partition.share.records)) for where, partition in partitions],
    )
    yield (
        FAMILIES[f"{prefix}acquisitionlocktimeout_total"],
        [(where, partition.lock_timeouts) for where, partition in partitions],
    )
    sessions = None if shares is None else shares.sessions
    prefix = "kafka_server_sharesessioncache_share"
    yield _unlabelled(f"{prefix}sessionscount", 0 if sessions is None else len(sessions))
    yield _unlabelled(
        f"{prefix}partitionscount", 0 if sessions is None else sessions.partition_count
    )
    yield _unlabelled(
        f"{prefix}sessionevictions_total", 0 if sessions is None else sessions.evictions
    )
    fetches = None if shares is None else services.share_fetches
    expired = 0 if fetches is None else fetches.expired
    yield _unlabelled("kafka_server_delayedsharefetchmetrics_expires_total", expired)
    prefix = "kafka_server_brokertopicmetrics_"
    for name, count in (
        ("failedsharefetch", 0 if fetches is None else fetches.failed),
        ("totalshareacknowledgement", 0 if shares is None else shares.acknowledgement_requests),
        (
            "failedshareacknowledgement",
            0 if shares is None else shares.failed_acknowledgement_requests,
        ),
    ):
        yield _unlabelled(f"{prefix}{name}requests_total", count)
    loaded = Histogram() if shares is None else shares.load_seconds
    waited = {} if fetches is None else fetches.acquire_seconds
    prefix = "kafka_server_sharegroupmetrics_"
    yield from _timed(f"{prefix}partitionloadtimems", [("", loaded)])
    yield from _timed(
        f"{prefix}topicpartitionsacquiretimems",
        [(labels(group=group), took) for group, took in sorted(waited.items())],
    )
    yield from _timed(
        "kafka_server_sharepartitionmetrics_fetchlocktimems",
        [(where, partition.lock_seconds) for where, partition in partitions],
    )


def _timed(name: str, timed: Sequence[tuple[str, Histogram]]) -> Iterator[Series]:
    """Yield the quantiles in milliseconds and the counts of durations, by their labels."""
    yield (
        FAMILIES[name],
        (
            (f"{where},{quantile}" if where else quantile, took.quantile(share) * 1000)
            for where, took in timed
            for quantile, share in _SHARES
        ),
    )
    yield FAMILIES[f"{name}_count"], ((where, took.count) for where, took in timed)


def _share_labels(share: SharePartition) -> str:
    return labels(group=share.key.group_id, topic=share.topic, partition=share.key.partition)


def _of_groups(view: MetricsView) -> Iterator[Series]:
    snapshot = view.snapshot
    states = Counter(group.state for group in snapshot.groups)
    prefix = "kafka_coordinator_group_groupmetadatamanager_num"
    yield _unlabelled(f"{prefix}offsets", sum(len(group.offsets) for group in snapshot.groups))
    yield _unlabelled(f"{prefix}groups", len(snapshot.groups))
    for state in _STATES:
        yield _unlabelled(f"{prefix}groups{state.lower()}", states[state])
    prefix = "kafka_server_group_coordinator_metrics_"
    kinds = Counter(group.kind for group in snapshot.groups)
    yield (
        FAMILIES[f"{prefix}group_count"],
        [(labels(protocol=kind), kinds[kind]) for kind in _KINDS],
    )
    states = Counter(group.state for group in snapshot.groups if group.kind == "share")
    yield (
        FAMILIES[f"{prefix}share_group_count"],
        [(labels(state=state), states[state]) for state in _SHARE_STATES],
    )
    yield _unlabelled(f"{prefix}share_group_rebalance_count", view.services.groups.share_rebalances)
    prefix = "kafka_server_sharegroupmetrics_deadletterqueue"
    queues = view.services.shares.dead_letters if view.services.has_shares else None
    for name, what in (
        ("recordcount_count", "records"),
        ("totalproducerequests_total", "requests"),
        ("failedproducerequests_total", "failures"),
    ):
        counts = Counter[str]() if queues is None else getattr(queues, what)
        samples = [(labels(group=group), count) for group, count in sorted(counts.items())]
        yield FAMILIES[f"{prefix}{name}"], samples
