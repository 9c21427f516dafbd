"""Finds anomalies in recorded operations: results that no fault of a client or broker excuses.

The classes of anomalies are those of Jepsen's Kafka workload, with additional classes for torn
transactions, zombies, offsets and owners. The outcome UNKNOWN proves nothing, but one visible value
of a transaction proves that the whole transaction was committed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import pairwise

from tests.support.history import (
    Assigned,
    CommitOffset,
    End,
    Fence,
    FetchOffset,
    Isolation,
    Operation,
    Outcome,
    Partition,
    Read,
    Replayed,
    Send,
    Watermarks,
)


class Kind(StrEnum):
    """The classes of anomalies."""

    LOST = "lost"
    """A committed value that no reader ever saw, although a reader passed its offset."""
    UNSEEN = "unseen"
    """A committed value that is not in the final read."""
    DUPLICATE = "duplicate"
    """One value at two committed offsets."""
    ABORTED_READ = "aborted read"
    """A visible value or offset of a transaction that certainly was not committed."""
    PRECOMMITTED_READ = "precommitted read"
    """A visible value of a transaction before its commit was requested."""
    TORN = "torn transaction"
    """Only a part of a transaction's effects is visible."""
    ZOMBIE = "zombie effect"
    """An operation of a fenced epoch took effect."""
    OFFSET_REGRESSION = "offset regression"
    """A fetched group offset is older than one whose commit ended before the fetch."""
    LSO_STALL = "lso stall"
    """A transaction is still open after all faults are over."""
    INCONSISTENT_OFFSETS = "inconsistent offsets"
    """Two values at one offset."""
    DOUBLE_OWNER = "double owner"
    """Two members own one partition in the same epoch."""
    REPLAY_DIVERGENCE = "replay divergence"
    """One log led to two different states: in two replays, or when it was written and when it was
    replayed.
    """
    NONMONOTONIC_READ = "nonmonotonic read"
    """A reader's position went back without a seek."""
    SKIPPED_READ = "skipped read"
    """A reader skipped a committed value that others saw."""
    NONMONOTONIC_SEND = "nonmonotonic send"
    """A process's later send got a smaller offset than an earlier one."""
    CIRCULAR = "circular information flow"
    """A cycle of transactions, each of which read a value that the next one wrote."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One finding: its class, its subject, and the evidence."""

    kind: Kind
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.subject}: {self.detail}"


class Fate(Enum):
    """Whether an effect is permanent."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


def check(history: Iterable[Operation]) -> list[Anomaly]:
    """Return all anomalies of the recorded operations, sorted and without duplicates."""
    return sorted(set(_Checker(list(history)).run()), key=str)


class _Checker:
    def __init__(self, history: list[Operation]) -> None:
        self._history = sorted(history, key=lambda operation: (operation.begin, operation.end))
        self._sends = [item for item in history if isinstance(item, Send)]
        self._reads = [item for item in self._history if isinstance(item, Read)]
        self._committed_reads = [
            read for read in self._reads if read.isolation is Isolation.READ_COMMITTED
        ]
        self._commits = [item for item in history if isinstance(item, CommitOffset)]
        self._ends: dict[str, list[End]] = defaultdict(list)
        for item in self._history:
            if isinstance(item, End):
                self._ends[item.txn].append(item)
        self._by_value: dict[str, list[Send]] = defaultdict(list)
        for send in self._sends:
            self._by_value[send.value].append(send)
        self._places: dict[str, set[tuple[Partition, int]]] = defaultdict(set)
        for read in self._committed_reads:
            for offset, value in read.values:
                self._places[value].add((read.partition, offset))
        self._proved: set[str] = set()
        self._proved = {
            send.txn
            for value in self._places
            if len(alive := self._alive(value)) == 1 and (send := alive[0]).txn is not None
        }

    def run(self) -> Iterator[Anomaly]:
        yield from self._torn_and_missing()
        yield from self._duplicates()
        yield from self._aborted_reads()
        yield from self._precommitted_reads()
        yield from self._zombies()
        yield from self._offsets_of_groups()
        yield from self._stalls()
        yield from self._inconsistent_offsets()
        yield from self._double_owners()
        yield from self._replays()
        yield from self._order_of_reads()
        yield from self._order_of_sends()
        yield from self._circles()

    # --- fates ---

    def _txn_fate(self, txn: str) -> Fate:
        """Return COMMITTED if a commit was acknowledged, or a value of the transaction was read."""
        ends = self._ends[txn]
        if any(end.commit and end.outcome is Outcome.OK for end in ends):
            return Fate.COMMITTED
        if any(not end.commit and end.outcome is Outcome.OK for end in ends):
            return Fate.ABORTED
        if not any(end.commit and end.outcome is Outcome.UNKNOWN for end in ends):
            return Fate.ABORTED  # no commit can have reached the broker
        return Fate.COMMITTED if txn in self._proved else Fate.UNKNOWN

    def _fate(self, effect: Send | CommitOffset) -> Fate:
        if effect.outcome is Outcome.FAILED:
            return Fate.ABORTED
        fate = Fate.COMMITTED if effect.txn is None else self._txn_fate(effect.txn)
        if fate is Fate.COMMITTED and effect.outcome is Outcome.UNKNOWN:
            return Fate.UNKNOWN
        return fate

    def _alive(self, value: str) -> list[Send]:
        """Return the sends that may have written a visible ``value``."""
        return [send for send in self._by_value[value] if self._fate(send) is not Fate.ABORTED]

    # --- values ---

    def _passed(self, send: Send) -> bool:
        """Return whether a read_committed reader passed the offset of ``send``."""
        return send.offset is not None and any(
            read.partition == send.partition and read.position <= send.offset < read.next
            for read in self._committed_reads
        )

    def _read_to_the_end(self, partition: Partition) -> bool:
        return any(read.final and read.partition == partition for read in self._committed_reads)

    def _missing(self, send: Send) -> Kind | None:
        if send.value in self._places or self._fate(send) is not Fate.COMMITTED:
            return None
        if self._passed(send):
            return Kind.LOST
        return Kind.UNSEEN if self._read_to_the_end(send.partition) else None

    def _torn_and_missing(self) -> Iterator[Anomaly]:
        whole: dict[str, list[Send]] = defaultdict(list)
        for send in self._sends:
            if send.txn is not None:
                whole[send.txn].append(send)
        torn = set()
        for txn, sends in whole.items():
            gone = [send for send in sends if self._missing(send)]
            if gone and any(send.value in self._places for send in sends):
                torn.add(txn)
                values = ", ".join(sorted(send.value for send in gone))
                yield Anomaly(Kind.TORN, txn, f"without {values}")
        for send in self._sends:
            kind = self._missing(send)
            if kind is not None and send.txn not in torn:
                yield Anomaly(kind, send.value, f"acknowledged in {_name(send.partition)}")

    def _duplicates(self) -> Iterator[Anomaly]:
        for value, places in self._places.items():
            if len(places) > 1:
                where = ", ".join(f"{_name(place)}@{offset}" for place, offset in sorted(places))
                yield Anomaly(Kind.DUPLICATE, value, where)

    def _aborted_reads(self) -> Iterator[Anomaly]:
        for value in self._places:
            if self._by_value[value] and not self._alive(value):
                yield Anomaly(Kind.ABORTED_READ, value, "its transaction was not committed")
        for read in self._reads:
            for offset, value in read.values:
                sends = self._by_value[value]
                if sends and all(s.outcome is Outcome.FAILED for s in sends):
                    detail = f"refused, and read at {_name(read.partition)}@{offset}"
                    yield Anomaly(Kind.ABORTED_READ, value, detail)

    def _precommitted_reads(self) -> Iterator[Anomaly]:
        for read in self._committed_reads:
            for offset, value in read.values:
                alive = self._alive(value)
                if alive and all(self._too_early(send, read) for send in alive):
                    where = f"{_name(read.partition)}@{offset}"
                    yield Anomaly(Kind.PRECOMMITTED_READ, value, f"read at {where} before its time")

    def _too_early(self, send: Send, read: Read) -> bool:
        if send.txn is None:
            return False
        if send.txn == read.txn:
            return True
        begins = [end.begin for end in self._ends[send.txn] if end.commit]
        return all(read.end < begin for begin in begins)

    def _inconsistent_offsets(self) -> Iterator[Anomaly]:
        values: dict[tuple[Partition, int], set[str]] = defaultdict(set)
        for read in self._reads:
            for offset, value in read.values:
                values[read.partition, offset].add(value)
        for send in self._sends:
            if send.offset is not None and send.outcome is Outcome.OK:
                values[send.partition, send.offset].add(send.value)
        for (place, offset), found in values.items():
            if len(found) > 1:
                yield Anomaly(
                    Kind.INCONSISTENT_OFFSETS, f"{_name(place)}@{offset}", ", ".join(sorted(found))
                )

    # --- fencing ---

    def _zombies(self) -> Iterator[Anomaly]:
        fences: dict[str, list[Fence]] = defaultdict(list)
        for item in self._history:
            if isinstance(item, Fence):
                fences[item.subject].append(item)
        for item in self._history:
            if not isinstance(item, Send | End | CommitOffset) or item.subject is None:
                continue
            newer = [
                fence
                for fence in fences[item.subject]
                if fence.epoch > item.epoch and fence.end < item.begin
            ]
            if newer and self._took_effect(item):
                detail = f"epoch {item.epoch} after {newer[0].epoch} had begun"
                yield Anomaly(Kind.ZOMBIE, f"{item.subject} {item.process}", detail)

    def _took_effect(self, item: Send | End | CommitOffset) -> bool:
        if item.outcome is Outcome.OK:
            return True
        if isinstance(item, Send):
            return item.value in self._places and len(self._by_value[item.value]) == 1
        return isinstance(item, End) and item.commit and item.txn in self._proved

    # --- groups ---

    def _interval(self, commit: CommitOffset) -> tuple[float, float]:
        """Return the interval in which a commit took effect.

        It is the interval of the commit request or, for a commit in a transaction, of the EndTxn
        request.
        """
        if commit.txn is None:
            return commit.begin, commit.end
        ends = [end for end in self._ends[commit.txn] if end.commit]
        if not ends:
            return commit.begin, float("inf")
        done = [end.end for end in ends if end.outcome is Outcome.OK]
        return ends[0].begin, min(done, default=float("inf"))

    def _offsets_of_groups(self) -> Iterator[Anomaly]:
        commits: dict[tuple[str, Partition], list[CommitOffset]] = defaultdict(list)
        for commit in self._commits:
            commits[commit.group, commit.partition].append(commit)
        for item in self._history:
            if not isinstance(item, FetchOffset):
                continue
            all_of_it = commits[item.group, item.partition]
            alive = [commit for commit in all_of_it if self._fate(commit) is not Fate.ABORTED]
            name = f"{item.group} {_name(item.partition)}"
            if item.offset != -1 and not any(c.offset == item.offset for c in alive):
                if any(commit.offset == item.offset for commit in all_of_it):
                    detail = f"{item.offset} was not committed"
                    yield Anomaly(Kind.ABORTED_READ, name, detail)
                continue
            yield from self._regression(item, alive, name)
            if item.final:
                yield from self._torn_offsets(item, alive)

    def _regression(
        self, item: FetchOffset, alive: list[CommitOffset], name: str
    ) -> Iterator[Anomaly]:
        before = [
            self._interval(commit)
            for commit in alive
            if self._fate(commit) is Fate.COMMITTED and self._interval(commit)[1] < item.begin
        ]
        # A commit is overwritten by a later commit that ended before the fetch.
        newest = max((begin for begin, _ in before), default=float("-inf"))
        if item.offset == -1:
            if before:
                yield Anomaly(Kind.OFFSET_REGRESSION, name, "nothing, after a commit")
            return
        possible = [
            commit
            for commit in alive
            if commit.offset == item.offset
            and self._interval(commit)[0] < item.end
            and self._last_moment(commit) >= newest
        ]
        if not possible:
            detail = f"{item.offset}, though it was overwritten"
            yield Anomaly(Kind.OFFSET_REGRESSION, name, detail)

    def _last_moment(self, commit: CommitOffset) -> float:
        certain = self._fate(commit) is Fate.COMMITTED
        return self._interval(commit)[1] if certain else float("inf")

    def _torn_offsets(self, item: FetchOffset, alive: list[CommitOffset]) -> Iterator[Anomaly]:
        """Compare a transaction's visible values with the final committed offset of its group."""
        for commit in alive:
            if commit.txn is None or self._txn_fate(commit.txn) is Fate.ABORTED:
                continue
            sends = [send for send in self._sends if send.txn == commit.txn]
            visible = [send for send in sends if send.value in self._places]
            unambiguous = [send for send in visible if len(self._alive(send.value)) == 1]
            if unambiguous and commit.offset > item.offset:
                detail = f"its offset {commit.offset} is gone ({item.offset})"
                yield Anomaly(Kind.TORN, commit.txn, detail)
            sole = [other for other in alive if other.offset == commit.offset] == [commit]
            ended = all(self._read_to_the_end(send.partition) for send in sends)
            if sole and commit.offset == item.offset and sends and not visible and ended:
                yield Anomaly(Kind.TORN, commit.txn, "its offset is there, its values are not")

    def _double_owners(self) -> Iterator[Anomaly]:
        owners: dict[tuple[str, int, Partition], set[str]] = defaultdict(set)
        for item in self._history:
            if isinstance(item, Assigned):
                for partition in item.partitions:
                    owners[item.group, item.epoch, partition].add(item.process)
        for (group, epoch, partition), members in owners.items():
            if len(members) > 1:
                detail = f"{', '.join(sorted(members))} at epoch {epoch}"
                yield Anomaly(Kind.DOUBLE_OWNER, f"{group} {_name(partition)}", detail)

    def _replays(self) -> Iterator[Anomaly]:
        states: dict[tuple[str, int], set[str]] = defaultdict(set)
        for item in self._history:
            if isinstance(item, Replayed):
                states[item.machine, item.offset].add(item.digest)
        for (machine, offset), digests in states.items():
            if len(digests) > 1:
                detail = f"at offset {offset}: {', '.join(sorted(digests))}"
                yield Anomaly(Kind.REPLAY_DIVERGENCE, machine, detail)

    # --- progress and order ---

    def _stalls(self) -> Iterator[Anomaly]:
        for item in self._history:
            if isinstance(item, Watermarks) and item.final and item.stable < item.end_offset:
                detail = f"stable {item.stable}, end {item.end_offset}"
                yield Anomaly(Kind.LSO_STALL, _name(item.partition), detail)

    def _order_of_reads(self) -> Iterator[Anomaly]:
        values_at = self._committed_offsets()
        last: dict[tuple[str, Partition, Isolation], Read] = {}
        for read in self._reads:
            key = read.process, read.partition, read.isolation
            before = None if read.moved else last.get(key)
            last[key] = read
            offsets = [offset for offset, _ in read.values]
            name = f"{read.process} {_name(read.partition)}"
            start = read.position if before is None else before.next
            if any(b <= a for a, b in pairwise(offsets)) or (offsets and offsets[0] < start):
                yield Anomaly(Kind.NONMONOTONIC_READ, name, f"{offsets} from {start} on")
                continue
            end = max([read.next, *(offset + 1 for offset in offsets)])
            missed = values_at[read.partition].keys() - set(offsets)
            for offset in sorted(missed):
                if start <= offset < end:
                    detail = f"{values_at[read.partition][offset]}@{offset}"
                    yield Anomaly(Kind.SKIPPED_READ, name, detail)

    def _committed_offsets(self) -> dict[Partition, dict[int, str]]:
        """Return the offsets at which readers saw committed values."""
        values_at: dict[Partition, dict[int, str]] = defaultdict(dict)
        for value, places in self._places.items():
            for partition, offset in places:
                values_at[partition][offset] = value
        return values_at

    def _order_of_sends(self) -> Iterator[Anomaly]:
        last: dict[tuple[str, Partition], Send] = {}
        for send in sorted(self._sends, key=lambda send: send.begin):
            if send.outcome is not Outcome.OK or send.offset is None:
                continue
            key = send.process, send.partition
            before = last.get(key)
            if before is not None and before.offset is not None and send.offset <= before.offset:
                detail = f"{send.value}@{send.offset} after {before.value}@{before.offset}"
                yield Anomaly(
                    Kind.NONMONOTONIC_SEND, f"{send.process} {_name(send.partition)}", detail
                )
            last[key] = send

    def _circles(self) -> Iterator[Anomaly]:
        """Yield cycles of transactions, in which each one read a value of the previous one."""
        wrote: dict[str, set[str]] = defaultdict(set)
        for read in self._committed_reads:
            if read.txn is None:
                continue
            for _, value in read.values:
                alive = self._alive(value)
                if len(alive) == 1 and alive[0].txn not in {None, read.txn}:
                    wrote[read.txn].add(str(alive[0].txn))
        for txn in sorted(wrote):
            path = _find_cycle(wrote, txn)
            if path is not None and txn == min(path):
                yield Anomaly(Kind.CIRCULAR, txn, " reads ".join([*path, txn]))


def _find_cycle(edges: dict[str, set[str]], start: str) -> Sequence[str] | None:
    """Return the nodes of a cycle, beginning with ``start``; None without such a cycle."""
    waiting: list[tuple[str, tuple[str, ...]]] = [(start, (start,))]
    seen: set[str] = set()
    while waiting:
        node, path = waiting.pop()
        for following in sorted(edges.get(node, ())):
            if following == start:
                return path
            if following not in seen:
                seen.add(following)
                waiting.append((following, (*path, following)))
    return None


def _name(partition: Partition) -> str:
    return f"{partition[0]}-{partition[1]}"
