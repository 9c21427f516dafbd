"""The records of ``__cluster_metadata``: all 27 types of Apache Kafka 4.4.

``record_codec.py`` encodes and decodes them; ``delta.py`` applies them to the image.

Source: the schemas ``metadata/*.json`` of kafka-metadata.
"""

from __future__ import annotations

from uuid import UUID

from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class BrokerEndpoint:
    """A listener of a broker.

    ``security_protocol``: 0 PLAINTEXT, 1 SSL, 2 SASL_PLAINTEXT, 3 SASL_SSL.
    """

    name: str
    host: str
    port: int
    security_protocol: int


@dataclass(frozen=True, slots=True)
class BrokerFeature:
    """The levels of a feature that a broker supports."""

    name: str
    min_supported_version: int
    max_supported_version: int


@dataclass(frozen=True, slots=True)
class RegisterBrokerRecord:
    """A broker has registered, with these values."""

    broker_id: int
    incarnation_id: UUID
    broker_epoch: int
    end_points: tuple[BrokerEndpoint, ...]
    features: tuple[BrokerFeature, ...]
    is_migrating_zk_broker: bool = False
    rack: str | None = None
    fenced: bool = True
    in_controlled_shutdown: bool = False
    log_dirs: tuple[UUID, ...] = ()
    cordoned_log_dirs: tuple[UUID, ...] | None = None


@dataclass(frozen=True, slots=True)
class UnregisterBrokerRecord:
    """A broker was unregistered."""

    broker_id: int
    broker_epoch: int


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic was created."""

    name: str
    topic_id: UUID


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """A partition was created, with this state."""

    topic_id: UUID
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    removing_replicas: tuple[int, ...]
    adding_replicas: tuple[int, ...]
    partition_id: int = -1
    leader: int = -1
    leader_recovery_state: int = 0
    leader_epoch: int = -1
    partition_epoch: int = -1
    directories: tuple[UUID, ...] = ()
    eligible_leader_replicas: tuple[int, ...] | None = None
    last_known_elr: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ConfigRecord:
    """A dynamic setting; a value of None removes it."""

    resource_type: int
    resource_name: str
    name: str
    value: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionChangeRecord:
    """Changes of a partition: None, or a field's default, leaves the field unchanged."""

    topic_id: UUID
    partition_id: int = -1
    isr: tuple[int, ...] | None = None
    leader: int = -2
    replicas: tuple[int, ...] | None = None
    removing_replicas: tuple[int, ...] | None = None
    adding_replicas: tuple[int, ...] | None = None
    leader_recovery_state: int = -1
    directories: tuple[UUID, ...] | None = None
    eligible_leader_replicas: tuple[int, ...] | None = None
    last_known_elr: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class FenceBrokerRecord:
    """A broker is fenced (before metadata.version 3.3-IV3)."""

    id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class UnfenceBrokerRecord:
    """A broker is unfenced (before metadata.version 3.3-IV3)."""

    id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RemoveTopicRecord:
    """A topic was deleted."""

    topic_id: UUID


@dataclass(frozen=True, slots=True)
class DelegationTokenRecord:
    """A delegation token."""

    owner: str
    requester: str
    renewers: tuple[str, ...]
    issue_timestamp: int
    max_timestamp: int
    expiration_timestamp: int
    token_id: str


@dataclass(frozen=True, slots=True)
class UserScramCredentialRecord:
    """A user's SCRAM credential."""

    name: str
    mechanism: int
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


@dataclass(frozen=True, slots=True)
class FeatureLevelRecord:
    """The finalized level of a feature; 0 turns it off."""

    name: str
    feature_level: int


@dataclass(frozen=True, slots=True)
class EntityData:
    """One type and name of a quota's entity; a name of None is the default."""

    entity_type: str
    entity_name: str | None = None


@dataclass(frozen=True, slots=True)
class ClientQuotaRecord:
    """A quota of an entity."""

    entity: tuple[EntityData, ...]
    key: str
    value: float
    remove: bool


@dataclass(frozen=True, slots=True)
class ProducerIdsRecord:
    """The first producer id that no block contains."""

    broker_id: int
    next_producer_id: int
    broker_epoch: int = -1


@dataclass(frozen=True, slots=True)
class BrokerRegistrationChangeRecord:
    """Changes of a registration; ``fenced`` is 1 to fence and -1 to unfence."""

    broker_id: int
    broker_epoch: int
    fenced: int = 0
    in_controlled_shutdown: int = 0
    log_dirs: tuple[UUID, ...] = ()
    cordoned_log_dirs: tuple[UUID, ...] | None = None


@dataclass(frozen=True, slots=True)
class AccessControlEntryRecord:
    """An ACL was created."""

    id: UUID
    resource_type: int
    resource_name: str
    pattern_type: int
    principal: str
    host: str
    operation: int
    permission_type: int


@dataclass(frozen=True, slots=True)
class RemoveAccessControlEntryRecord:
    """An ACL was deleted."""

    id: UUID


@dataclass(frozen=True, slots=True)
class NoOpRecord:
    """No change; it lets the high watermark advance."""


@dataclass(frozen=True, slots=True)
class ZkMigrationStateRecord:
    """The state of a migration from ZooKeeper."""

    zk_migration_state: int


@dataclass(frozen=True, slots=True)
class RemoveUserScramCredentialRecord:
    """A user's credential was deleted."""

    name: str
    mechanism: int


@dataclass(frozen=True, slots=True)
class BeginTransactionRecord:
    """A metadata transaction begins; the records after it take effect together."""

    name: str | None = None


@dataclass(frozen=True, slots=True)
class EndTransactionRecord:
    """The metadata transaction ends, and its records take effect."""


@dataclass(frozen=True, slots=True)
class AbortTransactionRecord:
    """The metadata transaction is aborted, and its records have no effect."""

    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RemoveDelegationTokenRecord:
    """A delegation token was removed."""

    token_id: str


@dataclass(frozen=True, slots=True)
class ControllerEndpoint:
    """A listener of a controller."""

    name: str
    host: str
    port: int
    security_protocol: int


@dataclass(frozen=True, slots=True)
class ControllerFeature:
    """The levels of a feature that a controller supports."""

    name: str
    min_supported_version: int
    max_supported_version: int


@dataclass(frozen=True, slots=True)
class RegisterControllerRecord:
    """A controller has registered."""

    controller_id: int
    incarnation_id: UUID
    zk_migration_ready: bool
    end_points: tuple[ControllerEndpoint, ...]
    features: tuple[ControllerFeature, ...]


@dataclass(frozen=True, slots=True)
class ClearElrRecord:
    """The eligible leader replicas of a topic are cleared; of all topics if the name is empty."""

    topic_name: str


@dataclass(frozen=True, slots=True)
class UnregisterControllerRecord:
    """The registration of a controller is removed (KIP-1312, metadata.version 33)."""

    controller_id: int


MetadataRecord = (
    RegisterBrokerRecord
    | UnregisterBrokerRecord
    | TopicRecord
    | PartitionRecord
    | ConfigRecord
    | PartitionChangeRecord
    | FenceBrokerRecord
    | UnfenceBrokerRecord
    | RemoveTopicRecord
    | DelegationTokenRecord
    | UserScramCredentialRecord
    | FeatureLevelRecord
    | ClientQuotaRecord
    | ProducerIdsRecord
    | BrokerRegistrationChangeRecord
    | AccessControlEntryRecord
    | RemoveAccessControlEntryRecord
    | NoOpRecord
    | ZkMigrationStateRecord
    | RemoveUserScramCredentialRecord
    | BeginTransactionRecord
    | EndTransactionRecord
    | AbortTransactionRecord
    | RemoveDelegationTokenRecord
    | RegisterControllerRecord
    | ClearElrRecord
    | UnregisterControllerRecord
)
"""A record of any type."""
