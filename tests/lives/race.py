"""Sends random requests to a broker, on a connection per client, with many in flight."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.lives.closed import broken
from tests.lives.draw import Request, settled
from tests.lives.knowledge import Knowledge
from tests.lives.learn import learn
from tests.lives.life import Life, Step
from tests.lives.pools import LONGEST_STRING
from tests.support.raw import Answer, _entity, decode, encode, errors_in, fitted

DEPTH = 2
"""The maximum number of requests in flight on a connection; the broker serves them in order."""
QUEUED = 240
"""The maximum number of steps that wait for a client, whose requests may be parked."""
REWRITING = frozenset({"alter_configs", "incremental_alter_configs"})
"""APIs after which the broker may apply retention or compaction to a topic."""

PATIENCE_S = 60.0


class LifeError(Exception):
    """The broker violated an invariant."""


@dataclass
class Sent:
    """A request in flight."""

    step: Step
    body: Mapping[str, Any]
    at: float


@dataclass
class Client:
    """A client with its connection and its queue of steps."""

    socket: socket.socket
    waiting: deque[Sent] = field(default_factory=deque)
    queue: deque[Step] = field(default_factory=deque)
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    may_close: bool = False


@dataclass
class Report:
    """The counts of requests and responses."""

    sent: int = 0
    answers: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    """Number of responses by API, version and error."""

    def summary(self) -> str:
        """Return a text of each API with its most frequent errors."""
        rows: dict[str, Counter[str]] = {}
        for (api, _, error), count in self.answers.items():
            rows.setdefault(api, Counter())[error] += count
        head = f"{self.sent} requests"
        return "\n".join(
            [head, *(f"{api}: {dict(rows[api].most_common())}" for api in sorted(rows))]
        )

    last: deque[str] = field(default_factory=lambda: deque(maxlen=4000))


def frame_of(
    request: Request,
    knowledge: Knowledge,
    number: int,
    mend: Callable[[Any], Any] | None = None,
) -> tuple[bytes, Any] | None:
    """Return the bytes and the body of a request, None if it is skipped or cannot be encoded.

    ``mend`` transforms the body.
    """
    if request.only_if is not None and not request.only_if(knowledge):
        return None
    entity = _entity(request.api, request.version, "request")
    body = fitted(request.api, request.version, settled(request.shape, knowledge))
    body = body if mend is None else mend(body)
    if not entity.__flexible__ and longest(body) > LONGEST_STRING:
        return None
    frame = encode(request.api, request.version, number, "life", body)
    return struct.pack(">i", len(frame)) + frame, body


def longest(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, Mapping):
        return max(map(longest, value.values()), default=0)
    if isinstance(value, list | tuple):
        return max(map(longest, value), default=0)
    return 0


class Race:
    """Sends random requests to a broker, and collects what the clients know from the responses."""

    def __init__(
        self,
        life: Life,
        bootstrap: str,
        *,
        wrong: Callable[[str], None],
        watch: Callable[[], list[str]],
        report: Report | None = None,
    ) -> None:
        """``watch`` returns the complaints that the broker has logged since the last call."""
        self._wrong, self._watch = wrong, watch
        self.life = life
        self.knowledge = Knowledge()
        self.report = report or Report()
        host, port = bootstrap.rsplit(":", 1)
        self._address = host, int(port)
        self._selector = selectors.DefaultSelector()
        self._clients = [self._connect(n) for n in range(life.clients)]
        self._queued = 0
        self._begun = False
        self._rewritten: set[str] = set()

    def close(self) -> None:
        for client in self._clients:
            client.socket.close()
        self._selector.close()

    def reconnect(self) -> None:
        """Reconnect after a kill; there are no responses to the requests in flight."""
        self.close()
        self._selector = selectors.DefaultSelector()
        self.knowledge.sessions.clear()
        queues = [client.queue for client in self._clients]
        self._clients = [self._connect(n) for n in range(self.life.clients)]
        for client, queue in zip(self._clients, queues, strict=True):
            client.queue = queue

    @property
    def rewritten(self) -> frozenset[str]:
        """Return the topics whose records the broker may have removed or replaced by itself."""
        return frozenset(self._rewritten)

    def run(self, requests: int) -> Report:
        """Send ``requests`` requests; parked requests stay in flight at the end."""
        if not self._begun:
            self._begin()
        end = self.report.sent + requests
        while self.report.sent < end:
            while self._queued < QUEUED:
                step = self.life.step()
                self._clients[step.client].queue.append(step)
                self._queued += 1
            self._turn(0.05)
        return self.report

    def _begin(self) -> None:
        self._begun = True
        first = self._clients[0]
        for step in self.life.prologue():
            first.queue.append(step)
            self._queued += 1
            while first.queue or first.waiting:
                self._turn(0.01)

    def _turn(self, wait_s: float) -> None:
        for client in self._clients:
            while client.queue and len(client.waiting) < DEPTH:
                self._send(client, client.queue.popleft())
                self._queued -= 1
        for line in self._watch():
            self._wrong(line)
        now = time.monotonic()
        for key, events in self._selector.select(wait_s):
            number = key.data
            if events & selectors.EVENT_WRITE:
                self._flush(number)
            if events & selectors.EVENT_READ:
                self._receive(number)
        for client in self._clients:
            if client.waiting and now - client.waiting[0].at > PATIENCE_S:
                raise LifeError(f"no answer within {PATIENCE_S} s: {shown(client.waiting[0])}")

    def _connect(self, number: int) -> Client:
        connected = socket.create_connection(self._address, 20)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        self._selector.register(connected, selectors.EVENT_READ, number)
        return Client(connected)

    def _send(self, client: Client, step: Step) -> None:
        made = frame_of(step.request, self.knowledge, step.number)
        if made is None:
            return
        frame, body = made
        sent = Sent(step, body, time.monotonic())
        # Record the topic now: the request may take effect even if a kill interrupts it.
        if step.request.api in REWRITING:
            self._rewritten |= {
                resource["resource_name"]
                for resource in body["resources"]
                if resource["resource_type"] == 2
            }
        elif step.request.api == "create_topics":
            self._rewritten |= {topic["name"] for topic in body["topics"] if topic["configs"]}
        self.report.sent += 1
        self.report.last.append(shown(sent))
        client.may_close |= body.get("acks") == 0 or longest(body) > LONGEST_STRING
        if body.get("acks") != 0:
            client.waiting.append(sent)
        client.unsent += frame
        self._flush(step.client)

    def _flush(self, number: int) -> None:
        client = self._clients[number]
        events = selectors.EVENT_READ
        if client.unsent:
            try:
                del client.unsent[: client.socket.send(client.unsent)]
            except BlockingIOError:
                pass
            except (ConnectionResetError, BrokenPipeError):
                self._closed(number)
                return
            if client.unsent:
                events |= selectors.EVENT_WRITE
        self._selector.modify(client.socket, events, number)

    def _receive(self, number: int) -> None:
        client = self._clients[number]
        try:
            data = client.socket.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._closed(number)
            return
        client.received += data
        while len(client.received) >= 4:
            (size,) = struct.unpack_from(">i", client.received)
            if len(client.received) < 4 + size:
                return
            frame = bytes(client.received[4 : 4 + size])
            del client.received[: 4 + size]
            self._answered(client, frame)

    def _closed(self, number: int) -> None:
        client = self._clients[number]
        if not client.may_close:
            told = shown(client.waiting[0]) if client.waiting else "nothing was asked"
            self._wrong(f"the broker closed a connection: {told}")
        self._selector.unregister(client.socket)
        client.socket.close()
        again = self._connect(number)
        again.queue = client.queue
        self._clients[number] = again

    def _answered(self, client: Client, frame: bytes) -> None:
        sent = client.waiting.popleft()
        request = sent.step.request
        number, answer = decode(request.api, request.version, frame)
        if number != sent.step.number:
            raise LifeError(f"correlation {number}: {shown(sent)}")
        self._judge(sent, answer)
        learn(self.knowledge, request, sent.body, answer)

    def _judge(self, sent: Sent, answer: Answer) -> None:
        request = sent.step.request
        found = errors_in(answer)
        for error in found or ["none"]:
            self.report.answers[request.api, request.version, error] += 1
        self.report.last.append(f"   #{sent.step.number} → {str(answer)[:300]}")
        # A share partition whose state is not initialized has this error code, as in Kafka
        # (tests/wire/test_share_sessions.py). A real fault would also leave an error in the log.
        is_uninitialized = request.api == "share_fetch" and answer["error_code"] == "none"
        if "unknown_server_error" in found and not is_uninitialized:
            self._wrong(f"UNKNOWN_SERVER_ERROR: {shown(sent)}\n{answer}")
        for complaint in broken(request.api, sent.body, answer):
            self._wrong(f"{complaint}: {shown(sent)}\n{answer}")


def shown(sent: Sent) -> str:
    """Return one line about a request."""
    request = sent.step.request
    text = ", ".join(f"{name}={_short(value)}" for name, value in sent.body.items())
    return f"#{sent.step.number} client {sent.step.client}: {request.api} v{request.version} {text}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 400 else text[:400] + "…"
