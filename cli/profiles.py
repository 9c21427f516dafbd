"""Connection settings of a command: profiles, and files with a client's settings.

The file of profiles is TOML, with a table for each profile::

    [staging]
    bootstrap = "kafka-1.example:9092,kafka-2.example:9092"
    timeout = 30
    security.protocol = "SASL_SSL"
    sasl.mechanism = "SCRAM-SHA-512"
    sasl.username = "alice"
    sasl.password = "…"

``current = "staging"`` above the tables, which ``fencepost profile use`` writes, is the profile of
commands that name no address, no settings file and no profile.

A settings file is what Kafka's own tools accept as ``--command-config``: properties, or the same
keys in TOML. The command line overrides the environment, which overrides the settings file, which
overrides the profile.
"""

from __future__ import annotations

import json
import os
import re
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

CURRENT = "current"
"""The key of the chosen profile's name; no profile can have this name."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HEADER = re.compile(r"""[ \t]*\[[ \t]*([A-Za-z0-9_-]+|"[^"\\]*"|'[^']*')[ \t]*[].]""")
_CURRENT_LINE = re.compile(r"(?m)^[ \t]*current[ \t]*=.*\n?")


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
    settings = profile_settings(name)
    return _profile(settings, f"{path}, profile {name!r}", path)


def profile_settings(name: str) -> dict[str, object]:
    """Return the settings of a profile by their dotted keys. Raises :class:`ProfileError`."""
    path = profiles_file()
    tables = _tables(path, _content(path, f"the profiles in {path}"))
    if name not in tables:
        from fencepost.coordinator.config.key import nearest

        names = (", ".join(sorted(tables)) or "none") + nearest(name, tables)
        raise ProfileError(f"{path} has no profile {name!r}; the profiles are {names}")
    return _flat(tables[name])


def all_profiles() -> dict[str, dict[str, object]]:
    """Return the settings of each profile; none without a file. Raises :class:`ProfileError`."""
    path = profiles_file()
    if not path.exists():
        return {}
    tables = _tables(path, _content(path, f"the profiles in {path}"))
    return {name: _flat(table) for name, table in sorted(tables.items())}


def current_profile() -> str | None:
    """Return the profile that ``fencepost profile use`` chose. Raises :class:`ProfileError`."""
    path = profiles_file()
    if not path.exists():
        return None
    name = _toml(path, _content(path, f"the profiles in {path}")).get(CURRENT)
    return name if isinstance(name, str) else None


def _tables(path: Path, raw: bytes) -> dict[str, object]:
    return {name: table for name, table in _toml(path, raw).items() if isinstance(table, dict)}


def _profile(settings: Mapping[str, object], where: str, path: Path) -> Profile:
    rest = dict(settings)
    bootstrap, timeout = rest.pop("bootstrap", None), rest.pop("timeout", None)
    if bootstrap is not None and not isinstance(bootstrap, str):
        raise ProfileError(f"{where}: bootstrap must be a string such as host:port")
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0.1
    ):
        raise ProfileError(f"{where}: timeout must be a number of seconds, at least 0.1")
    for key in sorted(rest):
        if not key.startswith(PREFIXES):
            allowed = "bootstrap, timeout, and a client's security.*, sasl.* and ssl.*"
            raise ProfileError(f"{where}: unknown key {key}; the keys are {allowed}")
    return Profile(
        bootstrap,
        None if timeout is None else float(timeout),
        _security(rest, where),
        path.exists() and _is_open(path, rest),
    )


# --- changes of the file ---


def save_profile(name: str, settings: Mapping[str, object]) -> None:
    """Check a profile and write it to the file; a profile with this name is replaced.

    Raises :class:`ProfileError`, and OSError.
    """
    if not _NAME.fullmatch(name) or name == CURRENT:
        raise ProfileError(f"{name!r} cannot name a profile: use letters, digits, - and _")
    path = profiles_file()
    _profile(settings, f"profile {name!r}", path)
    text = _without(_text(path), name)
    lines = [f"[{name}]", *(f"{_quoted(key)} = {_value(value)}" for key, value in settings.items())]
    _write(path, f"{text.rstrip()}\n\n".lstrip() + "\n".join(lines) + "\n", name, dict(settings))


def delete_profile(name: str) -> None:
    """Remove a profile from the file; it is no longer the current one.

    Raises as :func:`save_profile`.
    """
    profile_settings(name)
    path = profiles_file()
    text = _without(_text(path), name)
    if current_profile() == name:
        text = _CURRENT_LINE.sub("", text, count=1)
    _write(path, text, name, None)


def use_profile(name: str) -> None:
    """Make a profile the current one. Raises as :func:`save_profile`."""
    settings = profile_settings(name)
    path = profiles_file()
    text = _CURRENT_LINE.sub("", _text(path), count=1)
    _write(path, f"{CURRENT} = {_quoted(name)}\n{text}", name, settings)


def _text(path: Path) -> str:
    if not path.exists():
        return ""
    return _content(path, f"the profiles in {path}").decode()


def _without(text: str, name: str) -> str:
    """Remove the tables of a profile, with the comments in them."""
    kept, is_kept = [], True
    for line in text.splitlines(keepends=True):
        header = _HEADER.match(line)
        if header is not None:
            is_kept = header[1].strip("\"'") != name
        if is_kept:
            kept.append(line)
    return "".join(kept)


def _write(path: Path, text: str, name: str, expected: dict[str, object] | None) -> None:
    """Replace the file, readable by its owner only, if the text has the ``expected`` profile."""
    others = {key: settings for key, settings in all_profiles().items() if key != name}
    profiles = {key: _flat(table) for key, table in _tables(path, text.encode()).items()}
    if profiles != others | ({} if expected is None else {name: expected}):
        raise ProfileError(f"{path} is written in a way that cannot be changed here: edit it")
    import tempfile

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: object) -> str:
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


# --- settings files ---


def read_settings(path: Path) -> Profile:
    """Read a file of a client's settings, by Kafka's names. Raises :class:`ProfileError`.

    Settings for other kinds of clients may be in it, and are ignored.
    """
    settings = file_settings(path)
    bootstrap, timeout = settings.get("bootstrap.servers"), settings.get("default.api.timeout.ms")
    if timeout is not None and not str(timeout).isdecimal():
        raise ProfileError(f"{path}: default.api.timeout.ms must be a number of milliseconds")
    return Profile(
        None if bootstrap is None else str(bootstrap),
        None if timeout is None else max(0.1, int(str(timeout)) / 1000),
        _security(settings, str(path)),
        _is_open(path, settings),
    )


def file_settings(path: Path) -> dict[str, str]:
    """Return all settings in a file of a client. Raises :class:`ProfileError`."""
    from fencepost.coordinator.config.key import ConfigError
    from fencepost.coordinator.config.settings_file import parse

    raw = _content(path, f"the settings in {path}")
    try:
        return parse(raw, path.suffix)
    except ConfigError as error:
        raise ProfileError(f"{path}: {error.key}: {error.reason}") from None
    except ValueError:
        # The parsers' messages may quote a part of a password.
        raise ProfileError(f"{path} is neither TOML nor a file of Java properties") from None


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
    # Most commands import this module to look for a chosen profile, and find no file.
    import tomllib

    try:
        return tomllib.loads(raw.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"{path} is not valid TOML: {error}") from None


def _flat(table: object, prefix: str = "") -> dict[str, object]:
    """Join dotted keys: to TOML ``security.protocol`` is a table in a table."""
    flat: dict[str, object] = {}
    for key, value in table.items() if isinstance(table, dict) else ():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _security(settings: Mapping[str, object], where: str) -> Security | None:
    texts: dict[str, str] = {}
    for key, value in settings.items():
        if not key.startswith(PREFIXES):
            continue
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
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
