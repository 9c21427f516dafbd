"""Client quotas: the valid entities and values, and which of several quotas applies to a client.

An entity is a user, a client id, both of them, or an IP address; the default of a type applies to
every user, client id or address without a quota of its own.

Source: ``ClientQuotaControlManager``, ``ClientQuotasImage``, ``ClientQuotaManager``,
``QuotaConfig``; KIP-13, KIP-55, KIP-546, KIP-612.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Final

USER, CLIENT_ID, IP = "user", "client-id", "ip"
ENTITY_TYPES: Final = frozenset({USER, CLIENT_ID, IP})

DEFAULT: Final = None
"""Stands in place of a name for the default of an entity type."""

PRODUCE, FETCH = "producer_byte_rate", "consumer_byte_rate"
REQUEST, MUTATION = "request_percentage", "controller_mutation_rate"
CONNECTIONS: Final = "connection_creation_rate"
CLIENT_KEYS: Final = (PRODUCE, FETCH, REQUEST, MUTATION)
"""The quotas of users and clients. They limit produced bytes per second, fetched bytes per second,
the percentage of the event loop's time, and partitions created or deleted per second."""

_LONG, _INT = float(2**63 - 1), float(2**31 - 1)
WHOLE: Final = {PRODUCE: _LONG, FETCH: _LONG, CONNECTIONS: _INT}
"""The largest value of each quota that must be a whole number."""
FRACTION: Final = 1e-6
"""The largest fractional part of a quota that must be a whole number."""

Entity = frozenset[tuple[str, str | None]]
"""Pairs of a type and a name."""


def reason_against(entity: Mapping[str, str | None]) -> str | None:
    """Return why an entity is not valid; None if it is."""
    if not entity:
        return "Invalid empty client quota entity"
    for kind, name in entity.items():
        if kind not in ENTITY_TYPES:
            return f"Unhandled client quota entity type: {kind}"
        if name == "":
            return f"Empty {kind} not supported"
    if IP not in entity:
        return None
    if len(entity) > 1:
        return (
            "Invalid quota entity combination, IP entity should"
            " not be combined with User or ClientId"
        )
    address = entity[IP]
    try:
        # Host names are not valid: an entity must not depend on a name server.
        ip_address(address or "127.0.0.1")
    except ValueError:
        return f"{address} is not a valid IP."
    return None


def reason_against_value(entity: Mapping[str, str | None], key: str, value: float) -> str | None:
    """Return why an entity of these types cannot have this quota; None if it can."""
    if key not in ((CONNECTIONS,) if IP in entity else CLIENT_KEYS):
        return f"Invalid configuration key {key}"
    if not value > 0:
        return f"Quota {key} must be greater than 0"
    if not math.isfinite(value) or value > WHOLE.get(key, value):
        return f"Proposed value for {key} is too large."
    if key in WHOLE and abs(value % 1.0) > FRACTION:
        return f"{key} cannot be a fractional value."
    return None


ABSENT: Final = ""
"""Stands in a :data:`Pair` for a type that the entity does not have. Real names are never empty."""

Pair = tuple[str | None, str | None]
"""User and client id of an entity: a name, :data:`DEFAULT`, or :data:`ABSENT`."""


def pair_of(entity: Entity) -> Pair:
    """Return an entity of users and clients as a pair."""
    names = dict(entity)
    return names.get(USER, ABSENT), names.get(CLIENT_ID, ABSENT)


def entity_of(pair: Pair) -> Entity:
    """Return a pair as an entity."""
    names = zip((USER, CLIENT_ID), pair, strict=True)
    return frozenset((kind, name) for kind, name in names if name != ABSENT)


def candidates(user: str, client_id: str) -> Iterator[tuple[Pair, Pair]]:
    """Yield the entities whose quota may apply to a client, each with the clients that share it.

    The quota of the first entity that has one applies. The second pair names the clients that share
    it: with :data:`ABSENT`, all client ids of a user, or all users with a client id. Without
    :data:`ABSENT`, the quota is for this user with this client id alone, even if the quota is a
    default. A client without an id has no quota by client id, as in Kafka.
    """
    for name in (user, DEFAULT):
        if client_id:
            yield (name, client_id), (user, client_id)
            yield (name, DEFAULT), (user, client_id)
        yield (name, ABSENT), (user, ABSENT)
    if client_id:
        yield (ABSENT, client_id), (ABSENT, client_id)
        yield (ABSENT, DEFAULT), (ABSENT, client_id)
