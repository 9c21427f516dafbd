"""Planted bugs in the code that only a cluster on ZooKeeper runs."""

from __future__ import annotations

from typing import Final

from fencepost.cluster import image
from fencepost.cluster.controller import brokers
from fencepost.coordinator.handlers import answers
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
        "a controller writes without a look at its epoch",
        ((writes.fenced, "Check(znodes.CONTROLLER_EPOCH, epoch_version),", ""),),
    ),
    Bug(
        "whoever is elected takes the epoch for what he has read",
        (
            (
                ZooKeeperNode._elect,
                "Set(znodes.CONTROLLER_EPOCH, str(epoch).encode(), known.version)",
                "Set(znodes.CONTROLLER_EPOCH, str(epoch).encode())",
            ),
        ),
    ),
    Bug(
        "a registration outlives its session",
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
        "who has resigned keeps his node",
        ((ZooKeeperNode._look_at_controller, "mine and self.elected is None", "False"),),
    ),
    Bug(
        "a controller goes on when its connection is lost",
        ((ZooKeeperNode._changed, 'self._resign(f"the session is {state.value}")', "pass"),),
    ),
    Bug(
        "a controller goes on that is none any more",
        (
            (ZooKeeperNode._changed, 'self._resign(f"the session is {state.value}")', "pass"),
            (
                ZooKeeperNode._look_at_controller,
                'self._resign("another controller was elected")',
                "pass",
            ),
            (ZkMetadataStore._write_all, "self._on_refused()", "pass"),
        ),
    ),
    Bug(
        "the controller's node is looked at once",
        (
            (
                ZooKeeperNode._look_at_controller,
                "self._session.get(znodes.CONTROLLER, changed)",
                "self._session.get(znodes.CONTROLLER)",
            ),
        ),
    ),
    Bug(
        "a controller stays that could not write",
        ((ZkMetadataStore._write_all, "self._on_refused()", "pass"),),
    ),
    # --- brokers ---
    Bug(
        "brokers are looked at once",
        (
            (
                ZkController._look_at_brokers,
                "read_brokers(self._session, lambda path: self._watches.once(path, changed))",
                "read_brokers(self._session)",
            ),
        ),
    ),
    Bug(
        "who is back in another session was never away",
        (
            (
                brokers.discovered,
                "known is not None and known.epoch != seen.broker_epoch and not known.fenced",
                "False",
            ),
            (
                brokers.discovered,
                "known is None or known.epoch != seen.broker_epoch",
                "known is None",
            ),
        ),
    ),
    Bug(
        "who was gone before the election stays in ISRs",
        (
            (
                ZkController._look_at_brokers,
                "alive(self.store.image).keys() | self._in_sync()",
                "alive(self.store.image).keys()",
            ),
        ),
    ),
    Bug(
        "a new controller does not tell what there is",
        ((ZkController.start, "self._written(before, self.store.image)", "pass"),),
    ),
    Bug(
        "brokers are told what ZooKeeper has not taken yet",
        (
            (
                ZkMetadataStore._take,
                "self._changes.append(",
                "self._on_written(self.image, after); self._changes.append(",
            ),
            (ZkMetadataStore._write, "self._on_written(change.before, change.after)", "pass"),
        ),
    ),
    Bug(
        "a broker that does not answer is told nothing more of it",
        (
            (
                _BrokerChannel._run,
                "await asyncio.sleep(RETRY_MS / 1000)",
                "self._queue.popleft(); await asyncio.sleep(RETRY_MS / 1000)",
            ),
        ),
    ),
    Bug(
        "a broker hears a controller of an earlier epoch",
        (
            (
                ControllerRequestApplier.refuses,
                "body.controller_epoch < self.controller_epoch",
                "False",
            ),
        ),
    ),
    Bug(
        "a broker takes an older state of a partition",
        (
            (
                ControllerRequestApplier.update_metadata,
                "old is None or _epochs(now) > _epochs(old)",
                "True",
            ),
        ),
    ),
    Bug(
        "a broker refuses what is told while ZooKeeper does not answer",
        ((ZooKeeperNode._settings_of, "await asyncio.sleep(RETRY_MS / 1000)", "raise"),),
    ),
    Bug(
        "the timers of a controller that has resigned go on",
        ((ZkController.resign, "self.active.stop_timers()", "pass"),),
    ),
    # --- partitions ---
    Bug(
        "a state is written over whatever is there",
        (
            (
                writes.ZnodeWriter._change,
                "Set(path, self._state(now), was.partition_epoch)",
                "Set(path, self._state(now))",
            ),
        ),
    ),
    Bug(
        "notes of ISRs are deleted, not followed",
        ((ZkController._look_at_isrs, "await self._reread(topic, index)", "pass"),),
    ),
    Bug(
        "the node of a topic does not tell what is added",
        (
            (
                writes.assignment_of,
                "of({index: one.adding_replicas for index, one in parts.items()})",
                "{}",
            ),
        ),
    ),
    Bug(
        "an AlterPartition is answered before it is written",
        (
            (
                answers.forced,
                "None if ctx.store is None else ctx.store.durable()",
                "None if ctx.store is None or ctx.store.durable() else None",
            ),
        ),
    ),
    Bug(
        "a broker that becomes a replica while it starts does not follow",
        (
            (
                image.local_changes,
                "partition epoch.\n                and broker_id in was.replicas",
                "",
            ),
        ),
    ),
    Bug(
        "a killed broker cuts off batches of an epoch that no checkpoint has",
        ((_Loader.load, "and self._options.leader_epoch > NO_EPOCH", ""),),
    ),
    # --- deletion ---
    Bug(
        "the next controller does not go on deleting",
        ((ZkController._being_deleted, "if node is not None:", "if False:"),),
    ),
    Bug(
        "who comes back keeps what was deleted",
        (
            (
                ZkController._tell,
                "waiting & came if name not in before.topics else ()",
                "()",
            ),
        ),
    ),
    Bug(
        "who comes is not told of deletions under way",
        ((ZkController._tell, "(self._gone | self._parts).items()", "()"),),
    ),
    Bug(
        "who comes is not told of deletions that have ended",
        ((ZkController._tell, "(self._gone | self._parts).items()", "self._parts.items()"),),
    ),
    Bug(
        "nobody looks for topics that are gone",
        ((ZooKeeperNode._register, "self._mark(_TOPICS)", "pass"),),
    ),
    Bug(
        "the settings of a deleted topic stay",
        ((ZkController._finish_deletions, 'settings or ""', '""'),),
    ),
    Bug(
        "marks of others are not looked at",
        (
            (
                ZkController._look_at_deletions,
                "self._session.children(znodes.DELETE_TOPICS, self._marks(_DELETIONS))",
                "self._session.children(znodes.DELETE_TOPICS)",
            ),
        ),
    ),
    Bug(
        "the settings of a new topic are read from a server that lags",
        ((loading.read_new_settings, "await session.sync()", "pass"),),
    ),
    Bug(
        "settings are looked at once",
        (
            (
                ZooKeeperNode._look_at_settings,
                "partial(self._mark, _SETTINGS)",
                "",
            ),
        ),
    ),
    # --- requests of tools ---
    Bug(
        "reassignments of tools are looked for once",
        (
            (
                AdminNodes.look_at_reassignments,
                "self._session.get(path, self._watches.once(path, self._reassigned))",
                "self._session.get(path)",
            ),
        ),
    ),
    Bug(
        "a reassignment of a tool that is done stays",
        ((AdminNodes.is_concerned, "not _is_under_way(", "_is_under_way("),),
    ),
    Bug(
        "what a tool has added to a reassignment meanwhile is deleted",
        (
            (
                AdminNodes.look_at_reassignments,
                "Delete(path, node.version)",
                "Delete(path)",
            ),
        ),
    ),
    Bug(
        "elections of tools are looked for once",
        (
            (
                AdminNodes.look_at_elections,
                "self._session.get(path, self._watches.once(path, self._elected))",
                "self._session.get(path)",
            ),
        ),
    ),
    Bug(
        "a topic of a tool has no id",
        ((ZkController._adopt, "node = replace(node, topic_id=new_topic_id())", "return"),),
    ),
    # --- users, quotas, ACLs ---
    Bug(
        "a change of users is written over whatever is there",
        (
            (
                _MultiWrite.change,
                "self._writes.append(Set(path, data, node.version))",
                "self._writes.append(Set(path, data))",
            ),
        ),
    ),
    Bug(
        "a change of users leaves no note",
        (
            (
                _MultiWrite.change,
                "self._notifications.append(Create(where, note, sequence=True))",
                "pass",
            ),
        ),
    ),
    Bug(
        "a change of users is not known where it was made",
        ((SecurityZnodes._write, "await self.reread(some)", "pass"),),
    ),
    Bug(
        "notes of rules are looked at once",
        ((SecurityZnodes.look_at_rules, "await notes.new(changed)", "await notes.new()"),),
    ),
    Bug(
        "what is no longer in a znode stays known",
        (
            (
                SecurityZnodes._differences,
                "found.append(_RecordDiff(path, key, None,",
                "list(found).append(_RecordDiff(path, key, None,",
            ),
        ),
    ),
    # --- others ---
    Bug(
        "the next controller gives the last block of producer ids again",
        (
            (
                znodes.next_producer_id_of,
                '["block_end"]) + 1',
                '["block_start"])',
            ),
        ),
    ),
)
