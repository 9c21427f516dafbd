"""Configuration files in TOML or in Java's properties format, told apart by what is in them.

Almost every ``server.properties`` has a value without quotes, which is no TOML; a file whose values
are all numbers, true or false means the same in both formats.
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
"""Bytes of a configuration file: far above what all keys together need."""

_TOML_LINE = re.compile(
    rb"""(?m)^[ \t]*(\[[^=\n]*\][ \t\r]*(#.*)?$|[\w.'"-]+[ \t]*=[ \t]*["'\[])"""
)
"""The header of a table, or a value that begins with a quote or a bracket."""


def read_file(path: Path) -> dict[str, str]:
    """The settings of a file. Raises ConfigError, also where it cannot be read."""
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
    """The settings of a file's content. Raises ValueError, and ConfigError for a value of no use.

    ``suffix`` only decides how a file is reported that is no TOML but has lines as TOML has them:
    as broken TOML, unless its name says that it is Java's.
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
            hint = "; where one key continues another, write it in quotes"
        elif isinstance(error, tomllib.TOMLDecodeError):
            hint = "; it is read as TOML because of its quotes, brackets or tables"
        raise ValueError(f"{error}{hint}") from error


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted keys from nested tables: ``log.retention.hours = 1`` is three tables in TOML."""
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, setting_text(key, value)
