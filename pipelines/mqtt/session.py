"""One connection to an MQTT broker on which the bridge itself sends the acknowledgements.

paho sends PUBREC as soon as a QoS 2 message arrives, even with ``manual_ack``: from then on the
broker keeps only the packet id, and a crash before the commit would lose the message. So this
module withholds PUBREC as well as PUBCOMP, and delivers the message at PUBLISH, not at PUBREL:

    PUBLISH → commit (data, packet id) → PUBREC        PUBREL → commit (packet id gone) → PUBCOMP

The ledger then has the packet id of every redelivered PUBLISH, and PUBCOMP, which allows the broker
to reuse the id, follows the commit of the release. :mod:`fencepost.pipelines.mqtt.bridge` describes
the effect of a failure at each point in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self

import aiomqtt
import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from fencepost.client.security import PLAINTEXT, Security, SecurityError
from fencepost.client.tls import ssl_context
from fencepost.client.tls_errors import refusal
from fencepost.pipelines.mqtt.routes import Mapped

BARRIER = "fencepost/barrier"
"""A filter that no client subscribes to: UNSUBACK for it marks a position in the packet stream."""

EVENT_BYTES = 100
"""The assumed size of an event without its topic, payload and properties."""

SESSION_EXPIRY_S = 0xFFFFFFFF
"""MQTT 5: the broker never drops the session by itself."""


DISCONNECT_S = 0.5
"""The time limit for sending DISCONNECT; the broker keeps the session without one, too."""

EXPIRY = "message-expiry-s"
ATTRIBUTES = {
    "ContentType": "content-type",
    "ResponseTopic": "response-topic",
    "CorrelationData": "correlation-data",
    "PayloadFormatIndicator": "payload-format",
    "MessageExpiryInterval": EXPIRY,
}
"""MQTT 5's properties of a message by paho's names, and their names in headers."""

REFUSALS = frozenset({134, 135, 138, 140})
"""Reason codes of CONNACK: bad user name or password, not authorized, banned, bad method. paho
translates the codes of 3.1.1 into these."""


@dataclass(frozen=True, slots=True)
class Publish:
    """A message that has arrived and is not acknowledged yet."""

    packet_id: int
    qos: int
    dup: bool
    retain: bool
    topic: str
    payload: bytes
    properties: tuple[tuple[str, str], ...] = ()
    """MQTT 5's user properties; a name may occur several times."""
    attributes: tuple[tuple[str, bytes], ...] = ()
    """MQTT 5's other properties of the message, by their header names."""

    @property
    def size(self) -> int:
        """Bytes of memory while the message waits."""
        property_bytes = sum(
            len(name) + len(value) for name, value in (*self.properties, *self.attributes)
        )
        return EVENT_BYTES + len(self.topic) + len(self.payload) + property_bytes

    @property
    def lasting(self) -> tuple[tuple[str, bytes], ...]:
        """The attributes that a redelivery repeats: all but the remaining time, which decreases."""
        return tuple(attribute for attribute in self.attributes if attribute[0] != EXPIRY)


@dataclass(frozen=True, slots=True)
class Release:
    """The broker's PUBREL: it has forgotten the message, and the packet id may be reused next."""

    packet_id: int
    size: int = EVENT_BYTES


@dataclass(frozen=True, slots=True)
class Settled:
    """SUBSCRIBE was answered: the broker has repeated its messages in flight (MQTT 5, 4.4)."""

    size: int = EVENT_BYTES


Event = Publish | Release | Settled


@dataclass(frozen=True, slots=True)
class Address:
    """The MQTT broker's address, and the login. ``version`` is 4 (3.1.1) or 5."""

    host: str
    port: int = 1883
    client_id: str = "fencepost-bridge"
    version: int = 5
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    keepalive_s: int = 30
    max_in_flight: int = 2_000
    """MQTT 5's Receive Maximum: the number of unacknowledged messages the broker may send."""
    max_queued: int = 10_000
    """With this many events waiting, the socket is not read until half of them are gone."""
    max_queued_bytes: int = 64 * 1024 * 1024
    """The same limit in bytes, because each of 2,000 messages in flight may be of any size."""
    security: Security = PLAINTEXT
    """Kafka's properties: ``SSL`` encrypts, ``SASL_SSL`` with the mechanism ``PLAIN`` also sends a
    user name and a password, unless they are given above."""

    def __post_init__(self) -> None:
        if self.security.has_login and self.security.mechanism != "PLAIN":
            raise SecurityError("sasl.mechanism: MQTT knows user names and passwords, so PLAIN")

    @property
    def user(self) -> str | None:
        """The user name of the login; None without one."""
        return self.username or self.security.username or None


def _bytes_of(value: str | bytes | int) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


class MqttSession:
    """A connection with a persistent session: ``async with MqttSession(address) as session``."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._events: deque[Event] = deque()
        self._queued_bytes = 0
        self._arrived = asyncio.Event()
        self._paused_socket: Any = None
        self.pauses = 0
        """How often reading was paused because too many events waited."""
        self.is_new = True
        """Whether the broker had no session for this client id."""
        self.session_expiry_s: int | None = None
        """MQTT 5: the broker's session expiry interval, if it differs from the requested one."""
        self._is_settled = False
        self._tls_failure: ssl.SSLError | None = None
        self._client = self._make_client()
        self._paho: Any = self._client._client  # the hooks below are not public
        self._send_pubrec = self._paho._send_pubrec
        self._take_over()

    def _make_client(self) -> aiomqtt.Client:
        address = self._address
        shared: dict[str, Any] = {
            "hostname": address.host,
            "port": address.port,
            "identifier": address.client_id,
            "username": address.user,
            "password": address.password or address.security.password or None,
            "keepalive": address.keepalive_s,
            "tls_context": ssl_context(address.security),
        }
        if address.version == 5:
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = SESSION_EXPIRY_S
            properties.ReceiveMaximum = min(address.max_in_flight, 65_535)
            return aiomqtt.Client(
                **shared,
                protocol=aiomqtt.ProtocolVersion.V5,
                clean_start=False,
                properties=properties,
            )
        return aiomqtt.Client(**shared, protocol=aiomqtt.ProtocolVersion.V311, clean_session=False)

    def _take_over(self) -> None:
        """Hook into paho where it would acknowledge by itself."""
        client = self._paho
        client.manual_ack_set(True)
        client._send_pubrec = lambda _mid: paho.MQTT_ERR_SUCCESS
        handle_publish, on_connect = client._handle_publish, client.on_connect
        handle_suback, on_disconnect = client._handle_suback, client.on_disconnect
        asyncio_loop = asyncio.get_running_loop()

        def publish() -> Any:
            result = handle_publish()
            # paho keeps a QoS 2 message until its PUBREL; the bridge needs it now.
            while client._in_messages:
                _, message = client._in_messages.popitem(last=False)
                self._on_message(client, None, message)
            return result

        def release() -> Any:
            packet = client._in_packet["packet"]
            if len(packet) < 2:
                return paho.MQTT_ERR_PROTOCOL
            self._push(Release(int.from_bytes(packet[:2], "big")))
            return paho.MQTT_ERR_SUCCESS

        def subscribed() -> Any:
            if not self._is_settled:
                self._is_settled = True
                self._push(Settled())
            return handle_suback()

        def disconnected(*arguments: Any) -> Any:
            # aiomqtt would wait for CONNACK until its timeout.
            asyncio_loop.call_soon_threadsafe(self._fail_connecting)
            return on_disconnect(*arguments)

        def connected(*arguments: Any) -> Any:
            self.is_new = not arguments[2].session_present
            self.session_expiry_s = getattr(arguments[4], "SessionExpiryInterval", None)
            return on_connect(*arguments)

        client._handle_publish, client._handle_pubrel = publish, release
        self._remember_tls_failures()
        client._handle_suback = subscribed
        client.on_connect, client.on_message = connected, self._on_message
        client.on_disconnect = disconnected

    def _remember_tls_failures(self) -> None:
        """Keep TLS errors, which paho logs and aiomqtt turns into a text.

        With TLS 1.3 the broker's rejection of a certificate arrives in place of a CONNACK.
        """
        connect, receive = self._client._client_connect, self._paho._sock_recv

        is_encrypted = self._address.security.has_tls

        def noted(work: Any) -> Any:
            def done(*arguments: Any) -> Any:
                try:
                    return work(*arguments)
                except ConnectionResetError as error:
                    if not is_encrypted or work is receive:
                        raise
                    raise ConnectionResetError(
                        "closed during the TLS handshake: does that port speak TLS?"
                    ) from error
                except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                    raise  # the connection was cut off
                except ssl.SSLError as error:
                    self._tls_failure = error
                    raise

            return done

        self._paho._sock_recv = noted(receive)
        self._client._client_connect = noted(connect)  # type: ignore[method-assign]

    def _fail_connecting(self) -> None:
        if not self._client._connected.done():
            self._client._connected.set_exception(aiomqtt.MqttError("no CONNACK came"))

    def _on_message(self, _client: Any, _userdata: Any, message: paho.MQTTMessage) -> None:
        packet_properties = message.properties
        properties = getattr(packet_properties, "UserProperty", None) or ()
        with contextlib.suppress(UnicodeDecodeError):  # such a topic violates the protocol
            self._push(
                Publish(
                    message.mid,
                    message.qos,
                    bool(message.dup),
                    bool(message.retain),
                    message.topic,
                    bytes(message.payload),
                    tuple((str(name), str(text)) for name, text in properties),
                    tuple(
                        (name, _bytes_of(getattr(packet_properties, attribute)))
                        for attribute, name in ATTRIBUTES.items()
                        if hasattr(packet_properties, attribute)
                    ),
                )
            )

    def _push(self, event: Event) -> None:
        self._events.append(event)
        self._queued_bytes += event.size
        self._arrived.set()
        if self._waits_more_than(1) and self._paused_socket is None:
            self._paused_socket = self._paho.socket()
            if self._paused_socket is not None:
                self.pauses += 1
                asyncio.get_running_loop().remove_reader(self._paused_socket.fileno())

    def _waits_more_than(self, share: float) -> bool:
        """Return whether the queue has reached this share of its limit, in number or bytes."""
        most, most_bytes = self._address.max_queued, self._address.max_queued_bytes
        return len(self._events) >= max(1, most * share) or self._queued_bytes >= most_bytes * share

    def _resume(self) -> None:
        sock, self._paused_socket = self._paused_socket, None
        if sock is not None and sock is self._paho.socket():
            asyncio.get_running_loop().add_reader(sock.fileno(), self._read, sock)

    def _read(self, sock: Any) -> None:
        """Read the socket, and then the bytes that TLS has already taken out of it."""
        self._paho.loop_read()
        while sock is self._paho.socket() and getattr(sock, "pending", int)():
            self._paho.loop_read()

    async def speaks(self) -> bool:
        """Return whether the broker sends anything in the session before a SUBSCRIBE.

        The broker does so if messages are unacknowledged (MQTT 5, 4.4): it repeats them right after
        CONNACK, before it answers a request. Raises aiomqtt.MqttError.
        """
        waiting: asyncio.Future[Any] = asyncio.ensure_future(self._arrived.wait())
        asking: asyncio.Future[Any] = asyncio.ensure_future(self._client.unsubscribe(BARRIER))
        try:
            await asyncio.wait([waiting, asking], return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
            return bool(self._events)
        finally:
            waiting.cancel()
            asking.cancel()

    async def subscribe(self, mapped: Mapped) -> None:
        """Subscribe to the routes' filters. Raises aiomqtt.MqttError if one is refused.

        With MQTT 5 the broker sends retained messages only for a new subscription. MQTT 3.1.1 has
        no such option: the broker sends them again for every connection.
        """
        if mapped.covered:  # a bridge with other routes may have subscribed to them
            await self._client.unsubscribe(list(mapped.covered))
        subscriptions = mapped.subscriptions
        if self._address.version == 5:
            retained = SubscribeOptions.RETAIN_SEND_IF_NEW_SUB
            granted: Any = await self._client.subscribe(
                [
                    (pattern, SubscribeOptions(qos=qos, retainHandling=retained))
                    for pattern, qos in subscriptions
                ]
            )
        else:
            granted = await self._client.subscribe(subscriptions)
        for (pattern, qos), code in zip(subscriptions, granted, strict=True):
            number = code if isinstance(code, int) else int(code.value)
            if number != qos:
                raise SubscriptionRefusedError(f"{pattern!r}: asked for QoS {qos}, got {number}")

    async def gather(self, most: int, most_bytes: int, linger_ms: float) -> list[Event]:
        """Wait for an event, and briefly for further ones; return at most ``most``, in order.

        The events' sizes add up to at most ``most_bytes``, unless the first event alone is larger.
        Raises aiomqtt.MqttError if the connection is lost.
        """
        lost: asyncio.Future[Any] = self._client._disconnected
        if not self._events:
            self._arrived.clear()
            waiting: asyncio.Future[Any] = asyncio.ensure_future(self._arrived.wait())
            try:
                await asyncio.wait([waiting, lost], return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
        if lost.done():
            raise aiomqtt.MqttError("the connection is gone") from lost.exception()
        if linger_ms and len(self._events) < most and self._queued_bytes < most_bytes:
            await asyncio.sleep(linger_ms / 1000)
        taken: list[Event] = []
        total = 0
        while self._events and len(taken) < most:
            total += self._events[0].size
            if taken and total > most_bytes:
                break
            taken.append(self._events.popleft())
            self._queued_bytes -= taken[-1].size
        if self._paused_socket is not None and not self._waits_more_than(0.5):
            self._resume()
        return taken

    def acknowledge(self, event: Event) -> None:
        """Send PUBACK, PUBREC or PUBCOMP; on a dead connection do nothing: the broker resends."""
        if isinstance(event, Settled):
            return
        if isinstance(event, Release):
            self._paho.ack(event.packet_id, 2)
        elif event.qos == 1:
            self._paho.ack(event.packet_id, 1)
        elif event.qos == 2:
            self._send_pubrec(event.packet_id)

    async def __aenter__(self) -> Self:
        try:
            await self._connect()
        except BaseException as error:
            # A failed connection must not take over the session from the next one.
            self._paho._sock_close()
            reason = self._refusal(error)
            if reason:
                where = f"{self._address.host}:{self._address.port}"
                raise LoginRefusedError(f"MQTT {where}: {reason}") from error
            raise
        return self

    async def _connect(self) -> None:
        """Connect in a thread that does not delay the end of the process.

        aiomqtt uses a thread of the event loop's executor. A process waits for such threads at its
        end, even for one that is looking up an address or connecting to a host that does not
        answer.
        """
        loop, connect = asyncio.get_running_loop(), self._client._client_connect
        connected: asyncio.Future[None] = loop.create_future()

        def on_connected(error: BaseException | None) -> None:
            if connected.done():
                self._paho._sock_close()
            elif error is None:
                connected.set_result(None)
            else:
                connected.set_exception(error)

        def work() -> None:
            failure = None
            try:
                connect()
            except Exception as error:  # noqa: BLE001 - raised in the caller
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(on_connected, failure)

        threading.Thread(target=work, name="mqtt-connect", daemon=True).start()
        try:
            await asyncio.wait([connected])
        finally:
            connected.cancel()
        self._client._client_connect = connected.result  # type: ignore[method-assign]
        await self._client.__aenter__()

    def _refusal(self, error: BaseException) -> str | None:
        """Return why a retry with the same credentials would fail; None if it might succeed."""
        if self._tls_failure is not None:
            return refusal(self._tls_failure, self._address.host)
        code = getattr(getattr(error, "rc", None), "value", None)
        if isinstance(error, aiomqtt.MqttCodeError) and code in REFUSALS:
            user = self._address.user
            user_text = f"user {user!r}" if user else "no user name was given"
            return f"the broker refuses the login ({user_text}): {error}"
        return None

    async def __aexit__(self, *_exc: object) -> None:
        with contextlib.suppress(aiomqtt.MqttError, TimeoutError):
            await asyncio.wait_for(self._client.__aexit__(None, None, None), DISCONNECT_S)
        self._paho._sock_close()


class SubscriptionRefusedError(aiomqtt.MqttError):
    """The broker does not grant a route's subscription; a retry would not help."""


class LoginRefusedError(aiomqtt.MqttError):
    """The broker rejects our credentials, or we reject its certificate."""
