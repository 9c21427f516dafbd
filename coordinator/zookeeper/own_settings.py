"""Settings that a broker writes by itself, as every broker of Apache Kafka 3.9 does.

Such a controller answers nobody but whoever asks it, and clients take settings to any broker. They
are read before they are changed, and written without a look at who wrote meanwhile: the last one
wins, as there.

Source: ``ZkAdminManager.incrementalAlterConfigs``, ``KafkaZkClient.setOrCreateEntityConfigs``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import BROKER_RESOURCE, MetadataImage
from fencepost.cluster.record_codec import decode
from fencepost.cluster.records import ConfigRecord, MetadataRecord
from fencepost.coordinator.config.broker_config import BrokerConfig, is_password
from fencepost.coordinator.errors import MetadataUnavailableError
from fencepost.coordinator.metadata.changes import new_settings
from fencepost.coordinator.metadata.observed import ObservedMetadata
from fencepost.coordinator.runtime.background import spawn
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.errors import NotInZooKeeperError, ZooKeeperError
from fencepost.coordinator.zookeeper.loading import read_config
from fencepost.coordinator.zookeeper.passwords import Passwords
from fencepost.coordinator.zookeeper.session import Create, Put, Session


class OwnSettings(ObservedMetadata):
    """What is known of a cluster, in which settings can be changed; for one request."""

    def __init__(
        self,
        config: BrokerConfig,
        session: Session,
        image: MetadataImage,
        passwords: Passwords,
        *,
        node_id: int,
    ) -> None:
        super().__init__(config, node_id=node_id)
        self._session, self._passwords = session, passwords
        self._changed: dict[tuple[int, str], None] = {}
        self.image = image

    async def read(self, resources: Collection[tuple[int, str]]) -> None:
        """Know these resources' settings as they are now. Raises MetadataUnavailableError."""
        try:
            for kind, name in resources:
                if kind == BROKER_RESOURCE or name in self.image.topics:
                    values = await read_config(self._session, kind, name) or {}
                    now = self.image.configs.get((kind, name), {})
                    self._replay(new_settings(kind, name, now, values))
        except ZooKeeperError as error:
            raise MetadataUnavailableError(str(error)) from error

    def _replay(self, records: Sequence[MetadataRecord]) -> None:
        delta = MetadataDelta(self.image)
        for record in records:
            delta.replay(record)
        self.image = delta.apply(self.image.offset + len(records), self.image.epoch)

    def append(self, records: Sequence[MetadataRecord | bytes]) -> None:
        """Change settings, which :meth:`durable` writes.

        Raises MetadataUnavailableError for any other change, NotInZooKeeperError, and what
        :meth:`Passwords.encoded` does.
        """
        taken = [self._encoded(decode(one) if isinstance(one, bytes) else one) for one in records]
        resources: dict[tuple[int, str], None] = {}
        for record in taken:
            if not isinstance(record, ConfigRecord):
                raise MetadataUnavailableError("the controller is elsewhere")
            if znodes.config_path(record.resource_type, record.resource_name) is None:
                raise NotInZooKeeperError("such settings are not kept by a cluster on ZooKeeper")
            resources[record.resource_type, record.resource_name] = None
        self._replay(taken)
        self._changed |= resources

    def _encoded(self, record: MetadataRecord) -> MetadataRecord:
        """A change as it is kept."""
        if (
            not isinstance(record, ConfigRecord)
            or record.resource_type != BROKER_RESOURCE
            or record.value is None
            or not is_password(record.name)
        ):
            return record
        now = self.settings(record.resource_name).get(record.name)
        if record.value == now:  # a change of a broker says all its settings: this one is encoded
            return record
        value = self._passwords.encoded(record.resource_name, record.name, record.value)
        return replace(record, value=value)

    def plain_settings(self, name: str) -> Mapping[str, str]:
        """See :meth:`Metadata.plain_settings`."""
        return self._passwords.plain(name, self.settings(name))

    def durable(self) -> asyncio.Future[None] | None:
        """Done once ZooKeeper has all of it; it raises MetadataUnavailableError."""
        changed, self._changed = self._changed, {}
        return spawn(self._write(changed), "write settings") if changed else None

    async def _write(self, changed: Collection[tuple[int, str]]) -> None:
        try:
            for kind, name in changed:
                await self._write_one(kind, name)
        except ZooKeeperError as error:
            raise MetadataUnavailableError(str(error)) from error

    async def _write_one(self, kind: int, name: str) -> None:
        path = znodes.config_path(kind, name) or ""
        data = znodes.config_data(self.image.configs.get((kind, name), {}))
        told = Create(
            znodes.CONFIG_CHANGE_PREFIX, znodes.config_change_data(kind, name), sequence=True
        )
        await self._session.do([Put(path, data), told])


async def encode_anew(session: Session, node_id: int, passwords: Passwords) -> None:
    """Have passwords of a broker that its old secret has encoded so by its new one.

    Raises ZooKeeperError.
    """
    name = str(node_id)
    values = await read_config(session, BROKER_RESOURCE, name) or {}
    changed = passwords.encoded_anew(values)
    if changed:
        path = znodes.config_path(BROKER_RESOURCE, name) or ""
        note = znodes.config_change_data(BROKER_RESOURCE, name)
        await session.do(
            [
                Put(path, znodes.config_data({**values, **changed})),
                Create(znodes.CONFIG_CHANGE_PREFIX, note, sequence=True),
            ]
        )
