"""OAUTHBEARER tokens, and the sources of a client's tokens.

Source: RFC 7628; ``OAuthBearerUnsecuredLoginCallbackHandler``, librdkafka's
``sasl.oauthbearer.config``.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from fencepost.logcore.clock import time_of_day_ns
from fencepost.logcore.values import dataclass

MAX_TOKEN_BYTES: Final = 256 * 1024
"""The maximum size of a token: Kafka reads at most 512 KiB before authentication."""

TOKEN_KEY: Final = "fencepost.oauthbearer.token"  # noqa: S105 - a key's name
"""Our own setting for a token; with ``.file`` or ``.command`` appended, for its source."""

COMMAND_TIMEOUT_S: Final = 30.0
"""The time limit of a command that prints a token."""

DEFAULT_LIFETIME_S: Final = 3_600
"""The lifetime of an unsecured token."""

_EXTENSION_KEY = re.compile("[A-Za-z]+")
_EXTENSION_VALUE = re.compile(r"[\x21-\x7e \t\r\n]+")
_TOKEN = re.compile(r"[\x21-\x7e]+")


class TokenError(ValueError):
    """No token is available. The message gives the reason, without any part of a token."""


@dataclass(frozen=True, slots=True, repr=False)
class TokenSource:
    """The source of tokens: ``token``, ``path``, a command or ``claims``; exactly one is set.

    A new token is fetched for each login.
    """

    token: str = ""
    path: str = ""
    command: str = ""
    """A command whose first line of output is the token. It is split into words, and run without a
    shell."""
    claims: Mapping[str, Any] | None = None
    """The claims of an unsigned token."""
    lifetime_s: float = DEFAULT_LIFETIME_S
    """The lifetime of an unsigned token."""
    extensions: Mapping[str, str] = field(default_factory=dict)

    def fetch(self) -> str:
        """Return a token; block for as long as a command runs. Raises :class:`TokenError`."""
        if self.claims is not None:
            return unsecured_token(self.claims, self.lifetime_s)
        if self.path:
            try:
                with Path(self.path).open("rb") as file:
                    raw = file.read(MAX_TOKEN_BYTES + 1)
            except OSError as error:
                raise TokenError(f"the token in {self.path}: {error.strerror}") from None
            return _checked(raw, self.path)
        return _checked(self.token.encode(), "the token") if self.token else self._of_command()

    def _of_command(self) -> str:
        import shlex  # noqa: PLC0415 - few have a command
        import subprocess  # noqa: PLC0415

        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise TokenError(f"the command for a token: {error}") from None
        if not words:
            raise TokenError("the command for a token is empty")
        try:
            done = subprocess.run(  # noqa: S603 - the user's own command
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            reason = f"{words[0]} has not returned a token within {COMMAND_TIMEOUT_S:g} s"
            raise TokenError(reason) from None
        except OSError as error:
            raise TokenError(f"{words[0]}: {error.strerror}") from None
        if done.returncode:
            raise TokenError(f"{words[0]} ended with status {done.returncode}, without a token")
        return _checked(done.stdout.strip().partition(b"\n")[0], words[0])


def _checked(raw: bytes, where: str) -> str:
    text = raw.decode("ascii", "replace").strip()
    if not _TOKEN.fullmatch(text) or len(raw) > MAX_TOKEN_BYTES:
        raise TokenError(f"{where} contains no token")
    return text


def unsecured_token(claims: Mapping[str, Any], lifetime_s: float) -> str:
    """Return an unsigned token with the claims, valid from now on."""
    now = time_of_day_ns() // 1_000_000_000  # rounded down: no broker may see a time in the future
    return (
        ".".join(
            base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")
            for part in ({"alg": "none"}, {**claims, "iat": now, "exp": now + lifetime_s})
        )
        + "."
    )


def token_source(login: Mapping[str, str]) -> TokenSource:
    """Return the token source of ``Security.login``. Raises :class:`TokenError`."""
    if token := login.get(TOKEN_KEY):
        return TokenSource(token=token)
    if command := login.get(f"{TOKEN_KEY}.command"):
        return TokenSource(command=command)
    if path := login.get(f"{TOKEN_KEY}.file"):
        return TokenSource(path=path)
    if login.get("enable.sasl.oauthbearer.unsecure.jwt", "").lower() == "true":
        words = login.get("sasl.oauthbearer.config", "").split()
        return _unsecured(dict(word.partition("=")[::2] for word in words))
    if any(key.startswith("unsecuredLogin") for key in login):
        return _unsecured(login)
    if url := login.get("sasl.oauthbearer.token.endpoint.url"):
        if path := _file_of_url(url):
            return TokenSource(path=path)
        raise TokenError(
            "sasl.oauthbearer.token.endpoint.url: only file: URLs are supported;"
            f" {TOKEN_KEY}.command can run a command that fetches the token"
        )
    raise TokenError(
        f"OAUTHBEARER needs a token: {TOKEN_KEY}, {TOKEN_KEY}.file or {TOKEN_KEY}.command; for"
        ' development unsecuredLoginStringClaim_sub="…" in sasl.jaas.config'
    )


def _file_of_url(url: str) -> str:
    """Return the path of a ``file:`` URL, else an empty string."""
    parts = urlsplit(url)
    return unquote(parts.path) if parts.scheme == "file" else ""


def _unsecured(options: Mapping[str, str]) -> TokenSource:
    """Return the source of unsecured tokens from Kafka's JAAS options or librdkafka's options."""
    subject = _option(options, "rincipalClaimName", "sub")
    scope = _option(options, "copeClaimName", "scope")
    claims: dict[str, Any] = {}
    extensions: dict[str, str] = {}
    try:
        lifetime = float(
            options.get("unsecuredLoginLifetimeSeconds")
            or options.get("lifeSeconds")
            or DEFAULT_LIFETIME_S
        )
        for key, value in options.items():
            kind, _, name = key.partition("_")
            match kind:
                case "principal":
                    claims[subject] = value
                case "scope":
                    claims[scope] = value.split(",")
                case "unsecuredLoginStringClaim":
                    claims[name] = value
                case "unsecuredLoginNumberClaim":
                    claims[name] = float(value)
                case "unsecuredLoginListClaim":
                    # The first character separates the items that follow it.
                    claims[name] = value[1:].split(value[0]) if value else []
                case "unsecuredLoginExtension" | "extension":
                    extensions[name] = value
    except ValueError:
        raise TokenError("an unsecured token: a claim or its lifetime is not a number") from None
    if not isinstance(claims.get(subject), str):
        raise TokenError(f"an unsecured token needs a claim {subject}, the name of the principal")
    for key, value in extensions.items():
        fits = _EXTENSION_KEY.fullmatch(key) and _EXTENSION_VALUE.fullmatch(value)
        if key == "auth" or not fits:
            raise TokenError(f"{key!r} cannot be an extension")
    return TokenSource(claims=claims, lifetime_s=lifetime, extensions=extensions)


def _option(options: Mapping[str, str], end: str, default: str) -> str:
    """Return an option that Kafka calls ``unsecuredLoginP…`` and librdkafka ``p…``."""
    return next((value for key, value in options.items() if key.endswith(end)), default)
