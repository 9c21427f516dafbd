"""An incident from the event history: recorded requests of groups and transactional ids."""

from __future__ import annotations

import struct
from base64 import b64decode
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fencepost.client.client import ApiError
from fencepost.client.queries.features import finalized_levels
from fencepost.client.queries.incident import (
    MAX_FILE_BYTES,
    MAX_RECORDS,
    MAX_STEPS,
    Cause,
    Incident,
    IncidentError,
    Payload,
    Step,
    TopicOfIncident,
    is_group_setting,
    is_setting,
)
from fencepost.client.queries.incident_values import as_json
from fencepost.client.queries.reader import Reader
from fencepost.client.queries.session import ClusterSession
from fencepost.client.queries.settings import describe_configs
from fencepost.client.queries.where import OffsetPosition
from fencepost.client.requests import Partition
from fencepost.coordinator.history.entries import (
    GROUP,
    GROUP_REQUEST,
    REQUEST_SCOPES,
    TRANSACTION,
    TRANSACTION_REQUEST,
    Entry,
)
from fencepost.coordinator.history.recorded_apis import CONNECTION_CLOSED
from fencepost.logcore.batch import parse_header
from fencepost.logcore.errors import LogError
from fencepost.protocol.api import APIS, ApiKey
from fencepost.protocol.codec import decode_request, decode_response
from fencepost.protocol.schema import Entity
from fencepost.protocol.writer import uvarint

SETTING: Final = "fencepost.history.requests.enable"

MAX_PAYLOAD_BYTES: Final = MAX_FILE_BYTES // 4
"""The maximum size, in bytes, of all keys, values and headers together. In the file they are
longer, because they are in base64."""

COMPARED: Final = frozenset(
    {
        *("group-created", "group-upgraded", "group-downgraded", "rebalance-started"),
        *("generation-started", "assignment-refused", "member-joined", "member-left"),
        *("member-expired", "member-fenced", "pending-member-expired", "pending-member-evicted"),
        *("group-epoch-bumped", "assignor-failed"),
        *("epoch-bumped", "producer-id-rotated", "producer-fenced", "producer-refused"),
        *("transaction-aborted", "transaction-timed-out"),
        *("share-state-initialized", "share-records-returned", "share-records-given-up"),
        "share-partition-fenced",
    }
)
"""The kinds of events whose causes a replay compares."""

_MOVED: Final = frozenset(
    {"NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS"}
)
"""Errors of requests that no coordinator has decided on: a replay leaves them out."""

_NEW_MEMBER: Final = (0, -1)
"""Member epochs and generations of requests that join a group."""

_FROM_BROKER_NAMES: Final = ("member_id", "producer_id")


def with_scopes(subjects: Iterable[str]) -> list[tuple[str, str]]:
    """Return the scopes and subjects of all entries that an incident of ``subjects`` needs."""
    scopes = (GROUP, TRANSACTION, GROUP_REQUEST, TRANSACTION_REQUEST)
    return [(scope, subject) for scope in scopes for subject in subjects]


def incident_of(
    session: ClusterSession, entries: Sequence[Entry], subjects: Collection[str]
) -> Incident:
    """Return the incident in ``entries``, with the settings that the cluster has now.

    Raises IncidentError if the requests are missing, too many, or begin too late, and ApiError.
    """
    requests = [entry for entry in entries if entry.scope in REQUEST_SCOPES]
    if not requests:
        raise IncidentError(
            f"the history has no requests of {', '.join(subjects)}: set {SETTING}=true before the"
            " incident, or record with --follow while it happens again"
        )
    requests.sort(
        key=lambda request: (_received_ms(request), request.shard, request.detail["sequence"])
    )
    requests = [request for request in requests if not _is_left_out(request)]
    if not requests:
        raise IncidentError(f"no request of {', '.join(subjects)} reached a coordinator")
    start_ms = _received_ms(requests[0])
    steps = _steps(requests, start_ms)
    _check_begin(steps)
    causes = _causes(entries, requests, start_ms)
    end_ms = max(entry.at_ms for entry in entries)
    groups = tuple(
        dict.fromkeys(request.subject for request in requests if request.scope == GROUP_REQUEST)
    )
    return Incident(
        start_ms,
        end_ms,
        groups,
        tuple(
            dict.fromkeys(request.subject for request in requests if request.subject not in groups)
        ),
        _settings(session),
        {group: _group_settings(session, group) for group in groups},
        {name: level for name, level in finalized_levels(session).items() if level},
        _topics(session, requests),
        steps,
        causes,
    )


def _received_ms(entry: Entry) -> int:
    return int(entry.detail.get("received_ms", entry.at_ms))


def _causes(entries: Sequence[Entry], requests: Sequence[Entry], start_ms: int) -> list[Cause]:
    """Return the causes, each with the last step that had arrived before it."""
    numbers = {id(entry): number for number, entry in enumerate(requests, 1)}
    times = [_received_ms(request) for request in requests]
    causes = []
    last = 0
    for entry in entries:
        if id(entry) in numbers:
            last = max(last, numbers[id(entry)])
        elif entry.what in COMPARED and entry.scope not in REQUEST_SCOPES:
            if entry.at_ms < start_ms:
                continue
            # Some requests may have arrived in the same millisecond as the event. Of these, the
            # requests up to the last one that was answered before the event count as earlier.
            same_ms = bisect_right(times, entry.at_ms)
            after = max(bisect_left(times, entry.at_ms), min(last, same_ms))
            member = entry.detail.get("member")
            causes.append(
                Cause(
                    entry.at_ms - start_ms,
                    after,
                    entry.subject,
                    entry.what,
                    entry.why,
                    None if member is None else str(member),
                    entry.trigger,
                )
            )
    return causes


# --- the steps ---


def _steps(requests: Sequence[Entry], start_ms: int) -> list[Step]:
    """Return the steps in the order in which the brokers received them."""
    if len(requests) > MAX_STEPS:
        raise IncidentError(
            f"{len(requests)} requests, but an incident has at most {MAX_STEPS}:"
            " choose a later --since"
        )
    connections: dict[object, int] = {}
    steps = []
    for number, entry in enumerate(requests, 1):
        detail = entry.detail
        place = entry.shard, detail["connection"]
        connection = connections.setdefault(place, len(connections) + 1)
        at_ms = _received_ms(entry) - start_ms
        if entry.what == CONNECTION_CLOSED:
            steps.append(Step(number, at_ms, connection, CONNECTION_CLOSED))
            continue
        api = APIS[ApiKey(detail["api"])].name
        for side in ("request", "response"):
            if isinstance(detail[side], int):
                raise IncidentError(
                    f"a {api} {side} of {detail[side]} bytes is larger than a recorded one may be"
                )
        body = decode_request(b64decode(detail["request"])).body
        response = _response(entry)
        is_answered = response is not None or detail["error"] is not None
        steps.append(
            Step(
                number,
                at_ms,
                connection,
                api,
                entry.client_id,
                detail["version"],
                as_json(body),
                entry.at_ms - start_ms if is_answered else None,
                _last_before(requests, number, entry) if is_answered else None,
                None if response is None else as_json(response),
                None if detail["error"] is None else detail["error"].upper(),
            )
        )
    return steps


def _last_before(requests: Sequence[Entry], number: int, entry: Entry) -> int:
    """Return the last step of the same broker that had arrived before the response was sent."""
    last = number
    for later, other in enumerate(requests[number:], number + 1):
        if other.at_ms > entry.at_ms and _received_ms(other) > entry.at_ms:
            break
        if (
            other.shard == entry.shard
            and other.detail["sequence"] <= entry.detail["answered_after"]
        ):
            last = later
    return last


def _response(entry: Entry) -> Entity | None:
    raw = entry.detail["response"]
    if not isinstance(raw, str):
        return None
    _, response = decode_response(entry.detail["api"], entry.detail["version"], b64decode(raw))
    return response


def _is_left_out(entry: Entry) -> bool:
    """Return whether no coordinator has decided on the request."""
    if entry.what == CONNECTION_CLOSED:
        return False
    if (entry.detail["error"] or "").upper() in _MOVED:
        return True
    code = getattr(_response(entry), "error_code", None)
    return code is not None and code.name.upper() in _MOVED


def _check_begin(steps: Sequence[Step]) -> None:
    """Check that each member and producer of a successful request got its id in the recording."""
    given: set[object] = set()
    for step in steps:
        response = step.response or {}
        request = step.request
        joins = step.api in {"JoinGroup", "InitProducerId"} or (
            step.api.endswith("GroupHeartbeat") and request.get("member_epoch", 0) in _NEW_MEMBER
        )
        if joins:
            given.update(
                source.get(name) for source in (request, response) for name in _FROM_BROKER_NAMES
            )
            continue
        has_failed = step.error is not None or "error_code" in response
        for name in _FROM_BROKER_NAMES:
            value = request.get(name)
            if value in (None, "") or value in given or has_failed or step.api == "ShareFetch":
                continue
            raise IncidentError(
                f"the recording begins at {step.api} of {name.replace('_', ' ')} {value}, which the"
                " broker gave out earlier: a replay needs the request that asked for it, so record"
                " from an earlier time, or restart that client while recording"
            )


# --- the records ---


def with_records(session: ClusterSession, incident: Incident) -> Incident:
    """Add the keys, values and headers of the records that were produced or acquired.

    Records that have been deleted meanwhile get none. Raises IncidentError if there are too many
    records, and ApiError.
    """
    payloads: dict[str, dict[int, dict[int, Payload]]] = {}
    left, left_bytes = MAX_RECORDS, MAX_PAYLOAD_BYTES
    for (topic, index), offsets in sorted(_offsets(incident).items()):
        rows = payloads.setdefault(topic, {}).setdefault(index, {})
        reader = Reader(session, topic, committed=False)
        begin, end = OffsetPosition(offset=min(offsets)), OffsetPosition(offset=max(offsets) + 1)
        reader.seek([index], begin=begin, until=end)
        for _, record in reader.records():
            if record.offset not in offsets:
                continue
            rows[record.offset] = Payload(record.key, record.value, tuple(record.headers))
            left -= 1
            left_bytes -= len(record.key or b"") + len(record.value or b"")
            left_bytes -= sum(len(value or b"") for _, value in record.headers)
            if left < 0 or left_bytes < 0:
                raise IncidentError(
                    f"an incident has at most {MAX_RECORDS} records and {MAX_PAYLOAD_BYTES} bytes"
                    " of keys, values and headers: record without --records"
                )
    return replace(incident, records=payloads)


def _offsets(incident: Incident) -> dict[Partition, set[int]]:
    """Return the offsets of the produced and acquired records."""
    names = {topic.id: name for name, topic in incident.topics.items()}
    offsets: dict[Partition, set[int]] = defaultdict(set)
    for step in incident.steps:
        for topic in (step.response or {}).get("responses", ()):
            name = names.get(topic.get("topic_id", ""), "")
            for row in topic.get("partitions", ()) if name else ():
                for acquired in row.get("acquired_records", ()):
                    first, last = acquired.get("first_offset", 0), acquired.get("last_offset", 0)
                    offsets[name, row.get("partition_index", 0)].update(range(first, last + 1))
        if step.api == "Produce" and step.response is not None:
            for place, first, count in produced(step, names):
                offsets[place].update(range(first, first + count))
    return offsets


def produced(step: Step, names: Mapping[str, str]) -> Iterator[tuple[Partition, int, int]]:
    """Yield each partition of a Produce request, its first offset and the number of records.

    ``names`` are the topics by id. Raises IncidentError.
    """
    counts: dict[Partition, int] = {}
    for topic in step.request.get("topic_data", ()):
        for row in topic.get("partition_data", ()):
            try:
                header = parse_header(b64decode(row.get("records") or b""))
            except LogError as error:
                raise IncidentError(f"step {step.number} has no batch: {error}") from None
            counts[_topic(topic, names), row.get("index", 0)] = header.record_count
    for topic in (step.response or {}).get("responses", ()):
        for row in topic.get("partition_responses", ()):
            place = _topic(topic, names), row.get("index", 0)
            if "error_code" not in row:
                yield place, row.get("base_offset", 0), counts.get(place, 0)


def _topic(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    return row.get("name") or names.get(row.get("topic_id", ""), "")


# --- the cluster ---


def _settings(session: ClusterSession) -> dict[str, str]:
    entries = describe_configs(session, [("broker", str(session.some_broker))])
    return {
        entry.key: entry.value
        for entry in entries
        if entry.value is not None and is_setting(entry.key)
    }


def _group_settings(session: ClusterSession, group: str) -> dict[str, str]:
    try:
        entries = describe_configs(session, [("group", group)])
    except ApiError:
        return {}  # the principal may not see them
    return {
        entry.key: entry.value
        for entry in entries
        if entry.value is not None and is_group_setting(entry.key) and entry.source == "group"
    }


def _topics(session: ClusterSession, requests: Iterable[Entry]) -> dict[str, TopicOfIncident]:
    """Return the topics whose names or ids occur in the requests or responses."""
    frames = b"".join(
        b64decode(request.detail[side])
        for request in requests
        for side in ("request", "response")
        if isinstance(request.detail.get(side), str)
    )
    topics = {}
    for topic in session.topics():
        name = topic.name.encode()
        written = (struct.pack(">h", len(name)) + name, uvarint(len(name) + 1) + name)
        id_bytes = b"" if topic.topic_id is None else topic.topic_id.bytes
        if (id_bytes and id_bytes in frames) or any(form in frames for form in written):
            topics[topic.name] = TopicOfIncident(str(topic.topic_id), len(topic.partitions))
    return topics
