"""Enabling unclean leader election takes effect at once, not at the next periodic check."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from fencepost.cluster.image import BROKER_RESOURCE, TOPIC_RESOURCE
from fencepost.cluster.records import TopicRecord
from fencepost.coordinator.daemon.broker import Broker
from tests.support.metadata_changes import anything
from tests.unit.coordinator.controller.conftest import CONFIG

SETTING = {"unclean.leader.election.enable": "true"}


@pytest.mark.parametrize("of_all", [False, True])
async def test_enabling_unclean_leader_election_schedules_an_election_at_once(
    tmp_path: Path, of_all: bool
) -> None:
    listeners = {"listeners": "CONTROLLER://127.0.0.1:0"}
    async with Broker(tmp_path, config={**CONFIG, **listeners}) as decides:
        services = decides.services
        machine = services.active_controller.machine
        assert machine._unclean_ms > services.active_controller.now_ms()
        services.storage.metadata_log.append([TopicRecord("t", UUID(int=1))])
        resource = (BROKER_RESOURCE, "") if of_all else (TOPIC_RESOURCE, "t")
        configs = {**SETTING, "min.insync.replicas": "1"}
        services.active_controller.decide(
            lambda controller: controller.legacy_alter_configs(
                resource, configs, check_configs=anything
            )
        )
        assert machine._unclean_ms <= services.active_controller.now_ms()
