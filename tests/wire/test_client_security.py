"""Fencepost's own clients with a broker that requires TLS and authentication."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest

from fencepost.client.client import (
    AsyncWireClient,
    AuthenticationError,
    BrokerUnreachable,
    Security,
    WireClient,
)
from tests.support.secured import LISTENERS, USERS, Secured, quoted

SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"


def settings(secured: Secured, listener: str, **more: str) -> dict[str, str]:
    protocol = LISTENERS.get(listener, "PLAINTEXT")
    found = {"security.protocol": protocol}
    if "SSL" in protocol:
        found["ssl.truststore.location"] = str(secured.authority.truststore)
    if "SASL" in protocol:
        found |= {"sasl.mechanism": "PLAIN"}
        found |= {"sasl.username": "alice", "sasl.password": USERS["alice"]}
    return {**found, **more}


def cluster_id(
    secured: Secured, listener: str, told: dict[str, str], *, timeout_ms: int = 10_000
) -> str:
    """Return the cluster id that both of Fencepost's clients get with these settings.

    Both clients must have the same result, or the same error.
    """
    address = secured.listeners.get(listener, secured.bootstrap)
    security = Security.of(told)

    async def ask() -> Any:
        async with AsyncWireClient(address, security=security, timeout_ms=timeout_ms) as client:
            found = await asyncio.gather(*(client.call("DescribeCluster") for _ in range(3)))
            return found[0].cluster_id

    def outcome(run: Any) -> Any:
        try:
            return run()
        except (AuthenticationError, BrokerUnreachable) as error:
            return type(error), re.sub(r"_ssl.c:\d+", "", str(error))

    def blocking() -> Any:
        with WireClient(address, security=security, timeout_ms=timeout_ms) as client:
            return client.call("DescribeCluster").cluster_id

    one, other = outcome(blocking), outcome(lambda: asyncio.run(ask()))
    if isinstance(one, tuple):
        assert one[0] == other[0], (one, other)
        raise one[0](f"{one[1]} // {other[1]}")
    assert one == other
    return one


@pytest.mark.parametrize(
    ("listener", "more"),
    [
        ("PLAINTEXT", {}),
        ("TLS", {}),
        ("TLS", {"ssl.enabled.protocols": "TLSv1.2"}),
        ("LOGIN", {}),
        ("SAFE", {}),
        ("SAFE", {"security.protocol": "sasl_ssl", "sasl.mechanisms": "SCRAM-SHA-256"}),
        ("SAFE", {"sasl.mechanism": "SCRAM-SHA-512"}),
        ("SAFE", {"sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "bob"}),
        (
            "SAFE",
            {
                "sasl.mechanism": "SCRAM-SHA-512",
                "sasl.jaas.config": f"{SCRAM} required username=admin"
                f" password={quoted(USERS['admin'])};",
                "sasl.username": "",
                "sasl.password": "",
            },
        ),
        (
            "SAFE",
            {
                "sasl.mechanism": "OAUTHBEARER",
                "sasl.jaas.config": f'{OAUTH} required unsecuredLoginStringClaim_sub="alice";',
            },
        ),
        (
            "LOGIN",
            {
                "sasl.mechanism": "OAUTHBEARER",
                "enable.sasl.oauthbearer.unsecure.jwt": "true",
                "sasl.oauthbearer.config": "principal=alice scope=read lifeSeconds=60",
            },
        ),
    ],
)
def test_client_with_valid_security_settings_connects(
    secured: Secured, listener: str, more: dict[str, str]
) -> None:
    told = settings(secured, listener, **more)
    if "sasl.mechanisms" in more:
        del told["sasl.mechanism"]
    if more.get("sasl.username") == "bob":
        told["sasl.password"] = USERS["bob"]
    assert cluster_id(secured, listener, told)


def test_client_certificate_is_accepted_by_a_mutual_tls_listener(secured: Secured) -> None:
    own = str(secured.authority.client("alice").file)
    told = settings(secured, "MUTUAL", **{"ssl.keystore.location": own})
    assert cluster_id(secured, "MUTUAL", told)


def slowly(*case: Any) -> Any:
    """Mark a case as slow, because its clients retry until their timeout."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("listener", "more", "words"),
    [
        ("SAFE", {"sasl.password": "wrong-hunter2"}, "'alice' cannot log in by PLAIN: "),
        (
            "SAFE",
            {"sasl.mechanism": "SCRAM-SHA-512", "sasl.password": "wrong-hunter2"},
            "'alice' cannot log in by SCRAM-SHA-512: .*is the password correct",
        ),
        (
            "SAFE",
            {"sasl.mechanism": "SCRAM-SHA-256", "sasl.username": "nobody"},
            "'nobody' cannot log in by SCRAM-SHA-256: ",
        ),
        (
            "SAFE",
            {
                "sasl.mechanism": "OAUTHBEARER",
                "sasl.jaas.config": f'{OAUTH} required unsecuredLoginStringClaim_sub="al"'
                " unsecuredLoginLifetimeSeconds=-5;",
            },
            "the token's owner cannot log in by OAUTHBEARER: .*invalid_token",
        ),
        ("TLS", {"ssl.truststore.location": ""}, "not signed by an authority"),
        slowly("TLS", {"security.protocol": "PLAINTEXT"}, "speaks TLS|the listener requires TLS"),
        slowly("SAFE", {"security.protocol": "SASL_PLAINTEXT"}, "speaks TLS|closed by broker"),
        slowly("SAFE", {"security.protocol": "SSL"}, "perhaps the listener requires a login"),
        slowly("LOGIN", {"security.protocol": "PLAINTEXT"}, "the listener requires TLS or a login"),
        slowly("LOGIN", {"security.protocol": "SASL_SSL"}, "does not use TLS"),
        slowly("PLAINTEXT", {"security.protocol": "SSL"}, "does not use TLS"),
        (
            "PLAINTEXT",
            {
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "PLAIN",
                "sasl.username": "alice",
                "sasl.password": "hunter2",
            },
            "has no SASL: set security.protocol=PLAINTEXT, not SASL_PLAINTEXT",
        ),
        ("MUTUAL", {}, "certificate"),
        (
            "BRIEF",
            {"sasl.mechanism": "SCRAM-SHA-256"},
            "SCRAM-SHA-256 is not enabled there; sasl.mechanism can be: .*SCRAM-SHA-512",
        ),
    ],
)
def test_failed_connection_names_the_security_mistake(
    secured: Secured, listener: str, more: dict[str, str], words: str
) -> None:
    with pytest.raises((AuthenticationError, BrokerUnreachable)) as refused:
        cluster_id(secured, listener, settings(secured, listener, **more), timeout_ms=600)
    for told in str(refused.value).split(" // "):
        assert re.search(words, told), told
    assert "hunter2" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_client_reauthenticates_before_its_session_expires(
    secured: Secured, mechanism: str
) -> None:
    security = Security.of(settings(secured, "BRIEF", **{"sasl.mechanism": mechanism}))

    end = time.monotonic() + 20

    def renewed(client: Any, seen: list[Any]) -> bool:
        """Return whether the only connection has authenticated again."""
        (node,) = client._router._nodes.values()
        assert time.monotonic() < end
        assert not node.channel.closed
        seen.append((node, node.login_again_at))
        assert len({node for node, _ in seen}) == 1
        return len(set(seen)) == 2

    async def run() -> None:
        seen: list[Any] = []
        async with AsyncWireClient(secured.listeners["BRIEF"], security=security) as client:
            await client.metadata()
            while not renewed(client, seen):
                await asyncio.gather(*(client.call("DescribeCluster") for _ in range(5)))

    asyncio.run(run())
    seen: list[Any] = []
    with WireClient(secured.listeners["BRIEF"], security=security) as client:
        client.metadata()
        while not renewed(client, seen):
            client.call("DescribeCluster")
