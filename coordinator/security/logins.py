"""SASL logins: the mechanisms of each listener, connections not yet logged in, and failures.

Source: ``SaslChannelBuilder``, ``BrokerSecurityConfigs``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, cast

import structlog

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import HIDDEN, ConfigError
from fencepost.coordinator.runtime.rate_limited_log import RateLimitedLog
from fencepost.coordinator.security.mechanism import Mechanism
from fencepost.coordinator.security.oauth_login import OAUTHBEARER, OauthLogin, oauth_login
from fencepost.coordinator.security.password_checks import PasswordChecks
from fencepost.coordinator.security.plain_login import PLAIN, PlainLogin
from fencepost.coordinator.security.scram_login import ScramLogin
from fencepost.coordinator.security.users import ScramUsers
from fencepost.logcore.clock import Clock, SystemClock
from fencepost.logcore.values import dataclass
from fencepost.protocol.jaas import JaasError, parse_jaas
from fencepost.protocol.scram import SCRAM_MECHANISMS

MECHANISMS: Final = "sasl.enabled.mechanisms"
JAAS: Final = "sasl.jaas.config"
PER_IP: Final = "fencepost.unauthenticated.connections.per.ip"

SERVED: Final = (PLAIN, *SCRAM_MECHANISMS, OAUTHBEARER)
"""The mechanisms that Fencepost supports."""

SHOWN_CHARACTERS: Final = 100
"""The maximum number of characters of a user's name in a log line; the client chooses the name."""

_USER = "user_"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ListenerLogins:
    """The login settings of one listener's clients."""

    listener: str
    mechanisms: Mapping[str, Mechanism]
    """The enabled mechanisms, by name, in the order of ``sasl.enabled.mechanisms``."""
    max_receive_bytes: int = 65_536
    """The maximum size of a frame before the login completes [sasl.server.max.receive.size]."""
    failure_delay_ms: int = 100
    """The delay of the response to a failed login [connection.failed.authentication.delay.ms]."""
    timeout_ms: int = 10_000
    """The time limit for a whole login [fencepost.authentication.timeout.ms]."""
    max_reauth_ms: Mapping[str, int] | None = None
    """The lifetime of a login by mechanism, if it is limited [connections.max.reauth.ms]."""


@dataclass(frozen=True, slots=True)
class LoginFailure:
    """A login that failed, for the operator."""

    peer: str
    """Host and port."""
    listener: str
    mechanism: str | None
    """None if the client has not named a mechanism."""
    cause: str
    user: str | None = None
    """The user's name as the client sent it."""


class Logins:
    """The logins of all listeners of a broker."""

    def __init__(
        self, listeners: Iterable[ListenerLogins], *, clock: Clock, max_per_ip: int = 1_000
    ) -> None:
        self._listeners = {listener.listener: listener for listener in listeners}
        self._clock = clock
        self._max_per_ip = max_per_ip
        self._trying: Counter[str] = Counter()
        self.succeeded: Counter[tuple[str, str]] = Counter()
        """Successful logins, by listener and mechanism."""
        self.failed: Counter[tuple[str, str]] = Counter()
        """Failed logins, by listener and mechanism; the mechanism is empty if none was chosen."""
        self.refused = 0
        """Connections rejected by the limit for their address [fencepost.unauthenticated…]."""
        self.expired = 0
        """Connections closed for using an expired login."""
        self._lines = RateLimitedLog("more logins failed")

    @classmethod
    def of_listeners(
        cls,
        names: Iterable[str],
        config: BrokerConfig,
        users: ScramUsers,
        checks: PasswordChecks,
        clock: Clock,
    ) -> Logins:
        """Build the logins of the listeners with SASL. Raises ConfigError."""
        users.prepare()
        logins = [listener_logins(config, name, users, checks, clock) for name in names]
        return cls(logins, clock=clock, max_per_ip=config.int(PER_IP))

    def of(self, listener: str) -> ListenerLogins | None:
        """Return the login settings of a listener; None if it has no SASL."""
        return self._listeners.get(listener)

    @property
    def now_ms(self) -> int:
        """The broker's wall-clock time."""
        return self._clock.now_ms()

    @property
    def monotonic_ms(self) -> int:
        """The broker's monotonic time, for durations."""
        return self._clock.monotonic_ms()

    @property
    def trying(self) -> int:
        """The number of connections that have not completed a login."""
        return self._trying.total()

    # --- connections before the login ---

    def enter(self, host: str) -> bool:
        """Count a connection before its login; return False if its address is at the limit."""
        if self._trying[host] >= self._max_per_ip:
            self.refused += 1
            return False
        self._trying[host] += 1
        return True

    def leave(self, host: str) -> None:
        """Stop counting a connection that has logged in or has ended."""
        self._trying[host] -= 1
        if not self._trying[host]:
            del self._trying[host]

    # --- results ---

    def has_failed(self, failure: LoginFailure) -> None:
        """Count a failed login; log it unless the maximum number of lines per second is reached."""
        self.failed[failure.listener, failure.mechanism or ""] += 1
        if self._lines.may_log(self._clock.monotonic_ms()):
            _log.warning(
                "login failed",
                peer=failure.peer,
                listener=failure.listener,
                mechanism=failure.mechanism,
                user=_shown(failure.user),
                cause=failure.cause,
            )


def _shown(user: str | None) -> str | None:
    """Return a client's text in a form that is safe in a log line."""
    if user is None:
        return None
    return ascii(user[:SHOWN_CHARACTERS]) + ("…" if len(user) > SHOWN_CHARACTERS else "")


# --- out of the configuration ---


def check_logins(config: BrokerConfig, listener: str) -> None:
    """Raise ConfigError if the mechanisms or users of a listener with SASL are invalid."""
    names = cast("tuple[str, ...]", config.on_listener(listener, MECHANISMS))
    if not names:
        raise ConfigError(MECHANISMS, "", f"listener {listener} needs a mechanism")
    served = ", ".join(SERVED)
    for name in names:
        if name == "GSSAPI":
            reason = (
                "GSSAPI (Kerberos), Kafka's default, is not supported: name the mechanisms"
                f" of listener {listener}, from {served}"
            )
            raise ConfigError(MECHANISMS, name, reason)
        if name not in SERVED:
            raise ConfigError(MECHANISMS, name, f"supported for listener {listener} are {served}")
    if PLAIN in names:
        configured_passwords(config, listener)
    if OAUTHBEARER in names:
        configured_tokens(config, listener, SystemClock())


def listener_logins(
    config: BrokerConfig, listener: str, users: ScramUsers, checks: PasswordChecks, clock: Clock
) -> ListenerLogins:
    """Return the login settings of a listener with SASL. Raises ConfigError."""
    check_logins(config, listener)
    names = cast("tuple[str, ...]", config.on_listener(listener, MECHANISMS))
    mechanisms = {name: _mechanism(config, listener, name, users, checks, clock) for name in names}
    lifetimes = {
        name: _number(config, listener, "connections.max.reauth.ms", name) for name in names
    }
    return ListenerLogins(
        listener,
        mechanisms,
        max_receive_bytes=_number(config, listener, "sasl.server.max.receive.size"),
        failure_delay_ms=_number(config, listener, "connection.failed.authentication.delay.ms"),
        timeout_ms=config.int("fencepost.authentication.timeout.ms"),
        max_reauth_ms={name: most for name, most in lifetimes.items() if most},
    )


def _number(config: BrokerConfig, listener: str, key: str, mechanism: str = "") -> int:
    return cast("int", config.on_listener(listener, key, mechanism))


def _mechanism(
    config: BrokerConfig,
    listener: str,
    name: str,
    users: ScramUsers,
    checks: PasswordChecks,
    clock: Clock,
) -> Mechanism:
    if name == OAUTHBEARER:
        return configured_tokens(config, listener, clock)
    if name == PLAIN:
        return PlainLogin(users, checks, configured_passwords(config, listener))
    return ScramLogin(SCRAM_MECHANISMS[name], users)


def configured_passwords(config: BrokerConfig, listener: str) -> dict[str, str]:
    """Return the passwords in ``listener.name.NAME.plain.sasl.jaas.config``, by user.

    Raises ConfigError, whose message quotes no password.
    """
    options = _options(config, listener, PLAIN)
    passwords = {
        name.removeprefix(_USER): value for name, value in options.items() if name.startswith(_USER)
    }
    if "" in passwords or "" in passwords.values():
        key = _jaas_key(listener, PLAIN)
        raise ConfigError(key, HIDDEN, "a user has no name, or no password")
    return passwords


def configured_tokens(config: BrokerConfig, listener: str, clock: Clock) -> OauthLogin:
    """Return a listener's OAUTHBEARER mechanism. Raises ConfigError."""
    return oauth_login(config, listener, _options(config, listener, OAUTHBEARER), clock)


def _jaas_key(listener: str, mechanism: str) -> str:
    return f"listener.name.{listener.lower()}.{mechanism.lower()}.{JAAS}"


def _options(config: BrokerConfig, listener: str, mechanism: str) -> Mapping[str, str]:
    """Return the options of a mechanism's JAAS configuration; none if it has none."""
    text = cast("str | None", config.on_listener(listener, JAAS, mechanism))
    if text is None:
        return {}
    key = _jaas_key(listener, mechanism)
    try:
        login = parse_jaas(text)
    except JaasError as error:
        raise ConfigError(key, HIDDEN, str(error)) from None
    if login.family != mechanism:
        raise ConfigError(key, HIDDEN, f"{login.module} is not a login module of {mechanism}")
    return login.options
