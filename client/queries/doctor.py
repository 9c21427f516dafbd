"""The rules of exactly-once that clients of a cluster break, with the requests that show it.

The brokers record what each client's requests show (``coordinator/history/observations.py``). Here
the observations of all brokers are compared with the rules. There is a finding only if requests
prove that a rule was broken; requests that can also be explained otherwise yield none.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from fencepost.client.queries import exactly_once_rules as rules
from fencepost.client.queries.entries import entries_of
from fencepost.client.queries.exactly_once_rules import RULES, Rule
from fencepost.client.queries.group_view import describe_group
from fencepost.client.queries.pipelines import Client, Observations, Pipeline, client_of
from fencepost.client.queries.settings import describe_configs
from fencepost.client.queries.where import BEGINNING, OffsetPosition
from fencepost.client.router import ApiError
from fencepost.coordinator.history.entries import Observed
from fencepost.coordinator.metadata.names import HISTORY_TOPIC, is_internal
from fencepost.logcore.values import dataclass
from fencepost.txn.events import EventKind

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession
    from fencepost.coordinator.history.entries import Entry

PAGE: Final = "docs/doctor.md"
"""The page with a section for each rule."""

UNCLEAN: Final = "unclean.leader.election.enable"

_RANDOM: Final = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}"
    r"|(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{8,}"
    r"|[0-9]{4,}",
    re.IGNORECASE,
)
"""A part of a name that a process may have generated when it started: a UUID, hexadecimal digits, a
time or a process id."""

Members = Callable[[str], Iterable[Client]]
"""Returns the current members of a group."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that a client breaks, and the request that shows it."""

    rule: Rule
    what: str
    """The breach, in one sentence that names the group, the transactional id or the topic."""
    client_id: str | None = None
    host: str | None = None
    request: str | None = None
    """The API of the request; None if the configuration shows the breach."""
    at_ms: int | None = None
    """The time of the request, or of the last one if there are several."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the request that show the breach."""
    group: str | None = None
    transactional_id: str | None = None
    topics: tuple[str, ...] = ()


def finding_row(finding: Finding) -> dict[str, Any]:
    """Return a finding as a row for JSON output and the console."""
    rule = finding.rule
    return {
        "rule": rule.name,
        "level": str(rule.level),
        "what": finding.what,
        "client_id": finding.client_id,
        "host": finding.host,
        "request": finding.request,
        "at_ms": finding.at_ms,
        "fields": finding.fields,
        "group": finding.group,
        "transactional_id": finding.transactional_id,
        "topics": list(finding.topics),
        "title": rule.title,
        "why": rule.why,
        "change": rule.change,
        "page": f"{PAGE}#{rule.name}",
    }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings, and how complete they are."""

    findings: tuple[Finding, ...]
    observes: bool
    """Whether the brokers have recorded observations of clients; Apache Kafka's do not."""
    dropped: int = 0
    """The number of observations that brokers could not record."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The part of the cluster that a diagnosis is about; all of it by default."""

    group: str | None = None
    transactional_id: str | None = None
    topic: str | None = None

    def includes(self, finding: Finding, pipelines: Iterable[Pipeline]) -> bool:
        """Return whether a finding is about the subject, or about a pipeline with the subject."""
        touched = [pipeline for pipeline in pipelines if _touches(pipeline, finding)]
        group, name = self.group, self.transactional_id
        return (
            (self.topic is None or self.topic in finding.topics)
            and (
                group in {None, finding.group}
                or any(group == pipeline.group for pipeline in touched)
            )
            and (
                name in {None, finding.transactional_id}
                or any(name in pipeline.transactional_ids for pipeline in touched)
            )
        )


def _touches(pipeline: Pipeline, finding: Finding) -> bool:
    if finding.group is not None:
        return finding.group == pipeline.group
    if finding.transactional_id is not None:
        return finding.transactional_id in pipeline.transactional_ids
    return bool(pipeline.topics.intersection(finding.topics))


def diagnosed(
    session: ClusterSession, begin_ms: int | None, subject: Subject | None = None
) -> Diagnosis:
    """Check all rules against the requests since ``begin_ms``, and against the configuration."""
    entries: Iterable[Entry] = ()
    if HISTORY_TOPIC in session.client.metadata(refresh=True).topics:
        where = BEGINNING if begin_ms is None else OffsetPosition(time=begin_ms)
        entries = (
            entry
            for entry in entries_of(session, where)
            if begin_ms is None or entry.at_ms >= begin_ms
        )
    return diagnosed_from(session, entries, Subject() if subject is None else subject)


def diagnosed_from(
    session: ClusterSession, entries: Iterable[Entry], subject: Subject
) -> Diagnosis:
    """Check all rules against entries of the event history, and against the configuration."""
    topics = {topic.name: topic for topic in session.topics()}
    observes = HISTORY_TOPIC in topics
    observations = Observations(entries)

    def members(group: str) -> Iterable[Client]:
        try:
            return [
                (member.client_id, member.host) for member in describe_group(session, group).members
            ]
        except ApiError:
            return ()  # the principal may not describe the group

    all_findings = list(findings(observations, members))
    checked = {
        name for pipeline in observations.pipelines for name in pipeline.topics
    } & topics.keys()
    if subject.topic is not None:
        checked |= {subject.topic} & topics.keys()
    if not observes:
        checked = {name for name in topics if not is_internal(name)}
        all_findings += _feature(session)
    all_findings += _unclean(session, checked)
    order = {rule.name: number for number, rule in enumerate(RULES)}
    kept = [
        finding for finding in all_findings if subject.includes(finding, observations.pipelines)
    ]
    kept.sort(key=lambda finding: (order[finding.rule.name], finding.what))
    return Diagnosis(tuple(kept), observes, observations.dropped)


def findings(observations: Observations, members: Members) -> Iterator[Finding]:
    """Yield the findings about requests; each rule and subject once."""
    yield from _new_ids(observations)
    yield from _offsets_outside(observations)
    yield from _offsets_without_member(observations, members)
    yield from _uncommitted_reads(observations, members)
    yield from _old_version(observations)
    yield from _timeouts(observations)
    yield from _short_timeouts(observations)
    yield from _long_transactions(observations)
    yield from _plain_producers(observations)
    yield from _timed_commits(observations)
    yield from _few_acks(observations)


def _of_request(
    rule: Rule,
    entry: Entry,
    what: str,
    *shown: str,
    topics: Iterable[str] = (),
    **more: Any,
) -> Finding:
    """Return a finding about one request; ``shown`` names the details that prove it."""
    detail = entry.detail
    topic = detail.get("topic")
    return Finding(
        rule,
        what,
        client_id=entry.client_id,
        host=entry.client_host,
        request=(entry.trigger or "").removeprefix("request ") or None,
        at_ms=entry.at_ms,
        fields={**{name: detail.get(name) for name in shown}, **more},
        group=detail.get("group"),
        transactional_id=detail.get("transactional_id"),
        topics=tuple(sorted({*topics, *([topic] if topic is not None else [])})),
    )


def _last(entries: Iterable[Entry], *details: str) -> Iterator[Entry]:
    """Yield the last entry of each client with the same ``details``."""
    newest: dict[tuple[Any, ...], Entry] = {}
    for entry in entries:
        newest[*client_of(entry), *(entry.detail.get(name) for name in details)] = entry
    yield from newest.values()


def stem_of(name: str) -> str:
    """Replace with ``*`` each part of a name that a process may have generated at its start."""
    return _RANDOM.sub("*", name)


def _new_ids(observations: Observations) -> Iterator[Finding]:
    """Find transactional ids of one pattern, each of which was used by only one run of a process.

    Ids with a counter, such as Flink's, are not reported, because the next process can derive the
    ids of the former process. Ids of producers that send a member's generation with their offsets,
    as Kafka Streams does, are not reported either: the group coordinator fences the former process
    by its generation, so the next process need not reuse its transactional id.
    """
    with_member = list(observations.of(Observed.OFFSETS_ADDED_TO_TRANSACTION, by_member=True))
    fenced_ids = {entry.detail["transactional_id"] for entry in with_member}
    fenced = {client_of(entry) for entry in with_member}
    starts: dict[str, list[Entry]] = defaultdict(list)
    for entry in observations.transactions:
        if (entry.trigger or "").endswith("InitProducerId") and entry.what in {
            EventKind.EPOCH_BUMPED,
            EventKind.PRODUCER_ID_ROTATED,
        }:
            starts[entry.subject].append(entry)
    groups: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
    for name, events in starts.items():
        first, stem = events[0], stem_of(name)
        is_new = len(events) == 1 and first.detail.get("former_producer_epoch", 0) < 0
        is_fenced = name in fenced_ids or client_of(first) in fenced
        if stem == name or not is_new or is_fenced:
            continue
        # An id without fixed letters is only compared with ids of the same host.
        where = () if re.search(r"[a-z]", stem, re.IGNORECASE) else (first.client_host or "",)
        groups[(stem, stem_of(first.client_id or ""), *where)].append(first)
    for (stem, *_), events in groups.items():
        if len(events) > 1 and not _is_counter([event.subject for event in events]):
            last = max(events, key=lambda event: event.at_ms)
            names = sorted(event.subject for event in events)
            what = f"{len(names)} transactional ids {stem}, each new at one start"
            yield Finding(
                rules.NEW_TRANSACTIONAL_ID,
                what,
                client_id=last.client_id,
                host=last.client_host,
                request="InitProducerId",
                at_ms=last.at_ms,
                fields={"transactional_id": last.subject, "former": names[:3]},
                transactional_id=last.subject,
            )


def _is_counter(names: Iterable[str]) -> bool:
    """Return whether names come from a counter.

    All their generated parts must be decimal numbers, and most names must have a successor.
    """
    numbers = []
    for name in names:
        parts = [part for part in _RANDOM.findall(name) if part.isdigit()]
        if len(parts) != len(_RANDOM.findall(name)):
            return False
        numbers.append(tuple(map(int, parts)))
    numbers.sort()
    steps = [
        sum(abs(new - old) for old, new in zip(former, later, strict=False))
        for former, later in itertools.pairwise(numbers)
    ]
    return 2 * sum(step == 1 for step in steps) > len(steps)


def _offsets_outside(observations: Observations) -> Iterator[Finding]:
    outside = {
        pipeline.group: pipeline for pipeline in observations.pipelines if pipeline.commits_outside
    }
    for entry in _last(observations.of(Observed.OFFSETS_COMMITTED), "group"):
        group = entry.detail["group"]
        pipeline = outside.get(group)
        if pipeline is not None and client_of(entry) in pipeline.producers:
            ids = ", ".join(sorted(pipeline.transactional_ids)[:3])
            what = f"group {group} commits offsets outside of the transactions of {ids}"
        elif entry.detail["beside_transactions"]:
            what = f"group {group} commits offsets outside of transactions as well as in them"
        else:
            continue
        yield _of_request(
            rules.OFFSETS_OUTSIDE_TRANSACTION, entry, what, "member", "generation", "topic"
        )


def _offsets_without_member(observations: Observations, members: Members) -> Iterator[Finding]:
    """Find offsets committed without a member's identity although the group has members."""
    for entry in _last(
        observations.of(Observed.OFFSETS_ADDED_TO_TRANSACTION, by_member=False),
        "group",
        "transactional_id",
    ):
        group = entry.detail["group"]
        if any(observations.of(Observed.GROUP_JOINED, group=group)) or any(members(group)):
            yield _of_request(
                rules.OFFSETS_WITHOUT_MEMBER,
                entry,
                f"{entry.detail['transactional_id']} commits offsets of group {group} without"
                " member id and generation",
                *("member", "generation", "version", "topic"),
            )


def _uncommitted_reads(observations: Observations, members: Members) -> Iterator[Finding]:
    """Find inputs that a member reads only as read_uncommitted.

    An input that the same client also reads as read_committed is not reported, because the two
    readers may be different programs.
    """
    levels: dict[tuple[Client, str], dict[str, Entry]] = defaultdict(dict)
    for entry in observations.of(Observed.FETCHED):
        of_client = levels[client_of(entry), entry.detail["topic"]]
        of_client[entry.detail["isolation_level"]] = entry
    for pipeline in observations.pipelines:
        if pipeline.group is None:
            continue
        clients = {
            client_of(entry)
            for entry in observations.of(Observed.GROUP_JOINED, group=pipeline.group)
        }
        clients |= set(members(pipeline.group))
        for client in sorted(clients or pipeline.producers, key=str):
            for topic in sorted(pipeline.inputs):
                of_client = levels.get((client, topic), {})
                if list(of_client) == ["read_uncommitted"]:
                    yield _of_request(
                        rules.READS_UNCOMMITTED,
                        of_client["read_uncommitted"],
                        f"group {pipeline.group} reads {topic} with read_uncommitted",
                        *("topic", "isolation_level"),
                        group_id=pipeline.group,
                    )


def _old_version(observations: Observations) -> Iterator[Finding]:
    for entry in _last(
        observations.of(Observed.TRANSACTION_ENDED, transaction_version=1), "transactional_id"
    ):
        name = entry.detail["transactional_id"]
        yield _of_request(
            rules.TRANSACTION_VERSION_1,
            entry,
            f"{name} ends its transactions with transaction version 1",
            "version",
        )


def _timeouts(observations: Observations) -> Iterator[Finding]:
    for entry in _last(observations.of(Observed.TRANSACTION_TIMEOUT_REFUSED), "transactional_id"):
        name, timeout_ms = (
            entry.detail[key] for key in ("transactional_id", "transaction_timeout_ms")
        )
        yield _of_request(
            rules.TIMEOUT_ABOVE_MAXIMUM,
            entry,
            f"{name} asks for a transaction timeout of {timeout_ms} ms, which the broker refuses",
            "transaction_timeout_ms",
        )


def _short_timeouts(observations: Observations) -> Iterator[Finding]:
    """Find transactions that timed out although their producer was alive and came back."""
    timed_out: dict[tuple[str, Any], Entry] = {}
    late: dict[str, tuple[Entry, Entry]] = {}
    for entry in observations.transactions:
        if entry.what == EventKind.TRANSACTION_ABORTED and entry.detail.get("cause") == "timeout":
            timed_out[entry.subject, entry.detail.get("producer_id")] = entry
        elif entry.what == EventKind.PRODUCER_REFUSED:
            before = timed_out.get((entry.subject, entry.detail.get("given_producer_id")))
            epoch = entry.detail.get("given_producer_epoch")
            if before is not None and epoch == before.detail.get("producer_epoch"):
                late[entry.subject] = before, entry
    for name, (aborted, entry) in late.items():
        after_ms = entry.at_ms - aborted.at_ms
        yield Finding(
            rules.TIMEOUT_TOO_SHORT,
            f"{name} came back {after_ms} ms after its transaction had timed out",
            client_id=entry.client_id,
            host=entry.client_host,
            request=str(entry.detail.get("during") or entry.trigger),
            at_ms=entry.at_ms,
            fields={
                "aborted_at_ms": aborted.at_ms,
                "given_producer_epoch": entry.detail.get("given_producer_epoch"),
                "producer_epoch": entry.detail.get("producer_epoch"),
            },
            transactional_id=name,
        )


def _long_transactions(observations: Observations) -> Iterator[Finding]:
    for entry in _last(observations.of(Observed.TRANSACTION_NEARLY_TIMED_OUT), "transactional_id"):
        name, open_ms, timeout_ms = (
            entry.detail[key] for key in ("transactional_id", "open_ms", "transaction_timeout_ms")
        )
        yield _of_request(
            rules.TIMEOUT_NEARLY_REACHED,
            entry,
            f"a transaction of {name} was open for {open_ms} ms of its timeout of {timeout_ms} ms",
            *("open_ms", "transaction_timeout_ms"),
        )


def _plain_producers(observations: Observations) -> Iterator[Finding]:
    transactional: dict[str, set[str]] = defaultdict(set)
    for entry in observations.in_transactions:
        transactional[entry.detail["topic"]].add(entry.detail["transactional_id"])
    for entry in _last(observations.plain, "topic"):
        topic = entry.detail["topic"]
        if topic in transactional:
            ids = ", ".join(sorted(transactional[topic])[:3])
            yield _of_request(
                rules.PLAIN_PRODUCER,
                entry,
                f"{topic} is written outside of transactions, and in transactions of {ids}",
                *("topic", "transactional_id", "acks"),
            )


def _timed_commits(observations: Observations) -> Iterator[Finding]:
    pipelines = {
        pipeline.group for pipeline in observations.pipelines if pipeline.group is not None
    }
    timed: dict[str, list[Entry]] = defaultdict(list)
    for entry in observations.of(Observed.OFFSETS_COMMITTED_BY_TIMER):
        timed[entry.detail["group"]].append(entry)
    for group in sorted(pipelines & timed.keys()):
        repeats = [entry for entry in timed[group] if entry.detail.get("repeats")]
        for entry in _last(repeats or timed[group], "group"):
            every = f"every {entry.detail['interval_ms']} ms"
            if repeats:
                rule = rules.AUTO_COMMIT
                what = f"auto-commit commits the offsets of group {group} {every}, new or not"
            else:
                rule = rules.TIMED_COMMIT
                what = f"a timer commits the offsets of group {group} {every}"
            yield _of_request(rule, entry, what, "member", "interval_ms", "repeats")


def _few_acks(observations: Observations) -> Iterator[Finding]:
    topics = {name for pipeline in observations.pipelines for name in pipeline.topics}
    few = (entry for entry in observations.plain if entry.detail["acks"] in {0, 1})
    for entry in _last(few, "topic"):
        topic, acks = entry.detail["topic"], entry.detail["acks"]
        if topic in topics:
            what = f"{topic} is written with acks={acks}"
            yield _of_request(rules.ACKS_1, entry, what, "topic", "acks")


def _unclean(session: ClusterSession, topics: Iterable[str]) -> Iterator[Finding]:
    resources = [("topic", name) for name in sorted(topics)]
    for entry in describe_configs(session, resources, [UNCLEAN]) if resources else ():
        if entry.value == "true":
            yield Finding(
                rules.UNCLEAN_ELECTION,
                f"{entry.resource} allows unclean elections, by the setting of the {entry.source}",
                fields={UNCLEAN: entry.value, "source": entry.source},
                topics=(entry.resource,),
            )


def _feature(session: ClusterSession) -> Iterator[Finding]:
    """Find a cluster whose finalized transaction version is below 2; clients are not examined."""
    level = session.client.features().get("transaction.version", 0)
    if level < 2:
        yield Finding(
            rules.TRANSACTION_VERSION_1,
            f"the feature transaction.version of the cluster is {level}",
            fields={"transaction.version": level},
        )
