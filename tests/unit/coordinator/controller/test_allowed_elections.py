"""A setting that allows a replica outside the ISR to lead is heard of at once, not in minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.coordinator.daemon.broker import Broker
from tests.unit.coordinator.controller.conftest import CONFIG

SETTING = {"unclean.leader.election.enable": "true"}


@pytest.mark.parametrize("of_all", [False, True])
async def test_the_machine_hears_of_settings_that_are_changed(tmp_path: Path, of_all: bool) -> None:
    listeners = {"listeners": "CONTROLLER://127.0.0.1:0"}
    async with Broker(tmp_path, config={**CONFIG, **listeners}) as decides:
        services = decides.services
        machine = services.active_controller.machine
        assert machine._unclean_ms > services.active_controller.now_ms()
        if of_all:
            services.topics.configure_brokers("", {**SETTING, "min.insync.replicas": "1"})
        else:
            services.metadata.create_topic("t", 1, {})
            services.topics.configure("t", SETTING)
        assert machine._unclean_ms <= services.active_controller.now_ms()
