"""Requests of the matrix: the cluster, its settings, rules, quotas, users and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tests.oracle.authorisation import ABSENT, HERE, Body, Request

KINDS: Final = (HERE, ABSENT)
TOPIC, BROKER, LOGGER, METRICS, GROUP, UNKNOWN = 2, 4, 8, 16, 32, 7
NODE: Final = "1"
SET: Final = 0

RULE: Final = {
    "resource_type": 2,
    "resource_pattern_type": 3,
    "principal": "User:nobody",
    "host": "*",
    "operation": 3,
    "permission_type": 3,
}
FILTER: Final = {
    "resource_type_filter": 2,
    "pattern_type_filter": 3,
    "principal_filter": "User:nobody",
    "operation": 1,
    "permission_type": 1,
}


def _described(*resources: tuple[int, str, str], **how: Any) -> Body:
    rows = [
        {"resource_type": kind, "resource_name": name, "configuration_keys": [key]}
        for kind, name, key in resources
    ]
    return {"resources": rows, "include_synonyms": True, **how}


def _altered(*resources: tuple[int, str, str, str], validate_only: bool = False) -> Body:
    rows = [
        {
            "resource_type": kind,
            "resource_name": name,
            "configs": [{"name": key, "value": value, "config_operation": SET}],
        }
        for kind, name, key, value in resources
    ]
    return {"resources": rows, "validate_only": validate_only}


RETENTION: Final = "retention.ms"
SESSION: Final = "consumer.session.timeout.ms"


def _plain(body: Body) -> Body:
    """Return the body without the fields that only IncrementalAlterConfigs has."""
    rows = [
        {
            **row,
            "configs": [
                {k: v for k, v in c.items() if k != "config_operation"} for c in row["configs"]
            ],
        }
        for row in body["resources"]
    ]
    return {**body, "resources": rows}


SETTINGS: Sequence[Request] = (
    Request(
        "describe_configs",
        (1, 2, 4),
        "describe_configs t, describe_configs u",
        lambda n: _described((TOPIC, n["t"], RETENTION), (TOPIC, n["u"], RETENTION)),
        kinds={"u": KINDS},
        others="describe_configs cluster",
    ),
    Request(
        "describe_configs",
        (4,),
        "describe_configs g",
        lambda n: _described((GROUP, n["g"], SESSION)),
        "of a group",
        kinds={"g": KINDS},
        others="describe_configs cluster",
    ),
    Request(
        "describe_configs",
        (1, 4),
        "describe_configs cluster",
        lambda n: _described(
            (BROKER, NODE, "message.max.bytes"),
            (BROKER, "", "message.max.bytes"),
            (TOPIC, n["t"], RETENTION),
        ),
        "of brokers",
        kinds={"t": (HERE,)},
        others="describe_configs t",
    ),
    Request(
        "describe_configs",
        (4,),
        "describe_configs cluster",
        lambda n: _described((LOGGER, NODE, "kafka.none")),
        "of loggers",
    ),
    Request(
        "describe_configs",
        (4,),
        "describe_configs cluster",
        lambda n: _described((METRICS, "m-metrics", "interval.ms")),
        "of client metrics",
    ),
    Request(
        "describe_configs",
        (4,),
        "describe_configs cluster",
        lambda n: _described((BROKER, "7", "message.max.bytes")),
        "of another broker",
    ),
    *(
        Request(
            api,
            versions,
            rights,
            lambda n, made=made, change=change: change(made(n)),
            title,
            kinds=kinds,
            others="alter_configs cluster" if "cluster" not in rights else "",
            is_fresh=is_fresh,
        )
        for api, versions, change in (
            ("alter_configs", (0, 2), _plain),
            ("incremental_alter_configs", (0, 1), lambda body: body),
        )
        for title, rights, made, kinds, is_fresh in (
            (
                "",
                "alter_configs t, alter_configs u",
                lambda n: _altered(
                    (TOPIC, n["t"], RETENTION, "77777"), (TOPIC, n["u"], RETENTION, "88888")
                ),
                {"u": KINDS},
                True,
            ),
            (
                "validate_only",
                "alter_configs t",
                # An internal topic needs this value, so both brokers accept it there.
                lambda n: _altered(
                    (TOPIC, n["t"], "cleanup.policy", "compact"), validate_only=True
                ),
                {"t": (HERE, ABSENT, "internal")},
                False,
            ),
            (
                "of a bad value",
                "alter_configs t",
                lambda n: _altered((TOPIC, n["t"], RETENTION, "much"), validate_only=True),
                {},
                False,
            ),
            (
                "of a group",
                "alter_configs g",
                lambda n: _altered((GROUP, n["g"], SESSION, "60000"), validate_only=True),
                {"g": KINDS},
                False,
            ),
            (
                "of brokers",
                "alter_configs cluster",
                lambda _: _altered(
                    (BROKER, NODE, "message.max.bytes", "1048588"), validate_only=True
                ),
                {},
                False,
            ),
            (
                "of client metrics",
                "alter_configs cluster",
                lambda _: _altered(
                    (METRICS, "m-metrics", "interval.ms", "5000"), validate_only=True
                ),
                {},
                False,
            ),
        )
    ),
    Request(
        "list_config_resources",
        (0, 1),
        "describe_configs cluster",
        lambda _: {"resource_types": [METRICS]},
        others="describe cluster",
    ),
)

RULES: Sequence[Request] = (
    Request(
        "describe_acls",
        (1, 2, 3),
        "describe cluster",
        lambda _: {**FILTER, "resource_name_filter": "m-rules"},
        others="alter cluster",
    ),
    Request(
        "create_acls",
        (1, 2, 3),
        "alter cluster",
        lambda n: {"creations": [{**RULE, "resource_name": n["t"]}]},
        kinds={"t": (ABSENT,)},
        others="describe cluster",
        is_fresh=True,
    ),
    Request(
        "create_acls",
        (3,),
        "alter cluster",
        lambda n: {
            "creations": [
                {**RULE, "resource_name": n["t"], "principal": "nobody"},
                {**RULE, "resource_name": ""},
                {**RULE, "resource_type": 4, "resource_name": n["t"]},
            ]
        },
        "of bad rules",
        kinds={"t": (HERE,)},
    ),
    Request(
        "delete_acls",
        (1, 2, 3),
        "alter cluster",
        lambda n: {
            "filters": [
                {**FILTER, "resource_name_filter": n["t"]},
                {**FILTER, "resource_name_filter": "m-none", "pattern_type_filter": 4},
            ]
        },
        kinds={"t": (HERE,)},
        others="describe cluster",
    ),
)

QUOTAS: Sequence[Request] = (
    Request(
        "describe_client_quotas",
        (0, 1),
        "describe_configs cluster",
        lambda _: {
            "components": [{"entity_type": "user", "match_type": 0, "match": "m-nobody"}],
            "strict": True,
        },
        others="describe cluster",
    ),
    Request(
        "alter_client_quotas",
        (0, 1),
        "alter_configs cluster",
        lambda _: {
            "entries": [
                {
                    "entity": [{"entity_type": "user", "entity_name": "m-nobody"}],
                    "ops": [{"key": "producer_byte_rate", "value": 1e9, "remove": False}],
                }
            ],
            "validate_only": True,
        },
        others="alter cluster",
    ),
    Request(
        "alter_client_quotas",
        (1,),
        "alter_configs cluster",
        lambda _: {
            "entries": [
                {
                    "entity": [{"entity_type": "user", "entity_name": "m-nobody"}],
                    "ops": [{"key": "no_such_rate", "value": 1.0, "remove": False}],
                }
            ],
            "validate_only": True,
        },
        "of a bad key",
    ),
    Request(
        "describe_user_scram_credentials",
        (0,),
        "describe cluster",
        lambda _: {"users": [{"name": "m-nobody"}]},
        others="alter cluster",
    ),
    Request(
        "describe_user_scram_credentials",
        (0,),
        "describe cluster",
        lambda _: {"users": []},
        "of all",
    ),
    Request(
        "alter_user_scram_credentials",
        (0,),
        "alter cluster",
        lambda _: {
            "deletions": [{"name": "m-nobody", "mechanism": 1}],
            "upsertions": [
                {
                    "name": "m-bad",
                    "mechanism": 1,
                    "iterations": 1,
                    "salt": b"salt",
                    "salted_password": b"password",
                }
            ],
        },
        others="describe cluster",
    ),
)

CLUSTER: Sequence[Request] = (
    Request(
        "describe_cluster",
        (0, 1, 2),
        "describe cluster",
        lambda _: {"include_cluster_authorized_operations": True, "endpoint_type": 1},
        others="alter cluster",
    ),
    Request(
        "describe_cluster",
        (2,),
        "describe cluster",
        lambda _: {"include_fenced_brokers": True, "endpoint_type": 1},
        "without operations",
        is_idle=True,
    ),
    Request(
        "describe_log_dirs",
        (1, 2, 3, 5),
        "describe cluster",
        lambda n: {"topics": [{"topic": n["t"], "partitions": [0]}]},
        kinds={"t": KINDS},
        others="describe t",
    ),
    Request(
        "alter_replica_log_dirs",
        (1, 2),
        "alter cluster",
        lambda n: {
            "dirs": [
                {
                    "path": "/no/such/directory",
                    "topics": [{"name": n["t"], "partitions": [0]}],
                }
            ]
        },
        kinds={"t": KINDS},
        others="alter t",
    ),
    Request(
        "elect_leaders",
        (0, 1, 2),
        "alter cluster",
        lambda n: {
            "election_type": 0,
            "timeout": 5000,
            "topic_partitions": [{"topic": n["t"], "partitions": [0]}],
        },
        kinds={"t": KINDS},
        others="cluster_action cluster",
    ),
    Request(
        "alter_partition_reassignments",
        (0, 1),
        "alter cluster",
        lambda n: {
            "timeout": 5000,
            "topics": [{"name": n["t"], "partitions": [{"partition_index": 0, "replicas": [1]}]}],
        },
        kinds={"t": KINDS},
        others="alter t",
    ),
    Request(
        "list_partition_reassignments",
        (0,),
        "describe cluster",
        lambda n: {
            "timeout": 5000,
            "topics": [{"name": n["t"], "partition_indexes": [0]}],
        },
        kinds={"t": KINDS},
        others="describe t",
    ),
    Request(
        "update_features",
        (0, 1, 2),
        "alter cluster",
        lambda _: {
            "timeout": 5000,
            "feature_updates": [
                {"feature": "no.such.feature", "max_version_level": 1, "upgrade_type": 1}
            ],
            "validate_only": True,
        },
        others="cluster_action cluster",
    ),
    Request(
        "unregister_broker",
        (0,),
        "alter cluster",
        lambda _: {"broker_id": 99},
        others="cluster_action cluster",
    ),
    Request(
        "describe_quorum",
        (0, 1, 2),
        "describe cluster",
        lambda _: {
            "topics": [{"topic_name": "no-such-topic", "partitions": [{"partition_index": 0}]}]
        },
        others="cluster_action cluster",
    ),
    Request(
        "api_versions",
        (0, 3, 4),
        "describe cluster",
        lambda _: {"client_software_name": "raw", "client_software_version": "1"},
        is_idle=True,
    ),
)

REQUESTS: Sequence[Request] = (*SETTINGS, *RULES, *QUOTAS, *CLUSTER)
