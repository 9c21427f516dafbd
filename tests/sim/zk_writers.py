"""Writes by old tools and other brokers to ZooKeeper, and clients' requests for such changes.

Tools write the znode first and its change notification later, if it needs one. Some of their data
is unreadable, or concerns topics that do not exist.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fencepost.cluster.image import TOPIC_RESOURCE
from fencepost.coordinator.runtime import background
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.access_znodes import notification_of
from fencepost.coordinator.zookeeper.node import ZooKeeperNode
from fencepost.logcore.machine import DomainError
from tests.sim.daemon import Daemon
from tests.sim.daemon_faults import TOPIC
from tests.sim.zk_access import RULES, Asked, held, written
from tests.sim.zk_outages import Outages
from tests.sim.zk_server import Op

OLDER: Final = "older"
"""A topic that tools create and delete."""

NOWHERE: Final = "nowhere"
"""A topic that never exists."""

UNREADABLE: Final = b'{"version": 1, "partitions": [{"topic'


def _credential(salt: str) -> str:
    parts = [base64.b64encode((salt * count).encode()).decode() for count in (8, 32, 32)]
    return "salt={},stored_key={},server_key={},iterations=4096".format(*parts)


def _rule(user: str, permission: str, operation: str) -> str:
    rule = {"principal": f"User:{user}", "permissionType": permission}
    return json.dumps(rule | {"operation": operation, "host": "*"}, sort_keys=True)


_SECRETS: Final = tuple(map(_credential, "abc"))
_RULES: Final = tuple(
    (_rule(user, permission, "Read"), ("",))
    for user in ("alice", "bob")
    for permission in ("Allow", "Deny")
)

SETTINGS: Final[Mapping[str, Sequence[tuple[str, Sequence[str]]]]] = {
    "/config/users/alice": (
        ("SCRAM-SHA-256", _SECRETS),
        ("producer_byte_rate", ("1024", "2048")),
    ),
    "/config/users/bob": (("SCRAM-SHA-256", _SECRETS),),
    "/config/users/<default>": (("consumer_byte_rate", ("50000", "90000")),),
    "/config/users/alice/clients/app": (("request_percentage", ("50.0", "75.0")),),
    "/config/users/alice/clients/<default>": (("request_percentage", ("5.0", "7.5")),),
    "/config/clients/app": (("producer_byte_rate", ("512", "4096")),),
    "/config/ips/10.0.0.1": (("connection_creation_rate", ("10", "20")),),
    "/kafka-acl/Topic/orders": _RULES,
    "/kafka-acl/DelegationToken/*": _RULES,
    "/kafka-acl-extended/prefixed/Topic/ord": _RULES,
}
"""Entry names and their possible values, by znode."""

SOON: Final = 0.3
"""The probability that another client changes the same znode at about the same time."""

_STRANGE: Final = {"of.a.later.release": "1"}
_STRANGE_RULE: Final = {_rule("carol", "Allow", "Fly"): "", _rule("carol", "Deny", "Fly"): ""}


class Writers(Outages):
    """Runs the enabled faults and tool actions at random times, one after another."""

    def _later(self, *ops: Op) -> None:
        self.scheduler.after(self.draw.choice((0, 1, 30, 300, 1_000)), self._write, *ops)

    def _soon(self, action: Callable[..., None], *given: Any) -> None:
        """Schedule an action for a time at which a broker may be changing the same znode."""
        self.scheduler.after(self.draw.choice((2, 5, 10, 20, 40, 80)), action, *given)

    def _data(self, path: str) -> bytes | None:
        node = self.ensemble.tree.nodes.get(path)
        return None if node is None else node.data

    def _put(self, path: str, data: bytes) -> bool:
        """Set or create a znode, with its parents, as ``KafkaZkClient.setOrCreate`` does."""
        if self._data(path) is not None:
            return self._write(Op("set", path, data))
        return self._write(Op("ensure", path.rpartition("/")[0]), Op("create", path, data))

    @property
    def _ids(self) -> list[int]:
        return [broker.node_id for broker in self.history.brokers]

    # --- requests to the controller ---

    def _some_partition(self) -> tuple[str, int]:
        topics = self.truth.image.topics
        name = self.draw.choice((TOPIC, TOPIC, OLDER, NOWHERE))
        count = len(topics[name].partitions) if name in topics else 1
        return name, self.draw.randrange(count + (self.draw.random() < 0.1))

    def admin_reassign(self) -> None:
        """Run ``kafka-reassign-partitions --zookeeper``, or add to an ongoing reassignment."""
        ids = self._ids
        path, targets = znodes.REASSIGN_PARTITIONS, dict[tuple[str, int], tuple[int, ...]]()
        there = self._data(path)
        if there is not None and there != UNREADABLE:
            targets |= znodes.reassignments_of(there)
        for _ in range(self.draw.choice((1, 1, 2))):
            count = min(self.options.factor, len(ids))
            targets[self._some_partition()] = tuple(self.draw.sample(ids, count))
        is_broken = self.draw.random() < 0.1
        data = UNREADABLE if is_broken else znodes.reassignments_data(targets)
        self._put(path, data)
        if self.draw.random() < SOON:
            self._soon(self.admin_reassign)

    def admin_elect(self) -> None:
        """Run ``kafka-preferred-replica-election``, unless an election is pending."""
        if self._data(znodes.PREFERRED_ELECTION) is None:
            rows = [
                {"topic": name, "partition": index}
                for name, index in {self._some_partition(): None for _ in range(3)}
            ]
            data = json.dumps({"version": 1, "partitions": rows}).encode()
            is_broken = self.draw.random() < 0.1
            self._put(znodes.PREFERRED_ELECTION, UNREADABLE if is_broken else data)

    def admin_delete(self) -> None:
        """Run ``kafka-topics --delete --zookeeper``, sometimes for a topic that does not exist."""
        self._write(Op("create", znodes.delete_path(self.draw.choice((OLDER, NOWHERE)))))

    def admin_create(self) -> None:
        """Run ``kafka-topics --create --zookeeper`` of a release without topic ids."""
        ids, options = self._ids, self.options
        parts = {
            str(index): self.draw.sample(ids, options.factor)
            for index in range(self.draw.choice((1, 2)))
        }
        data = json.dumps({"version": 1, "partitions": parts}).encode()
        settings = znodes.config_path(TOPIC_RESOURCE, OLDER) or ""
        if self._data(znodes.topic_path(OLDER)) is None and self._data(settings) is None:
            self._write(Op("create", settings, znodes.config_data({"retention.ms": "5"})))
            self._later(Op("create", znodes.topic_path(OLDER), data))

    # --- settings ---

    def tool_settings(self) -> None:
        """Run ``kafka-configs --zookeeper`` for a topic, a broker or all brokers."""
        brokers = (*map(str, self._ids), znodes.DEFAULT_ENTITY)
        folder, names = self.draw.choice((("topics", (TOPIC,)), ("brokers", brokers)))
        name = self.draw.choice(names)
        path = f"{znodes.CONFIGS}/{folder}/{name}"
        before = self._data(path)
        if folder == "topics" and (
            before is None or self._data(znodes.delete_path(TOPIC)) is not None
        ):
            return
        values = znodes.config_of(path, before) if before else {}
        key = self.draw.choice(("retention.ms", "segment.ms"))
        key = key if folder == "topics" else f"log.{key}"
        if values.pop(key, None) is None or self.draw.random() < 0.7:
            values[key] = str(self.draw.randint(1, 1_000_000))
        if self._put(path, znodes.config_data(values)):
            note: dict[str, Any] = {"version": 2, "entity_path": f"{folder}/{name}"}
            if self.draw.random() < 0.5:
                note = {"version": 1, "entity_type": folder, "entity_name": name}
            data = json.dumps(note).encode()
            self._later(Op("create", znodes.CONFIG_CHANGE_PREFIX, data, sequence=True))

    # --- users, quotas, ACLs ---

    def tool_access(self) -> None:
        """Change users, quotas or ACLs, as ``--zookeeper`` tools or another broker do."""
        self._change_access(self.draw.choice([*SETTINGS]))

    def _change_access(self, path: str) -> None:
        before = self._data(path)
        items = held(path, before)
        items.pop("", None)
        key, values = self.draw.choice(SETTINGS[path])
        if items.pop(key, None) is None or self.draw.random() < 0.5:
            items[key] = self.draw.choice(values)
        if self.draw.random() < 0.1:
            items |= _STRANGE_RULE if path.startswith(RULES) else _STRANGE
        data = UNREADABLE if self.draw.random() < 0.05 else written(path, items)
        if not items and path.startswith(RULES) and before is not None:
            done = self._write(Op("delete", path))
        else:
            done = self._put(path, data)
        if done:
            where, note = notification_of(path)
            self._later(Op("create", where, note, sequence=True))

    def broker_access(self) -> None:
        """Ask a random broker to change users, quotas or ACLs."""
        broker = self._broker()
        count = self.draw.choice((1, 1, 3))
        for path in self.draw.sample([*SETTINGS], count):
            key, values = self.draw.choice(SETTINGS[path])
            is_removed = self.draw.random() < 0.4
            value = self.draw.choice(values)
            self._ask_broker(broker, path, key, value, is_removed=is_removed)
            if self.draw.random() < SOON:
                self._soon(self._change_access, path)

    def change_by_broker(self, path: str, key: str, value: str) -> None:
        """Ask the first broker to change users, quotas or ACLs."""
        self._ask_broker(self.history.brokers[0], path, key, value, is_removed=False)

    def _ask_broker(
        self, broker: Daemon, path: str, key: str, value: str, *, is_removed: bool
    ) -> None:
        if broker.services is None or broker.loop is None:
            return
        node = broker.services.on_zookeeper
        if node.broker_epoch < 0:
            return
        asked = self.truth.access.asks(broker.node.name, path, key, value, is_removed=is_removed)
        with broker.loop.running():
            background.spawn(self._change(broker, node, asked), "change users, quotas and rules")

    async def _change(self, broker: Daemon, node: ZooKeeperNode, asked: Asked) -> None:
        """Make a change as the handlers do, which first read the changes made by other clients."""
        await node.catch_up()
        try:
            await node.access.change({asked.item.path: [asked.change]})
        except DomainError as error:
            broker.node.say(f"refuses a change of {asked.item.path}: {type(error).__name__}")
        else:
            broker.node.say(f"has changed {asked.item.path}")
            self.truth.access.acknowledged(asked, broker.services.metadata.image)
