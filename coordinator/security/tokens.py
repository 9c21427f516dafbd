"""Validation of OAUTHBEARER tokens: signed by an issuer, or unsecured.

Subject, scope and validity period are checked in the same way for both kinds of token.
Source: ``BrokerJwtValidator``, ``OAuthBearerUnsecuredJws``,
``OAuthBearerUnsecuredValidatorCallbackHandler``, ``OAuthBearerValidationUtils``; RFC 7519.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.key_set import Jwk, KeySet
from fencepost.coordinator.security.mechanism import Identity
from fencepost.coordinator.security.principal import USER, Principal
from fencepost.logcore.values import dataclass

_CURVES: Final = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}
_RSA_ALGORITHMS: Final = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
"""Algorithms for an RSA key. A token may only name an algorithm for its key's type; algorithms with
a shared secret are never accepted."""

_MAX_MS: Final = 1 << 53


class TokenRefusedError(Exception):
    """A token is invalid; the message is for the operator.

    ``scope`` is the required scope, if the token lacks only the scope.
    """

    def __init__(self, cause: str, *, scope: str | None = None) -> None:
        super().__init__(cause)
        self.scope = scope


@dataclass(frozen=True, slots=True)
class RequiredClaims:
    """Claims required of every token. ``skew_ms`` is the permitted clock skew."""

    subject: str = "sub"
    """The claim that holds the user's name."""
    scope: str = "scope"
    """The claim that holds the scope: a space-separated string, or a list."""
    required_scope: tuple[str, ...] = ()
    skew_ms: int = 0
    needs_issued_at: bool = False

    def identity(self, claims: Mapping[str, Any], now_ms: int) -> Identity:
        """Return the identity in a token's claims. Raises TokenRefusedError."""
        name = claims.get(self.subject)
        if not isinstance(name, str) or not name.strip() or not _is_text(name):
            raise TokenRefusedError(f"no user in the claim {self.subject}")
        expires_ms = _time_ms(claims, "exp", is_needed=True) or 0
        issued_ms = _time_ms(claims, "iat", is_needed=self.needs_issued_at)
        begins_ms = _time_ms(claims, "nbf", is_needed=False)
        if expires_ms + self.skew_ms <= now_ms:
            raise TokenRefusedError("it has expired")
        for what, at_ms in (("it was issued in the future", issued_ms), ("not yet", begins_ms)):
            if at_ms is not None and at_ms > now_ms + self.skew_ms:
                raise TokenRefusedError(what)
            if at_ms is not None and at_ms >= expires_ms:
                raise TokenRefusedError("it ends before it begins")
        scope = _scope(claims.get(self.scope))
        if missing := [scope_name for scope_name in self.required_scope if scope_name not in scope]:
            raise TokenRefusedError(f"no scope {missing[0]!r}", scope=" ".join(self.required_scope))
        return Identity(Principal(USER, name), expires_ms)


def _time_ms(claims: Mapping[str, Any], name: str, *, is_needed: bool) -> int | None:
    value = claims.get(name)
    if value is None and not is_needed:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TokenRefusedError(f"no time in the claim {name}")
    if not abs(value) <= _MAX_MS // 1000:  # also rejects NaN
        raise TokenRefusedError(f"no time that can be in the claim {name}")
    return round(value * 1000)


def _is_text(name: str) -> bool:
    """Return whether a JSON string can be encoded: a lone surrogate cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _scope(value: object) -> Sequence[str]:
    if isinstance(value, str):
        return value.split()
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else ()


class Tokens(Protocol):
    """A validator of tokens."""

    def check(self, token: str, now_ms: int) -> Work[Identity]:
        """Return the identity of ``token``. Raises TokenRefusedError, AuthenticationFailed."""


@dataclass(frozen=True, slots=True)
class UnsecuredTokens:
    """Accepts unsecured tokens without proof: for development."""

    claims: RequiredClaims = RequiredClaims()

    def check(self, token: str, now_ms: int) -> Work[Identity]:
        """See :class:`Tokens`."""
        header, payload, *rest = (*token.split("."), "", "")[:4]
        if rest[0] or token.count(".") not in {1, 2}:
            raise TokenRefusedError("it is signed, or not a token")
        if _decoded_part(header).get("alg") != "none":
            raise TokenRefusedError("its algorithm is not none")
        yield from ()  # makes this a generator, as :class:`Tokens` requires
        return self.claims.identity(_decoded_part(payload), now_ms)


@dataclass(frozen=True, slots=True)
class SignedTokens:
    """Accepts tokens signed by an issuer."""

    keys: KeySet
    claims: RequiredClaims
    issuer: str | None = None
    audience: tuple[str, ...] = ()

    def check(self, token: str, now_ms: int) -> Work[Identity]:
        """See :class:`Tokens`."""
        import jwt  # noqa: PLC0415 - an optional dependency

        header = _decoded_part(token.partition(".")[0])
        algorithm, name = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str):
            raise TokenRefusedError("it names no algorithm")
        jwks = yield from self.keys.find(
            lambda key: (
                (name is None or key.get("kid") == name)
                and key.get("use", "sig") == "sig"
                and algorithm in algorithms_of(key)
            )
        )
        if len(jwks) > 1:
            raise TokenRefusedError("it does not name the key that signed it")
        try:
            claims = jwt.decode(
                token,
                jwt.PyJWK(dict(jwks[0]), algorithm=algorithm).key,
                algorithms=[algorithm],
                audience=self.audience or None,
                issuer=self.issuer,
                # :class:`RequiredClaims` checks these times with the broker's clock.
                options={"verify_exp": False, "verify_iat": False, "verify_nbf": False},
            )
        except jwt.PyJWTError as error:
            raise TokenRefusedError(f"{type(error).__name__} of PyJWT") from None
        return self.claims.identity(claims, now_ms)


def algorithms_of(key: Jwk) -> frozenset[str]:
    """Return the algorithms that a key permits, by its type and its own ``alg``."""
    kind = key.get("kty")
    algorithms: frozenset[str] = frozenset()
    if kind == "RSA":
        algorithms = _RSA_ALGORITHMS
    elif kind == "EC":
        algorithms = frozenset({_CURVES.get(str(key.get("crv")), "")}) - {""}
    elif kind == "OKP":
        algorithms = frozenset({"EdDSA"})
    algorithm = key.get("alg")
    return algorithms if algorithm is None else algorithms & {algorithm}


def _decoded_part(text: str) -> Mapping[str, Any]:
    """Return a decoded part of a token. Raises TokenRefusedError."""
    try:
        part = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, RecursionError):
        raise TokenRefusedError("it is not a token") from None
    if not isinstance(part, dict):
        raise TokenRefusedError("it is not a token")
    return part
