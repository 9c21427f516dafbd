"""Validation of certificates in a cluster with ZooKeeper, where passwords are encoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import BROKER_RESOURCE, MetadataImage
from fencepost.cluster.records import ConfigRecord
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.controller.active import ActiveController
from fencepost.coordinator.controller.services import ControllerServices
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.handlers.certificate_check import check_certificates
from fencepost.coordinator.metadata.controller_settings import controller_settings
from fencepost.coordinator.zookeeper.broker_store import ZooKeeperMetadata
from fencepost.coordinator.zookeeper.connection import ZooKeeperConfig
from fencepost.coordinator.zookeeper.loading import ZkImage
from fencepost.coordinator.zookeeper.passwords import Passwords
from fencepost.coordinator.zookeeper.session import ZkSession
from fencepost.coordinator.zookeeper.store import ZkMetadataStore
from fencepost.protocol import ApiKey
from fencepost.protocol.messages import request_factory
from tests.unit.coordinator.services.coordinators import Services

SETTINGS: Final = {"zookeeper.connect": "nowhere:1", "password.encoder.secret": "the secret"}
LOCATION: Final = "listener.name.safe.ssl.keystore.location"
PASSWORD: Final = "listener.name.safe.ssl.key.password"


class Elected:
    """Broker 1 as the active controller, with a password in the settings of two brokers."""

    def __init__(self, directory: Path) -> None:
        self.services = Services(directory, SETTINGS)
        config = self.services.config
        passwords = Passwords(config, node_id=1)
        self.services.metadata = ZooKeeperMetadata(config, passwords, node_id=1)
        delta = MetadataDelta(MetadataImage())
        encoded = passwords.encoded("1", PASSWORD, "password")
        delta.replay(ConfigRecord(BROKER_RESOURCE, "1", PASSWORD, encoded))
        delta.replay(ConfigRecord(BROKER_RESOURCE, "1", "confluent.unknown", "1"))
        self.store = ZkMetadataStore(
            config,
            ZkSession(ZooKeeperConfig.of(config), lambda _state: None),
            ZkImage(delta.apply(0, 1), (), {}),
            node_id=1,
            epoch=1,
            epoch_version=1,
            on_written=lambda _before, _after: None,
            on_refused=lambda: None,
        )
        self.looked_at: list[BrokerConfig] = []
        self.services.check_certificates = self._look

    def _look(self, config: BrokerConfig) -> asyncio.Future[ConfigError | None]:
        self.looked_at.append(config)
        found: asyncio.Future[ConfigError | None] = asyncio.get_running_loop().create_future()
        found.set_result(None)
        return found

    def check(self, broker: str, **changes: str) -> None:
        """Validate a change of a broker's settings, requested by IncrementalAlterConfigs."""
        entries = [
            {"name": name, "config_operation": 0, "value": value} for name, value in changes.items()
        ]
        make: Any = request_factory(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1)
        resource = make.AlterConfigsResource(
            resource_type=BROKER_RESOURCE,
            resource_name=broker,
            configs=tuple(make.AlterableConfig(**entry) for entry in entries),
        )
        settings = controller_settings(self.services.config, node_id=1)
        active = ActiveController(
            self.store, settings, self.services.clock, None, lambda *_: None, own_broker=False
        )
        nothing: Any = None  # never used
        ctx = Context(
            broker=self.services,
            registry=nothing,
            api_key=ApiKey.INCREMENTAL_ALTER_CONFIGS,
            version=1,
            correlation_id=0,
            client_id=None,
            body=nothing,
            respond=nothing,
            peer_host="127.0.0.1",
            connection=nothing,
            zookeeper_controller=ControllerServices(active, self.store, is_elected=True),
        )
        for awaited in check_certificates(ctx, resource):
            assert awaited is not None
            assert awaited.done()

    async def stop(self) -> None:
        self.store.close()
        await self.services.stop()


@pytest.fixture
async def elected(tmp_path: Path) -> AsyncIterator[Elected]:
    broker = Elected(tmp_path)
    await broker.services.start()
    yield broker
    await broker.stop()


async def test_controller_checks_its_own_certificate_with_the_decoded_password(
    elected: Elected,
) -> None:
    elected.check("1", **{LOCATION: "/here.pem"})
    (config,) = elected.looked_at
    assert config.on_listener("SAFE", "ssl.keystore.location") == "/here.pem"
    assert config.on_listener("SAFE", "ssl.key.password") == "password"


async def test_controller_does_not_check_the_certificate_of_another_broker(
    elected: Elected,
) -> None:
    elected.check("2", **{LOCATION: "/on/its/host.pem"})
    assert elected.looked_at == []
