"""Readiness of the broker: the response of `/readyz`, and its reasons."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from fencepost.coordinator.runtime.shard_state import LOADING_STATES, ShardState

if TYPE_CHECKING:
    from fencepost.coordinator.broker_services import Services

STARTING: Final = "starting: the logs are being opened"
SERVING: Final = "serving"
STOPPING: Final = "stopping: pending requests are answered, new connections are refused"

SHOWN: Final = 3
"""The maximum number of partitions that a reason names."""


def unready(stage: str, services: Services | None) -> str:
    """Return the reason why the broker is not ready for clients; empty if it is ready."""
    if stage != SERVING or services is None:
        return STARTING if stage == SERVING else stage
    offline = [log.name for log in services.logs if log.offline is not None]
    if offline:
        more = f" and {len(offline) - SHOWN} more" if len(offline) > SHOWN else ""
        return (
            f"off line: {', '.join(sorted(offline)[:SHOWN])}{more}; the log of the broker says why"
        )
    for coordinator in (services.groups, services.txns):
        shards = coordinator.shards
        states = Counter(shard.state for shard in shards)
        loading = sum(states[state] for state in LOADING_STATES)
        for what, count in (("loading", loading), ("failed", states[ShardState.FAILED])):
            if count:
                return f"{what}: {count} of {len(shards)} partitions of {shards[0].partition.topic}"
    return ""
