"""Connection settings of a command: profiles, and files with a client's settings.

The file of profiles is TOML, with a table for each profile::

    [staging]
    bootstrap = "kafka-1.example:9092,kafka-2.example:9092"
    timeout = 30
    security.protocol = "SASL_SSL"
    sasl.mechanism = "SCRAM-SHA-512"
    sasl.username = "alice"
    sasl.password = "…"

A settings file is what Kafka's own tools accept as ``--command-config``: properties, or the same
keys in TOML. The command line overrides the environment, which overrides the settings file, which
overrides the profile.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from fencepost.client.security import (
    PREFIXES,
    SECRETS,
    Security,
    SecurityError,
)
from fencepost.logcore.values import dataclass

MAX_FILE_BYTES = 1 << 20


class ProfileError(ValueError):
    """The file or a profile in it is unusable; the message says where, without secrets."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The settings of a profile or a settings file; None for those that are missing."""

    bootstrap: str | None = None
    timeout_s: float | None = None
    security: Security | None = None
    is_open: bool = False
    """Whether the file holds a secret that users other than its owner can read."""


def profiles_file() -> Path:
    """Return ``$FENCEPOST_PROFILES``, or ``fencepost/profiles.toml`` in the XDG config folder."""
    named = os.environ.get("FENCEPOST_PROFILES")
    if named:
        return Path(named)
    # XDG Base Directory Specification: a relative path must be ignored.
    base = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    if not base.is_absolute():
        base = Path("~/.config").expanduser()
    return base / "fencepost" / "profiles.toml"


def read_profile(name: str) -> Profile:
    """Read a profile by name. Raises :class:`ProfileError`."""
    path = profiles_file()
    tables = _toml(path, _content(path, f"the profiles in {path}"))
    if not isinstance(tables.get(name), dict):
        from fencepost.coordinator.config.key import nearest

        known = (", ".join(sorted(tables)) or "none") + nearest(name, tables)
        raise ProfileError(f"{path} has no profile {name!r}; the profiles are {known}")
    where = f"{path}, profile {name!r}"
    settings = _flat(tables[name])
    bootstrap, timeout = settings.pop("bootstrap", None), settings.pop("timeout", None)
    if bootstrap is not None and not isinstance(bootstrap, str):
        raise ProfileError(f"{where}: bootstrap must be a string such as host:port")
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0.1
    ):
        raise ProfileError(f"{where}: timeout must be a number of seconds, at least 0.1")
    for key in sorted(settings):
        if not key.startswith(PREFIXES):
            known = "bootstrap, timeout, and a client's security.*, sasl.* and ssl.*"
            raise ProfileError(f"{where}: unknown key {key}; the keys are {known}")
    return Profile(
        bootstrap,
        None if timeout is None else float(timeout),
        _security(settings, where),
        _is_open(path, settings),
    )


def read_settings(path: Path) -> Profile:
    """Read a file of a client's settings, by Kafka's names. Raises :class:`ProfileError`.

    Settings for other kinds of clients may be in it, and are ignored.
    """
    from fencepost.coordinator.config.key import ConfigError
    from fencepost.coordinator.config.settings_file import parse

    raw = _content(path, f"the settings in {path}")
    try:
        settings = parse(raw, path.suffix)
    except ConfigError as error:
        raise ProfileError(f"{path}: {error.key}: {error.reason}") from None
    except ValueError:
        # The parsers' messages may quote a part of a password.
        raise ProfileError(f"{path} is neither TOML nor a file of Java properties") from None
    bootstrap, timeout = settings.get("bootstrap.servers"), settings.get("default.api.timeout.ms")
    if timeout is not None and not str(timeout).isdecimal():
        raise ProfileError(f"{path}: default.api.timeout.ms must be a number of milliseconds")
    return Profile(
        None if bootstrap is None else str(bootstrap),
        None if timeout is None else max(0.1, int(str(timeout)) / 1000),
        _security(settings, str(path)),
        _is_open(path, settings),
    )


def _content(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"{what} cannot be read: {error.strerror}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ProfileError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    return raw


def _toml(path: Path, raw: bytes) -> dict[str, object]:
    try:
        return tomllib.loads(raw.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"{path} is not valid TOML: {error}") from None


def _flat(table: object, prefix: str = "") -> dict[str, object]:
    """Join dotted keys: to TOML ``security.protocol`` is a table in a table."""
    found: dict[str, object] = {}
    for key, value in table.items() if isinstance(table, dict) else ():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _security(settings: Mapping[str, object], where: str) -> Security | None:
    texts: dict[str, str] = {}
    for key, value in settings.items():
        if not key.startswith(PREFIXES):
            continue
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            texts[key] = ",".join(value)
        elif isinstance(value, bool):
            texts[key] = str(value).lower()
        elif isinstance(value, (str, int)):
            texts[key] = str(value)
        else:
            raise ProfileError(f"{where}: {key} must be a string")
    try:
        return Security.of(texts) if texts else None
    except SecurityError as error:
        raise ProfileError(f"{where}: {error}") from None


def _is_open(path: Path, settings: Mapping[str, object]) -> bool:
    return any(settings.get(key) for key in SECRETS) and bool(path.stat().st_mode & 0o044)
