"""Requests of the matrix: the cluster, its settings, rules, quotas, users and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tests.oracle.authorisation import ABSENT, HERE, Body, Request
from tests.support import requests

KINDS: Final = (HERE, ABSENT)
TOPIC, BROKER, LOGGER, METRICS, GROUP, UNKNOWN = 2, 4, 8, 16, 32, 7
NODE: Final = "1"
RETENTION: Final = "retention.ms"
SESSION: Final = "consumer.session.timeout.ms"


def _described(*resources: tuple[int, str, str]) -> Body:
    rows = [requests.described_resource(*resource) for resource in resources]
    return requests.describe_configs(*rows, include_synonyms=True)


def _altered(*resources: tuple[int, str, str, str]) -> list[Body]:
    return [
        requests.altered_resource(kind, name, requests.config_op(key, value))
        for kind, name, key, value in resources
    ]


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
            lambda n, build=build, rows=rows, is_fresh=is_fresh: build(
                *rows(n), validate_only=not is_fresh
            ),
            title,
            kinds=kinds,
            others="alter_configs cluster" if "cluster" not in rights else "",
            is_fresh=is_fresh,
        )
        for api, versions, build in (
            ("alter_configs", (0, 2), requests.alter_configs),
            ("incremental_alter_configs", (0, 1), requests.incremental_alter_configs),
        )
        for title, rights, rows, kinds, is_fresh in (
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
                # Internal topics require this value, so both brokers accept it there.
                lambda n: _altered((TOPIC, n["t"], "cleanup.policy", "compact")),
                {"t": (HERE, ABSENT, "internal")},
                False,
            ),
            (
                "of a bad value",
                "alter_configs t",
                lambda n: _altered((TOPIC, n["t"], RETENTION, "much")),
                {},
                False,
            ),
            (
                "of a group",
                "alter_configs g",
                lambda n: _altered((GROUP, n["g"], SESSION, "60000")),
                {"g": KINDS},
                False,
            ),
            (
                "of brokers",
                "alter_configs cluster",
                lambda _: _altered((BROKER, NODE, "message.max.bytes", "1048588")),
                {},
                False,
            ),
            (
                "of client metrics",
                "alter_configs cluster",
                lambda _: _altered((METRICS, "m-metrics", "interval.ms", "5000")),
                {},
                False,
            ),
        )
    ),
    Request(
        "list_config_resources",
        (0, 1),
        "describe_configs cluster",
        lambda _: requests.list_config_resources(METRICS),
        others="describe cluster",
    ),
)


def _acl(name: str, **fields: Any) -> Body:
    return requests.acl(name, **{"principal": "User:nobody", **fields})


def _filter(name: str, **fields: Any) -> Body:
    return requests.acl_filter(name, principal_filter="User:nobody", **fields)


def _quota(**values: float) -> Body:
    entry = requests.quota_entry({"user": "m-nobody"}, **values)
    return requests.alter_client_quotas(entry, validate_only=True)


RULES: Sequence[Request] = (
    Request(
        "describe_acls",
        (1, 2, 3),
        "describe cluster",
        lambda _: _filter("m-rules"),
        others="alter cluster",
    ),
    Request(
        "create_acls",
        (1, 2, 3),
        "alter cluster",
        lambda n: requests.create_acls(_acl(n["t"])),
        kinds={"t": (ABSENT,)},
        others="describe cluster",
        is_fresh=True,
    ),
    Request(
        "create_acls",
        (3,),
        "alter cluster",
        lambda n: requests.create_acls(
            _acl(n["t"], principal="nobody"), _acl(""), _acl(n["t"], resource_type=4)
        ),
        "of bad rules",
        kinds={"t": (HERE,)},
    ),
    Request(
        "delete_acls",
        (1, 2, 3),
        "alter cluster",
        lambda n: requests.delete_acls(_filter(n["t"]), _filter("m-none", pattern_type_filter=4)),
        kinds={"t": (HERE,)},
        others="describe cluster",
    ),
)

QUOTAS: Sequence[Request] = (
    Request(
        "describe_client_quotas",
        (0, 1),
        "describe_configs cluster",
        lambda _: requests.describe_client_quotas(
            requests.quota_component("user", 0, "m-nobody"), strict=True
        ),
        others="describe cluster",
    ),
    Request(
        "alter_client_quotas",
        (0, 1),
        "alter_configs cluster",
        lambda _: _quota(producer_byte_rate=1e9),
        others="alter cluster",
    ),
    Request(
        "alter_client_quotas",
        (1,),
        "alter_configs cluster",
        lambda _: _quota(no_such_rate=1.0),
        "of a bad key",
    ),
    Request(
        "describe_user_scram_credentials",
        (0,),
        "describe cluster",
        lambda _: requests.describe_user_scram_credentials(["m-nobody"]),
        others="alter cluster",
    ),
    Request(
        "describe_user_scram_credentials",
        (0,),
        "describe cluster",
        lambda _: requests.describe_user_scram_credentials([]),
        "of all",
    ),
    Request(
        "alter_user_scram_credentials",
        (0,),
        "alter cluster",
        lambda _: requests.alter_user_scram_credentials(
            [requests.scram_deletion("m-nobody", 1)],
            [requests.scram_upsertion("m-bad", 1, iterations=1)],
        ),
        others="describe cluster",
    ),
)

CLUSTER: Sequence[Request] = (
    Request(
        "describe_cluster",
        (0, 1, 2),
        "describe cluster",
        lambda _: requests.describe_cluster(include_cluster_authorized_operations=True),
        others="alter cluster",
    ),
    Request(
        "describe_cluster",
        (2,),
        "describe cluster",
        lambda _: requests.describe_cluster(include_fenced_brokers=True),
        "without operations",
        is_idle=True,
    ),
    Request(
        "describe_log_dirs",
        (1, 2, 3, 5),
        "describe cluster",
        lambda n: requests.describe_log_dirs(requests.topic_partitions(n["t"], 0)),
        kinds={"t": KINDS},
        others="describe t",
    ),
    Request(
        "alter_replica_log_dirs",
        (1, 2),
        "alter cluster",
        lambda n: requests.alter_replica_log_dirs(
            requests.log_dir("/no/such/directory", (n["t"], [0]))
        ),
        kinds={"t": KINDS},
        others="alter t",
    ),
    Request(
        "elect_leaders",
        (0, 1, 2),
        "alter cluster",
        lambda n: requests.elect_leaders(requests.topic_partitions(n["t"], 0)),
        kinds={"t": KINDS},
        others="cluster_action cluster",
    ),
    Request(
        "alter_partition_reassignments",
        (0, 1),
        "alter cluster",
        lambda n: requests.alter_partition_reassignments(
            requests.reassigned_topic(n["t"], (0, [1]))
        ),
        kinds={"t": KINDS},
        others="alter t",
    ),
    Request(
        "list_partition_reassignments",
        (0,),
        "describe cluster",
        lambda n: requests.list_partition_reassignments(requests.indexes_of(n["t"], 0)),
        kinds={"t": KINDS},
        others="describe t",
    ),
    Request(
        "update_features",
        (0, 1, 2),
        "alter cluster",
        lambda _: requests.update_features(
            requests.feature_update("no.such.feature", 1), validate_only=True
        ),
        others="cluster_action cluster",
    ),
    Request(
        "unregister_broker",
        (0,),
        "alter cluster",
        lambda _: requests.unregister_broker(99),
        others="cluster_action cluster",
    ),
    Request(
        "unregister_controller",
        (0,),
        "alter cluster",
        lambda _: requests.unregister_controller(99),
        others="cluster_action cluster",
    ),
    Request(
        "describe_quorum",
        (0, 1, 2),
        "describe cluster",
        lambda _: requests.describe_quorum(requests.quorum_topic("no-such-topic", 0)),
        others="cluster_action cluster",
    ),
    Request(
        "api_versions",
        (0, 3, 5),
        "describe cluster",
        lambda _: requests.api_versions(),
        is_idle=True,
    ),
)

REQUESTS: Sequence[Request] = (*SETTINGS, *RULES, *QUOTAS, *CLUSTER)
