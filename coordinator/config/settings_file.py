"""Configuration files in TOML or in Java's properties format, distinguished by their content.

Almost every ``server.properties`` has some text without quotes as a value, which is not valid TOML.
If every value is a plain decimal number or a boolean, the settings are the same in either format.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fencepost.coordinator.config import properties
from fencepost.coordinator.config.key import ConfigError, setting_text

MAX_CONFIG_FILE_BYTES = 1 << 20
"""The maximum size of a configuration file, far more than all keys together need."""

_TOML_LINE = re.compile(
    rb"""(?m)^[ \t]*(\[[^=\n]*\][ \t\r]*(#.*)?$|[\w.'"-]+[ \t]*=[ \t]*["'\[])"""
)
"""The header of a table, or a value that begins with a quote or a bracket."""


def read_file(path: Path) -> dict[str, str]:
    """Return the settings of a file. Raises ConfigError, also for an unreadable file."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_CONFIG_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(path), None, f"cannot be read: {error}") from error
    if len(raw) > MAX_CONFIG_FILE_BYTES:
        raise ConfigError(str(path), None, f"longer than {MAX_CONFIG_FILE_BYTES} bytes")
    try:
        return parse(raw, path.suffix)
    except ValueError as error:
        raise ConfigError(str(path), None, f"cannot be read: {error}") from error


def parse(raw: bytes, suffix: str = "") -> dict[str, str]:
    """Parse a file's content. Raises ValueError, and ConfigError for a value of a wrong type.

    ``suffix`` only matters for a file that is not valid TOML but has lines that look like TOML.
    With ``.properties`` it is parsed as properties; otherwise the error is about TOML.
    """
    try:
        return dict(_flatten(tomllib.loads(raw.decode()), ""))
    except ConfigError:
        raise
    except ValueError as error:
        if suffix == properties.SUFFIX or not _TOML_LINE.search(raw):
            return properties.parse(raw)
        hint = ""
        if "overwrite" in str(error):
            hint = "; a key that begins with another key must be in quotes"
        elif isinstance(error, tomllib.TOMLDecodeError):
            hint = "; it is read as TOML because of its quotes, brackets or tables"
        raise ValueError(f"{error}{hint}") from error


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield dotted keys of nested tables: ``log.retention.hours = 1`` is nested in TOML."""
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, setting_text(key, value)
