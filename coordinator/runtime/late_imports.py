"""Imports that are left for later, in steps: nobody waits for all modules of a part at once."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from importlib import import_module

# Each in an order in which every module, with what it needs, is a piece small enough for a turn.

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
    "groups.machine",
)
"""What the machine of groups is made of."""

TXN_MODULES = (
    "txn.commands",
    "txn.state",
    "txn.records",
    "txn.init_producer",
    "txn.marker_queues",
    "txn.machine",
)
"""What that of transactions is made of."""

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
    "coordinator.controller.quorum_log",
    "coordinator.controller.active",
)
"""What the active controller is made of."""

NEW_TOPIC_MODULES = (
    *CONTROLLER_MODULES,
    "coordinator.metadata.config_checks",
    "coordinator.controller.topic_decisions",
)
"""What making a topic takes."""


def load(names: Iterable[str]) -> Generator[None, None, None]:
    """Import modules of this package that are not there yet, one a step."""
    for name in names:
        module = f"fencepost.{name}"
        if module not in sys.modules:
            import_module(module)
            yield
