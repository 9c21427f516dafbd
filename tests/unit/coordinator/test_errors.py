from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
from kio.schema.errors import ErrorCode

from fencepost import cluster, coordinator, groups, logcore, txn
from fencepost.coordinator.error_codes import CODES, error_code
from fencepost.logcore.machine import DomainError

BASES = {
    "LogError",
    "GroupError",
    "ShareError",
    "TxnError",
    "ShardError",
    "ClusterError",
    "DataError",
    "ReplicationError",
}
"""Base classes that are never raised."""


def classes() -> list[type[DomainError]]:
    for package in (cluster, logcore, groups, txn, coordinator):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)

    def below(parent: type[DomainError]) -> Iterator[type[DomainError]]:
        for child in parent.__subclasses__():
            yield child
            yield from below(child)

    return sorted(
        {error for error in below(DomainError) if error.__module__.startswith("fencepost.")},
        key=lambda error: error.__qualname__,
    )


def test_every_domain_error_has_an_error_code():
    missing = [error for error in classes() if error not in CODES and error.__name__ not in BASES]
    assert missing == []


def test_error_codes_map_contains_only_concrete_domain_errors():
    assert set(CODES) <= set(classes())
    assert not [error for error in CODES if error.__name__ in BASES]


@pytest.mark.parametrize("cls", CODES, ids=lambda cls: cls.__name__)
def test_error_code_is_the_one_named_in_the_docstring(cls):
    """If a class's docstring contains the name of Kafka's error, the class must have its code."""
    words = (cls.__doc__ or "").replace("(", " ").replace(")", " ").replace(",", " ").split()
    known = {code.name.upper(): code for code in ErrorCode}
    named = [known[word.strip(".")] for word in words if word.strip(".") in known]
    if named:
        assert CODES[cls] in named


def test_unmapped_domain_error_is_unknown_server_error():
    assert error_code(DomainError("?")) is ErrorCode.unknown_server_error
