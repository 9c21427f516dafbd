"""Requests of brokers to their controller, and of clients directly to the controller."""

from __future__ import annotations

import uuid
from typing import Any, Final

from tests.answers.asking import CONTROLLER, FIRST, OPERATOR, Asker, inside, settled
from tests.answers.script_access import acl, acl_filter
from tests.answers.script_topics import (
    BROKER,
    GROUP,
    RETENTION,
    SESSION,
    SET,
    SIZE,
    TOPIC,
    WAIT,
    placed,
    plain,
    row,
)
from tests.oracle.traces_features import SAFE, UPGRADE, to
from tests.support.controllers import FEATURES, anonymous
from tests.support.raw import encode, fitted

Case = tuple[str, int, dict[str, Any]]
STRANGE_BROKER: Final = 50
"""The id of a simulated broker, whose requests the script sends."""


def cases(stem: str) -> list[Case]:
    """Return a valid and an invalid request for each decision."""
    grown = {"name": stem, "count": 2, "assignments": [{"broker_ids": [1]}]}
    moved = {"partition_index": 0, "replicas": [1]}
    return [
        ("create_topics", 7, {**WAIT, "topics": [placed(stem, [1]), placed("a/b", [1])]}),
        ("create_topics", 7, {**WAIT, "topics": [placed(stem, [1])], "validate_only": True}),
        ("create_partitions", 3, {**WAIT, "topics": [grown]}),
        ("create_partitions", 3, {**WAIT, "topics": [grown]}),
        *(
            ("incremental_alter_configs", 1, {"resources": [resource]})
            for resource in (
                row(TOPIC, stem, (RETENTION, SET, "5000")),
                row(TOPIC, f"{stem}-none", (RETENTION, SET, "5000")),
                row(TOPIC, stem, (RETENTION, SET, "x")),
                row(BROKER, "", (SIZE, SET, "1048588")),
                row(BROKER, "1", (SIZE, SET, "1048588")),
                row(BROKER, "1", (SIZE, SET, "x")),
                row(GROUP, stem, (SESSION, SET, "50000")),
                row(GROUP, stem, (SESSION, SET, "-1")),
            )
        ),
        ("alter_configs", 2, {"resources": [plain(row(TOPIC, stem, (RETENTION, SET, "7000")))]}),
        ("alter_configs", 2, {"resources": [plain(row(TOPIC, stem, (RETENTION, SET, "x")))]}),
        *access_cases(stem),
        (
            "elect_leaders",
            2,
            {
                **WAIT,
                "election_type": 0,
                "topic_partitions": [{"topic": stem, "partitions": [0, 9]}],
            },
        ),
        (
            "alter_partition_reassignments",
            1,
            {**WAIT, "topics": [{"name": stem, "partitions": [moved]}]},
        ),
        ("list_partition_reassignments", 0, {**WAIT, "topics": None}),
        (
            "update_features",
            2,
            {**WAIT, "feature_updates": [to(9, UPGRADE)], "validate_only": True},
        ),
        ("update_features", 2, {**WAIT, "feature_updates": [to(1, SAFE)], "validate_only": True}),
        ("unregister_broker", 0, {"broker_id": 555}),
        ("unregister_controller", 0, {"controller_id": 555}),
        ("delete_topics", 6, {**WAIT, "topics": [{"name": stem, "topic_id": None}] * 2}),
        ("delete_topics", 5, {**WAIT, "topic_names": [stem, f"{stem}-none"]}),
    ]


def access_cases(stem: str) -> list[Case]:
    """Return valid and invalid requests about ACLs, quotas and users."""
    password = {"salt": b"salt", "salted_password": b"p" * 32}
    user = {"name": stem, "mechanism": 1, "iterations": 4096, **password}
    op = {"key": "producer_byte_rate", "value": 1e9, "remove": False}
    entity = [{"entity_type": "user", "entity_name": stem}]
    return [
        ("create_acls", 3, {"creations": [acl(stem), acl("")]}),
        ("describe_acls", 3, acl_filter(stem)),
        ("delete_acls", 3, {"filters": [acl_filter(stem), acl_filter(stem, operation=0)]}),
        ("alter_client_quotas", 1, {"entries": [{"entity": entity, "ops": [op]}]}),
        (
            "alter_client_quotas",
            1,
            {"entries": [{"entity": entity, "ops": [{**op, "key": "no_such_rate"}]}]},
        ),
        (
            "alter_client_quotas",
            1,
            {"entries": [{"entity": entity, "ops": [{**op, "remove": True}]}]},
        ),
        (
            "alter_user_scram_credentials",
            0,
            {"deletions": [], "upsertions": [user, {**user, "name": ""}]},
        ),
        (
            "alter_user_scram_credentials",
            0,
            {"deletions": [{"name": stem, "mechanism": 1}], "upsertions": []},
        ),
    ]


def directly(ask: Asker) -> None:
    """Send requests to the controller itself."""
    if CONTROLLER in ask.places:
        for api, version, body in cases("direct"):
            ask.asked(api, version, body, at=CONTROLLER)
        for version in (1, 2):
            for kind in (1, 2, 3):
                body = {"endpoint_type": kind, "include_fenced_brokers": True}
                ask.asked("describe_cluster", version, body, at=CONTROLLER)
        settled(ask)


def in_envelopes(ask: Asker) -> None:
    """Send requests in envelopes, as a broker forwards them, with all rights and with no right."""
    if CONTROLLER not in ask.places:
        return

    def handed_on(api: str, version: int, body: dict[str, Any], who: bytes, **more: bytes) -> None:
        request = fitted(api, version, body)
        data = more.get("data") or encode(api, version, 77, "client", request)
        envelope = {
            "request_data": data,
            "request_principal": who,
            "client_host_address": more.get("host", b"\x7f\0\0\1"),
        }
        answer = ask.connection(CONTROLLER, OPERATOR).call("envelope", 0, **envelope)
        if answer["response_data"] is not None:
            answer = inside(api, version, answer)
        ask.keep(f"envelope of {api} v{version} {len(ask.steps)}", body, answer)

    for who in (anonymous("u0"), anonymous()):
        for api, version, body in cases("enveloped"):
            handed_on(api, version, body, who)
    api, version, body = cases("enveloped")[0]
    for who, more in (
        (b"", {}),
        (b"\0\7nonsense", {}),
        (anonymous(), {"data": b"nonsense"}),
        (anonymous(), {"data": b"\0\1\0\0"}),
        (anonymous(), {"host": b""}),
        (anonymous(), {"host": b"\x7f\0\0"}),
    ):
        handed_on(api, version, body, who, **more)
    handed_on("metadata", 9, {"topics": []}, anonymous())


def lives_of_brokers(ask: Asker) -> None:
    """Send registrations, heartbeats and other requests of brokers."""
    for at in (FIRST, CONTROLLER):
        if at in ask.places:
            _one_life(ask, at)


def _one_life(ask: Asker, at: str) -> None:
    cluster_id = ask.quietly("describe_cluster", 0)["cluster_id"]
    known = ask.cluster.create_topic(f"life-{at}")
    topic_id = ask.cluster.topic_id(known)
    registration: dict[str, Any] = {
        "broker_id": STRANGE_BROKER,
        "cluster_id": cluster_id,
        "incarnation_id": uuid.UUID(int=1 << 70),
        "listeners": [{"name": "PLAINTEXT", "host": "127.0.0.1", "port": 1}],
        "features": [
            {"name": name, "min_supported_version": low, "max_supported_version": high}
            for name, (low, high) in FEATURES.items()
        ],
        "log_dirs": [uuid.UUID(int=1 << 71)],
        "previous_broker_epoch": -1,
    }

    def tell(api: str, version: int, body: dict[str, Any]) -> Any:
        return ask.asked(api, version, body, at=at)

    tell("broker_registration", 4, {**registration, "cluster_id": "other"})
    tell("broker_registration", 4, {**registration, "listeners": []})
    tell("broker_registration", 4, {**registration, "log_dirs": []})
    tell("broker_registration", 4, {**registration, "features": []})
    tell("broker_registration", 4, {**registration, "broker_id": 1})
    epoch = tell("broker_registration", 4, registration).get("broker_epoch", -1)
    tell("broker_registration", 4, registration)
    tell("broker_registration", 4, {**registration, "incarnation_id": uuid.UUID(int=1 << 72)})
    life = {"broker_id": STRANGE_BROKER, "broker_epoch": epoch}
    stale = {"broker_id": STRANGE_BROKER, "broker_epoch": 0}
    for whose in (life, stale, {"broker_id": 99, "broker_epoch": 7}):
        heartbeat = {**whose, "current_metadata_offset": 0, "cordoned_log_dirs": None}
        tell("broker_heartbeat", 2, heartbeat)
        tell("broker_heartbeat", 2, {**heartbeat, "want_shut_down": True})
        tell("allocate_producer_ids", 0, whose)
        part = {
            "partition_index": 0,
            "leader_epoch": 0,
            "partition_epoch": 0,
            "new_isr_with_epochs": [{"broker_id": STRANGE_BROKER, "broker_epoch": epoch}],
        }
        for index in (0, 9):
            parts = [{**part, "partition_index": index}]
            topics = [{"topic_id": topic_id, "partitions": parts}]
            tell("alter_partition", 3, {**whose, "topics": topics})
        directory = {"id_": uuid.UUID(int=1 << 71), "topics": []}
        tell("assign_replicas_to_dirs", 0, {**whose, "directories": [directory]})
    settled(ask)
    ask("describe_cluster", 2, endpoint_type=1, include_fenced_brokers=True)
    if at == CONTROLLER:
        ask("unregister_broker", 0, broker_id=STRANGE_BROKER)
        ask("unregister_broker", 0, broker_id=STRANGE_BROKER)
        settled(ask)
        ask("describe_cluster", 2, endpoint_type=1, include_fenced_brokers=True)


SCRIPT: Final = (directly, in_envelopes, lives_of_brokers)
