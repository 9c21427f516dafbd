"""Recording of the requests of groups and transactional ids, for ``fencepost record``.

While ``fencepost.history.requests.enable`` is true, the history gets an entry for each request that
concerns a group or a transactional id, and that a coordinator or the leader of a share partition
handles. The entry contains the frames of the request and of its response, and the sequence number
of the request. Keys, values, headers and the metadata of committed offsets are removed first.
Handlers are not wrapped until the setting is true for the first time, so that requests have no
additional cost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass, replace
from functools import partial
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import CloseConnection, Context, Registry, Run
from fencepost.coordinator.history.entries import MAX_REQUEST_BYTES
from fencepost.coordinator.history.recorded_apis import CONNECTION_CLOSED, REQUEST, SUBJECTS
from fencepost.coordinator.runtime.background import swallow
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.batch import HEADER_SIZE
from fencepost.logcore.machine import DomainError, Event
from fencepost.logcore.values import dataclass
from fencepost.protocol.api import KNOWN_APIS, ApiKey
from fencepost.protocol.codec import encode_request, encode_response

if TYPE_CHECKING:
    from fencepost.coordinator.broker_services import Services

MAX_SUBJECTS: Final = 16
"""The maximum number of groups and transactional ids for which the end of a connection is recorded.
"""

MAX_PARTITIONS: Final = 1_000
"""The maximum number of elements of an array in a recorded request or response."""

_LENGTH_BYTES: Final = 4
"""The size of a frame's length prefix; the prefix is not recorded."""

_LEFT_OUT: Final[Mapping[str, Callable[[Any], object]]] = {
    # A Produce request keeps the headers of its batches, because they contain the producer and the
    # sequence.
    "records": lambda records: None if records is None else bytes(records[:HEADER_SIZE]),
    "committed_metadata": lambda _text: "",
}
"""The functions that reduce the content of a request's fields, by field name."""
_LEFT_OUT_OF_RESPONSES: Final[Mapping[str, Callable[[Any], object]]] = {
    "records": lambda records: None if records is None else b"",
    # The leader's JoinGroup response has the subscriptions of all members.
    "members": lambda members: () if members and hasattr(members[0], "metadata") else members,
    "assignment": lambda assignment: b"" if isinstance(assignment, bytes) else assignment,
}
"""The functions that reduce the content of a response's fields, by field name. (The recorded
requests contain the subscriptions and assignments.)"""


@dataclass(slots=True)
class _Connection:
    """An open connection whose requests are recorded."""

    number: int
    subjects: dict[tuple[str, str], Origin]
    """The groups and transactional ids that this connection's requests have named. The key is the
    scope and the name; the value is the client of the last such request."""


class TooLargeError(Exception):
    """A message is larger than the limit for recorded messages."""


class RequestRecorder:
    """Records the requests of all connections to one broker while :attr:`is_on`."""

    def __init__(self, services: Services, registry: Registry) -> None:
        self._history, self._clock = services.history, services.clock
        self.is_on = True
        self._shard = f"broker {services.node_id}"
        self._sequence = services.clock.now_ms() * 1000
        """The last number given to a request or a connection. The numbers also increase from one
        start of the broker to the next."""
        self._connections: dict[int, _Connection] = {}
        for key in SUBJECTS:
            registry.wrap(key, partial(self._wrapped, key))

    def closed(self, connection: object) -> None:
        """Record that a client's connection has closed."""
        recorded = self._connections.pop(id(connection), None)
        if recorded is None:
            return
        self._sequence += 1
        for (scope, subject), origin in recorded.subjects.items():
            detail = {"connection": recorded.number, "sequence": self._sequence}
            event = Event(CONNECTION_CLOSED, subject, detail, quiet=True)
            self._history.remember(scope, self._shard, event, origin, CONNECTION_CLOSED)

    # --- inside ---

    def _wrapped(self, key: ApiKey, run: Run) -> Run:
        scope, field = SUBJECTS[key]

        def recorded(ctx: Context) -> Any:
            subject = getattr(ctx.body, field, None) if self.is_on else None
            if not subject:
                return run(ctx)
            note = self._note(ctx, scope, subject)
            try:
                return _observed(run(ctx), note)
            except BaseException as error:
                note(None, error)
                raise

        return recorded

    def _note(
        self, ctx: Context, scope: str, subject: str
    ) -> Callable[[Any, BaseException | None], None]:
        """Begin the entry of a request; the returned function records the entry with the result."""
        self._sequence += 1
        sequence, received_ms = self._sequence, self._clock.now_ms()
        connection = self._connections.get(id(ctx.connection))
        if connection is None:
            connection = self._connections[id(ctx.connection)] = _Connection(sequence, {})
        if len(connection.subjects) < MAX_SUBJECTS or (scope, subject) in connection.subjects:
            connection.subjects[scope, subject] = ctx.origin
        # Encoded at once: a handler may change the records of a request in place.
        request = _frame(ctx, ctx.body, is_request=True)

        def done(response: Any, error: BaseException | None) -> None:
            answered = None if response is None else _frame(ctx, response, is_request=False)
            detail = {
                "connection": connection.number,
                "sequence": sequence,
                "answered_after": self._sequence,
                "received_ms": received_ms,
                "api": ctx.api_key,
                "version": ctx.version,
                "request": request,
                "response": answered,
                "error": _name_of(error),
            }
            event = Event(REQUEST, subject, detail, quiet=True)
            name = f"request {KNOWN_APIS[ctx.api_key].name}"
            self._history.remember(scope, self._shard, event, ctx.origin, name)

        return done


def _name_of(error: BaseException | None) -> str | None:
    """Return the error of the response; None if the connection was closed without one."""
    if isinstance(error, DomainError):
        return error_code(error).name
    is_answered = isinstance(error, Exception) and not isinstance(error, CloseConnection)
    return "unknown_server_error" if is_answered else None


def _observed(result: Any, note: Callable[[Any, BaseException | None], None]) -> Any:
    """Pass a handler's outcome to ``note``; return a result of the same kind as the handler's.

    The kinds are a response, an awaitable and a generator.
    """
    if isinstance(result, GeneratorType):
        return _observed_steps(result, note)
    if hasattr(type(result), "__await__"):
        return _observed_awaitable(result, note)
    note(result, None)
    return result


def _observed_steps(
    steps: Work[Any], note: Callable[[Any, BaseException | None], None]
) -> Work[Any]:
    try:
        result = yield from steps
    except BaseException as error:
        note(None, error)
        raise
    return _observed(result, note)


async def _observed_awaitable(
    awaitable: Awaitable[Any], note: Callable[[Any, BaseException | None], None]
) -> Any:
    try:
        result = await awaitable
    except BaseException as error:
        note(None, error)
        raise
    return _observed(result, note)


def _frame(ctx: Context, message: Any, *, is_request: bool) -> bytes | int:
    """Return a message's frame without records; for a message that is too large, its size."""
    key, version, correlation_id = ctx.api_key, ctx.version, ctx.correlation_id
    # No failure of the recording may fail the request.
    with swallow("request not recorded"), suppress(TooLargeError):
        if is_request:
            reduced = _reduced(message, _LEFT_OUT)
            chunks = encode_request(key, version, correlation_id, ctx.client_id, reduced)
        else:
            reduced = _reduced(message, _LEFT_OUT_OF_RESPONSES)
            chunks = encode_response(key, version, correlation_id, reduced)  # type: ignore[assignment]
        frame = b"".join(chunks)
        return frame[_LENGTH_BYTES:] if len(frame) <= MAX_REQUEST_BYTES else len(frame)
    return ctx.size_bytes


def _reduced(message: Any, left_out: Mapping[str, Callable[[Any], object]]) -> Any:
    """Return a copy of a message without the content of the fields ``left_out``."""
    changed: dict[str, object] = {}
    for name in message.__dataclass_fields__:
        value = getattr(message, name)
        if name in left_out:
            changed[name] = left_out[name](value)
        elif isinstance(value, tuple) and value:
            if len(value) > MAX_PARTITIONS:
                raise TooLargeError
            if is_dataclass(value[0]):
                changed[name] = tuple(_reduced(item, left_out) for item in value)
    return replace(message, **changed) if changed else message
