"""Translates ids, epochs and offsets between an incident and the broker that replays it."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from datetime import timedelta
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.client.queries.incident import (
    APIS_BY_NAME,
    MAX_RECORDS,
    Incident,
    IncidentError,
    Payload,
    Step,
)
from fencepost.client.queries.incident_values import from_json
from fencepost.client.queries.recording import produced
from fencepost.client.requests import Partition
from fencepost.logcore.batch import LogRecord, encode_batch, parse_header
from fencepost.logcore.errors import LogError
from fencepost.protocol.schema import Entity, all_fields

_EPOCHS: Final = ("generation_id", "generation_id_or_member_epoch", "member_epoch")
_EMPTY: Final = Payload(None, None, ())
_NOTHING_WAITED: Final = timedelta()
_LONG_WAIT: Final = timedelta(seconds=60)


class ReplayIds:
    """Translates the incident's requests for the broker, and the broker's responses back."""

    def __init__(self, incident: Incident, topics: Mapping[str, uuid.UUID | None]) -> None:
        self._members: dict[str, str] = {}
        self._epochs: dict[tuple[str, str, int], int] = {}
        """The replay's epochs, by group, member and recorded generation or member epoch."""
        self._producers: dict[int, int] = {}
        self._producer_epochs: dict[tuple[int, int], int] = {}
        self._topic_ids: dict[uuid.UUID | None, uuid.UUID | None] = {}
        self._names: dict[uuid.UUID | None, str] = {}
        self._bases: dict[Partition, int] = {}
        """The recorded offset of the first record of the replay, for each partition."""
        self._records = 0
        self._payloads = incident.records
        self._firsts: dict[Partition, int] = {}
        """The base offsets in the recorded response to the current Produce request."""
        for name, topic in incident.topics.items():
            try:
                recorded = uuid.UUID(topic.id)
            except ValueError:
                continue  # the brokers of the incident had no topic ids
            self._names[recorded] = name
            self._topic_ids[recorded] = topics.get(name)

    def request(self, step: Step) -> Entity:
        """Return the request of a step as the replay sends it. Raises IncidentError."""
        body = from_json(APIS_BY_NAME[step.api], step.version, "request", step.request)
        self._firsts = {}
        if step.api == "Produce":
            names = {str(topic_id): name for topic_id, name in self._names.items()}
            self._firsts = {place: first for place, first, _ in produced(step, names)}
        body = self._translated(body, body)
        if step.api == "ShareFetch" and step.response is not None:
            # A ShareFetch waits in real time, so let it wait only for records that it will get.
            waits = any(True for _ in self.acquired(self._response(step)))
            body = replace(body, max_wait=_LONG_WAIT if waits else _NOTHING_WAITED)
        return body

    def _response(self, step: Step) -> Entity:
        return from_json(APIS_BY_NAME[step.api], step.version, "response", step.response or {})

    def _translated(self, message: Entity, request: Entity) -> Entity:
        changed: dict[str, Any] = {}
        for info in all_fields(type(message)):
            name, value = info.name, getattr(message, info.name)
            if name == "member_id":
                changed[name] = self._members.get(value, value)
            elif name in _EPOCHS:
                group, member = getattr(request, "group_id", ""), getattr(request, "member_id", "")
                changed[name] = self._epochs.get((group, member, value), value)
            elif name.endswith("producer_id"):
                changed[name] = self._producers.get(value, value)
            elif name.endswith("producer_epoch"):
                producer = getattr(message, name.replace("epoch", "id"))
                changed[name] = self._producer_epochs.get((producer, value), value)
            elif name == "topic_id":
                changed[name] = self._topic_ids.get(value, value)
                if hasattr(message, "partitions"):
                    rows = [self._offsets(value, row) for row in message.partitions]
                    changed["partitions"] = tuple(
                        self._translated(row, request) if is_dataclass(row) else row for row in rows
                    )
            elif name == "topic_data":
                changed[name] = tuple(self._topic_data(item, request) for item in value)
            elif name not in changed and _is_structs(value):
                changed[name] = tuple(self._translated(item, request) for item in value)
        return replace(message, **changed) if changed else message

    def _offsets(self, topic_id: uuid.UUID, row: Any) -> Any:
        """Return a partition's entry, with its acknowledged offsets translated to the replay's."""
        if not getattr(row, "acknowledgement_batches", ()):
            return row
        base = self._bases.get((self._names.get(topic_id, ""), row.partition_index), 0)
        return replace(
            row,
            acknowledgement_batches=tuple(
                replace(
                    acknowledgement_batch,
                    first_offset=acknowledgement_batch.first_offset - base,
                    last_offset=acknowledgement_batch.last_offset - base,
                )
                for acknowledgement_batch in row.acknowledgement_batches
            ),
        )

    def _topic_data(self, topic: Any, request: Entity) -> Any:
        """Return a topic of a Produce request with batches of the replay."""
        name = getattr(topic, "name", None) or self._names.get(getattr(topic, "topic_id", None), "")
        rows = [
            replace(row, records=self._batch(row.records, (name, row.index)))
            if row.records
            else row
            for row in topic.partition_data
        ]
        return self._translated(replace(topic, partition_data=tuple(rows)), request)

    def payload(self, place: Partition, offset: int) -> Payload:
        """Return the key, value and headers of a record at an offset of the replay."""
        return self._recorded_payload(place, offset + self._bases.get(place, 0))

    def _recorded_payload(self, place: Partition, offset: int) -> Payload:
        return self._payloads.get(place[0], {}).get(place[1], {}).get(offset, _EMPTY)

    def _batch(self, header_bytes: bytes, place: Partition) -> bytes:
        """Return a batch with as many records as the recorded one."""
        try:
            header = parse_header(header_bytes)
        except LogError as error:
            raise IncidentError(f"a Produce request has no batch: {error}") from None
        self._records += header.record_count
        if not 0 < header.record_count <= MAX_RECORDS or self._records > MAX_RECORDS:
            raise IncidentError(f"the requests produce more than {MAX_RECORDS} records")
        producer, epoch = header.producer_id, header.producer_epoch
        stamp = max(header.base_timestamp, 0)
        first = self._firsts.get(place, -1 - header.record_count)
        return encode_batch(
            [
                LogRecord(at, stamp, *self._recorded_payload(place, first + at))
                for at in range(header.record_count)
            ],
            producer_id=self._producers.get(producer, producer),
            producer_epoch=self._producer_epochs.get((producer, epoch), epoch),
            base_sequence=header.base_sequence,
            transactional=header.is_transactional,
        )

    # --- responses ---

    def learn(self, step: Step, recorded: Entity, response: Entity) -> None:
        """Note the ids and epochs that the broker has given in place of the recorded ones."""
        request = from_json(APIS_BY_NAME[step.api], step.version, "request", step.request)
        old, new = getattr(recorded, "member_id", ""), getattr(response, "member_id", "")
        if old and new:
            self._members[old] = new
        member = old or getattr(request, "member_id", "")
        for name in _EPOCHS:
            epoch = getattr(recorded, name, 0)
            if epoch > 0:
                self._epochs[request.group_id, member, epoch] = getattr(response, name)
        producer, epoch = (getattr(recorded, f"producer_{part}", -1) for part in ("id", "epoch"))
        if producer >= 0 and epoch >= 0 and error_names(recorded)[0] == "NONE":
            self._producers[producer] = response.producer_id
            self._producer_epochs[producer, epoch] = response.producer_epoch

    def acquired(self, response: Entity | None) -> Iterator[tuple[Partition, int]]:
        """Yield each partition of a ShareFetch response, and the last offset acquired in it."""
        for place, ranges in _acquired(response, self._names):
            base = self._bases.get(place, 0)
            yield place, max(last for _, last in ranges) - base

    def boundaries(self, responses: Iterable[Entity | None]) -> Mapping[Partition, list[int]]:
        """Return the first offsets of all acquired ranges, sorted, as offsets of the replay.

        In the replay, a partition's log begins with the first record that the incident acquired.
        """
        offsets: dict[Partition, set[int]] = defaultdict(set)
        for response in responses:
            for place, ranges in _acquired(response, self._names):
                offsets[place].update(first for first, _ in ranges)
        self._bases = {place: min(firsts) for place, firsts in offsets.items()}
        return {
            place: sorted(first - self._bases[place] for first in firsts)
            for place, firsts in offsets.items()
        }

    def recorded_text(self, text: str | None) -> str | None:
        """Return a text of the replay's history with the member ids of the incident."""
        if text is not None:
            for old, new in self._members.items():
                text = text.replace(new, old)
        return text


def _acquired(
    response: Entity | None, names: Mapping[uuid.UUID | None, str]
) -> Iterator[tuple[Partition, list[tuple[int, int]]]]:
    for topic in getattr(response, "responses", ()):
        for row in getattr(topic, "partitions", ()):
            ranges = [
                (acquired.first_offset, acquired.last_offset)
                for acquired in getattr(row, "acquired_records", ())
            ]
            if ranges and topic.topic_id in names:
                yield (names[topic.topic_id], row.partition_index), ranges


def acquires_only(step: Step, response: Entity | None) -> bool:
    """Return whether a request did nothing but acquire records."""
    acknowledges = any(
        row.get("acknowledgement_batches")
        for topic in step.request.get("topics", ())
        for row in topic.get("partitions", ())
    )
    return not acknowledges and any(
        getattr(row, "acquired_records", ())
        for topic in getattr(response, "responses", ())
        for row in getattr(topic, "partitions", ())
    )


def error_names(message: Entity) -> tuple[str, ...]:
    """Return all error codes of a response in the order of its fields."""
    return tuple(_errors(message)) or ("NONE",)


def _errors(message: Entity) -> Iterator[str]:
    for info in all_fields(type(message)):
        value = getattr(message, info.name)
        if info.kafka_type == "error_code":
            yield ErrorCode(value).name.upper()
        elif _is_structs(value):
            for item in value:
                yield from _errors(item)


def _is_structs(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and is_dataclass(value[0])
