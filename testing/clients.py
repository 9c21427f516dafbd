"""Clients of other libraries on a broker under test; they are closed before the broker ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any, Final, Protocol, TypeVar

import structlog

from fencepost.testing.faults import Faults

C = TypeVar("C")

_log = structlog.get_logger(__name__)

STYLES: Final = {
    "aiokafka": "aiokafka",
    "cimpl": "confluent",
    "confluent_kafka": "confluent",
    "kafka": "kafka-python",
}
"""The ``style`` of a client's settings, by the package that has the client's class."""

PACKAGES: Final = {
    "aiokafka": "aiokafka",
    "confluent_kafka": "confluent-kafka",
    "kafka": "kafka-python",
}
"""The package to install for a client, by the module that has the client's class."""

CLOSE_S: Final = 1.0
"""How long the close of one client may wait for its broker."""


class ServesClients(Protocol):
    """The part of a broker or a cluster under test that its clients need."""

    faults: Faults

    @property
    def trouble(self) -> str:
        """The nodes that are down or paused, in a sentence; empty if none is."""

    def name(self, base: str) -> str:
        """Return a name that no other test uses."""

    def client_config(self, user: str | None, style: str) -> dict[str, Any]:
        """Return the settings that connect a client."""

    def serve_again(self) -> None:
        """Start or resume every node."""


class Clients:
    """The clients that a test or a fixture has made; :meth:`close` closes all of them."""

    def __init__(self, kafka: ServesClients) -> None:
        self._kafka = kafka
        self._made: list[Any] = []
        self._numbers = count(1)

    def make(
        self,
        kind: Callable[..., C],
        args: tuple[Any, ...],
        settings: Mapping[str, Any],
        user: str | None,
    ) -> C:
        """Call ``kind`` with settings that connect the client; see ``KafkaUnderTest.client``."""
        style = _style_of(kind)
        connects = self._kafka.client_config(user, style)
        if style == "confluent":
            given_settings = args[0] if args else {}
            if not isinstance(given_settings, Mapping):
                raise TypeError(
                    f"settings of confluent-kafka are a mapping by name, not {given_settings!r}"
                )
            made = kind({**connects, **given_settings}, *args[1:], **settings)
        else:
            made = kind(*args, **{**connects, **settings})
        self._made.append(made)
        return made

    def producer(self, name: str) -> Callable[..., Any]:
        """Return a function that makes producers of a class, such as ``kafka.KafkaProducer``."""

        def make(settings: Mapping[str, Any] | None = None, *, user: str | None = None) -> Any:
            return self._make(_class(name), (), settings or {}, user)

        return make

    def consumer(self, name: str) -> Callable[..., Any]:
        """Return a function that makes subscribed consumers of a class."""

        def make(
            *topics: str,
            group: str | None = None,
            settings: Mapping[str, Any] | None = None,
            user: str | None = None,
        ) -> Any:
            kind = _class(name)
            group = self._kafka.name("consumers") if group is None else group
            usual = {
                "group.id": group,
                "client.id": f"{group}-{next(self._numbers)}",
                "auto.offset.reset": "earliest",
            }
            if _style_of(kind) == "confluent":
                made = self._make(kind, (), {**usual, **(settings or {})}, user)
                if topics:
                    made.subscribe(list(topics))
                return made
            usual = {key.replace(".", "_"): value for key, value in usual.items()}
            return self._make(kind, topics, {**usual, **(settings or {})}, user)

        return make

    def _make(
        self, kind: Any, args: tuple[str, ...], settings: Mapping[str, Any], user: Any
    ) -> Any:
        if _style_of(kind) == "confluent":
            return self.make(kind, (settings,), {}, user)
        return self.make(kind, args, settings, user)

    def close(self) -> None:
        """Close the clients, the newest first.

        Before that, faults are removed, and a broker that is down is started: without a broker,
        librdkafka's consumer waits 45 seconds to leave its group.
        """
        made, self._made = self._made, []
        if not made:
            return
        self._kafka.faults.clear()
        if self._kafka.trouble:
            _attempt("start the broker for its clients", self._kafka.serve_again)
        while made:
            _attempt("close a client", partial(_close, made.pop()))


def _attempt(what: str, work: Callable[[], object]) -> None:
    """Do ``work`` and log its error, which must not hide the test's error or stop the clean-up."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - see above
        _log.warning(f"could not {what}", error=str(error))


def _style_of(kind: object) -> str:
    for cls in inspect.getmro(kind) if inspect.isclass(kind) else ():
        style = STYLES.get(cls.__module__.partition(".")[0])
        if style is not None:
            return style
    raise TypeError(f"kind is a class of confluent-kafka, aiokafka or kafka-python, not {kind!r}")


def _class(name: str) -> Any:
    module, _, cls = name.rpartition(".")
    try:
        return getattr(import_module(module), cls)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs: pip install {PACKAGES[module]}") from error


def _close(client: Any) -> None:
    """Close a client; one whose methods are coroutines is left to its ``async with``."""
    if hasattr(client, "purge"):  # librdkafka's producer, whose close() may wait without a limit
        client.purge()
        client.flush(CLOSE_S)
        return
    close = getattr(client, "close", None)
    if close is None or inspect.iscoroutinefunction(close):
        return
    methods: Collection[str] = ()
    with suppress(ValueError):  # a function in C has no signature
        methods = inspect.signature(close).parameters
    limits = {"timeout": CLOSE_S, "timeout_ms": int(CLOSE_S * 1000)}
    close(**{name: value for name, value in limits.items() if name in methods})
