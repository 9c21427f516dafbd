"""Updates of the clients' knowledge from responses, by API."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from tests.lives.draw import Request
from tests.lives.knowledge import NO_TOPIC, Knowledge, ShareMember, SharePartition
from tests.support.batches import batches
from tests.support.raw import Answer, errors_in
from tests.support.share import RENEW

Body = Mapping[str, Any]


def _joined(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    assert request.about is not None
    member = k.members[request.about]
    error = answer["error_code"]
    member.last_error = error
    if error in ("none", "member_id_required") and answer["member_id"] not in ("", member.id):
        member.ids = [*member.ids[-4:], answer["member_id"]]
    if error == "none":
        member.older = [*member.older[-4:], member.generation]
        member.generation = answer["generation_id"]
        member.protocol = answer["protocol_name"]
        slots = {k.members[slot].id: slot for slot in list(k.members)}
        ids = (row["member_id"] for row in answer["members"])
        # Brokers list the members in the order of their hash tables.
        member.leads = sorted(ids, key=lambda member_id: slots.get(member_id, (member_id, 0)))
    elif error in ("unknown_member_id", "fenced_instance_id"):
        member.ids = [*member.ids, ""]


def _synced(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    assert request.about is not None
    member, error = k.members[request.about], answer["error_code"]
    member.last_error = "synced" if error == "none" else error
    if error == "unknown_member_id":
        member.ids = [*member.ids[-4:], ""]


def _beat(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    if answer["error_code"] != "none":
        _synced(k, request, body, answer)


def _consumer_heard(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    assert request.about is not None
    member = k.members[request.about]
    error = answer["error_code"]
    member.last_error = error
    if error == "none":
        if answer["member_id"] and answer["member_id"] != member.id:
            member.ids = [*member.ids[-4:], answer["member_id"]]
        member.epoch = answer["member_epoch"]
        given = answer["assignment"]
        if given is not None:
            member.owned = [
                {"topic_id": uuid.UUID(row["topic_id"]), "partitions": row["partitions"]}
                for row in given["topic_partitions"]
            ]
        if member.epoch <= 0:
            member.owned = []
    elif error in ("unknown_member_id", "fenced_member_epoch"):
        member.epoch, member.owned = 0, []


def _claimed(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    if answer["error_code"] == "none":
        about = request.about or ("", request.notes.get("slot", 0))
        k.producers[about].now_is((answer["producer_id"], answer["producer_epoch"]))


def _ended(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    if answer["error_code"] == "none" and answer.get("producer_id", -1) >= 0:
        assert request.about is not None
        k.producers[request.about].now_is((answer["producer_id"], answer["producer_epoch"]))


def _produced(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    sent = {
        part["index"]: part["records"]
        for topic in body["topic_data"]
        for part in topic["partition_data"]
    }
    name = request.notes["topic"]
    for response in answer["responses"]:
        for part in response["partition_responses"]:
            data = sent.get(part["index"])
            if part["error_code"] != "none" or not data:
                continue
            (first, *_) = batches(data)
            count = first.last_offset - first.base_offset + 1
            at = name, part["index"]
            k.ends[at] = max(k.ends.get(at, 0), part["base_offset"] + count)
            producer = k.producers[request.about or ("", 0)]
            if (first.producer_id, first.producer_epoch) == producer.identity:
                producer.sequences[at] = first.base_sequence + count


def _described(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    for topic in answer["topics"]:
        k.saw_topic(topic["name"], topic.get("topic_id"))


def _fetched(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    client, error = request.notes["client"], answer.get("error_code", "none")
    if error == "none" and answer.get("session_id"):
        epoch = max(0, body.get("session_epoch", 0)) + 1
        k.sessions[client] = answer["session_id"], epoch
    elif error != "none" and body.get("session_id"):
        k.sessions.pop(client, None)


def _share_heard(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    member = _share_member(k, request, body)
    if member is None:
        return
    if answer["error_code"] == "none":
        member.epoch = max(answer["member_epoch"], 0)
    elif answer["error_code"] in ("unknown_member_id", "fenced_member_epoch"):
        member.epoch = 0


def _share_member(k: Knowledge, request: Request, body: Body) -> ShareMember | None:
    """Return the member that sent a request, None if the request had another member id."""
    assert request.about is not None
    if body["member_id"] != f"share-member-{request.about[1]}":
        return None
    return k.shares[request.about]


LOST_PARTITION = frozenset({"unknown_topic_id", "unknown_topic_or_partition"})


def _share_answered(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    """Update a member's share session after a ShareFetch or a ShareAcknowledge."""
    member = _share_member(k, request, body)
    if member is None:
        return
    epoch, group = body["share_session_epoch"], body["group_id"]
    if answer["error_code"] != "none":
        if answer["error_code"] == "share_session_not_found":
            member.close()
        elif answer["error_code"] == "invalid_share_session_epoch":
            member.session = 0
        return
    if epoch == 0:
        member.close()
    if request.api == "share_fetch":
        member.partitions |= _named(group, body["topics"], "partition_index")
        member.partitions -= _named(group, body["forgotten_topics_data"], None)
        if body["max_records"] > 0 and not body.get("is_renew_ack"):
            k.read_shares |= member.partitions
    member.session = epoch + 1
    if epoch == -1:
        # The broker drops the states of a group without sessions.
        member.close()
        k.read_shares = {key for key in k.read_shares if key[0] != group}
    sent = {
        (row["topic_id"], part["partition_index"]): part["acknowledgement_batches"]
        for row in body["topics"]
        for part in row["partitions"]
    }
    for row in answer["responses"]:
        for part in row["partitions"]:
            topic_id = uuid.UUID(row["topic_id"]) if row["topic_id"] else NO_TOPIC
            at = topic_id, part["partition_index"]
            error = part["error_code"]
            if error not in ("none", 0):
                k.read_shares.discard((group, *at))
            if request.api == "share_fetch":
                error = part["acknowledge_error_code"]
            _acknowledged(member, at, sent.get(at, []), error)
            for acquired in part.get("acquired_records", ()):
                offsets = range(acquired["first_offset"], acquired["last_offset"] + 1)
                member.held.setdefault(at, set()).update(offsets)


def _acknowledged(
    member: ShareMember, at: tuple[uuid.UUID, int], batches: list[Body], error: str | int
) -> None:
    """Remove acknowledged offsets, and offsets that are not acquired according to the broker."""
    held = member.held.get(at)
    if held is None:
        return
    for batch in batches:
        types = batch["acknowledge_types"]
        offsets = range(batch["first_offset"], batch["last_offset"] + 1)
        for number, offset in enumerate(offsets):
            kind = types[number] if len(types) > 1 and number < len(types) else types[:1]
            if error not in ("none", 0) or kind not in (RENEW, [RENEW]):
                held.discard(offset)
    if not held or error in LOST_PARTITION:
        del member.held[at]


def _named(group: str, rows: list[Body], index: str | None) -> set[SharePartition]:
    return {
        (group, row["topic_id"], part[index] if index else part)
        for row in rows
        for part in row["partitions"]
    }


def _states_changed(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    k.read_shares.clear()


FENCED = frozenset({"producer_fenced", "invalid_producer_epoch", "invalid_producer_id_mapping"})


def _of_a_producer(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    if request.about is not None and FENCED.intersection(errors_in(answer)):
        k.producers[request.about].is_fenced = True


TAUGHT: Mapping[str, Callable[[Knowledge, Request, Body, Answer], None]] = {
    "join_group": _joined,
    "sync_group": _synced,
    "heartbeat": _beat,
    "consumer_group_heartbeat": _consumer_heard,
    "init_producer_id": _claimed,
    "end_txn": _ended,
    "produce": _produced,
    "metadata": _described,
    "create_topics": _described,
    "fetch": _fetched,
    "share_group_heartbeat": _share_heard,
    "share_fetch": _share_answered,
    "share_acknowledge": _share_answered,
    **dict.fromkeys(
        (
            "alter_share_group_offsets",
            "delete_groups",
            "delete_share_group_offsets",
            "delete_share_group_state",
            "delete_topics",
            "initialize_share_group_state",
        ),
        _states_changed,
    ),
}


def learn(k: Knowledge, request: Request, body: Body, answer: Answer) -> None:
    """Update ``k`` with the response to ``request``, which was sent as ``body``."""
    if "producer_id" in body or request.api in ("produce", "add_partitions_to_txn"):
        _of_a_producer(k, request, body, answer)
    teach = TAUGHT.get(request.api)
    if teach is not None:
        teach(k, request, body, answer)
