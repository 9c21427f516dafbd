"""OAUTHBEARER: a client authenticates with a token that an issuer signed.

The response to an invalid token is a JSON error. The client acknowledges it with one byte, and then
the login fails.

Source: ``OAuthBearerSaslServer``, ``OAuthBearerClientInitialResponse``,
``OAuthBearerValidatorCallbackHandler``; RFC 7628.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import urlsplit

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.key_set import SCHEMES, KeySet
from fencepost.coordinator.security.mechanism import AuthenticationFailed, Identity
from fencepost.coordinator.security.scram_login import check_size
from fencepost.coordinator.security.tokens import (
    RequiredClaims,
    SignedTokens,
    TokenRefusedError,
    Tokens,
    UnsecuredTokens,
)
from fencepost.logcore.clock import Clock

OAUTHBEARER: Final = "OAUTHBEARER"
URL: Final = "sasl.oauthbearer.jwks.endpoint.url"
_UNVERIFIED: Final = {
    "sasl.oauthbearer.expected.issuer": "sasl.oauthbearer.allow.unverified.issuer",
    "sasl.oauthbearer.expected.audience": "sasl.oauthbearer.allow.unverified.audience",
}
"""The configuration keys with a claim's expected value, each with the key that makes the check
optional."""
UNSECURED: Final = "unsecured"
"""The prefix of the options in ``sasl.jaas.config`` that enable unsecured tokens."""

MAX_MESSAGE_BYTES: Final = 24_576
"""The maximum size of a message with a token. While the broker fetches the issuer's keys, it holds
four times this size. Web servers accept tokens of 8 to 16 KiB."""

_FIRST = re.compile(
    r"n,(?:a=(?P<authzid>(?:[\x01-\x2b\x2d-\x3c\x3e-\x7f]|=2C|=3D)+))?,\x01"
    r"(?P<pairs>(?:[A-Za-z]+=[\x21-\x7e \t\r\n]+\x01)*)\x01",
    re.DOTALL,
)
_AUTH = re.compile(r"(?P<scheme>\w+) +(?P<token>[-_~+/.a-zA-Z0-9]+=*)", re.ASCII)
_NOTED = b"\x01"


class OauthLogin:
    """The mechanism OAUTHBEARER."""

    def __init__(self, tokens: Tokens, now_ms: Callable[[], int]) -> None:
        self.name = OAUTHBEARER
        self.tokens, self.now_ms = tokens, now_ms

    def begin(self, host: str = "") -> OauthExchange:  # noqa: ARG002 - nothing depends on it
        """Start a login."""
        return OauthExchange(self)


class OauthExchange:
    """One login."""

    def __init__(self, login: OauthLogin) -> None:
        self.identity: Identity | None = None
        self._login = login
        self._refused: tuple[str, str] | None = None
        """The response to an invalid token, and the cause for the operator."""

    def step(self, token: bytes) -> Work[bytes]:
        """Return empty bytes for a valid token, else a JSON error. Raises AuthenticationFailed."""
        if self._refused is not None:
            client_message, cause = self._refused
            if token == _NOTED:
                raise AuthenticationFailed(cause, client_message=client_message)
            self._refused = None
        check_size(token, MAX_MESSAGE_BYTES)
        authorization_id, bearer = _first(token)
        try:
            identity = yield from self._login.tokens.check(bearer, self._login.now_ms())
        except TokenRefusedError as error:
            client_message = '{"status":"invalid_token"}'
            if error.scope is not None:
                client_message = f'{{"status":"insufficient_scope", "scope":"{error.scope}"}}'
            self._refused = client_message, f"the token: {error}"
            return client_message.encode()
        name = identity.principal.name
        if authorization_id not in {"", name}:
            client_message = (
                f"Authentication failed: Client requested an authorization id ({authorization_id})"
                f" that is different from the token's principal name ({name})"
            )
            raise AuthenticationFailed(
                "the client wants to be another user", client_message=client_message, user=name
            )
        self.identity = identity
        return b""


def _first(message: bytes) -> tuple[str, str]:
    """Return the requested authorization id, which may be empty, and the token."""
    match = _FIRST.fullmatch(message.decode(errors="replace"))
    if match is None:
        raise AuthenticationFailed("not an OAUTHBEARER message")
    pairs = dict(pair.split("=", 1) for pair in match["pairs"].split("\x01") if pair)
    auth = _AUTH.fullmatch(pairs.get("auth", ""))
    if auth is None or auth["scheme"].lower() != "bearer":
        raise AuthenticationFailed("no bearer token in the message")
    return match["authzid"] or "", auth["token"]


# --- from the configuration ---


def oauth_login(
    config: BrokerConfig, listener: str, options: Mapping[str, str], clock: Clock
) -> OauthLogin:
    """Return a listener's mechanism; ``options`` are its JAAS options. Raises ConfigError."""

    def of(name: str) -> Any:
        return config.on_listener(listener, name, OAUTHBEARER)

    url = of(URL)
    if url is None:
        return OauthLogin(_unsecured(options), clock.now_ms)
    if urlsplit(url).scheme not in SCHEMES:
        raise ConfigError(URL, url, f"it must be a URL of {', '.join(SCHEMES)}")
    if find_spec("jwt") is None or find_spec("cryptography") is None:
        raise ConfigError(
            URL, url, "signed tokens need PyJWT: pip install '.[oauth]' in a clone of Fencepost"
        )
    for expected, allow in _UNVERIFIED.items():
        if not of(expected) and not of(allow):
            # Source: ``BrokerJwtValidator.configure``.
            raise ConfigError(
                expected, None, f"it must be set, unless {allow}=true disables the check"
            )
    keys = KeySet(
        url,
        clock,
        refresh_ms=of("sasl.oauthbearer.jwks.endpoint.refresh.ms"),
        backoff_ms=of("sasl.oauthbearer.jwks.endpoint.retry.backoff.ms"),
        max_backoff_ms=of("sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms"),
    )
    claims = RequiredClaims(
        of("sasl.oauthbearer.sub.claim.name"),
        of("sasl.oauthbearer.scope.claim.name"),
        skew_ms=of("sasl.oauthbearer.clock.skew.seconds") * 1000,
        needs_issued_at=True,
    )
    signed = SignedTokens(
        keys,
        claims,
        of("sasl.oauthbearer.expected.issuer"),
        of("sasl.oauthbearer.expected.audience"),
    )
    return OauthLogin(signed, clock.now_ms)


def _unsecured(options: Mapping[str, str]) -> UnsecuredTokens:
    if not any(name.startswith(UNSECURED) for name in options):
        raise ConfigError(
            URL,
            "",
            (
                "OAUTHBEARER needs it to verify the signatures of tokens. For development, to"
                " accept unsigned tokens of any client, set an option"
                " unsecuredLoginStringClaim_sub or unsecuredValidator… in sasl.jaas.config"
            ),
        )
    skew = options.get("unsecuredValidatorAllowableClockSkewMs", "").strip() or "0"
    if not skew.isdecimal():
        raise ConfigError(
            "unsecuredValidatorAllowableClockSkewMs",
            skew,
            "it must be a number of milliseconds, 0 or more",
        )
    return UnsecuredTokens(
        RequiredClaims(
            options.get("unsecuredValidatorPrincipalClaimName", "").strip() or "sub",
            options.get("unsecuredValidatorScopeClaimName", "").strip() or "scope",
            tuple(options.get("unsecuredValidatorRequiredScope", "").split()),
            int(skew),
        )
    )
