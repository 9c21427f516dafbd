"""The APIs that a controller's listener serves: Kafka's controller APIs only.

Source: the listeners of each request in ``common/message/*.json``, ``ControllerApis``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fencepost.coordinator.handlers import Registry
from fencepost.protocol.api import KNOWN_APIS, ApiKey

_OF_ITS_OWN: Final[Mapping[int, str]] = {
    ApiKey.API_VERSIONS: "controller_versions",
    ApiKey.FETCH: "metadata_fetch",
    ApiKey.DESCRIBE_CLUSTER: "describe_controllers",
}
"""APIs whose handler differs from the one on a broker's listener."""

_SERVED: Final = (
    ApiKey.SASL_HANDSHAKE,
    ApiKey.API_VERSIONS,
    ApiKey.CREATE_TOPICS,
    ApiKey.DELETE_TOPICS,
    ApiKey.DESCRIBE_ACLS,
    ApiKey.CREATE_ACLS,
    ApiKey.DELETE_ACLS,
    ApiKey.DESCRIBE_CONFIGS,
    ApiKey.ALTER_CONFIGS,
    ApiKey.SASL_AUTHENTICATE,
    ApiKey.CREATE_PARTITIONS,
    ApiKey.ELECT_LEADERS,
    ApiKey.INCREMENTAL_ALTER_CONFIGS,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS,
    ApiKey.LIST_PARTITION_REASSIGNMENTS,
    ApiKey.ALTER_CLIENT_QUOTAS,
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
    ApiKey.VOTE,
    ApiKey.BEGIN_QUORUM_EPOCH,
    ApiKey.END_QUORUM_EPOCH,
    ApiKey.DESCRIBE_QUORUM,
    ApiKey.ALTER_PARTITION,
    ApiKey.UPDATE_FEATURES,
    ApiKey.ENVELOPE,
    ApiKey.FETCH_SNAPSHOT,
    ApiKey.BROKER_REGISTRATION,
    ApiKey.BROKER_HEARTBEAT,
    ApiKey.UNREGISTER_BROKER,
    ApiKey.UNREGISTER_CONTROLLER,
    ApiKey.ALLOCATE_PRODUCER_IDS,
    ApiKey.CONTROLLER_REGISTRATION,
    ApiKey.ASSIGN_REPLICAS_TO_DIRS,
)


def controller_registry(*more: ApiKey) -> Registry:
    """Return the registry of a controller's listeners, with ``more`` APIs."""
    modules = {int(key): KNOWN_APIS[key].module for key in (*_SERVED, *more)}
    return Registry(modules={**modules, **_OF_ITS_OWN})
