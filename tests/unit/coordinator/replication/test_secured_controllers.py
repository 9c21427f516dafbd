"""Brokers and their controller with TLS: certificates on both sides, or logins."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.daemon.errors import BrokerError
from tests.support.certificates import Authority, trust_settings
from tests.support.waits import until_true
from tests.unit.coordinator.daemon.test_cluster_broker import (
    controller,
    create,
    fenced,
    leads,
    member,
    of,
    run,
)
from tests.unit.coordinator.daemon.test_controller_part import combined, door
from tests.unit.coordinator.daemon.test_controller_part import fenced as seen_fenced

pytestmark = pytest.mark.slow

PLAIN = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required"
    ' username="broker" password="right" user_broker="right";'
)


def secured(protocol: str, authority: Authority, name: str) -> dict[str, str]:
    """Return settings of a node with certificates on both sides, or with a password."""
    keystore = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(authority.issue(name)),
    }
    own = {**keystore, **trust_settings(authority)}
    settings = {
        "listener.security.protocol.map": f"CONTROLLER:{protocol},PLAINTEXT:PLAINTEXT",
        **{f"listener.name.controller.{key}": value for key, value in own.items()},
    }
    if protocol == "SSL":
        return settings | {"listener.name.controller.ssl.client.auth": "required"}
    return settings | {
        "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.controller.protocol": "PLAIN",
        "listener.name.controller.plain.sasl.jaas.config": PLAIN,
    }


@pytest.mark.parametrize("protocol", ["SSL", "SASL_SSL"])
def test_broker_registers_with_controller_over_tls(tmp_path: Path, protocol: str) -> None:
    authority = Authority(tmp_path / "ca")

    async def work() -> None:
        async with (
            controller(tmp_path / "c", **secured(protocol, authority, "controller")) as decides,
            member(tmp_path, decides.address, **secured(protocol, authority, "broker")) as broker,
        ):
            await create(broker, "t", [101])
            await until_true(lambda: leads(broker, "t")() == 101, "what the controller decides")

    run(work)


def test_combined_node_and_broker_are_unfenced_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")

    async def work() -> None:
        async with (
            combined(tmp_path, **secured("SSL", authority, "one")) as broker,
            member(tmp_path, door(broker), **secured("SSL", authority, "broker")),
        ):
            assert seen_fenced(broker) == {1: False, 101: False}

    run(work)


@pytest.mark.parametrize("wrong", ["authority", "password", "protocol"])
def test_untrusted_broker_fails_with_its_cause_and_controller_keeps_running(
    tmp_path: Path, wrong: str
) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "other")
    right = secured("SASL_SSL", authority, "broker")
    told = {
        "authority": (secured("SASL_SSL", other, "broker"), "not signed by an authority"),
        "password": (
            {**right, "listener.name.controller.plain.sasl.jaas.config": PLAIN.replace("rig", "l")},
            "Authentication failed",
        ),
        "protocol": ({**right, "listener.security.protocol.map": "CONTROLLER:SASL_PLAINTEXT"}, ""),
    }
    settings, cause = told[wrong]
    settings = {**settings, "initial.broker.registration.timeout.ms": "500"}

    async def work() -> None:
        async with controller(
            tmp_path / "c", **secured("SASL_SSL", authority, "controller")
        ) as decides:
            stranger = member(tmp_path, decides.address, 102, **settings)
            with pytest.raises(BrokerError, match=f"no controller has returned.*{cause}"):
                await stranger.start()
            async with member(tmp_path, decides.address, **right):
                assert fenced(decides) == {101: False}

    run(work)


def test_missing_truststore_file_is_config_error_at_startup(tmp_path: Path) -> None:
    settings = secured("SSL", Authority(tmp_path / "ca"), "broker")
    settings["listener.name.controller.ssl.truststore.location"] = f"{tmp_path}/gone.pem"

    async def work() -> None:
        with pytest.raises(ConfigError, match=r"gone.pem: No such file"):
            await member(tmp_path, ("127.0.0.1", 1), **settings).start()

    run(work)


def test_broker_reconnects_to_controller_after_truststore_is_repaired(tmp_path: Path) -> None:
    """The broker logs why the connection fails, and reconnects after the file is repaired."""
    authority = Authority(tmp_path / "ca")
    settings = secured("SSL", authority, "broker")
    truststore = authority.truststore
    own = tmp_path / "own.pem"
    own.write_bytes(truststore.read_bytes())
    settings["listener.name.controller.ssl.truststore.location"] = str(own)

    async def work() -> None:
        there = secured("SSL", authority, "controller")
        decides = controller(tmp_path / "c", **there)
        await decides.start()
        again = controller(tmp_path / "c", decides.address[1], **there)
        try:
            async with member(tmp_path, decides.address, **settings) as broker:
                own.write_text("no certificate")
                await decides.stop()
                await again.start()
                await until_true(lambda: of(broker).membership.controller is None, "the loss")
                own.write_bytes(truststore.read_bytes())
                await until_true(lambda: fenced(again) == {101: False}, "that it is back")
                await create(broker, "t", [101])
                await until_true(lambda: leads(broker, "t")() == 101, "a new topic")
        finally:
            await again.stop()

    run(work)
