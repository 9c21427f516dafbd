"""ACLs are created and deleted, and the authorizer applies the changes.

The scenarios come from Kafka's AclControlManagerTest, and from AuthorizerTest's cases of creating,
deleting and listing ACLs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from structlog.testing import capture_logs

from fencepost.cluster.acl import (
    ANYTHING,
    Acl,
    AclFilter,
    AclLimits,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from fencepost.cluster.controller.acls import check_filter
from fencepost.cluster.controller.errors import InvalidRequestError, PolicyViolationError
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.view import ControllerSettings
from fencepost.cluster.records import AccessControlEntryRecord, RemoveAccessControlEntryRecord
from fencepost.coordinator.handlers.controller_decisions import ITEMS_PER_TURN, batched
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.security.acls import AclPublisher
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.errors import StorageError
from fencepost.logcore.machine import DomainError
from fencepost.protocol.steps import Steps, finish
from tests.support.quick import seeds
from tests.support.stalls import watched_loop
from tests.unit.coordinator.security.slow_authorizer import rule, session
from tests.unit.coordinator.security.test_authorizer import HOSTS, NAMES, USERS, drawn
from tests.unit.coordinator.services.coordinators import storage

ANY = AclFilter()
READ_T = rule("ALLOW READ User:alice * TOPIC LITERAL t")


class Kept:
    """A metadata log with ACLs, and their authorizer."""

    def __init__(self, directory: Path, **limits: int) -> None:
        self._directory, self._limits = directory, AclLimits(**limits)
        self.open()

    def open(self) -> None:
        self.storage: Storage = storage(self._directory)
        self.authorizer = Authorizer()
        AclPublisher(self.storage.metadata, self.authorizer)
        settings = ControllerSettings("cluster", acl_limits=self._limits)
        self.controller = Controller(settings, self.storage.metadata.image, 0)

    def restart(self) -> None:
        self.storage.metadata.force()
        self.storage.logs.close()
        self.open()

    def creating(self, rules: Iterable[Acl]) -> Steps[list[DomainError | None]]:
        """Create ACLs, with a decision per step."""
        machine = self.controller
        machine.image = self.storage.metadata.image
        errors, created = yield from machine.check_acl_creation(
            rules, self.authorizer.rules, lambda _: None
        )
        for some in batched(created, ITEMS_PER_TURN):
            outcome = machine.create_acls(some, self.authorizer.rules, uuid4)
            self.storage.metadata.append(outcome.records)
            yield
        return errors

    def deleting(self, filters: Iterable[AclFilter]) -> Steps[list[list[Acl] | DomainError]]:
        """Delete ACLs, with a decision per step."""
        machine = self.controller
        machine.image = self.storage.metadata.image
        answers, deleted = yield from machine.check_acl_deletion(filters, self.authorizer.rules)
        for some in batched(deleted, ITEMS_PER_TURN):
            outcome = machine.delete_acls(some, self.authorizer.rules)
            self.storage.metadata.append(outcome.records)
            yield
        return answers

    def create(self, *rules: Acl) -> list[str | None]:
        return [None if error is None else str(error) for error in finish(self.creating(rules))]

    def delete(self, *filters: AclFilter) -> list:
        return [
            result if isinstance(result, Exception) else set(result)
            for result in finish(self.deleting(filters))
        ]

    def found(self, wanted: AclFilter = ANY) -> set[Acl]:
        found = finish(self.authorizer.rules.find(wanted))
        assert len(found) == len(set(found))
        return set(found)

    @property
    def records(self) -> int:
        return self.storage.metadata.partition.log_end_offset


@pytest.fixture
def kept(tmp_path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.storage.logs.close()


def exactly(acl: Acl) -> AclFilter:
    return AclFilter(
        acl.resource_type,
        acl.pattern_type,
        acl.resource_name,
        acl.principal,
        acl.host,
        acl.operation,
        acl.permission,
    )


# --- valid rules and filters ----------------------------------------------------------------------

GOOD = rule("ALLOW ALTER User:* * TOPIC LITERAL *")
NO_COLON = (
    "Could not parse principal from `{}` (no colon is present separating the principal type from"
    " the principal name)"
)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pattern_type": PatternType.UNKNOWN}, "Invalid patternType UNKNOWN"),
        ({"pattern_type": PatternType.ANY}, "Invalid patternType ANY"),
        ({"pattern_type": PatternType.MATCH}, "Invalid patternType MATCH"),
        ({"resource_type": ResourceType.UNKNOWN}, "Invalid resourceType UNKNOWN"),
        ({"resource_type": ResourceType.ANY}, "Invalid resourceType ANY"),
        ({"operation": Operation.UNKNOWN}, "Invalid operation UNKNOWN"),
        ({"operation": Operation.ANY}, "Invalid operation ANY"),
        ({"permission": Permission.UNKNOWN}, "Invalid permissionType UNKNOWN"),
        ({"permission": Permission.ANY}, "Invalid permissionType ANY"),
        ({"resource_name": ""}, "Invalid empty resource name"),
        ({"host": ""}, "Host pattern cannot be null or empty"),
        (
            {"resource_type": ResourceType.CLUSTER, "resource_name": "other"},
            "The only valid name for the CLUSTER resource is kafka-cluster",
        ),
        (
            {"principal": "invalid"},
            NO_COLON.format("invalid"),
        ),
        (
            {"principal": ""},
            NO_COLON.format(""),
        ),
        ({"resource_type": ResourceType.CLUSTER, "resource_name": "kafka-cluster"}, None),
        ({"resource_type": ResourceType.GROUP, "operation": Operation.WRITE}, None),
        ({"principal": ":"}, None),
        ({"host": "anything at all"}, None),
        ({"resource_name": "ü" * 512}, None),
        ({"resource_name": "ü" * 512 + "x"}, "the resource_name has more than 1024 bytes"),
        ({"principal": "User:" + "x" * 1020}, "the principal has more than 1024 bytes"),
        ({"host": "x" * 1025}, "the host has more than 1024 bytes"),
    ],
)
def test_invalid_acl_is_refused_with_its_reason(kept, changes, why):
    wanted = replace(GOOD, **changes)
    assert kept.create(READ_T, wanted) == [None, why]
    assert kept.found() == {READ_T} | ({wanted} if why is None else set())


@pytest.mark.parametrize(
    "unknown",
    [
        AclFilter(pattern_type=PatternType.UNKNOWN),
        AclFilter(resource_type=ResourceType.UNKNOWN),
        AclFilter(operation=Operation.UNKNOWN),
        AclFilter(permission=Permission.UNKNOWN),
    ],
)
def test_acl_filter_with_unknown_field_is_an_invalid_request(kept, unknown):
    kept.create(READ_T)
    with pytest.raises(InvalidRequestError, match="the filter has an unknown"):
        check_filter(unknown)
    refused, gone = kept.delete(unknown, ANY)
    assert isinstance(refused, InvalidRequestError)
    assert gone == {READ_T}


# --- creation and deletion ------------------------------------------------------------------------


def test_acl_changes_apply_at_once_and_after_restart(kept):
    who = session("alice")
    kept.create(READ_T)
    for _ in range(2):
        assert kept.authorizer.allows(who, Operation.READ, ResourceType.TOPIC, "t")
        assert kept.found() == {READ_T}
        kept.restart()
    kept.delete(exactly(READ_T))
    for _ in range(2):
        assert not kept.authorizer.allows(who, Operation.READ, ResourceType.TOPIC, "t")
        assert kept.found() == set()
        kept.restart()


def test_acl_is_stored_as_access_control_entry_record(kept):
    kept.create(rule("DENY WRITE Role:x 10.0.0.1 GROUP PREFIXED g"))
    ((id_, record),) = kept.storage.metadata.image.acls.items()
    assert record == AccessControlEntryRecord(
        id=id_,
        resource_type=3,
        resource_name="g",
        pattern_type=4,
        principal="Role:x",
        host="10.0.0.1",
        operation=4,
        permission_type=2,
    )


@pytest.mark.parametrize("change", [{"operation": 99}, {"permission_type": 0}])
def test_acl_record_with_unknown_value_prevents_startup(kept, change):
    """Without the ACL, which may be a DENY rule, the broker might allow too much."""
    kept.create(READ_T)
    (record,) = kept.storage.metadata.image.acls.values()
    kept.storage.metadata.append([replace(record, **change)])
    with pytest.raises(MetadataError, match=f"the rule {record.id} is not understood"):
        kept.restart()


def test_acl_record_with_unknown_value_is_logged_and_the_others_apply(kept):
    kept.create(READ_T)
    (record,) = kept.storage.metadata.image.acls.values()
    odd, last = replace(record, id=UUID(int=1), operation=99), replace(record, resource_name="last")
    first = replace(record, id=UUID(int=2), resource_name="first")
    with capture_logs() as lines:
        kept.storage.metadata.append([first, odd, replace(last, id=UUID(int=3))])
    (line,) = [text for text in lines if text["log_level"] == "error"]
    assert line["acl"] == str(odd.id)
    assert "99 is not a valid Operation" in line["cause"]
    held = {READ_T, *(replace(READ_T, resource_name=name) for name in ("first", "last"))}
    assert kept.found() == held
    with capture_logs() as lines:
        kept.storage.metadata.append([RemoveAccessControlEntryRecord(odd.id)])
        assert kept.delete(exactly(READ_T)) == [{READ_T}]
    assert kept.found() == held - {READ_T}
    assert lines == []


def test_valid_acls_of_a_request_apply_despite_invalid_ones(kept):
    good = [rule(f"ALLOW READ User:a * TOPIC {how} t") for how in ("LITERAL", "PREFIXED")]
    bad = replace(GOOD, pattern_type=PatternType.UNKNOWN)
    assert kept.create(*good, bad) == [None, None, "Invalid patternType UNKNOWN"]
    gone, refused = kept.delete(
        AclFilter(pattern_type=PatternType.LITERAL), AclFilter(resource_type=ResourceType.UNKNOWN)
    )
    assert gone == {good[0]}
    assert isinstance(refused, InvalidRequestError)
    assert kept.found() == {good[1]}


def test_duplicate_acl_is_stored_once(kept):
    before = kept.records
    assert kept.create(READ_T, READ_T) == [None, None]
    assert kept.records == before + 1
    assert kept.create(READ_T) == [None]
    assert kept.records == before + 1


def test_acl_matched_by_two_filters_is_returned_twice_and_deleted_once(kept):
    kept.create(READ_T)
    before = kept.records
    assert kept.delete(ANY, exactly(READ_T)) == [{READ_T}, {READ_T}]
    assert kept.records == before + 1
    assert kept.delete(ANY) == [set()]
    assert kept.records == before + 1


def test_acl_changes_of_one_request_are_limited(tmp_path):
    kept = Kept(tmp_path, max_changes_per_request=10)
    rules = [
        rule(f"ALLOW READ User:alice 127.0.0.1 TOPIC LITERAL mytopic_{at}") for at in range(12)
    ]
    with pytest.raises(PolicyViolationError, match="max_changes_per_request"):
        kept.create(*rules[:11])
    assert kept.found() == set()
    assert kept.create(*rules[:10]) == [None] * 10
    assert kept.create(*rules) == [None] * 12, "what is there already does not count"
    with pytest.raises(InvalidRequestError, match="Cannot remove more than 10 acls in a single"):
        kept.delete(*map(exactly, rules))
    with pytest.raises(InvalidRequestError, match="Cannot remove more than 10 acls in a single"):
        kept.delete(ANY)
    assert kept.found() == set(rules)
    kept.delete(*map(exactly, rules[:10]), *map(exactly, rules[:10]))
    assert kept.found() == set(rules[10:])


def test_number_of_acls_is_limited(tmp_path):
    kept = Kept(tmp_path, max_acls=3)
    rules = [rule(f"ALLOW READ User:u{at} * TOPIC LITERAL t") for at in range(4)]
    kept.create(*rules[:2])
    with pytest.raises(PolicyViolationError, match="max_acls"):
        kept.create(*rules[2:])
    assert kept.create(rules[2]) == [None]
    assert kept.create(*rules[:3]) == [None] * 3, "there is nothing to be made"
    kept.delete(exactly(rules[0]))
    assert kept.create(rules[3]) == [None]


def test_bytes_of_acl_changes_of_one_request_are_limited(tmp_path):
    kept = Kept(tmp_path, max_change_bytes=len("tUser:alice*"))
    assert kept.create(READ_T) == [None]
    with pytest.raises(PolicyViolationError, match="max_change_bytes"):
        kept.create(rule("ALLOW READ User:alice * TOPIC LITERAL tt"))
    with pytest.raises(PolicyViolationError, match="max_change_bytes"):
        kept.create(
            *[rule(f"ALLOW {what} User:alice * TOPIC LITERAL t") for what in ("WRITE", "ALL")]
        )


def test_acl_change_is_not_applied_if_its_append_fails(kept, monkeypatch):
    kept.create(READ_T)

    def fail(*_args: object, **_fields: object) -> None:
        raise StorageError("no")

    monkeypatch.setattr(kept.storage.metadata.partition, "append_batch", fail)
    for change in (lambda: kept.create(GOOD), lambda: kept.delete(ANY)):
        with pytest.raises(StorageError):
            change()
        assert kept.found() == {READ_T}
    monkeypatch.undo()
    kept.create(GOOD)
    assert kept.delete(ANY) == [{READ_T, GOOD}]


# --- filters -------------------------------------------------------------------------------------


def test_acl_filter_selects_by_principal_host_operation_and_permission(kept):
    rules = [
        rule(text)
        for text in (
            "ALLOW READ User:alice host1 TOPIC LITERAL t",
            "ALLOW WRITE User:alice host1 TOPIC LITERAL t",
            "ALLOW READ User:bob host2 TOPIC LITERAL t",
            "ALLOW READ User:bob * TOPIC LITERAL t",
            "ALLOW READ User:* * TOPIC LITERAL t",
        )
    ]
    kept.create(*rules)
    assert kept.found(AclFilter(principal="User:alice")) == set(rules[:2])
    assert kept.found(AclFilter(principal="User:bob")) == set(rules[2:4])
    assert kept.found(AclFilter(principal="User:*")) == {rules[4]}
    assert kept.found(AclFilter(host="*")) == set(rules[3:])
    assert kept.found(AclFilter(operation=Operation.WRITE)) == {rules[1]}
    assert kept.found(AclFilter(permission=Permission.DENY)) == set()


def test_acl_filter_selects_by_resource_pattern(kept):
    one, two = "foo-1", "bar-2"
    acl1 = rule(f"ALLOW READ User:alice * TOPIC LITERAL {one}")
    acl2 = rule(f"ALLOW WRITE User:alice 192.168.0.1 TOPIC LITERAL {one}")
    acl3 = rule(f"ALLOW DESCRIBE User:alice * TOPIC LITERAL {two}")
    acl4 = rule("ALLOW READ User:* * TOPIC PREFIXED bar-")
    kept.create(acl1, acl2, acl3, acl4)
    topic = ResourceType.TOPIC
    assert kept.found() == {acl1, acl2, acl3, acl4}
    assert kept.found(AclFilter(topic, PatternType.LITERAL, one)) == {acl1, acl2}
    assert kept.found(AclFilter(topic, PatternType.PREFIXED, "bar-")) == {acl4}
    matching = AclFilter(pattern_type=PatternType.MATCH, resource_name=two)
    assert kept.found(matching) == {acl3, acl4}
    answers = kept.delete(
        matching,
        exactly(acl1),
        AclFilter(topic, PatternType.LITERAL, two),
        AclFilter(topic, PatternType.ANY, "baz"),
    )
    assert answers == [{acl3, acl4}, {acl1}, {acl3}, set()]
    assert kept.found() == {acl2}


@pytest.mark.parametrize("where", ["LITERAL t", "LITERAL *", "PREFIXED t"])
def test_acl_deletion_keeps_other_acls_of_the_resource(kept, where):
    """Some ACLs of a resource are deleted; its other ACLs, and those of other resources, stay."""
    read, write, deny = (
        rule(f"{text} User:alice * TOPIC {where}")
        for text in ("ALLOW READ", "ALLOW WRITE", "DENY READ")
    )
    kept.create(rule("ALLOW READ User:alice * GROUP LITERAL t"))
    kept.create(read, write)
    kept.create(write, deny)
    how, name = where.split(" ")
    mine = AclFilter(ResourceType.TOPIC, PatternType[how], name)
    assert kept.found(mine) == {read, write, deny}
    kept.delete(exactly(read))
    assert kept.found(mine) == {write, deny}
    assert kept.delete(mine) == [{write, deny}]
    assert len(kept.found()) == 1


def matches(wanted: AclFilter, acl: Acl) -> bool:
    """Match like Kafka's ``ResourcePatternFilter`` and ``AccessControlEntryFilter``."""
    if wanted.resource_type not in {ResourceType.ANY, acl.resource_type}:
        return False
    how, name = wanted.pattern_type, wanted.resource_name
    if how not in {PatternType.ANY, PatternType.MATCH, acl.pattern_type}:
        return False
    if name is not None:
        if how is not PatternType.MATCH:
            if name != acl.resource_name:
                return False
        elif acl.pattern_type is PatternType.LITERAL:
            if acl.resource_name not in {name, ANYTHING}:
                return False
        elif not name.startswith(acl.resource_name):
            return False
    return (
        wanted.principal in {None, acl.principal}
        and wanted.host in {None, acl.host}
        and wanted.operation in {Operation.ANY, acl.operation}
        and wanted.permission in {Permission.ANY, acl.permission}
    )


def drawn_filter(draw: random.Random) -> AclFilter:
    return AclFilter(
        draw.choice([ResourceType.ANY, ResourceType.TOPIC, ResourceType.GROUP]),
        draw.choice([pattern_type for pattern_type in PatternType if pattern_type]),
        draw.choice([None, *NAMES, "abc"]),
        draw.choice([None, None, *(f"User:{user}" for user in USERS)]),
        draw.choice([None, None, None, *HOSTS]),
        draw.choice([Operation.ANY, Operation.ANY, Operation.READ, Operation.ALL]),
        draw.choice([Permission.ANY, Permission.ANY, Permission.ALLOW]),
    )


@pytest.mark.parametrize("seed", seeds(25))
def test_acl_table_equals_the_model_after_random_changes(tmp_path, seed):
    """Deletion removes exactly the ACLs that the filters match (CVE-2024-27309)."""
    draw, kept, model = random.Random(seed), Kept(tmp_path), set[Acl]()
    for _ in range(12):
        wanted = drawn_filter(draw)
        assert kept.found(wanted) == {acl for acl in model if matches(wanted, acl)}, wanted
        match draw.randrange(4):
            case 0:
                kept.restart()
            case 1:
                filters = [drawn_filter(draw) for _ in range(draw.randrange(3))]
                meant = [{acl for acl in model if matches(each, acl)} for each in filters]
                assert kept.delete(*filters) == meant
                model.difference_update(*meant)
            case _:
                made = [drawn(draw) for _ in range(draw.choice([1, 2, 9]))]
                kept.create(*made)
                model.update(made)
        assert kept.found() == model
        assert kept.authorizer.rules.count == len(model)
    kept.storage.logs.close()


# --- large tables --------------------------------------------------------------------------------


def large(count: int) -> Iterable[Acl]:
    for at in range(count):
        how = "PREFIXED" if at % 2 else "LITERAL"
        yield rule(f"ALLOW READ User:u{at % 100} 10.0.0.{at % 50} TOPIC {how} name{at}")


@pytest.mark.slow
def test_event_loop_stays_responsive_while_many_of_twenty_thousand_acls_change(kept):
    """A turn runs steps until the slice is over, so the longest step limits its duration."""
    rules = list(large(20_000))
    half = rules[:10_000]
    with watched_loop() as watch:
        for steps in (
            kept.creating(half),
            kept.creating(rules[10_000:]),
            kept.creating(half),
            kept.authorizer.rules.find(ANY),
            kept.deleting(map(exactly, half)),
        ):
            more = True
            while more:

                def step(steps=steps) -> None:
                    nonlocal more
                    more = next(steps, StopIteration) is not StopIteration

                watch.time(step, steps)
    assert kept.found() == set(rules[10_000:])
    watch.check()
