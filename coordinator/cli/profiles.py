"""Profiles: which cluster a command speaks to, by a name of the user's own.

The file is TOML, with a table for each profile::

    [staging]
    bootstrap = "kafka-1.example:9092,kafka-2.example:9092"
    timeout = 30

What the command line says wins over the environment, and that over the profile.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

PLAINTEXT = "PLAINTEXT"
MAX_FILE_BYTES = 1 << 20


class ProfileError(ValueError):
    """The file or the profile in it can not be used; the message says where."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profile says; None where it says nothing."""

    bootstrap: str | None = None
    timeout_s: float | None = None


def profiles_file() -> Path:
    """``$FENCEPOST_PROFILES``, or ``fencepost/profiles.toml`` among the user's settings."""
    named = os.environ.get("FENCEPOST_PROFILES")
    if named:
        return Path(named)
    # XDG Base Directory Specification: a relative path is no answer.
    base = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    if not base.is_absolute():
        base = Path("~/.config").expanduser()
    return base / "fencepost" / "profiles.toml"


def read_profile(name: str) -> Profile:
    """The profile ``name`` of the file. Raises :class:`ProfileError`."""
    path = profiles_file()
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"the profiles in {path} can not be read: {error.strerror}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ProfileError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        tables = tomllib.loads(raw.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"{path} is no TOML: {error}") from error
    if not isinstance(tables.get(name), dict):
        known = ", ".join(sorted(tables)) or "none"
        raise ProfileError(f"{path} has no profile {name!r}; there is: {known}")
    return _profile(f"{path}, profile {name!r}", _flat(tables[name]))


def _flat(table: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Dotted keys as one: ``security.protocol`` is a table in a table to TOML."""
    found: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _profile(where: str, settings: dict[str, object]) -> Profile:
    bootstrap, timeout = settings.pop("bootstrap", None), settings.pop("timeout", None)
    protocol = settings.pop("security.protocol", PLAINTEXT)
    if bootstrap is not None and not isinstance(bootstrap, str):
        raise ProfileError(f"{where}: bootstrap must be a text, as host:port")
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0.1
    ):
        raise ProfileError(f"{where}: timeout must be a number of seconds, at least 0.1")
    if protocol != PLAINTEXT:
        # Silence would send what was meant to be secret over an open connection.
        raise ProfileError(f"{where}: security.protocol can only be {PLAINTEXT} in this release")
    if settings:
        known = "bootstrap, timeout, security.protocol"
        raise ProfileError(f"{where}: unknown key {min(settings)}; known are {known}")
    return Profile(bootstrap, None if timeout is None else float(timeout))
