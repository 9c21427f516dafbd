"""Users, quotas and ACLs of a cluster on ZooKeeper; every broker reads, watches and changes them.

The controller is not involved. The broker that receives a change reads the znodes concerned, and
writes them if their versions have not changed; after a conflict it starts over. The same
transaction creates notifications for the other brokers. The broker then applies its own change by
reading the znodes again, like every other broker.

Source: ``AclAuthorizer.updateResourceAcls``, ``ZkAdminManager``, ``AdminZkClient``,
``ZkConfigManager.startup``.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from fencepost.cluster.acl import Permission, ResourceType
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import (
    AccessControlEntryRecord,
    ClientQuotaRecord,
    MetadataRecord,
    RemoveAccessControlEntryRecord,
    RemoveUserScramCredentialRecord,
    UserScramCredentialRecord,
)
from fencepost.coordinator.errors import (
    MetadataUnavailableError,
    PolicyViolationError,
    RequestTimedOutError,
)
from fencepost.coordinator.runtime.background import log_failure, spawn
from fencepost.coordinator.zookeeper import access_znodes as formats
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.access_znodes import AccessRecord, SecurityChange
from fencepost.coordinator.zookeeper.change_notifications import ChangeNotifications
from fencepost.coordinator.zookeeper.errors import (
    NotOurFormatError,
    NotWrittenError,
    ZooKeeperError,
)
from fencepost.coordinator.zookeeper.loading import batched
from fencepost.coordinator.zookeeper.session import (
    Create,
    Delete,
    RefusedError,
    Set,
    Write,
    ZkSession,
    Znode,
)
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback

if TYPE_CHECKING:
    from fencepost.logcore.clock import Clock

_log = structlog.get_logger(__name__)

RETRY_MS: Final = 100
"""The minimum pause before a retry (kafka: ``retryBackoffMs``). A random time of up to 50 ms is
added."""

GIVE_UP_MS: Final = 30_000
"""The time limit of a change, including its wait for earlier changes. Clients do not wait longer.
"""

MAX_PATHS: Final = 100
"""The maximum number of znodes that one transaction may change."""

MAX_ZNODE_BYTES: Final = 1_000_000
"""The maximum size of a znode. ZooKeeper disconnects a client that sends over 1 MiB."""

MAX_TRANSACTION_BYTES: Final = 500_000
"""The maximum size of a transaction that changes several znodes."""

MAX_RECORDS: Final = 500
"""The maximum number of records applied in one step, so that the event loop is not blocked."""

LONG_BYTES: Final = 32_768
"""The size in bytes above which a znode is parsed in a thread."""


class _RecordDiff(NamedTuple):
    """A record that differs between a znode and the image."""

    path: str
    key: Hashable
    now: AccessRecord | None
    """The record in the znode; None if it was removed."""
    record: MetadataRecord
    """The record that changes the image."""
    loosens: bool
    """Whether the change may permit operations that were not permitted before."""


class _PendingChanges:
    """Changes that are not yet in ZooKeeper."""

    def __init__(self, by_path: Mapping[str, Sequence[SecurityChange]], until_ms: int) -> None:
        self.by_path = by_path
        self.until_ms = until_ms
        """The monotonic time at which the changes expire."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        """Set the error for the caller, unless the caller has stopped waiting."""
        if not self.done.done():
            self.done.set_exception(without_traceback(error))
            self.done.exception()  # retrieved here, in case no caller awaits the future


class SecurityZnodes:
    """Reads, watches and writes the znodes of users, quotas and ACLs, on the event loop.

    ``take`` applies records to the broker's image. ``has_rules`` says whether the broker has an
    authorizer: without one, ACLs are not read.
    """

    def __init__(
        self,
        session: ZkSession,
        clock: Clock,
        take: Callable[[Sequence[MetadataRecord]], None],
        *,
        has_rules: bool,
    ) -> None:
        self._session, self._clock, self._take = session, clock, take
        folders = formats.RULE_CHANGES.values() if has_rules else ()
        self._notifications = [ChangeNotifications(session, clock, folder) for folder in folders]
        self._written: dict[str, dict[Hashable, AccessRecord]] = {}
        """The records of each znode that could be parsed."""
        self._reading = asyncio.Lock()
        self._queue: deque[_PendingChanges] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- reading ---

    async def load(self) -> None:
        """Read all znodes, and start the writer. Raises ZooKeeperError."""
        if self._notifications:
            kinds = [
                formats.camel(resource_type)
                for resource_type in ResourceType
                if resource_type >= ResourceType.TOPIC
            ]
            for folder in formats.RULE_CHANGES:
                for kind in kinds:
                    await self._session.ensure(f"{folder}/{kind}")
        for notes in self._notifications:
            await self._session.ensure(notes.folder)
            await notes.skip()
        await self.reload()
        self._task = spawn(self._write_all(), "write users, quotas and rules")

    async def reload(self) -> None:
        """Read all znodes again, after missed notifications. Raises ZooKeeperError."""
        await self.reread({*await self._all_paths(), *self._written})

    async def process_acl_changes(self, changed: Callable[[], object] | None = None) -> None:
        """Apply ACLs that other brokers have changed. Raises ZooKeeperError."""
        for notes in self._notifications:
            new, paths = await notes.new(changed), set()
            for notification in new:
                try:
                    paths.add(
                        formats.path_of_notification(
                            notes.folder, notification.path, notification.data
                        )
                    )
                except NotOurFormatError as error:
                    _log.error("notification in ZooKeeper skipped", cause=str(error))
            await self.reread(paths)
            await notes.mark_handled(new)

    async def _all_paths(self) -> list[str]:
        """Return the paths of all znodes that may hold users, quotas or ACLs."""
        children, users = self._session.children, formats.USERS
        paths = []
        for folder in (users, formats.CLIENTS, formats.IPS):
            paths += [f"{folder}/{name}" for name in await children(folder)]
        folders = [f"{path}/clients" for path in paths if path.startswith(f"{users}/")]
        for folder in formats.RULE_CHANGES if self._notifications else ():
            folders += [f"{folder}/{kind}" for kind in await children(folder)]
        for batch in batched(folders):
            there = await asyncio.gather(*map(children, batch))
            for folder, names in zip(batch, there, strict=True):
                paths += [f"{folder}/{name}" for name in names]
        return paths

    async def reread(self, paths: Iterable[str]) -> None:
        """Apply the current contents of these znodes. Raises ZooKeeperError.

        A cancelled call may have applied only some of the differences. The next call for these
        znodes applies the others.
        """
        async with self._reading:
            for batch in batched([*dict.fromkeys(paths)]):
                nodes = await asyncio.gather(*map(self._session.get, batch))
                loosening: list[_RecordDiff] = []
                differences: list[_RecordDiff] = []
                for path, node in zip(batch, nodes, strict=True):
                    for difference in await self._differences(path, node):
                        (loosening if difference.loosens else differences).append(difference)
                # Changes that permit more come last, because an intermediate image must not permit
                # operations that neither the old nor the new ACLs permit.
                differences += loosening
                for start in range(0, len(differences), MAX_RECORDS):
                    self._take_differences(differences[start : start + MAX_RECORDS])
                    await asyncio.sleep(0)

    def _take_differences(self, differences: Sequence[_RecordDiff]) -> None:
        self._take([difference.record for difference in differences])
        # Note only records that are in the image now. A record that is noted here, but missing in
        # the image, would never be applied, and it may be a denial.
        for difference in differences:
            records = self._written.setdefault(difference.path, {})
            if difference.now is not None:
                records[difference.key] = difference.now
                continue
            del records[difference.key]
            if not records:
                del self._written[difference.path]

    async def _differences(self, path: str, node: Znode | None) -> list[_RecordDiff]:
        """Return the differences between a znode and its part of the image."""
        data = None if node is None else node.data
        if data is not None and len(data) > LONG_BYTES:
            read = await asyncio.to_thread(formats.records_of, path, data)
        else:
            read = formats.records_of(path, data)
        now = {formats.key_of(record): record for record in read}
        before = self._written.get(path, {})
        diffs = []
        for key, gone in before.items():
            if key not in now:
                is_denial = _is_acl(gone, Permission.DENY)
                diffs.append(_RecordDiff(path, key, None, formats.removal_of(gone), is_denial))
        for key, record in now.items():
            if before.get(key) != record:
                diffs.append(
                    _RecordDiff(path, key, record, record, _is_acl(record, Permission.ALLOW))
                )
        return diffs

    # --- writing ---

    def change(self, by_path: Mapping[str, Sequence[SecurityChange]]) -> asyncio.Future[None]:
        """Queue changes of znodes; the future is done once they are written and read again.

        The future raises NotWrittenError, PolicyViolationError, RequestTimedOutError.
        """
        pending = _PendingChanges(by_path, self._clock.monotonic_ms() + GIVE_UP_MS)
        self._queue.append(pending)
        self._wake.set()
        return pending.done

    def stop(self) -> None:
        """Stop writing, and cancel the queued changes."""
        if self._task is not None:
            self._task.cancel()
        for change in self._queue:
            change.done.cancel()
        self._queue.clear()

    async def _write_all(self) -> None:
        while True:
            self._wake.clear()
            while batch := self._next_batch():
                await self._write_together(batch)
            await self._wake.wait()

    def _next_batch(self) -> list[_PendingChanges]:
        """Take as many changes from the queue as fit into one transaction."""
        batch: list[_PendingChanges] = []
        count = 0
        while self._queue and (not batch or count + len(self._queue[0].by_path) <= MAX_PATHS):
            changes = self._queue.popleft()
            if self._is_wanted(changes):
                batch.append(changes)
                count += len(changes.by_path)
        return batch

    def _is_wanted(
        self, changes: _PendingChanges, late: RequestTimedOutError | None = None
    ) -> bool:
        """Return whether a caller waits for a change; fail an expired change with ``late``."""
        if self._clock.monotonic_ms() > changes.until_ms:
            waited = "The change has waited too long for earlier ones."
            changes.fail(late or RequestTimedOutError(waited))
        return not changes.done.done()

    async def _write_together(self, batch: Sequence[_PendingChanges]) -> None:
        """Write changes in one transaction; if that fails, in one transaction per change."""
        changes: dict[str, list[SecurityChange]] = {}
        for change in batch:
            for path, more in change.by_path.items():
                changes.setdefault(path, []).extend(more)
        error: Exception | None = None
        try:
            await self._write(changes, min(change.until_ms for change in batch))
        except RequestTimedOutError as late:
            # Unexpired changes go back to the front of the queue.
            self._queue.extendleft(
                [change for change in reversed(batch) if self._is_wanted(change, late)]
            )
            return
        except Exception as found:  # noqa: BLE001 - every caller gets it
            if len(batch) > 1:
                for change in batch:
                    if self._is_wanted(change):
                        await self._write_together([change])
                return
            error = without_traceback(found)
            if not isinstance(found, DomainError):
                log_failure("write users, quotas and rules", found)
                error = NotWrittenError("ZooKeeper has not taken the change.")
        for pending in batch:
            if error is not None:
                pending.fail(error)
            elif not pending.done.done():
                pending.done.set_result(None)

    async def _write(self, changes: Mapping[str, Sequence[SecurityChange]], until_ms: int) -> None:
        left = sorted(changes, key=lambda path: path.count("/"))
        while left:
            cause = "others change the same"
            try:
                async with asyncio.timeout((until_ms - self._clock.monotonic_ms()) / 1000):
                    read_back = await self._try({path: changes[path] for path in left[:MAX_PATHS]})
                    await self.reread(read_back)
                left = left[len(read_back) :]
                continue
            except TimeoutError:
                cause = "no answer"
            except RefusedError as refused:
                if not refused.is_passing:
                    raise NotWrittenError(f"ZooKeeper has refused the change: {refused}") from None
            except NotOurFormatError as error:
                raise NotWrittenError(str(error)) from None
            except ZooKeeperError as error:
                cause = str(error)
            if self._clock.monotonic_ms() > until_ms:
                raise RequestTimedOutError(f"ZooKeeper has not taken the change in time: {cause}")
            await asyncio.sleep(RETRY_MS * (1 + random.random() / 2) / 1000)  # noqa: S311 - no secret

    async def _try(self, changes: Mapping[str, Sequence[SecurityChange]]) -> list[str]:
        """Write as many of these changes as fit into one transaction; return their paths."""
        paths = {*changes, *(parent for path in changes for parent in formats.parents_of(path))}
        read = await asyncio.gather(*map(self._session.get, paths))
        transaction = _MultiWrite(dict(zip(paths, read, strict=True)), changes)
        done: list[str] = []
        for path in changes:
            if done and transaction.size > MAX_TRANSACTION_BYTES:
                break
            if transaction.takes_long(path):
                await asyncio.to_thread(transaction.change, path)
            else:
                transaction.change(path)
            done.append(path)
        writes = transaction.all()
        if writes:
            await self._session.do(writes)
        return done


class _MultiWrite:
    """The writes for a set of changes, with their notifications."""

    def __init__(
        self, nodes: dict[str, Znode | None], changes: Mapping[str, Sequence[SecurityChange]]
    ) -> None:
        self._nodes, self._changes = nodes, changes
        self._writes: list[Write] = []
        self._notifications: list[Write] = []
        self._deleted: dict[str, int] = {}
        """Number of deleted children, by parent path."""
        self.size = 0
        """Approximate size in bytes."""

    def takes_long(self, path: str) -> bool:
        """Return whether the change should run in a thread, to avoid blocking the event loop."""
        node = self._nodes[path]
        size = 0 if node is None else len(node.data)
        return size > LONG_BYTES or len(self._changes[path]) > MAX_RECORDS

    def change(self, path: str) -> None:
        """Add the writes that change one znode, if its data changes.

        Raises NotOurFormatError, PolicyViolationError.
        """
        node = self._nodes[path]
        before = None if node is None else node.data
        data = formats.changed(path, before, self._changes[path])
        if data == formats.changed(path, before, ()):
            return
        if data is not None and len(data) > MAX_ZNODE_BYTES:
            raise PolicyViolationError(f"{path} would have more than {MAX_ZNODE_BYTES} bytes")
        if node is not None and data is None:
            if node.child_count or any(change.startswith(f"{path}/") for change in self._changes):
                self._writes.append(Set(path, znodes.config_data({}), node.version))
            else:
                self._writes.append(Delete(path, node.version))
                above = path.rpartition("/")[0]
                self._deleted[above] = self._deleted.get(above, 0) + 1
        elif data is not None and node is not None:
            self._writes.append(Set(path, data, node.version))
        elif data is not None:
            for node_path in (*formats.parents_of(path), path):
                if self._nodes[node_path] is None:
                    self._writes.append(Create(node_path, data if node_path == path else b""))
                    self._nodes[node_path] = Znode(b"", 0, 0, 0, 0)
        folder, note = formats.notification_of(path)
        self._notifications.append(Create(folder, note, sequence=True))
        self.size += len(data or b"") + 2 * len(path)

    def all(self) -> list[Write]:
        """Return all writes.

        When the last quota below a user's ``clients`` znode is deleted, that znode is deleted too,
        and then the user's znode if it has no settings.
        """
        for folder, count in self._deleted.items():
            node = self._nodes.get(folder)
            if node is None or node.child_count != count:
                continue
            self._writes.append(Delete(folder, node.version))
            path = folder.rpartition("/")[0]
            user = self._nodes[path]
            if user is None or user.child_count != 1 or path in self._changes:
                continue
            try:
                if not znodes.config_of(path, user.data):
                    self._writes.append(Delete(path, user.version))
            except NotOurFormatError:
                continue  # another program may be able to parse the znode
        return [*self._writes, *self._notifications]


def _is_acl(record: AccessRecord, permission: Permission) -> bool:
    """Return whether a record is an ACL with this permission."""
    return isinstance(record, AccessControlEntryRecord) and record.permission_type == permission


def change_of(image: MetadataImage, record: MetadataRecord) -> SecurityChange:
    """Return the change to a znode that corresponds to a metadata record.

    Raises MetadataUnavailableError for a change that only the controller makes.
    """
    match record:
        case UserScramCredentialRecord() | AccessControlEntryRecord():
            return SecurityChange(record)
        case ClientQuotaRecord():
            return SecurityChange(record, record.remove)
        case RemoveUserScramCredentialRecord(name=name, mechanism=mechanism):
            return SecurityChange(image.scram[name, mechanism], is_removed=True)
        case RemoveAccessControlEntryRecord() if record.id in image.acls:
            return SecurityChange(image.acls[record.id], is_removed=True)
    raise MetadataUnavailableError("the controller is elsewhere")


def reason_against(record: MetadataRecord) -> str | None:
    """Return why ZooKeeper cannot store a user, a quota or an ACL; None if it can."""
    if isinstance(record, (UserScramCredentialRecord, ClientQuotaRecord, AccessControlEntryRecord)):
        return formats.reason_against(record)
    return None
