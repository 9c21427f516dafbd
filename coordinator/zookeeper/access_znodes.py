"""Users, quotas and ACLs in the znodes of Apache Kafka 3.9.

This module converts znodes into metadata records and back, without I/O. Parsing a znode never
raises: an entry that cannot be parsed is logged and skipped. But if it may be a DENY, it is parsed
as an ACL that denies everything that the entry may have denied.

Source: ``ConfigEntityZNode``, ``ZkAclStore``, ``ZkAclChangeStore``, ``AclEntry``; ``Sanitizer``;
``ScramCredentialUtils``; ``ZkAdminManager.alterClientQuotas``.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import structlog

from fencepost.cluster.acl import (
    ANYBODY,
    ANYTHING,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from fencepost.cluster.quota_entities import (
    CLIENT_ID,
    FRACTION,
    IP,
    USER,
    WHOLE,
    reason_against_value,
)
from fencepost.cluster.records import (
    AccessControlEntryRecord,
    ClientQuotaRecord,
    EntityData,
    RemoveAccessControlEntryRecord,
    RemoveUserScramCredentialRecord,
    UserScramCredentialRecord,
)
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.errors import NotOurFormatError
from fencepost.protocol.scram import MIN_ITERATIONS, SCRAM_MECHANISMS

_log = structlog.get_logger(__name__)

N = TypeVar("N", bound=IntEnum)

AccessRecord = UserScramCredentialRecord | ClientQuotaRecord | AccessControlEntryRecord
"""The types of records in these znodes; a znode may hold several records."""

Removal = RemoveUserScramCredentialRecord | ClientQuotaRecord | RemoveAccessControlEntryRecord

USERS, CLIENTS, IPS = (f"{znodes.CONFIGS}/{kind}" for kind in ("users", "clients", "ips"))
LITERAL_RULES: Final = "/kafka-acl"
PREFIXED_RULES: Final = "/kafka-acl-extended/prefixed"
LITERAL_CHANGES: Final = "/kafka-acl-changes"
PREFIXED_CHANGES: Final = "/kafka-acl-extended-changes"

RULE_FOLDERS: Final = {
    PatternType.LITERAL: LITERAL_RULES,
    PatternType.PREFIXED: PREFIXED_RULES,
}
RULE_CHANGES: Final = {
    LITERAL_RULES: LITERAL_CHANGES,
    PREFIXED_RULES: PREFIXED_CHANGES,
}
"""The parent path of ACL notifications, by the parent path of the ACLs."""

MAX_ITERATIONS: Final = 1_000_000
"""The maximum number of iterations that is accepted. Kafka's tools write credentials directly to
ZooKeeper, without a limit on the iterations."""

MAX_PATH: Final = 8_192
"""The maximum length of a path in characters."""

_BETWEEN: Final = "/clients/"
_FOLDERS: Final = {(USER,): USERS, (CLIENT_ID,): CLIENTS, (IP,): IPS}
_NOT_IN_PATHS: Final = (
    (0x00, 0x1F),
    (0x7F, 0x9F),
    (0xD800, 0xF8FF),
    (0xFFF0, 0xFFFF),
)
"""Ranges of code points that ZooKeeper rejects in paths."""


class SecurityChange(NamedTuple):
    """A record to write to a znode, or to remove from it."""

    record: AccessRecord
    is_removed: bool = False


# --- paths ---


def path_of(record: AccessRecord) -> str:
    """Return the path of the znode that holds a record."""
    match record:
        case UserScramCredentialRecord():
            return f"{USERS}/{sanitized(record.name)}"
        case ClientQuotaRecord():
            names = {component.entity_type: component.entity_name for component in record.entity}
            if len(names) > 1:
                return f"{USERS}/{sanitized(names[USER])}{_BETWEEN}{sanitized(names[CLIENT_ID])}"
            ((kind, name),) = names.items()
            return f"{_FOLDERS[kind,]}/{sanitized(name)}"
        case _:
            folder = RULE_FOLDERS[PatternType(record.pattern_type)]
            kind = camel(ResourceType(record.resource_type))
            return f"{folder}/{kind}/{record.resource_name}"


def reason_against(record: AccessRecord) -> str | None:
    """Return why no znode can hold a record; None if one can."""
    path = path_of(record)
    if isinstance(record, AccessControlEntryRecord) and "/" in record.resource_name:
        return f"ACL binding contains invalid resource name: {record.resource_name}"
    if (
        len(path) > MAX_PATH
        or any(part in {"", ".", ".."} for part in path.split("/")[1:])
        or any(low <= ord(character) <= high for character in path for low, high in _NOT_IN_PATHS)
    ):
        return "ZooKeeper cannot keep this name"
    if isinstance(record, ClientQuotaRecord) and path.startswith(f"{IPS}/"):
        name = record.entity[0].entity_name
        if name is not None and ":" in name:
            return "Apache Kafka 3.9 cannot read a quota of an IPv6 address"
    return None


def sanitized(name: str | None) -> str:
    """Return a name as a path element; None is the default entity."""
    if name is None:
        return znodes.DEFAULT_ENTITY
    return quote(name, safe="").replace("~", "%7E")


def desanitized(text: str) -> str | None:
    """Return the name in a path element; None for the default entity."""
    return None if text == znodes.DEFAULT_ENTITY else unquote(text.replace("+", " "))


def parents_of(path: str) -> Iterator[str]:
    """Yield the ancestors of a path that may not exist yet, topmost first."""
    if path.startswith(f"{USERS}/") and _BETWEEN in path:
        user, _, _ = path.partition(_BETWEEN)
        yield user
        yield user + _BETWEEN.rstrip("/")


def is_of_rules(path: str) -> bool:
    """Return whether a znode holds ACLs."""
    return path.startswith((f"{LITERAL_RULES}/", f"{PREFIXED_RULES}/"))


# --- contents ---


def records_of(path: str, data: bytes | None) -> list[AccessRecord]:
    """Return the records in a znode; none if it does not exist."""
    if data is None:
        return []
    records = _rules(path, data) if is_of_rules(path) else _of_entity(path, data)
    if any(path_of(record) != path for record in records):
        _log.error("znode skipped: Kafka would encode its name otherwise", path=path)
        return []
    return records


def key_of(record: AccessRecord) -> Hashable:
    """Return the key of a record in its znode; a later record with the same key replaces it."""
    match record:
        case UserScramCredentialRecord():
            return record.name, record.mechanism
        case ClientQuotaRecord():
            return record.entity, record.key
        case _:
            return record.id


def removal_of(record: AccessRecord) -> Removal:
    """Return the metadata record that removes a record."""
    match record:
        case UserScramCredentialRecord():
            return RemoveUserScramCredentialRecord(record.name, record.mechanism)
        case ClientQuotaRecord():
            return replace(record, value=0.0, remove=True)
        case _:
            return RemoveAccessControlEntryRecord(record.id)


def changed(path: str, data: bytes | None, changes: Iterable[SecurityChange]) -> bytes | None:
    """Return a znode's data after changes; None if the znode is no longer needed.

    Raises NotOurFormatError if the current data cannot be parsed.
    """
    if is_of_rules(path):
        return _changed_rules(path, data, changes)
    values = znodes.config_of(path, data or b"")
    for record, is_removed in changes:
        match record:
            case UserScramCredentialRecord():
                key, value = _MECHANISMS[record.mechanism].name, credential_text(record)
            case ClientQuotaRecord():
                key, value = record.key, quota_text(record.key, record.value)
            case _:
                continue
        if is_removed:
            values.pop(key, None)
        else:
            values[key] = value
    return znodes.config_data(values) if values else None


# --- users and quotas ---

_MECHANISMS: Final = {mechanism.number: mechanism for mechanism in SCRAM_MECHANISMS.values()}


def entity_of(path: str) -> tuple[EntityData, ...] | None:
    """Return the entity of a znode of ``/config``; None if it is not a user, client or IP."""
    for (kind,), folder in _FOLDERS.items():
        name = path.removeprefix(f"{folder}/")
        if name == path:
            continue
        names = [name]
        if kind == USER and _BETWEEN in name:
            names = [*name.partition(_BETWEEN)[::2]]
        if any(not name or "/" in name for name in names):
            return None
        kinds = (USER, CLIENT_ID) if len(names) > 1 else (kind,)
        components = zip(kinds, map(desanitized, names), strict=True)
        return tuple(
            EntityData(*component)
            for component in sorted(components, key=lambda component: component[0])
        )
    return None


def _of_entity(path: str, data: bytes) -> list[AccessRecord]:
    entity = entity_of(path)
    if entity is None:
        return []
    try:
        values = znodes.config_of(path, data)
    except NotOurFormatError as error:
        _log.error("settings in ZooKeeper skipped", path=path, cause=str(error))
        return []
    names = {component.entity_type: component.entity_name for component in entity}
    records: list[AccessRecord] = []
    for key, text in values.items():
        try:
            if key in SCRAM_MECHANISMS:
                if names.keys() == {USER} and (user := names[USER]) is not None:
                    records.append(credential_of(user, key, text))
                continue
            records.append(
                ClientQuotaRecord(entity, key, _quota_of(names, key, text), remove=False)
            )
        except ValueError as error:  # the error message contains no secret
            _log.error("setting in ZooKeeper skipped", path=path, key=key, cause=str(error))
    return records


def credential_text(record: UserScramCredentialRecord) -> str:
    """Return a SCRAM credential as the value that the znode has under the mechanism's name."""
    parts = {
        "salt": _base64(record.salt),
        "stored_key": _base64(record.stored_key),
        "server_key": _base64(record.server_key),
        "iterations": str(record.iterations),
    }
    return ",".join(f"{key}={value}" for key, value in parts.items())


def credential_of(user: str, mechanism: str, text: str) -> UserScramCredentialRecord:
    """Parse a SCRAM credential. Raises ValueError, whose message does not quote the value."""
    scram_mechanism = SCRAM_MECHANISMS[mechanism]
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    try:
        keys = [
            base64.b64decode(parts[key], validate=True)
            for key in ("salt", "stored_key", "server_key")
        ]
        iterations = int(parts["iterations"])
    except (KeyError, ValueError, binascii.Error):
        raise ValueError("it is not a SCRAM credential") from None
    if len(keys[1]) != scram_mechanism.key_bytes or len(keys[2]) != scram_mechanism.key_bytes:
        raise ValueError("its keys have the wrong length for the mechanism")
    if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
        raise ValueError(f"its iterations are not between {MIN_ITERATIONS} and {MAX_ITERATIONS}")
    return UserScramCredentialRecord(
        user, scram_mechanism.number, keys[0], keys[1], keys[2], iterations
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def quota_text(key: str, value: float) -> str:
    """Return a quota formatted as Java formats a long, an int or a double."""
    if key in WHOLE:
        return str(int(value + FRACTION))
    if 1e-3 <= value < 1e7:
        return repr(float(value))
    places = next(precision for precision in range(18) if float(f"{value:.{precision}e}") == value)
    digits, _, exponent = f"{value:.{places}e}".partition("e")
    return f"{digits if places else digits + '.0'}E{int(exponent)}"


def _quota_of(names: Mapping[str, str | None], key: str, text: str) -> float:
    value = float(text)
    if reason := reason_against_value(names, key, value):
        raise ValueError(reason)
    return value


# --- rules ---


def camel(constant: IntEnum) -> str:
    """Return an enum constant of an ACL as ZooKeeper spells it, e.g. ``TransactionalId``."""
    return constant.name.title().replace("_", "")


def _word(kind: type[N], text: object, least: N) -> N:
    """Return the enum constant named by ``text``, in any of Kafka's spellings.

    Raises ValueError, also for a constant below ``least``.
    """
    plain = str(text).replace("_", "").upper()
    for key in kind:
        if key >= least and key.name.replace("_", "") == plain:
            return key
    raise ValueError(f"{text!r} is not a {kind.__name__}")


class _Resource(NamedTuple):
    kind: ResourceType
    pattern: PatternType
    name: str


def _resource_of(path: str) -> _Resource | None:
    for pattern, folder in RULE_FOLDERS.items():
        if path.startswith(f"{folder}/"):
            kind, _, name = path.removeprefix(f"{folder}/").partition("/")
            try:
                return _Resource(_word(ResourceType, kind, ResourceType.TOPIC), pattern, name)
            except ValueError:
                _log.warning("ACLs of an unknown resource type skipped", path=path)
    return None


def _rules(path: str, data: bytes) -> list[AccessRecord]:
    resource = _resource_of(path)
    if resource is None:
        return []
    try:
        entries = _entries(path, data)
    except NotOurFormatError as error:
        _log.error(
            "ACLs in ZooKeeper cannot be read: every request to the resource is denied",
            cause=str(error),
        )
        return [_rule(resource, ANYBODY, ANYTHING, Operation.ALL, Permission.DENY)]
    rules: dict[Hashable, AccessRecord] = {}
    for entry in entries:
        rule = _rule_of(path, resource, entry)
        if rule is not None:
            rules[rule.id] = rule
    return [*rules.values()]


def _entries(path: str, data: bytes) -> list[Any]:
    if not data:
        return []
    value = znodes.read_json(data, path)
    entries = value.get("acls")
    if value.get("version") != 1 or not isinstance(entries, list):
        raise NotOurFormatError(f"{path} is not in the ACL format of version 1")
    return entries


def _rule_of(path: str, resource: _Resource, entry: Any) -> AccessControlEntryRecord | None:
    """Return an entry's ACL.

    Return None for an ALLOW that cannot be parsed. Any other entry that cannot be parsed becomes a
    DENY of everything that it may have denied.
    """
    fields = entry if isinstance(entry, dict) else {}
    principal, host = fields.get("principal"), fields.get("host")
    wrong = None
    permission, operation = Permission.DENY, Operation.ALL
    try:
        permission = _word(Permission, fields.get("permissionType"), Permission.DENY)
        operation = _word(Operation, fields.get("operation"), Operation.ALL)
    except ValueError as error:
        wrong = str(error)
    if not isinstance(principal, str) or ":" not in principal:
        wrong, principal = "it names no principal", ANYBODY
    if not isinstance(host, str):
        wrong, host = "it names no host", ANYTHING
    if wrong is not None:
        allows = permission is Permission.ALLOW
        effect = (
            "it allows nothing" if allows else "it denies everything that the rule may have denied"
        )
        _log.error("ACL in ZooKeeper cannot be read", path=path, cause=wrong, effect=effect)
        if allows:
            return None
    return _rule(resource, principal, host, operation, permission)


def _rule(
    resource: _Resource, principal: str, host: str, operation: Operation, permission: Permission
) -> AccessControlEntryRecord:
    parts = (
        int(resource.kind),
        resource.name,
        int(resource.pattern),
        principal,
        host,
        int(operation),
        int(permission),
    )
    # An ACL has the same id on every broker, also after a broker restarts.
    return AccessControlEntryRecord(uuid.uuid5(uuid.NAMESPACE_OID, repr(parts)), *parts)


def entry_of(rule: AccessControlEntryRecord) -> dict[str, str]:
    """Return an ACL as an entry of the znode's ``acls``."""
    return {
        "principal": rule.principal,
        "permissionType": camel(Permission(rule.permission_type)),
        "host": rule.host,
        "operation": camel(Operation(rule.operation)),
    }


def _changed_rules(
    path: str, data: bytes | None, changes: Iterable[SecurityChange]
) -> bytes | None:
    """Return a znode's data after changes of its ACLs, without reformatting the unchanged entries.

    An entry that cannot be parsed is removed together with the ACL that was derived from it.
    """
    resource = _resource_of(path)
    if resource is None:
        raise NotOurFormatError(f"{path} holds no ACLs")
    entries: dict[object, list[Any]] = {}
    for entry in _entries(path, data or b""):
        rule = _rule_of(path, resource, entry)
        entries.setdefault(None if rule is None else _facts(rule), []).append(entry)
    for record, is_removed in changes:
        if not isinstance(record, AccessControlEntryRecord):
            continue
        if is_removed:
            entries.pop(_facts(record), None)
        else:
            entries.setdefault(_facts(record), [entry_of(record)])
    if not entries:
        return None
    left = [rule for rules in entries.values() for rule in rules]
    return znodes.written({"acls": left, "version": 1})


def _facts(rule: AccessControlEntryRecord) -> tuple[object, ...]:
    return rule.principal, rule.host, rule.operation, rule.permission_type


# --- notifications ---


def notification_of(path: str) -> tuple[str, bytes]:
    """Return the path prefix and the data of the notification of a change."""
    resource = _resource_of(path) if is_of_rules(path) else None
    if resource is None:
        return znodes.CONFIG_CHANGE_PREFIX, znodes.entity_change_data(
            path.removeprefix(f"{znodes.CONFIGS}/")
        )
    if resource.pattern is PatternType.LITERAL:
        return f"{LITERAL_CHANGES}/acl_changes_", f"{resource.kind.name}:{resource.name}".encode()
    value = {
        "version": 1,
        "resourceType": resource.kind.name,
        "name": resource.name,
        "patternType": resource.pattern.name,
    }
    return f"{PREFIXED_CHANGES}/acl_changes_", znodes.written(value)


def path_of_notification(folder: str, path: str, data: bytes) -> str:
    """Return the path of the ACLs that a notification names. Raises NotOurFormatError."""
    try:
        if folder == LITERAL_CHANGES:
            kind, _, name = data.decode().partition(":")
            pattern = PatternType.LITERAL
        else:
            value = znodes.read_json(data, path)
            kind, name = value["resourceType"], str(value["name"])
            pattern = _word(PatternType, value["patternType"], PatternType.LITERAL)
        kind_name = camel(_word(ResourceType, kind, ResourceType.TOPIC))
    except (KeyError, ValueError) as error:
        raise NotOurFormatError(f"{path} names no resource: {error}") from None
    return f"{RULE_FOLDERS[pattern]}/{kind_name}/{name}"
