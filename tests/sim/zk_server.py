"""A model of ZooKeeper: an ensemble that agrees on transactions, and its clients' sessions.

One member leads and commits; the other members apply its transactions in order, but later. Each
client is connected to one member, which answers requests in their order. A client sees its own
writes, and gets the event of a watch before it can read the change. Two clients that are connected
to different members may see different states. A session lives as long as its client sends requests
or pings, over any connection.

Source: ZooKeeper's "Consistency Guarantees"; ``PrepRequestProcessor``, ``FinalRequestProcessor``,
``DataTree``, ``SessionTrackerImpl``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kazoo.exceptions import (
    BadVersionError,
    KazooException,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
)
from kazoo.protocol.states import ZnodeStat

from tests.sim.network import CLOCK_MS, Network, Node

ENSEMBLE: Final = "z"
"""The ensemble's name in the network: one node for all members."""


class Op(NamedTuple):
    """One operation of a client: its kind, a path, and the arguments of the kind."""

    kind: str
    """get, exists, children; create, set, delete, check, ensure; sync."""
    path: str
    data: bytes = b""
    version: int = -1
    ephemeral: bool = False
    sequence: bool = False
    watch: bool = False


class Request(NamedTuple):
    """A client's request: one read, or the writes of a transaction."""

    ops: tuple[Op, ...]
    is_multi: bool

    @property
    def is_read(self) -> bool:
        """Whether a member answers the request without the leader."""
        return self.ops[0].kind in ("get", "exists", "children")

    def __str__(self) -> str:
        return ", ".join(f"{op.kind} {op.path}" for op in self.ops)


@dataclass(slots=True)
class Znode:
    """A node of the tree."""

    data: bytes
    czxid: int
    mzxid: int
    ctime: int
    owner: int
    version: int = 0
    made: int = 0
    """How many children were ever created, which is also the next sequence number."""
    children: dict[str, None] = field(default_factory=dict)

    @property
    def stat(self) -> ZnodeStat:
        """The stat that clients get."""
        return ZnodeStat(
            self.czxid,
            self.mzxid,
            self.ctime,
            self.ctime,
            self.version,
            self.made,
            0,
            self.owner,
            len(self.data),
            len(self.children),
            self.czxid,
        )


class Change(NamedTuple):
    """One change of a transaction, as all members apply it."""

    kind: str
    """create, set, delete."""
    path: str
    data: bytes = b""
    version: int = 0
    owner: int = 0


class Transaction(NamedTuple):
    """The changes that were committed under one zxid."""

    zxid: int
    time: int
    changes: tuple[Change, ...]


class Tree:
    """The data tree of a member."""

    def __init__(self) -> None:
        self.zxid = 0
        self.nodes: dict[str, Znode] = {"/": Znode(b"", 0, 0, 0, 0)}

    def apply(self, done: Transaction) -> None:
        """Apply a transaction."""
        for change in done.changes:
            match change.kind:
                case "create":
                    self.nodes[change.path] = Znode(
                        change.data, done.zxid, done.zxid, done.time, change.owner
                    )
                    parent = self.nodes[parent_of(change.path)]
                    parent.children[name_of(change.path)] = None
                    parent.made += 1
                case "set":
                    node = self.nodes[change.path]
                    node.data, node.version, node.mzxid = change.data, change.version, done.zxid
                case "delete":
                    del self.nodes[change.path]
                    del self.nodes[parent_of(change.path)].children[name_of(change.path)]
        self.zxid = done.zxid


def parent_of(path: str) -> str:
    """Return the parent of a path."""
    return path.rpartition("/")[0] or "/"


def name_of(path: str) -> str:
    """Return the last part of a path."""
    return path.rpartition("/")[2]


@dataclass(slots=True)
class SessionOf:
    """The ensemble's state of a session."""

    session_id: int
    timeout_ms: int
    heard_ms: int
    connection: Connection | None = None
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Asked:
    number: int
    request: Request
    result: Any = None
    zxid: int = -1
    """The zxid that the member must have applied before it answers; -1 until the commit."""


class Connection:
    """The server's end of a client's connection, at one member."""

    def __init__(self, member: Member, session: SessionOf, client: Node) -> None:
        self.member, self.session, self.client = member, session, client
        self.is_open = True
        self.tell: Callable[[str, Any], None] = lambda _kind, _what: None
        """Sends answers, events, pongs and the end of the connection to the client, in order."""
        self.asked: deque[_Asked] = deque()
        self.data_watches: dict[str, None] = {}
        self.child_watches: dict[str, None] = {}

    def close(self) -> None:
        """Close the connection; writes that have arrived may still be committed."""
        if self.is_open:
            self.is_open = False
            self.asked.clear()
            if self in self.member.connections:
                self.member.connections.remove(self)
            if self.session.connection is self:
                self.session.connection = None
            self.tell("end", None)

    def arrive(self, number: int, request: Request) -> None:
        """Take a request of the client."""
        if not self.is_open:
            return
        ensemble = self.member.ensemble
        if ensemble.before_step(self, request):
            return
        self.session.heard_ms = ensemble.now
        asked = _Asked(number, request)
        self.asked.append(asked)
        if not request.is_read:
            self.member.forward(self, asked)
        self.pump()

    def ping(self) -> None:
        """Answer a ping, which keeps the session alive."""
        if self.is_open:
            self.session.heard_ms = self.member.ensemble.now
            self.tell("pong", None)

    def pump(self) -> None:
        """Answer the requests that can be answered, in order."""
        while self.is_open and self.asked:
            asked = self.asked[0]
            if asked.request.is_read:
                result = self._read(asked.request.ops[0])
            elif asked.zxid < 0 or self.member.tree.zxid < asked.zxid:
                return
            else:
                result = asked.result
            self.asked.popleft()
            if not self.member.ensemble.after_step(self, asked.request):
                self.tell("answer", (asked.number, self.member.tree.zxid, result))

    def _read(self, op: Op) -> Any:
        node = self.member.tree.nodes.get(op.path)
        if node is None:
            if op.kind != "exists":
                return NoNodeError()
            if op.watch:
                self.data_watches[op.path] = None
            return None
        if op.watch:
            (self.child_watches if op.kind == "children" else self.data_watches)[op.path] = None
        if op.kind == "get":
            return node.data, node.stat
        return node.stat if op.kind == "exists" else [*node.children]

    def changed(self, change: Change) -> None:
        """Trigger the watches of a change in the member's tree."""
        path, above = change.path, parent_of(change.path)
        if path in self.data_watches:
            del self.data_watches[path]
            self.tell("event", ("data", path))
        if change.kind == "set":
            return
        if change.kind == "delete" and path in self.child_watches:
            del self.child_watches[path]
            self.tell("event", ("children", path))
        if above in self.child_watches:
            del self.child_watches[above]
            self.tell("event", ("children", above))


class Member:
    """A server of the ensemble."""

    def __init__(self, ensemble: Ensemble, number: int) -> None:
        self.ensemble, self.number = ensemble, number
        self.tree = Tree()
        self.connections: list[Connection] = []
        self._latest_ms = self._forwarded_ms = 0

    def forward(self, connection: Connection, asked: _Asked) -> None:
        """Forward a write to the leader, in the order of this member's writes."""
        ensemble = self.ensemble
        if self.number == 0:
            ensemble.commit(connection, asked)
            return
        self._forwarded_ms = max(self._forwarded_ms, ensemble.now + ensemble.lag())
        wait_ms = self._forwarded_ms - ensemble.now
        ensemble.scheduler.after(wait_ms, ensemble.commit, connection, asked)

    def learn(self, done: Transaction) -> None:
        """Apply a committed transaction, on a follower after some delay."""
        ensemble = self.ensemble
        if self.number == 0:
            self._apply(done)
            return
        self._latest_ms = max(self._latest_ms, ensemble.now + ensemble.lag())
        ensemble.scheduler.after(self._latest_ms - ensemble.now, self._apply, done)

    def _apply(self, done: Transaction) -> None:
        self.tree.apply(done)
        for connection in tuple(self.connections):
            for change in done.changes:
                connection.changed(change)
            connection.pump()


class _Refused(Exception):  # noqa: N818 - never leaves this module
    """Raised if a write of a transaction cannot be carried out."""

    def __init__(self, at: int, why: KazooException) -> None:
        self.at, self.why = at, why


class Ensemble:
    """All members; number 0 leads."""

    def __init__(self, network: Network, *, members: int, lag_ms: int) -> None:
        self.network, self.scheduler = network, network.scheduler
        self.lag_ms = lag_ms
        self.clock_ms = CLOCK_MS
        """How far the ensemble's clock is ahead of the simulated time."""
        self.members = [Member(self, number) for number in range(members)]
        self.sessions: dict[int, SessionOf] = {}
        self.zxid = 0
        self.away_until_ms = 0
        self.committed: Callable[[str, Transaction], None] = lambda _client, _done: None
        """Called with each transaction, and the name of the node that asked for it."""
        self.before_step: Callable[[Connection, Request], bool] = lambda _at, _request: False
        """Called with each request before it is handled; True drops the request."""
        self.after_step: Callable[[Connection, Request], bool] = lambda _at, _request: False
        """Called after each request is handled; True drops the answer."""

    @property
    def now(self) -> int:
        """The simulated time in milliseconds."""
        return self.scheduler.now

    @property
    def tree(self) -> Tree:
        """The leader's tree."""
        return self.members[0].tree

    def lag(self) -> int:
        """Draw the delay of a message between two members."""
        return self.scheduler.draw.randint(0, self.lag_ms) if self.lag_ms else 0

    # --- sessions ---

    def connect(
        self, client: Node, session_id: int, timeout_ms: int, last_zxid: int, number: int
    ) -> Connection | bool:
        """Open a session for a client, or continue a session over a new connection.

        Return False if this member cannot serve the client now, True if the session has expired.
        """
        member = self.members[number % len(self.members)]
        if self.now < self.away_until_ms or member.tree.zxid < last_zxid:
            return False
        if session_id:
            session = self.sessions.get(session_id)
            if session is None or session.is_over:
                return True
        else:
            self.zxid += 1
            self._commit(client.name, ())
            session = SessionOf(0x1000 + self.zxid, timeout_ms, self.now)
            self.sessions[session.session_id] = session
            self.scheduler.after(timeout_ms, self._look_at, session)
        former = session.connection
        if former is not None:
            former.close()
        connection = session.connection = Connection(member, session, client)
        session.heard_ms = self.now
        member.connections.append(connection)
        return connection

    def _look_at(self, session: SessionOf) -> None:
        if session.is_over:
            return
        left_ms = session.heard_ms + session.timeout_ms - self.now
        if left_ms > 0:
            self.scheduler.after(left_ms, self._look_at, session)
        else:
            self.expire(session)

    def expire(self, session: SessionOf) -> None:
        """Expire a session; its client finds out later."""
        if session.is_over:
            return
        session.is_over = True
        self.scheduler.say(ENSEMBLE, f"session {session.session_id:#x} is over")
        gone = [path for path, node in self.tree.nodes.items() if node.owner == session.session_id]
        self.zxid += 1
        self._commit(ENSEMBLE, tuple(Change("delete", path) for path in gone))
        if session.connection is not None:
            session.connection.close()

    def goes_away(self, for_ms: int) -> None:
        """Stop all members for a while. Afterwards the session timeouts begin from zero."""
        self.scheduler.say(ENSEMBLE, f"is away for {for_ms} ms")
        self.away_until_ms = max(self.away_until_ms, self.now + for_ms)
        for session in self.sessions.values():
            session.heard_ms = self.away_until_ms
            if session.connection is not None:
                session.connection.close()

    # --- transactions ---

    def commit(self, connection: Connection, asked: _Asked) -> None:
        """Decide on a write, which is carried out completely or not at all."""
        session = connection.session
        if session.is_over or session.connection not in (None, connection):
            asked.result = SessionExpiredError()
            asked.zxid = self.zxid
            return
        if asked.request == CLOSE:
            self.expire(session)
            return
        if asked.request.ops[0].kind == "sync":  # answered once all commits so far are applied
            asked.result, asked.zxid = asked.request.ops[0].path, self.zxid
            connection.pump()
            return
        try:
            changes, results = self._prepare(asked.request.ops, session.session_id)
        except _Refused as refused:
            asked.result = _results(asked.request, refused)
            asked.zxid = self.zxid
        else:
            self.zxid += 1
            self._commit(connection.client.name, changes)
            stats = [
                self.tree.nodes[path].stat if kind == "set" else path for kind, path in results
            ]
            asked.result = stats if asked.request.is_multi else stats[0]
            asked.zxid = self.zxid
        connection.pump()

    def write(self, who: str, ops: Sequence[Op]) -> bool:
        """Write without a session, as a tool; return whether that succeeded."""
        try:
            changes, _ = self._prepare(ops, 0)
        except _Refused:
            return False
        self.zxid += 1
        self._commit(who, changes)
        return True

    def _commit(self, who: str, changes: tuple[Change, ...]) -> None:
        done = Transaction(self.zxid, self.now + self.clock_ms, changes)
        for member in self.members:
            member.learn(done)
        self.committed(who, done)

    def _prepare(
        self, ops: Sequence[Op], session_id: int
    ) -> tuple[tuple[Change, ...], list[tuple[str, str]]]:
        """Return the changes of a transaction, and the result of each write. Raises _Refused."""
        view = _View(self.tree)
        results = []
        for at, op in enumerate(ops):
            try:
                results.append((op.kind, view.take(op, session_id)))
            except KazooException as error:
                raise _Refused(at, error) from error
        return tuple(view.changes), results


def _results(request: Request, refused: _Refused) -> Any:
    """Return the results of a refused transaction, as a client gets them."""
    if not request.is_multi:
        return refused.why
    return [
        RolledBackError()
        if at < refused.at
        else refused.why
        if at == refused.at
        else RuntimeInconsistency()
        for at in range(len(request.ops))
    ]


class _View:
    """The tree as it would be after the writes of a transaction so far."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._versions: dict[str, int | None] = {}
        """Versions of the nodes that this transaction has changed, None for deleted ones."""
        self._made: dict[str, int] = {}
        self.changes: list[Change] = []

    def _version(self, path: str) -> int | None:
        if path in self._versions:
            return self._versions[path]
        node = self._tree.nodes.get(path)
        return None if node is None else node.version

    def _checked(self, op: Op) -> int:
        version = self._version(op.path)
        if version is None:
            raise NoNodeError
        if op.version not in (-1, version):
            raise BadVersionError
        return version

    def take(self, op: Op, session_id: int) -> str:
        """Add a write to the transaction; return the path of its node. Raises KazooException."""
        match op.kind:
            case "create":
                return self._create(op, session_id)
            case "ensure":
                for path in _upwards(op.path):
                    if self._version(path) is None:
                        self._create(Op("create", path), 0)
            case "set":
                self._versions[op.path] = version = self._checked(op) + 1
                self.changes.append(Change("set", op.path, op.data, version))
            case "delete":
                self._checked(op)
                if any(self._children(op.path)):
                    raise NotEmptyError
                self._versions[op.path] = None
                self.changes.append(Change("delete", op.path))
            case _:
                self._checked(op)
        return op.path

    def _create(self, op: Op, session_id: int) -> str:
        path, above = op.path, parent_of(op.path)
        if self._version(above) is None:
            raise NoNodeError
        if op.sequence:
            known = self._tree.nodes.get(above)
            number = (0 if known is None else known.made) + self._made.get(above, 0)
            path = f"{path}{number:010}"
        if self._version(path) is not None:
            raise NodeExistsError
        self._made[above] = self._made.get(above, 0) + 1
        self._versions[path] = 0
        owner = session_id if op.ephemeral else 0
        self.changes.append(Change("create", path, op.data, owner=owner))
        return path

    def _children(self, path: str) -> Iterator[str]:
        known = self._tree.nodes.get(path)
        for name in () if known is None else known.children:
            if self._version(f"{path}/{name}") is not None:
                yield name
        yield from (
            child
            for child, version in self._versions.items()
            if version is not None and parent_of(child) == path
        )


def _upwards(path: str) -> Iterator[str]:
    """Yield the ancestors of a path from the top, and then the path itself."""
    at = 0
    while at >= 0:
        at = path.find("/", at + 1)
        yield path if at < 0 else path[:at]


CLOSE: Final = Request((Op("close", "the session"),), is_multi=False)
"""The request with which a client ends its session."""
