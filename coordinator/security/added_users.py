"""The first users, in the syntax of ``kafka-storage format --add-scram``.

An example is ``SCRAM-SHA-512=[name=admin,password=…]``. Further components are ``iterations=``,
``salt=`` (base64) and ``saltedpassword=`` (base64, needs ``salt=``). A value may be quoted, and
cannot contain a comma.

Source: ``ScramParser``.
"""

from __future__ import annotations

import base64
import binascii

from fencepost.cluster.controller.scram import MAX_ITERATIONS, ScramCredentialUpsertion
from fencepost.coordinator.security.users import new_salt
from fencepost.protocol.scram import MIN_ITERATIONS, SCRAM_MECHANISMS, salted_password

_COMPONENTS = frozenset({"name", "password", "iterations", "salt", "saltedpassword"})


class AddedUserError(ValueError):
    """The text does not describe a user. The message quotes no value of the text."""


def parse_added_user(text: str) -> ScramCredentialUpsertion:
    """Return the user in one argument. Raises AddedUserError."""
    name, separator, rest = text.strip().partition("=")
    mechanism = SCRAM_MECHANISMS.get(name)
    if not separator or mechanism is None:
        raise AddedUserError(f"it must begin with one of {', '.join(SCRAM_MECHANISMS)} and =")
    if not (rest.startswith("[") and rest.endswith("]")):
        raise AddedUserError("the mechanism must be followed by [name=…,password=…]")
    parts = dict(_component(component) for component in rest[1:-1].split(","))
    unknown = sum(part not in _COMPONENTS for part in parts)
    if unknown:
        names = ", ".join(sorted(_COMPONENTS))
        raise AddedUserError(f"{unknown} of its components are none of {names}")
    if not parts.get("name"):
        raise AddedUserError("it has no name")
    iterations = _iterations(parts.get("iterations", str(MIN_ITERATIONS)))
    salt = _decoded("salt", parts["salt"]) if "salt" in parts else new_salt()
    if parts.get("password"):
        salted = salted_password(mechanism, parts["password"], salt, iterations)
    elif "saltedpassword" not in parts:
        raise AddedUserError("it has neither password nor saltedpassword")
    elif "salt" not in parts:
        raise AddedUserError("it has saltedpassword without salt")
    else:
        salted = _decoded("saltedpassword", parts["saltedpassword"])
    return ScramCredentialUpsertion(parts["name"], mechanism.number, iterations, salt, salted)


def _component(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise AddedUserError("a component is not NAME=VALUE; a value can have no comma")
    if len(value) >= 2 and value.startswith('"') and value.endswith('"'):
        value = value[1:-1]
    return name, value


def _iterations(text: str) -> int:
    if not text.isdecimal() or not MIN_ITERATIONS <= int(text) <= MAX_ITERATIONS:
        bounds = f"{MIN_ITERATIONS} and {MAX_ITERATIONS}"
        raise AddedUserError(f"iterations must be a number between {bounds}")
    return int(text)


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise AddedUserError(f"{name} is not valid base64") from None
