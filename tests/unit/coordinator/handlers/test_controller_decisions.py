"""The controller decides on large requests in steps, and serves other requests in between."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from fencepost.coordinator.handlers import Context, alter_client_quotas
from fencepost.coordinator.handlers.controller_decisions import (
    CHARACTERS_PER_TURN,
    ITEMS_PER_TURN,
    batches_per_turn,
)
from fencepost.coordinator.security.principal import ClientSession
from fencepost.protocol import ApiKey
from fencepost.protocol.messages import request_factory, response_factory
from tests.unit.coordinator.services.coordinators import Services

KEYS: Final = (
    "producer_byte_rate",
    "consumer_byte_rate",
    "request_percentage",
    "controller_mutation_rate",
)
NAME_CHARACTERS: Final = 30_000
ENTITIES: Final = 40


def sizes(items: list[int]) -> list[int]:
    return [len(some) for some in batches_per_turn(items, int)]


def test_large_request_is_split_at_either_limit_into_nonempty_chunks() -> None:
    assert sizes([0] * (2 * ITEMS_PER_TURN + 1)) == [ITEMS_PER_TURN, ITEMS_PER_TURN, 1]
    half = CHARACTERS_PER_TURN // 2
    assert sizes([half, half, 1, 2 * CHARACTERS_PER_TURN, 1]) == [2, 1, 1, 1]
    assert sizes([]) == []


class Asked:
    """A connection with every right."""

    client_software = None
    session = ClientSession("127.0.0.1", "PLAINTEXT")


def long_names() -> Any:
    """Return a request that sets all quotas of users with long names."""
    make: Any = request_factory(ApiKey.ALTER_CLIENT_QUOTAS, 1)
    ops = tuple(make.OpData(key=key, value=100.0, remove=False) for key in KEYS)
    names = (f"{at:05}" + "x" * (NAME_CHARACTERS - 5) for at in range(ENTITIES))
    entries = tuple(
        make.EntryData(entity=(make.EntityData(entity_type="user", entity_name=name),), ops=ops)
        for name in names
    )
    return make.AlterClientQuotasRequest(entries=entries, validate_only=False)


async def test_quota_alteration_with_long_names_is_split_at_the_character_limit(
    tmp_path: Path,
) -> None:
    services = await Services(tmp_path).start()
    nothing: Any = None  # never used
    ctx = Context(
        broker=services,
        registry=nothing,
        api_key=ApiKey.ALTER_CLIENT_QUOTAS,
        version=1,
        correlation_id=0,
        client_id=None,
        body=long_names(),
        respond=response_factory(ApiKey.ALTER_CLIENT_QUOTAS, 1),
        peer_host="127.0.0.1",
        connection=Asked(),
    )
    counts = [0]
    for awaited in alter_client_quotas.run(ctx):
        if awaited is not None:
            await awaited
        counts.append(len(services.metadata.image.quotas))
    assert counts[-1] == ENTITIES
    most = max(after - before for before, after in pairwise(counts))
    assert most * len(KEYS) * NAME_CHARACTERS <= CHARACTERS_PER_TURN
    await services.stop()
