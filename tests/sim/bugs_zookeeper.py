"""Planted bugs in the code that only a cluster on ZooKeeper runs."""

from __future__ import annotations

from typing import Final

from fencepost.cluster import image
from fencepost.cluster.controller import brokers
from fencepost.cluster.controller.partition_change import PartitionChangeBuilder
from fencepost.coordinator.handlers import answers
from fencepost.coordinator.runtime.flusher import Flusher
from fencepost.coordinator.zookeeper import loading, writes, znodes
from fencepost.coordinator.zookeeper.access import SecurityZnodes, _MultiWrite
from fencepost.coordinator.zookeeper.admin_nodes import AdminNodes
from fencepost.coordinator.zookeeper.channels import _BrokerChannel
from fencepost.coordinator.zookeeper.node import ZooKeeperNode
from fencepost.coordinator.zookeeper.requests import ControllerRequestApplier
from fencepost.coordinator.zookeeper.store import ZkMetadataStore
from fencepost.coordinator.zookeeper.zk_controller import ZkController
from fencepost.logcore.recovery import _Loader
from tests.sim.bug import Bug

ZOOKEEPER: Final = (
    # --- sessions and elections ---
    Bug(
        "a controller writes without checking its epoch",
        ((writes.fenced, "Check(znodes.CONTROLLER_EPOCH, epoch_version),", ""),),
    ),
    Bug(
        "an elected controller does not check the version of the controller epoch",
        (
            (
                ZooKeeperNode._elect,
                "Set(znodes.CONTROLLER_EPOCH, str(epoch).encode(), epoch_znode.version)",
                "Set(znodes.CONTROLLER_EPOCH, str(epoch).encode())",
            ),
        ),
    ),
    Bug(
        "a broker keeps its registration after its session has expired",
        (
            (ZooKeeperNode._changed, "self._registration.lose()", "pass"),
            (
                ZooKeeperNode._register,
                "self._registration.is_of_this_session",
                "self._registration.epoch >= 0",
            ),
        ),
    ),
    Bug(
        "a controller that has resigned keeps its znode",
        ((ZooKeeperNode._process_controller_change, "is_own and self.elected is None", "False"),),
    ),
    Bug(
        "a controller stays active without a connection",
        ((ZooKeeperNode._changed, 'self._resign(f"the session is {state.value}")', "pass"),),
    ),
    Bug(
        "a deposed controller stays active",
        (
            (ZooKeeperNode._changed, 'self._resign(f"the session is {state.value}")', "pass"),
            (
                ZooKeeperNode._process_controller_change,
                'self._resign("another controller was elected")',
                "pass",
            ),
            (ZkMetadataStore._write_all, "self._on_refused()", "pass"),
        ),
    ),
    Bug(
        "brokers do not watch the controller znode",
        (
            (
                ZooKeeperNode._process_controller_change,
                "self._session.get(znodes.CONTROLLER, changed)",
                "self._session.get(znodes.CONTROLLER)",
            ),
        ),
    ),
    Bug(
        "a controller stays active after a failed write",
        ((ZkMetadataStore._write_all, "self._on_refused()", "pass"),),
    ),
    # --- brokers ---
    Bug(
        "the controller does not watch the broker znodes",
        (
            (
                ZkController._process_broker_change,
                "read_brokers(self._session, lambda path: self._watches.once(path, changed))",
                "read_brokers(self._session)",
            ),
        ),
    ),
    Bug(
        "the controller ignores that a broker has a new session",
        (
            (
                brokers.register_discovered,
                "registered.epoch != record.broker_epoch and not registered.fenced",
                "False",
            ),
            (
                brokers.register_discovered,
                "registered is None or registered.epoch != record.broker_epoch",
                "registered is None",
            ),
        ),
    ),
    Bug(
        "a broker that failed before the election stays in ISRs",
        (
            (
                ZkController._process_broker_change,
                "(alive(self.store.image).keys() - live.keys()) | self._in_sync()",
                "alive(self.store.image).keys() - live.keys()",
            ),
        ),
    ),
    Bug(
        "a new controller does not send its metadata",
        ((ZkController._send_everything, "await self._send_changes(before, after)", "pass"),),
    ),
    Bug(
        "the controller sends changes before they are written to ZooKeeper",
        (
            (
                ZkMetadataStore._queue_decision,
                "self._changes.append(",
                "self._on_written(self.image, after); self._changes.append(",
            ),
            (ZkMetadataStore._write, "self._on_written(change.before, change.after)", "pass"),
        ),
    ),
    Bug(
        "the controller does not retry a request that got no response",
        (
            (
                _BrokerChannel._run,
                "await asyncio.sleep(RETRY_MS / 1000)",
                "self._queue.popleft(); await asyncio.sleep(RETRY_MS / 1000)",
            ),
        ),
    ),
    Bug(
        "a broker accepts a request of an earlier controller epoch",
        (
            (
                ControllerRequestApplier.refuses,
                "body.controller_epoch < self.controller_epoch",
                "False",
            ),
        ),
    ),
    Bug(
        "a broker accepts an older partition state",
        (
            (
                ControllerRequestApplier.update_metadata,
                "old is None or _epochs(now) > _epochs(old)",
                "True",
            ),
        ),
    ),
    Bug(
        "a broker refuses a request because ZooKeeper does not answer",
        ((ZooKeeperNode._new_topics_of, "await asyncio.sleep(RETRY_MS / 1000)", "raise"),),
    ),
    Bug(
        "a controller that has resigned keeps its timers",
        ((ZkController.resign, "self.active.stop_timers()", "pass"),),
    ),
    # --- partitions ---
    Bug(
        "the controller does not check the version of a partition state",
        (
            (
                writes.ZnodeWriter._change,
                "Set(path, self._state(now), was.partition_epoch)",
                "Set(path, self._state(now))",
            ),
        ),
    ),
    Bug(
        "the controller deletes ISR notifications without reading the ISRs",
        (
            (
                ZkController._process_isr_change_notifications,
                "await self._reread(topic, index)",
                "pass",
            ),
        ),
    ),
    Bug(
        "a topic znode lacks the adding replicas",
        (
            (
                writes.assignment_of,
                "of({index: part.adding_replicas for index, part in parts.items()})",
                "{}",
            ),
        ),
    ),
    Bug(
        "the controller answers AlterPartition before the write",
        (
            (
                answers.forced,
                "None if ctx.store is None else ctx.store.durable()",
                "None if ctx.store is None or ctx.store.durable() else None",
            ),
        ),
    ),
    Bug(
        "a broker that becomes a replica during its start does not follow",
        (
            (
                image.local_changes,
                "partition epoch.\n                and broker_id in was.replicas",
                "",
            ),
        ),
    ),
    Bug(
        "a killed broker truncates batches of an epoch that is in no checkpoint",
        ((_Loader.load, "and self._options.leader_epoch > NO_EPOCH", ""),),
    ),
    # --- deletion ---
    Bug(
        "a new controller does not continue deletions",
        ((ZkController._being_deleted, "if node is not None:", "if False:"),),
    ),
    Bug(
        "a returning broker keeps the replicas of a topic under deletion",
        (
            (
                ZkController._send_changes,
                "waiting & came if name not in before.topics else ()",
                "()",
            ),
        ),
    ),
    Bug(
        "the controller does not send pending deletions to a returning broker",
        ((ZkController._send_changes, "(self._gone | self._parts).items()", "()"),),
    ),
    Bug(
        "the controller does not send completed deletions to a returning broker",
        (
            (
                ZkController._send_changes,
                "(self._gone | self._parts).items()",
                "self._parts.items()",
            ),
        ),
    ),
    Bug(
        "a returning broker does not look for deleted topics",
        ((ZooKeeperNode._register, "self._mark(_TOPICS)", "pass"),),
    ),
    Bug(
        "a broker does not look for deleted topics after a failover",
        ((ControllerRequestApplier.refuses, "self._on_failover()", "pass"),),
    ),
    Bug(
        "the settings of a deleted topic stay in ZooKeeper",
        ((ZkController._finish_deletions, 'settings or ""', '""'),),
    ),
    Bug(
        "the controller does not watch deletion marks",
        (
            (
                ZkController._process_topic_deletion,
                "self._session.children(znodes.DELETE_TOPICS, self._marks(_DELETIONS))",
                "self._session.children(znodes.DELETE_TOPICS)",
            ),
        ),
    ),
    Bug(
        "a broker reads the settings of a new topic from a lagging server",
        ((loading.read_new_topics, "await session.sync()", "pass"),),
    ),
    Bug(
        "a broker knows only those partitions of a new topic that a request names",
        ((loading.read_new_topics, "_partition_count(name, node.data)", "0"),),
    ),
    Bug(
        "brokers do not watch the settings",
        (
            (
                ZooKeeperNode._process_config_changes,
                "partial(self._mark, _SETTINGS)",
                "",
            ),
        ),
    ),
    # --- requests of tools ---
    Bug(
        "the controller does not watch for reassignments that tools request",
        (
            (
                AdminNodes.process_partition_reassignment,
                "self._session.get(path, self._watches.once(path, self._reassigned))",
                "self._session.get(path)",
            ),
        ),
    ),
    Bug(
        "a completed reassignment that a tool requested stays in ZooKeeper",
        ((AdminNodes.is_concerned, "not _is_under_way(", "_is_under_way("),),
    ),
    Bug(
        "the controller deletes a reassignment that a tool has just changed",
        (
            (
                AdminNodes.process_partition_reassignment,
                "Delete(path, node.version)",
                "Delete(path)",
            ),
        ),
    ),
    Bug(
        "the controller does not watch for elections that tools request",
        (
            (
                AdminNodes.process_preferred_replica_election,
                "self._session.get(path, self._watches.once(path, self._elected))",
                "self._session.get(path)",
            ),
        ),
    ),
    Bug(
        "a new controller creates a partition's state without a leader",
        (
            (
                PartitionChangeBuilder.build,
                "is_first = state.partition_epoch == NEVER_LED",
                "is_first = False",
            ),
        ),
    ),
    Bug(
        "the controller gives no id to a topic that a tool created",
        ((ZkController._adopt, "node = replace(node, topic_id=topic_id)", "return"),),
    ),
    # --- users, quotas, ACLs ---
    Bug(
        "a broker does not check the version of a user's znode",
        (
            (
                _MultiWrite.change,
                "self._writes.append(Set(path, data, node.version))",
                "self._writes.append(Set(path, data))",
            ),
        ),
    ),
    Bug(
        "a change of a user creates no notification",
        (
            (
                _MultiWrite.change,
                "self._notifications.append(Create(folder, note, sequence=True))",
                "pass",
            ),
        ),
    ),
    Bug(
        "a broker does not apply its own change of a user",
        ((SecurityZnodes._write, "await self.reread(read_back)", "pass"),),
    ),
    Bug(
        "brokers do not watch the notifications of ACLs",
        ((SecurityZnodes.process_acl_changes, "await notes.new(changed)", "await notes.new()"),),
    ),
    Bug(
        "a broker keeps entries that a znode no longer has",
        (
            (
                SecurityZnodes._differences,
                "diffs.append(_RecordDiff(path, key, None,",
                "list(diffs).append(_RecordDiff(path, key, None,",
            ),
        ),
    ),
    # --- others ---
    Bug(
        "a new controller allocates the last block of producer ids again",
        (
            (
                znodes.next_producer_id_of,
                '["block_end"]) + 1',
                '["block_start"])',
            ),
        ),
    ),
    Bug(
        "a broker on ZooKeeper serves requests that were sent to its former process",
        tuple(
            (serve, "await self._registration.made.wait()", "pass")
            for serve in (
                ZooKeeperNode.leader_and_isr,
                ZooKeeperNode.update_metadata,
                ZooKeeperNode.stop_replica,
            )
        ),
    ),
    Bug(
        "a leader on ZooKeeper that restarted unnoticed keeps its leader epoch",
        ((ZkController._send_everything, "batched(self._loaded.restarted)", "()"),),
    ),
    Bug(
        "a broker on ZooKeeper acknowledges a batch before it is flushed",
        ((Flusher.after, "if not held:", "if held or not held:"),),
    ),
)
