"""Changes that a broker of a cluster on ZooKeeper writes itself, like Apache Kafka 3.9's brokers.

Clients send changes of settings, users, quotas and ACLs to any broker. A controller of Apache Kafka
3.9 accepts no forwarded client requests, so each broker validates a change by the controller's
rules and writes the znodes itself. The broker reads settings before it changes them, and writes
them unconditionally: the last writer wins, as in Kafka. Changes of users, quotas and ACLs are
merged into the current contents of their znode (``access.py``).

Source: ``ZkAdminManager.incrementalAlterConfigs``, ``KafkaZkClient.setOrCreateEntityConfigs``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace

from fencepost.cluster.delta import replayed
from fencepost.cluster.image import BROKER_RESOURCE, MetadataImage
from fencepost.cluster.records import ConfigRecord, MetadataRecord
from fencepost.coordinator.config.broker_config import BrokerConfig, is_password
from fencepost.coordinator.errors import MetadataUnavailableError, RequestTimedOutError
from fencepost.coordinator.metadata.kraft_metadata_cache import KRaftMetadataCache
from fencepost.coordinator.runtime.background import spawn
from fencepost.coordinator.zookeeper import access_znodes
from fencepost.coordinator.zookeeper.access import (
    GIVE_UP_MS,
    SecurityZnodes,
    change_of,
    reason_against,
)
from fencepost.coordinator.zookeeper.access_znodes import SecurityChange
from fencepost.coordinator.zookeeper.errors import ZooKeeperError
from fencepost.coordinator.zookeeper.loading import config_records, read_config
from fencepost.coordinator.zookeeper.passwords import Passwords
from fencepost.coordinator.zookeeper.session import ZkSession
from fencepost.coordinator.zookeeper.writes import (
    check_storable,
    config_change_notification,
    put_settings,
)


class ZooKeeperMetadata(KRaftMetadataCache):
    """The metadata that a broker received; the passwords of brokers in it are encoded."""

    def __init__(self, config: BrokerConfig, passwords: Passwords, *, node_id: int) -> None:
        super().__init__(config, node_id=node_id)
        self._passwords = passwords

    def with_plain_passwords(self, name: str, settings: Mapping[str, str]) -> Mapping[str, str]:
        """See :meth:`Metadata.with_plain_passwords`."""
        return self._passwords.plain(name, settings)


class BrokerStore(ZooKeeperMetadata):
    """The image that a broker received, and the changes of one request on top of it."""

    def __init__(
        self,
        config: BrokerConfig,
        session: ZkSession,
        image: MetadataImage,
        passwords: Passwords,
        access: SecurityZnodes,
        *,
        node_id: int,
    ) -> None:
        super().__init__(config, passwords, node_id=node_id)
        self._session, self._access = session, access
        self._settings: dict[tuple[int, str], None] = {}
        """Resources whose settings are not written yet."""
        self._changes: dict[str, list[SecurityChange]] = {}
        """Changes of users, quotas and ACLs that are not written yet, by path."""
        self.image = image

    @property
    def epoch(self) -> int:
        """The epoch of the latest controller known to the broker."""
        return self.image.epoch

    @property
    def next_offset(self) -> int:
        """The number of the next change, since this store has no log offsets."""
        return self.image.offset + 1

    def unforced(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because appends never wait (see :meth:`durable`)."""
        return nullcontext()

    async def read(self, resources: Collection[tuple[int, str]]) -> None:
        """Read the current settings of these resources.

        Raises MetadataUnavailableError, RequestTimedOutError.
        """
        async with _in_time("ZooKeeper has not returned the settings in time."):
            for kind, name in resources:
                if kind == BROKER_RESOURCE or name in self.image.topics:
                    values = await read_config(self._session, kind, name) or {}
                    now = self.image.configs.get((kind, name), {})
                    self._replay(config_records(kind, name, now, values))

    def _replay(self, records: Sequence[MetadataRecord]) -> None:
        self.image = replayed(
            self.image, records, self.image.offset + len(records), self.image.epoch
        )

    def append(self, records: Sequence[MetadataRecord]) -> None:
        """Apply a change to the image; :meth:`durable` writes it.

        Raises MetadataUnavailableError for a change that only the controller makes,
        NotInZooKeeperError, and the errors of :meth:`Passwords.encoded`. After an error the image
        is unchanged.
        """
        taken = [self._encoded(record) for record in records]
        settings: dict[tuple[int, str], None] = {}
        changes: list[SecurityChange] = []
        for record in taken:
            if isinstance(record, ConfigRecord):
                check_storable([record])
                settings[record.resource_type, record.resource_name] = None
            else:
                changes.append(change_of(self.image, record))
        self._replay(taken)
        self._settings |= settings
        for change in changes:
            self._changes.setdefault(access_znodes.path_of(change.record), []).append(change)

    def _encoded(self, record: MetadataRecord) -> MetadataRecord:
        """Return a change as it is stored in its znode, where passwords are encoded."""
        if (
            not isinstance(record, ConfigRecord)
            or record.resource_type != BROKER_RESOURCE
            or record.value is None
            or not is_password(record.name)
        ):
            return record
        now = self.settings(record.resource_name).get(record.name)
        if record.value == now:  # the setting is unchanged, and already encoded
            return record
        value = self._passwords.encoded(record.resource_name, record.name, record.value)
        return replace(record, value=value)

    def reason_against(self, record: MetadataRecord) -> str | None:
        """See :meth:`Metadata.reason_against`."""
        return reason_against(record)

    def durable(self) -> asyncio.Future[None] | None:
        """Write the changes since the last call; the future is done once ZooKeeper has them.

        A handler may call it for each item of a request, so that each item has its own result. The
        future raises MetadataUnavailableError, RequestTimedOutError, or the errors of
        :meth:`SecurityZnodes.change`.
        """
        settings, self._settings = self._settings, {}
        changes, self._changes = self._changes, {}
        if not settings:
            return self._access.change(changes) if changes else None
        return spawn(self._write(settings, changes), "write settings")

    async def _write(
        self, settings: Collection[tuple[int, str]], changes: Mapping[str, Sequence[SecurityChange]]
    ) -> None:
        async with _in_time("ZooKeeper has not taken the settings in time."):
            for kind, name in settings:
                await self._write_settings(kind, name)
        if changes:
            await self._access.change(changes)

    async def _write_settings(self, kind: int, name: str) -> None:
        values = self.image.configs.get((kind, name), {})
        await self._session.do(
            [put_settings(kind, name, values), config_change_notification(kind, name)]
        )


@asynccontextmanager
async def _in_time(late: str) -> AsyncIterator[None]:
    """Run the block for at most GIVE_UP_MS, so that a lost connection does not hold up a request.

    Raises RequestTimedOutError(``late``) after that time, and MetadataUnavailableError for a
    ZooKeeperError.
    """
    try:
        async with asyncio.timeout(GIVE_UP_MS / 1000):
            yield
    except TimeoutError:
        raise RequestTimedOutError(late) from None
    except ZooKeeperError as error:
        raise MetadataUnavailableError(str(error)) from error


async def reencode(session: ZkSession, node_id: int, passwords: Passwords) -> None:
    """Decode a broker's passwords with its old secret, and encode them with the new one.

    Raises ZooKeeperError.
    """
    name = str(node_id)
    values = await read_config(session, BROKER_RESOURCE, name) or {}
    changed = passwords.reencoded(values)
    if changed:
        put = put_settings(BROKER_RESOURCE, name, {**values, **changed})
        await session.do([put, config_change_notification(BROKER_RESOURCE, name)])
