"""SASL authentication of connections, before any other request is served.

:class:`Authenticator` turns frames into responses, without knowing the connection. Before
authentication only request headers are decoded, and the bodies of ApiVersions, SaslHandshake and
SaslAuthenticate. :class:`SaslGate` runs an authenticator on a connection, which serves no other
request until the client is authenticated.

The gate closes a connection in the same cases as Kafka, after the same responses.

Source: ``SaslServerAuthenticator``, ``KafkaChannel``, ``Selector``; KIP-43, KIP-152, KIP-368.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, Protocol

import structlog
from kio.schema.errors import ErrorCode

from fencepost.coordinator.runtime.background import call_later
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.logins import ListenerLogins, LoginFailure, Logins
from fencepost.coordinator.security.mechanism import (
    AuthenticationFailed,
    Exchange,
    Identity,
    TooManyLoginsError,
)
from fencepost.coordinator.security.principal import ClientSession
from fencepost.coordinator.server.request_stream import RequestStream
from fencepost.logcore.values import dataclass
from fencepost.protocol.api import APIS, ApiKey
from fencepost.protocol.codec import (
    ALL_VERSIONS,
    Request,
    decode_request,
    encode_response,
    unsupported_api_versions,
)
from fencepost.protocol.errors import MalformedRequest, UnsupportedVersion
from fencepost.protocol.messages import response_factory
from fencepost.protocol.schema import Entity
from fencepost.protocol.writer import Chunk, InFile

log = structlog.get_logger(__name__)

MIN_REAUTHENTICATION_MS: Final = 1_000
"""The minimum time between the beginnings of two reauthentications."""

_FIRST_REQUESTS: Mapping[int, tuple[int, int]] = {
    key: ALL_VERSIONS[key] for key in (ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE)
}
_TOKENS: Mapping[int, tuple[int, int]] = {
    ApiKey.SASL_AUTHENTICATE: ALL_VERSIONS[ApiKey.SASL_AUTHENTICATE]
}
_SIZE = struct.Struct(">i")

Answer = list[Chunk | InFile]
"""A frame to send."""


class LoginRefused(Exception):  # noqa: N818 - as CloseConnection
    """Ends a connection; contains the reason, and the last response if there is one."""

    def __init__(
        self, cause: str, *, answer: Iterable[Chunk | InFile] = (), user: str | None = None
    ) -> None:
        super().__init__(cause)
        self.answer = list(answer)
        self.user = user


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """The authenticated principal, its mechanism, and the session lifetime."""

    identity: Identity
    mechanism: str
    lifetime_ms: int | None
    """None for unlimited."""


class Authenticator:
    """One authentication. ``previous`` is the session that a reauthentication extends.

    ``versions`` builds the response to ApiVersions, ``now_ms`` is the broker's clock, ``host`` the
    client's address.
    """

    def __init__(
        self,
        rules: ListenerLogins,
        versions: Callable[[Request], Entity],
        now_ms: Callable[[], int],
        previous: ClientSession | None = None,
        host: str = "",
    ) -> None:
        self._rules, self._versions, self._now_ms = rules, versions, now_ms
        self._host = host
        self._previous = previous
        self._has_sent_versions = False
        self._exchange: Exchange | None = None
        self._is_bare = False
        """Whether tokens have no request header, as after a handshake of version 0."""
        self._is_other_mechanism = False
        self.mechanism: str | None = None
        """The mechanism chosen in the handshake; None before the handshake."""
        self.result: LoggedIn | None = None

    def response_to(self, frame: bytes) -> Work[Answer]:
        """Return the response to the next frame. Raises LoginRefused."""
        if self._is_other_mechanism:
            raise LoginRefused("the mechanism differs from that of the previous login")
        if self._exchange is None:
            return self._first(frame)
        answer = yield from (self._bare if self._is_bare else self._token)(frame, self._exchange)
        return answer

    # --- handshake ---

    def _first(self, frame: bytes) -> Answer:
        try:
            request = decode_request(frame, _FIRST_REQUESTS)
        except UnsupportedVersion as error:
            if error.api_key == ApiKey.API_VERSIONS and not self._has_sent_versions:
                served = ALL_VERSIONS[ApiKey.API_VERSIONS]
                return unsupported_api_versions(served, error.correlation_id)
            raise LoginRefused(f"{_api(error)} before the handshake") from error
        except MalformedRequest as error:
            raise LoginRefused(f"not a Kafka request: {error}") from error
        if request.api_key == ApiKey.SASL_HANDSHAKE:
            return self.handshake(request)
        if self._has_sent_versions:
            raise LoginRefused("ApiVersions a second time")
        entity = self._versions(request)
        self._has_sent_versions = entity.error_code == ErrorCode.none
        return _encode(request, entity)

    def handshake(self, request: Request) -> Answer:
        """Select the mechanism. Raises LoginRefused."""
        name = request.body.mechanism
        mechanism = self._rules.mechanisms.get(name)
        code = ErrorCode.none if mechanism is not None else ErrorCode.unsupported_sasl_mechanism
        make = response_factory(request.api_key, request.api_version)
        answer = _encode(
            request, make.message(error_code=code, mechanisms=tuple(self._rules.mechanisms))
        )
        if mechanism is None:
            cause = f"the mechanism {name[:50]!a} is not enabled"
            raise LoginRefused(cause, answer=answer if self._previous is None else ())
        self.mechanism = name
        if self._previous is not None and self._previous.mechanism != name:
            self._is_other_mechanism = True
        else:
            self._is_bare = request.api_version == 0
            self._exchange = mechanism.begin(self._host)
        return answer

    # --- tokens ---

    def _token(self, frame: bytes, exchange: Exchange) -> Work[Answer]:
        try:
            request = decode_request(frame, _TOKENS)
        except UnsupportedVersion as error:
            raise LoginRefused(
                f"{_api(error)} during the login", answer=_illegal_state(error)
            ) from error
        except MalformedRequest as error:
            raise LoginRefused(f"not a Kafka request: {error}") from error
        make = response_factory(request.api_key, request.api_version)
        try:
            data = yield from self._step(exchange, request.body.auth_bytes)
        except AuthenticationFailed as error:
            code = ErrorCode.sasl_authentication_failed
            body = make.error(code, error.client_message or self._usual_text)
            raise LoginRefused(
                str(error), answer=_encode(request, body), user=error.user
            ) from error
        lifetime_ms = self._finish(exchange)
        return _encode(
            request,
            make.message(
                error_code=ErrorCode.none,
                error_message="",
                auth_bytes=data,
                session_lifetime_ms=lifetime_ms,
            ),
        )

    def _bare(self, token: bytes, exchange: Exchange) -> Work[Answer]:
        try:
            data = yield from self._step(exchange, token)
        except AuthenticationFailed as error:
            raise LoginRefused(str(error), user=error.user) from error
        self._finish(exchange)
        return [_SIZE.pack(len(data)) + data]

    def _step(self, exchange: Exchange, token: bytes) -> Work[bytes]:
        try:
            data = yield from exchange.step(bytes(token))
        except TooManyLoginsError as error:
            raise LoginRefused(str(error)) from error
        before, now = self._previous, exchange.identity
        if before is not None and now is not None and before.principal != now.principal:
            client_message = (
                "Cannot change principals during re-authentication from"
                f" {before.principal.kind}.{before.principal.name}:"
                f" {now.principal.kind}.{now.principal.name}"
            )
            raise AuthenticationFailed(
                "another user", client_message=client_message, user=now.principal.name
            )
        return data

    def _finish(self, exchange: Exchange) -> int:
        """Set ``result`` if the client is authenticated; return the session lifetime in ms.

        The lifetime is 0 if it is unlimited, or if the client is not authenticated yet.
        """
        if exchange.identity is None or self.mechanism is None:
            return 0
        now_ms = self._now_ms()
        ends = exchange.identity.expires_at_ms
        bounds = [] if ends is None else [ends - now_ms]
        if most := (self._rules.max_reauth_ms or {}).get(self.mechanism):
            bounds.append(most)
        lifetime_ms = max(0, min(bounds, default=0))
        self.result = LoggedIn(exchange.identity, self.mechanism, lifetime_ms if bounds else None)
        return lifetime_ms

    @property
    def _usual_text(self) -> str:
        """Return the error message of a failed authentication; it never contains the reason."""
        what = "authentication" if self._previous is None else "re-authentication"
        return (
            f"Authentication failed during {what} due to invalid credentials with SASL"
            f" mechanism {self.mechanism}"
        )


def _encode(request: Request, entity: Entity) -> Answer:
    return encode_response(request.api_key, request.api_version, request.correlation_id, entity)


def _api(error: UnsupportedVersion) -> str:
    api = APIS.get(error.api_key)
    return f"{api.name if api else f'API key {error.api_key}'} at version {error.version}"


def _illegal_state(error: UnsupportedVersion) -> Answer:
    """Encode the requested API's response with ILLEGAL_SASL_STATE.

    Return an empty list for SaslAuthenticate, an unsupported API or version, or an API whose
    response has no top-level error.
    """
    low, high = ALL_VERSIONS.get(error.api_key, (1, 0))
    if error.api_key == ApiKey.SASL_AUTHENTICATE or not low <= error.version <= high:
        return []
    make = response_factory(error.api_key, error.version)
    entity = make.error(ErrorCode.illegal_sasl_state, "the login is not complete")
    if entity is None:
        return []
    return encode_response(error.api_key, error.version, error.correlation_id, entity)


# --- gate of a connection ---


class GatedConnection(Protocol):
    """The part of a connection that :class:`SaslGate` uses."""

    session: ClientSession
    peer_host: str
    next_request: Callable[[], Request | Work[Request | None] | None]
    """Returns the connection's next request."""

    @property
    def peer(self) -> str:
        """Return the client's address."""

    def versions(self, request: Request) -> Entity:
        """Return the response to ApiVersions."""

    def end(self) -> None:
        """Stop serving; close once all responses are written to the socket."""

    def cut_off(self, reason: str) -> None:
        """Close immediately, and log the reason."""


class SaslGate:
    """Authenticates the client of a connection, and then passes its requests on."""

    def __init__(
        self,
        connection: GatedConnection,
        stream: RequestStream,
        logins: Logins,
        rules: ListenerLogins,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._connection, self._stream, self._loop = connection, stream, loop
        self._logins, self._rules = logins, rules
        self._usual_bytes = stream.frames.max_bytes
        self._login: Authenticator | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_counted = False
        self._began_again_ms: int | None = None
        self._ends_ms = 0
        """When the session ends, by the monotonic clock, which is independent of changes of the
        wall clock."""

    def open(self) -> bool:
        """Start the gate; return False if too many clients of this address are authenticating."""
        self._is_counted = self._logins.enter(self._connection.peer_host)
        if self._is_counted:
            self._connection.next_request = self.next_request
            self._begin()
        return self._is_counted

    def close(self) -> None:
        """Cancel the timer, and no longer count this client as authenticating."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_counted:
            self._is_counted = False
            self._logins.leave(self._connection.peer_host)

    def _begin(self, previous: ClientSession | None = None) -> Authenticator:
        rules = self._rules
        self._stream.frames.max_bytes = rules.max_receive_bytes
        self._login = Authenticator(
            rules,
            self._connection.versions,
            lambda: self._logins.now_ms,
            previous,
            self._connection.peer_host,
        )
        self._timer = call_later(self._loop, rules.timeout_ms, "login", self._is_late)
        return self._login

    def _is_late(self) -> None:
        login = self._login
        self._fail("it took too long", None if login is None else login.mechanism)
        self._connection.cut_off("a login took too long")

    def next_request(self) -> Request | Work[Request | None] | None:
        """Return the steps that process the next frame of an authentication.

        After authentication, return the client's next request. Return None if bytes are missing.
        """
        if self._login is None:
            return self._next_of_user()
        try:
            frame = self._stream.frames.next_frame()
        except MalformedRequest as error:
            return self._refuse(LoginRefused(str(error)), self._login)
        if frame is None:
            return None
        self._stream.size_bytes = len(frame)
        return self._answer(self._login.response_to(bytes(frame)), self._login)

    def _next_of_user(self) -> Request | Work[Request | None] | None:
        """Return the next request of an authenticated client whose session has a limited lifetime.

        A SaslHandshake begins a reauthentication. Any other request after the end of the session
        closes the connection.
        """
        coming = self._stream.next_request()
        if coming is None:
            return None
        session, logins = self._connection.session, self._logins
        if isinstance(coming, Request) and coming.api_key == ApiKey.SASL_HANDSHAKE:
            now_ms, before_ms = logins.monotonic_ms, self._began_again_ms
            if before_ms is None or now_ms - before_ms >= MIN_REAUTHENTICATION_MS:
                self._began_again_ms = now_ms
                login = self._begin(session)
                return self._answer(_handshake(login, coming), login)
        if logins.monotonic_ms > self._ends_ms:
            logins.expired += 1
            self._connection.end()
            return None
        return coming

    def _answer(self, work: Work[Answer], login: Authenticator) -> Work[None]:
        """Take one step of an authentication, and send its response."""
        try:
            self._stream.put((yield from work))
        except LoginRefused as error:
            yield from self._refuse(error, login)
            return
        except Exception:
            log.exception("login broken off", peer=self._connection.peer)
            yield from self._refuse(LoginRefused("an error of the broker"), login)
            return
        if login.result is not None:
            self._admit(login.result)

    def _admit(self, result: LoggedIn) -> None:
        self.close()
        self._login = self._timer = None
        self._stream.frames.max_bytes = self._usual_bytes
        connection, name = self._connection, result.mechanism
        expires_at_ms = None
        if result.lifetime_ms is None:
            connection.next_request = self._stream.next_request
        else:
            expires_at_ms = self._logins.now_ms + result.lifetime_ms
            self._ends_ms = self._logins.monotonic_ms + result.lifetime_ms
        self._logins.succeeded[self._rules.listener, name] += 1
        connection.session = replace(
            connection.session,
            principal=result.identity.principal,
            mechanism=name,
            expires_at_ms=expires_at_ms,
        )

    def _refuse(self, error: LoginRefused, login: Authenticator) -> Work[None]:
        """Wait for the failure delay, without reading; then send the refusal and close."""
        self._fail(str(error), login.mechanism, error.user)
        if self._timer is not None:
            self._timer.cancel()
        if self._rules.failure_delay_ms:
            pause: asyncio.Future[None] = self._loop.create_future()
            call_later(self._loop, self._rules.failure_delay_ms, "failed login", _Completion(pause))
            yield pause
        self._stream.put(error.answer)
        self._connection.end()

    def _fail(self, cause: str, mechanism: str | None, user: str | None = None) -> None:
        peer, listener = self._connection.peer, self._rules.listener
        self._logins.has_failed(LoginFailure(peer, listener, mechanism, cause, user))


def open_gate(
    connection: GatedConnection,
    stream: RequestStream,
    logins: Logins,
    loop: asyncio.AbstractEventLoop,
) -> SaslGate | None:
    """Create the gate of a connection, and close the connection if it may not authenticate now.

    Return None for a listener without SASL.
    """
    rules = logins.of(connection.session.listener)
    if rules is None:
        return None
    gate = SaslGate(connection, stream, logins, rules, loop)
    if not gate.open():
        connection.cut_off("too many connections of its address have not logged in")
    return gate


class _Completion:
    """Completes a future, unless it was cancelled."""

    def __init__(self, future: asyncio.Future[None]) -> None:
        self._future = future

    def __call__(self) -> None:
        if not self._future.done():
            self._future.set_result(None)


def _handshake(login: Authenticator, request: Request) -> Work[Answer]:
    yield from ()
    return login.handshake(request)
