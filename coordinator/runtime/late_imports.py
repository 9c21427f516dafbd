"""Imports deferred until their first use, in steps, so that no request waits for all of them."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from importlib import import_module

# The order keeps each import short enough for one turn: earlier modules are loaded already.

GROUP_MODULES = (
    "groups.consumer_commands",
    "groups.commands",
    "groups.records",
    "groups.consumer_records",
    "groups.reconcile",
    "logcore.regex_syntax",
    "logcore.regex",
    "groups.regex",
    "groups.consumer_group",
    "groups.classic_group",
    "groups.consumer_target",
    "groups.classic_rebalance",
    "groups.conversion",
    "groups.consumer_members",
    "groups.classic",
    "groups.consumer",
    "groups.admin",
    "groups.share_commands",
    "groups.share_group",
    "groups.share_target",
    "groups.share_heartbeat",
    "groups.share_state",
    "groups.machine",
)
"""The modules of the groups' state machine."""

SHARE_STATE_MODULES = (
    "groups.share.commands",
    "groups.share.state_records",
    "groups.share.state",
)
"""The modules of the share coordinator's state machine."""

SHARE_GROUP_MODULES = (
    *SHARE_STATE_MODULES,
    "coordinator.services.share_persister",
    "coordinator.services.share_groups",
)
"""The modules with which the group coordinator sends requests to the share coordinator."""

TXN_MODULES = (
    "txn.commands",
    "txn.state",
    "txn.records",
    "txn.init_producer",
    "txn.marker_queues",
    "txn.machine",
)
"""The modules of the transactions' state machine."""

SHARE_MODULES = (
    "groups.share.partition",
    "groups.share.acquire",
    "groups.share.acknowledge",
    "groups.share.completion",
    "groups.share.session",
    "groups.share.state",
    "coordinator.services.share_persister",
    "coordinator.services.share_settings",
    "coordinator.services.dead_letters",
    "coordinator.services.served_partition",
    "coordinator.services.share_partitions",
    "coordinator.services.share_fetches",
)
"""The modules of share partitions and their fetches."""

CONTROLLER_MODULES = (
    "cluster.controller.errors",
    "cluster.controller.view",
    "cluster.controller.heartbeats",
    "cluster.controller.brokers",
    "cluster.controller.placement",
    "cluster.controller.configs",
    "cluster.controller.isr",
    "cluster.controller.elections",
    "cluster.controller.reassignments",
    "cluster.controller.topics",
    "cluster.controller.acls",
    "cluster.controller.machine",
    "coordinator.metadata.controller_settings",
    "coordinator.controller.metadata_log_reader",
    "coordinator.controller.active",
)
"""The modules of the active controller."""

NEW_TOPIC_MODULES = (
    *CONTROLLER_MODULES,
    "coordinator.metadata.config_checks",
    "coordinator.controller.topic_decisions",
)
"""The modules that the creation of a topic needs."""


def load(names: Iterable[str]) -> Generator[None, None, None]:
    """Import the modules of this package that are not loaded yet, one per step."""
    for name in names:
        module = f"fencepost.{name}"
        if module not in sys.modules:
            import_module(module)
            yield
