"""The authorizer's decisions, with the scenarios of StandardAuthorizerTest and AuthorizerTest.

Users, topics and hosts have the same names as in Kafka's tests.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import replace

import pytest

from fencepost.cluster.acl import (
    CLUSTER_NAME,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from fencepost.coordinator.config.broker_config import BrokerConfig, ConfigError
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.security import rules as rules_module
from fencepost.coordinator.security.authorizer import STANDARD, Authorizer, parse_super_users
from fencepost.coordinator.security.principal import (
    ANONYMOUS,
    ClientSession,
    Principal,
    canonical_host,
)
from fencepost.coordinator.security.rules import NO_ID, RuleTable
from fencepost.protocol.steps import finish
from tests.support.stalls import MAX_STALL_MS, slowness
from tests.unit.coordinator.security import slow_authorizer as model
from tests.unit.coordinator.security.slow_authorizer import rule, session

KINDS = {"T": ResourceType.TOPIC, "G": ResourceType.GROUP, "C": ResourceType.CLUSTER}
REAL = [operation for operation in Operation if operation > Operation.ALL]


def authorizer(*texts: str, **fields) -> Authorizer:
    made = Authorizer(**fields)
    made.rules = RuleTable.of(map(rule, texts))
    return made


def may(of: Authorizer, who: ClientSession | str, what: str, host: str = "127.0.0.1") -> bool:
    """Decide on an operation like ``READ T foo``; the resource name may be empty."""
    operation, kind, name = what.split(" ")
    asks = session(who, host) if isinstance(who, str) else who
    return of.allows(asks, Operation[operation], KINDS[kind], name)


def all_of(of: Authorizer, who: str, *whats: str, host: str = "127.0.0.1") -> list[bool]:
    return [may(of, who, what, host) for what in whats]


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", set()),
        (" ", set()),
        ("User:bob;User:alice ", {"User:bob", "User:alice"}),
        (";  User:bob  ;  User:alice ", {"User:bob", "User:alice"}),
        ("User:CN=a,O=b;Role:x", {"User:CN=a,O=b", "Role:x"}),
    ],
)
def test_super_users_are_separated_by_semicolons(text, names):
    assert {str(principal) for principal in parse_super_users(text)} == names


def test_super_user_without_principal_type_is_a_config_error():
    with pytest.raises(ConfigError, match=r"'bob' is not a principal of the form TYPE:NAME"):
        parse_super_users("bob;:alice")


@pytest.mark.parametrize("name", ["", STANDARD, f" {STANDARD} "])
def test_standard_authorizer_is_the_only_one_configured_by_class_name(name):
    settings = {"super.users": "User:alice;User:chris", "authorizer.class.name": name}
    made = Authorizer.configured(BrokerConfig(settings))
    if not name:
        assert made is None
    else:
        assert may(made, "alice", "READ T foo")
        assert may(made, "chris", "READ T foo")
        assert not may(made, "Alice", "READ T foo")


@pytest.mark.parametrize("name", ["kafka.security.authorizer.AclAuthorizer", "Standard", "*"])
def test_unknown_authorizer_class_is_a_config_error(tmp_path, name):
    with pytest.raises(ConfigError, match="Java classes are not loaded; built in is org"):
        Broker(tmp_path, config={"authorizer.class.name": name})


@pytest.mark.parametrize(("text", "allowed"), [(" true ", True), ("false", False), (None, False)])
def test_allow_everyone_if_no_acl_found_applies_to_resources_without_acl(text, allowed):
    settings = {"authorizer.class.name": STANDARD, "super.users": " User:admin "}
    if text is not None:
        settings["allow.everyone.if.no.acl.found"] = text
    made = Authorizer.configured(BrokerConfig(settings))
    made.rules = RuleTable.of([rule("ALLOW READ User:Alice * TOPIC LITERAL topic1")])
    assert may(made, "Bob", "READ T topic2") is allowed
    assert not may(made, "Bob", "READ T topic1")  # another user's ACL is an ACL
    assert not may(made, "Alice", "WRITE T topic1")
    assert may(made, "admin", "WRITE T topic1")


def test_anonymous_principal_can_be_a_super_user():
    of = authorizer(super_users=[ANONYMOUS])
    assert may(of, ClientSession("127.0.0.1", "PLAINTEXT"), "ALTER C kafka-cluster")


# --- one ACL --------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["DESCRIBE", "READ", "WRITE", "DELETE", "ALTER"])
def test_describe_is_implied_by_other_allowed_operations(operation):
    of = authorizer(f"ALLOW {operation} User:bob * TOPIC PREFIXED foo_")
    assert may(of, "bob", "DESCRIBE T foo_bar")
    denied = authorizer(
        f"DENY {operation} User:bob * TOPIC PREFIXED foo_", "ALLOW ALL User:bob * TOPIC LITERAL *"
    )
    assert may(denied, "bob", "DESCRIBE T foo_bar") is (operation != "DESCRIBE")


@pytest.mark.parametrize("permission", ["ALLOW", "DENY"])
@pytest.mark.parametrize(
    ("operation", "implied"),
    [
        (Operation.ALL, set(REAL)),
        (Operation.READ, {Operation.DESCRIBE}),
        (Operation.WRITE, {Operation.DESCRIBE}),
        (Operation.DELETE, {Operation.DESCRIBE}),
        (Operation.ALTER, {Operation.DESCRIBE}),
        (Operation.ALTER_CONFIGS, {Operation.DESCRIBE_CONFIGS}),
        *[(o, set()) for o in (Operation.CREATE, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)],
        *[(o, set()) for o in (Operation.CLUSTER_ACTION, Operation.IDEMPOTENT_WRITE)],
    ],
)
def test_acl_operation_implies_the_same_operations_as_in_kafka(permission, operation, implied):
    texts = [f"{permission} {operation.name} User:alice * CLUSTER LITERAL {CLUSTER_NAME}"]
    decided = implied | {operation}
    if permission == "DENY":
        texts.append(f"ALLOW ALL User:alice * CLUSTER LITERAL {CLUSTER_NAME}")
        decided = set(REAL) if operation is Operation.ALL else {operation}
    of = authorizer(*texts)
    for checked in REAL:
        expected = (checked in decided) is (permission == "ALLOW")
        assert may(of, "alice", f"{checked.name} C {CLUSTER_NAME}", "192.168.3.1") is expected, (
            checked
        )


def test_acl_applies_to_exactly_its_principal_or_to_the_wildcard():
    of = authorizer(
        "ALLOW READ User:bob * TOPIC PREFIXED foo_",
        "ALLOW READ User:* * GROUP LITERAL bar",
        "ALLOW WRITE Role:bob * TOPIC PREFIXED foo_",
    )
    assert all_of(of, "bob", "READ T foo_bar", "READ G bar", "WRITE T foo_bar") == [
        True, True, False
    ]  # fmt: skip
    assert all_of(of, "alice", "READ T foo_bar", "READ G bar") == [False, True]
    assert not may(of, "Bob", "READ T foo_bar")
    role = replace(session(""), principal=Principal("Role", "bob"))
    assert may(of, role, "WRITE T foo_bar")
    assert may(of, role, "READ G bar"), "User:* is everybody, whatever their type"


def test_empty_resource_name_matches_wildcard_acl():
    of = authorizer()
    assert not may(of, "alice", "READ G ")
    of.rules = RuleTable.of([rule("ALLOW READ User:* * GROUP LITERAL *")])
    assert may(of, "alice", "READ G ")


# --- many ACLs ------------------------------------------------------------------------------------


def test_acls_of_several_resources_and_principals_are_combined():
    of = authorizer(
        "ALLOW READ User:bob * TOPIC PREFIXED foo_",
        "ALLOW WRITE User:bob * TOPIC PREFIXED foo_",
        "ALLOW DESCRIBE_CONFIGS User:* * GROUP LITERAL bar",
        "ALLOW ALTER_CONFIGS User:* * GROUP LITERAL bar",
    )
    assert may(of, "bob", "READ T foo_")
    assert may(of, "fred", "ALTER_CONFIGS G bar")


def test_deny_all_overrides_allow_on_the_same_topic():
    of = authorizer(
        "DENY ALL User:alice * TOPIC LITERAL foo",
        "ALLOW READ User:alice * TOPIC PREFIXED foo",
        "DENY ALL User:* * TOPIC LITERAL foo",
        "ALLOW DESCRIBE User:* * TOPIC PREFIXED foo",
    )
    assert all_of(of, "alice", "WRITE T foo", "READ T foo", "DESCRIBE T foo", "READ T foobar") == [
        False, False, False, True
    ]  # fmt: skip
    whats = "DESCRIBE T foo", "READ T foo", "WRITE T foo", "DESCRIBE T foobaz", "READ T foobaz"
    assert all_of(of, "bob", *whats) == [False, False, False, True, False]


def test_allow_all_permits_every_operation_on_matching_topics():
    of = authorizer(
        "ALLOW ALL User:* * TOPIC LITERAL foo",
        "ALLOW ALL User:alice * TOPIC PREFIXED bar",
        "ALLOW ALL User:bob * TOPIC LITERAL baz",
    )
    assert all_of(of, "alice", "WRITE T foo", "DESCRIBE_CONFIGS T bar", "DESCRIBE T baz") == [
        True, True, False
    ]  # fmt: skip
    assert all_of(of, "bob", "WRITE T foo", "READ T bar", "DESCRIBE T baz") == [True, False, True]
    assert all_of(of, "malory", "DESCRIBE T foo", "WRITE T bar", "READ T baz") == [
        True, False, False
    ]  # fmt: skip


def test_acl_applies_only_to_requests_from_its_host():
    here, host1, host2 = "10.0.0.9", "192.168.1.1", "192.168.1.2"
    of = authorizer(
        f"DENY READ User:alice {host1} TOPIC LITERAL foo",
        "ALLOW READ User:alice * TOPIC LITERAL foo",
        f"ALLOW READ User:bob {host2} TOPIC LITERAL bar",
        f"ALLOW DESCRIBE User:* {here} TOPIC LITERAL bar",
    )
    whats = "READ T foo", "READ T bar", "DESCRIBE T bar"
    assert all_of(of, "alice", *whats, host=here) == [True, False, True]
    assert all_of(of, "alice", *whats, host=host1) == [False, False, False]
    assert all_of(of, "alice", *whats, host=host2) == [True, False, False]
    assert all_of(of, "bob", *whats, host=here) == [False, False, True]
    assert all_of(of, "bob", *whats, host=host1) == [False, False, False]
    assert all_of(of, "bob", *whats, host=host2) == [False, True, True]


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("0:0:0:0:0:0:0:1", "::1"),
        ("::1", "::1"),
        ("2001:DB8:0:0::A", "2001:db8::a"),
        ("::ffff:192.168.1.1", "192.168.1.1"),
        ("::ffff:c0a8:101", "192.168.1.1"),
        ("fe80:0:0:0:0:0:0:1%eth0", "fe80::1%eth0"),
    ],
)
def test_acl_host_matches_equivalent_forms_of_an_ip_address(written, address):
    of = authorizer(
        f"DENY READ User:alice {written} TOPIC LITERAL foo",
        "ALLOW READ User:alice * TOPIC LITERAL foo",
    )
    assert not may(of, "alice", "READ T foo", address)
    assert may(of, "alice", "READ T foo", "192.168.1.2")


@pytest.mark.parametrize("host", ["*", "localhost", "", "10.0.0.0/8", "a\0b", "ü", "::x", "%"])
def test_one_form_leaves_text_that_is_no_ip_address_unchanged(host):
    assert canonical_host(host) == host


@pytest.mark.parametrize(
    ("written", "inside", "outside"),
    [
        ("10.1.2.0/24", ["10.1.2.0", "10.1.2.3", "10.1.2.255"], ["10.1.3.0", "::1"]),
        ("10.1.2.9/24", ["10.1.2.3"], ["10.1.3.9"]),
        ("10.1.2.9/024", ["10.1.2.3"], ["10.1.3.9"]),
        ("0.0.0.0/0", ["10.1.2.3"], ["::1"]),
        ("10.1.2.3/32", ["10.1.2.3"], ["10.1.2.2"]),
        ("0:0:0:0:0:0:0:1/128", ["::1"], ["::2", "0.0.0.1"]),
        ("fe80::/10", ["fe80::1", "fe80::1%eth0"], ["fc00::1", "10.1.2.3"]),
        ("::/0", ["fe80::1"], ["10.1.2.3"]),
        ("10.1.2.3/33", [], ["10.1.2.3"]),
        ("10.1.2/24", [], ["10.1.2.3"]),
        ("10.1.2.3/", [], ["10.1.2.3"]),
        ("10.1.2.3/-1", [], ["10.1.2.3"]),
        ("/8", [], ["10.1.2.3"]),
        ("::/129", [], ["::1"]),
    ],
)
def test_acl_for_cidr_range_applies_to_addresses_in_it(written, inside, outside):
    """The results equal those of Apache Kafka 4.4's ``CidrUtils`` (KIP-1276)."""
    of = authorizer(
        f"DENY READ User:alice {written} TOPIC LITERAL foo",
        "ALLOW READ User:alice * TOPIC LITERAL foo",
    )
    assert not any(may(of, "alice", "READ T foo", host) for host in inside)
    assert all(may(of, "alice", "READ T foo", host) for host in outside)


def test_authorizer_examines_only_cidr_ranges_that_contain_the_host(monkeypatch):
    texts = [
        f"ALLOW READ User:alice 10.{at >> 8}.{at & 255}.0/24 TOPIC LITERAL foo"
        for at in range(5_000)
    ]
    of, looked = authorizer(*texts), []
    real = rules_module._HolderRules.on

    def counted(self, name):
        looked.append(self)
        return real(self, name)

    monkeypatch.setattr(rules_module._HolderRules, "on", counted)
    assert may(of, "alice", "READ T foo", "10.7.9.1")
    assert not may(of, "alice", "READ T foo", "11.7.9.1")
    assert len(looked) == 1


def test_deny_overrides_allow_across_literal_prefixed_and_wildcard_acls():
    of = authorizer(
        "ALLOW READ User:* * TOPIC LITERAL green2",
        "ALLOW READ User:bob * TOPIC PREFIXED green",
        "ALLOW READ User:bob * TOPIC LITERAL betamax4",
        "ALLOW READ User:bob * TOPIC LITERAL betamax",
        "ALLOW READ User:* * TOPIC PREFIXED beta",
        "ALLOW READ User:* * TOPIC PREFIXED alpha",
        "DENY READ User:bob * TOPIC PREFIXED alp",
        "ALLOW WRITE User:bob * GROUP LITERAL *",
        "DENY WRITE User:* * GROUP LITERAL wheel",
    )
    assert all_of(of, "bob", "READ T green1", "WRITE G wheel") == [True, False]
    whats = "READ T alpha", "WRITE G arbitrary", "READ T ala"
    assert all_of(of, "bob", *whats) == [False, True, False]


def test_prefixed_acl_matches_names_that_begin_with_its_prefix():
    of = authorizer(
        "ALLOW ALL User:alice * TOPIC PREFIXED fooa",
        "ALLOW ALL User:bob * TOPIC LITERAL foobar",
        "ALLOW ALL User:bob * TOPIC PREFIXED f",
    )
    assert all_of(of, "bob", "WRITE T foobarr", "READ T goobar", "READ T fooa") == [
        True, False, True
    ]  # fmt: skip
    assert all_of(of, "alice", "DESCRIBE T fooa", "WRITE T bar", "READ T baz") == [
        True, False, False
    ]  # fmt: skip


def test_topic_acls_of_three_users_decide_by_operation_and_host():
    host1, host2 = "192.168.1.1", "192.168.1.2"
    of = authorizer(
        f"ALLOW READ User:alice {host1} TOPIC LITERAL t",
        f"ALLOW READ User:alice {host2} TOPIC LITERAL t",
        f"DENY READ User:alice {host1} TOPIC LITERAL t",
        f"ALLOW WRITE User:alice {host1} TOPIC LITERAL t",
        "ALLOW DESCRIBE User:alice * TOPIC LITERAL t",
        "ALLOW READ User:rob * TOPIC LITERAL t",
        "ALLOW WRITE User:batman * TOPIC LITERAL t",
    )
    whats = "READ T t", "WRITE T t", "DESCRIBE T t", "ALTER T t"
    assert all_of(of, "alice", *whats, host=host1) == [False, True, True, False]
    assert all_of(of, "alice", *whats, host=host2) == [True, False, True, False]
    assert all_of(of, "rob", *whats, host=host1) == [True, False, True, False]
    assert all_of(of, "batman", *whats, host=host1) == [False, True, True, False]


def test_deny_for_a_host_overrides_allow_for_everyone():
    of = authorizer(
        "ALLOW ALL User:* * TOPIC LITERAL t", "DENY ALL User:alice 192.168.2.1 TOPIC LITERAL t"
    )
    assert not may(of, "alice", "READ T t", "192.168.2.1")
    assert may(of, "random", "READ T t", "192.0.4.4")


@pytest.mark.parametrize(
    "name", ["*", "admin;User:x", "admin\n", "Admin", " admin", "", "User:admin"]
)
def test_user_name_with_special_characters_matches_only_its_own_acls(name):
    """A user name never has more rights than the ACLs for exactly this name allow."""
    of = authorizer(
        "ALLOW READ User:bob * TOPIC LITERAL foo",
        "ALLOW READ User:* * TOPIC LITERAL public",
        "DENY READ User:* * TOPIC LITERAL closed",
        super_users=parse_super_users("User:admin;User:*"),
    )
    who = ClientSession("127.0.0.1", "IN", Principal("User", name))
    is_named = name == "*"  # a super user named so, not a wildcard
    assert [may(of, who, f"READ T {topic}") for topic in ("foo", "public", "closed")] == [
        is_named,
        True,
        is_named,
    ]


def test_super_user_is_allowed_despite_deny_acls():
    users = [Principal("User", "superuser1"), Principal("User", "superuser2")]
    of = authorizer("DENY ALL User:* * TOPIC LITERAL t", super_users=users)
    assert may(of, "superuser1", "READ T t", "192.0.4.4")
    assert may(of, "superuser2", "READ T t", "192.0.4.4")
    assert not may(of, "superuser3", "READ T t", "192.0.4.4")


def test_wildcard_resource_acls_apply_to_every_name():
    of = authorizer()
    assert not may(of, "alice", "READ T t", "192.168.3.1")
    everywhere = rule("ALLOW READ User:alice 192.168.3.1 TOPIC LITERAL *")
    of.rules = RuleTable.of([everywhere])
    assert may(of, "alice", "READ T t", "192.168.3.1")
    write = rule("ALLOW WRITE User:alice 192.168.3.1 TOPIC LITERAL t")
    of.rules = RuleTable.of([everywhere, write])
    assert may(of, "alice", "WRITE T t", "192.168.3.1")
    of.rules = RuleTable.of(
        [everywhere, write, rule("DENY WRITE User:alice 192.168.3.1 TOPIC LITERAL *")]
    )
    assert not may(of, "alice", "WRITE T t", "192.168.3.1")


def test_asterisk_is_a_wildcard_only_in_a_literal_pattern():
    of = authorizer(
        "ALLOW READ User:alice * GROUP PREFIXED *", "ALLOW WRITE User:alice * GROUP LITERAL *"
    )
    assert all_of(of, "alice", "READ G a", "READ G *", "READ G *a") == [False, True, True]
    assert all_of(of, "alice", "WRITE G a", "WRITE G *", "WRITE G *a") == [True, True, True]
    of = authorizer("DENY READ User:* * GROUP LITERAL *", allows_without_rules=True)
    assert all_of(of, "alice", "READ G a", "READ G *", "READ G *a") == [False, False, False]


def test_prefixed_acl_is_found_among_similar_prefixes():
    names = ["a_other", "foo-1", "foo-2", "foo-3-zzz", "fooo-4", "fo-5", "fop-6", "fon-7", "fon-"]
    deny = [f"DENY READ User:alice * TOPIC PREFIXED {name}" for name in (*names, "z_other")]
    deny += [f"DENY READ User:alice * TOPIC LITERAL {name}" for name in ("a_other", "z_other")]
    of = authorizer(*deny, "ALLOW READ User:alice * TOPIC PREFIXED foo-")
    assert all_of(of, "alice", "READ T foo-", "READ T foo-0", "READ T foo-1", "READ T fo-") == [
        True, True, False, False
    ]  # fmt: skip


def test_acls_match_names_and_prefixes_of_one_character():
    of = authorizer(
        "ALLOW READ User:alice * TOPIC LITERAL f", "ALLOW READ User:alice * TOPIC PREFIXED _"
    )
    whats = "READ T f", "READ T foo", "READ T _foo", "READ T _", "READ T foo_"
    assert all_of(of, "alice", *whats) == [True, False, True, True, False]


def test_changed_acls_apply_to_the_next_request():
    of, who = authorizer("ALLOW READ User:alice * TOPIC LITERAL t"), session("alice")
    assert of.allows(who, Operation.READ, ResourceType.TOPIC, "t")
    assert of.allows_some(who, Operation.READ, ResourceType.TOPIC)
    version = of.version
    of.rules = RuleTable.of([])
    assert of.version > version
    assert not of.allows(who, Operation.READ, ResourceType.TOPIC, "t")
    assert not of.allows_some(who, Operation.READ, ResourceType.TOPIC)
    assert (of.allowed, of.denied) == (1, 1)


def test_reason_names_the_acl_that_decides():
    texts = [
        "ALLOW READ User:bob * TOPIC LITERAL foo",
        "ALLOW ALL User:* * TOPIC PREFIXED fo",
        "DENY WRITE User:bob ::ffff:10.0.0.1 TOPIC LITERAL *",
    ]
    of = authorizer(*texts, super_users=[Principal("User", "root")], allows_without_rules=True)

    def why(who: str, what: str, host: str = "10.0.0.1") -> str:
        operation, kind, name = what.split(" ")
        return of.reason(session(who, host), Operation[operation], KINDS[kind], name)

    assert why("bob", "READ T foo") == "ALLOW READ for User:bob from * on Topic:LITERAL:foo"
    assert why("eve", "READ T foo") == "ALLOW ALL for User:* from * on Topic:PREFIXED:fo"
    assert why("bob", "WRITE T foo") == (
        "DENY WRITE for User:bob from ::ffff:10.0.0.1 on Topic:LITERAL:*"
    )
    assert why("bob", "WRITE T foo", "10.0.0.2").startswith("ALLOW ALL for User:*")
    assert why("eve", "READ T bar") == "no rule allows it"
    assert why("eve", "READ G bar") == "allow.everyone.if.no.acl.found"
    assert why("root", "READ G bar") == "super user"


# --- any resource of a type -----------------------------------------------------------------------


def some(of: Authorizer, who: str, what: str, host: str = "192.168.1.1") -> bool:
    operation, kind = what.split(" ")
    return of.allows_some(session(who, host), Operation[operation], KINDS[kind])


def test_authorize_by_resource_type_without_acls_follows_the_default():
    of = Authorizer(allows_without_rules=True)
    assert some(of, "alice", "READ T")
    assert not some(Authorizer(), "alice", "READ T")
    of.rules = RuleTable.of([rule("ALLOW READ User:bob * TOPIC LITERAL t")])
    assert some(of, "alice", "READ T"), "there are names that no rule is about"


def test_authorize_by_resource_type_considers_operation_principal_and_host():
    host1, host2 = "192.168.1.1", "192.168.1.2"
    of = authorizer(
        f"DENY READ User:user1 {host1} TOPIC LITERAL sb1",
        f"DENY READ User:user2 {host1} TOPIC LITERAL sb1",
        f"ALLOW WRITE User:user1 {host1} TOPIC LITERAL sb1",
        f"DENY READ User:user1 {host1} GROUP LITERAL sb2",
        f"DENY READ User:user1 {host2} CLUSTER LITERAL kafka-cluster",
        f"DENY READ User:user2 {host2} TOPIC LITERAL sb1",
        f"ALLOW READ User:user1 {host2} TOPIC LITERAL sb1",
    )
    assert not any(some(of, "user1", f"READ {kind}", host1) for kind in KINDS)
    assert some(of, "user1", "READ T", host2)
    assert some(of, "user1", "WRITE T", host1)
    assert not some(of, "user1", "DESCRIBE T", host1), "implications do not count here"
    assert not some(of, "user2", "READ T", host2)


def test_authorize_by_resource_type_is_denied_by_deny_of_same_name():
    texts = ["ALLOW WRITE User:user1 192.168.1.1 TOPIC LITERAL sb1"]
    assert some(authorizer(*texts), "user1", "WRITE T")
    texts.append("DENY WRITE User:user1 192.168.1.1 TOPIC LITERAL sb1")
    assert not some(authorizer(*texts), "user1", "WRITE T")


def test_authorize_by_resource_type_is_denied_by_deny_of_shorter_prefix():
    texts = []
    for permission, name, expected in [
        ("ALLOW", "abcde", True),
        ("DENY", "abcd", False),
        ("ALLOW", "abc", True),
        ("DENY", "a", False),
        ("ALLOW", "ab", False),
    ]:
        texts.append(f"{permission} READ User:user1 192.168.1.1 GROUP PREFIXED {name}")
        assert some(authorizer(*texts), "user1", "READ G") is expected, texts


def test_authorize_by_resource_type_is_denied_by_deny_of_wildcard():
    texts = []
    for permission, how, name, expected in [
        ("ALLOW", "PREFIXED", "hello", True),
        ("DENY", "LITERAL", "*", False),
        ("ALLOW", "LITERAL", "*", False),
        ("ALLOW", "LITERAL", "aloha", False),
    ]:
        texts.append(f"{permission} WRITE User:user1 192.168.1.1 GROUP {how} {name}")
        assert some(authorizer(*texts), "user1", "WRITE G") is expected, texts


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("User:user1 192.168.1.1", "User:user1 *"),
        ("User:user1 192.168.1.1", "User:* 192.168.1.1"),
        ("User:user1 *", "User:user1 192.168.1.1"),
    ],
)
def test_authorize_by_resource_type_considers_wildcard_user_and_host(first, then):
    texts = [f"ALLOW READ {first} TOPIC LITERAL sb1"]
    assert some(authorizer(*texts), "user1", "READ T")
    texts.append(f"DENY READ {then} TOPIC LITERAL sb1")
    assert not some(authorizer(*texts), "user1", "READ T")
    texts += [f"DENY READ {first} TOPIC LITERAL sb2", f"ALLOW READ {then} TOPIC LITERAL sb3"]
    assert some(authorizer(*texts), "user1", "READ T")
    texts.append(f"DENY ALL {then} TOPIC LITERAL sb3")
    assert not some(authorizer(*texts), "user1", "READ T")


def test_authorize_by_resource_type_considers_acls_for_all_operations():
    texts = [
        "DENY WRITE User:user1 192.168.1.1 TOPIC LITERAL sb1",
        "ALLOW ALL User:user1 192.168.1.1 TOPIC LITERAL sb1",
    ]
    assert some(authorizer(*texts), "user1", "READ T")
    texts.append("DENY ALL User:user1 192.168.1.1 TOPIC LITERAL sb1")
    assert not some(authorizer(*texts), "user1", "READ T")


def test_authorize_by_resource_type_allows_super_users_despite_deny():
    of = authorizer(
        "DENY ALL User:* * TOPIC LITERAL *",
        "DENY ALL User:* * GROUP LITERAL *",
        super_users=[Principal("User", "root")],
    )
    assert some(of, "root", "READ T")
    assert some(of, "root", "READ G")
    assert not some(of, "toor", "READ T")


def test_authorize_by_resource_type_cache_is_bounded(monkeypatch):
    monkeypatch.setattr("fencepost.coordinator.security.authorizer.MAX_KEPT_ANSWERS", 2)
    of = authorizer("ALLOW WRITE User:* * TOPIC LITERAL t")
    for user in "abcde":
        assert some(of, user, "WRITE T")
        assert len(of._verdicts) <= 2


# --- the authorizer against the model -------------------------------------------------------------

NAMES = ["*", "a", "ab", "aba", "abab", "b", "ba", "bab", "é", "aé", "\U0001f600", "hardcode", "h"]
USERS = ["alice", "bob", "*"]
HOSTS = ["*", "127.0.0.1", "::ffff:127.0.0.1", "0:0:0:0:0:0:0:1", "::1"]
RANGES = ["127.0.0.0/8", "127.0.0.9/8", "10.0.0.0/8", "0.0.0.0/0", "::/0", "::1/128", "::8/125"]


def drawn(draw: random.Random) -> Acl:
    return Acl(
        draw.choice([ResourceType.TOPIC, ResourceType.GROUP]),
        draw.choice([PatternType.LITERAL, PatternType.PREFIXED]),
        draw.choice(NAMES),
        f"User:{draw.choice(USERS)}",
        draw.choice(draw.choice([HOSTS, RANGES])),
        draw.choice([operation for operation in Operation if operation >= Operation.ALL]),
        draw.choice([Permission.ALLOW, Permission.DENY]),
    )


def compare(of: Authorizer, rules: list[Acl], *, default: bool) -> None:
    for user in ("alice", "bob", "carol", "*"):
        for host in ("127.0.0.1", "::1"):
            who = session(user, host)
            for kind in (ResourceType.TOPIC, ResourceType.GROUP):
                for operation in (Operation.READ, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS):
                    asked = (who, operation, kind)
                    expected = model.allows_some(rules, *asked, allows_without_rules=default)
                    assert of.allows_some(*asked) is expected, (asked, rules)
                    for name in (*NAMES, "", "abc", "*a", "aébc"):
                        expected = model.allows(rules, *asked, name, allows_without_rules=default)
                        assert of.allows(*asked, name, audited=False) is expected, (asked, name)
                        decision = of.rules.decide(str(who.principal), host, *asked[1:], name)
                        assert expected is (default if decision[0] is None else decision[0])
                        assert decision.rule is None or decision.rule in rules


def check_prefixes(table: RuleTable, rules: list[Acl]) -> None:
    """Check that the table keeps no prefix without an ACL."""
    wanted = {
        kind: {
            acl.resource_name
            for acl in rules
            if (acl.resource_type, acl.pattern_type) == (kind, PatternType.PREFIXED)
        }
        for kind in table._prefixes
    }
    assert {kind: set(prefixes._texts) for kind, prefixes in table._prefixes.items()} == wanted
    for (kind, *_), held in table._by_holder.items():
        texts = {name for how, name in held.grants if how is PatternType.PREFIXED}
        assert set(held.prefixes._texts) == texts
        assert texts <= wanted.get(kind, set())


SEEDS, SLOW_SEEDS = range(4), range(4, 40)


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW_SEEDS)]
)
def test_authorizer_equals_the_model_after_random_changes(seed):
    """This includes the removal of only some of a resource's ACLs (CVE-2024-27309)."""
    draw = random.Random(seed)
    default = draw.random() < 0.5
    of = Authorizer(allows_without_rules=default)
    rules: list[Acl] = []
    for _ in range(4):
        gone = draw.sample(rules, draw.randrange(len(rules) // 2 + 1))
        more = [drawn(draw) for _ in range(draw.choice([0, 1, 3, 12]))]
        before, known = of.rules, list(rules)
        of.rules = finish(
            before.changed(removed=[*gone, drawn(draw), *gone], added=dict.fromkeys(more, NO_ID))
        )
        rules = list(dict.fromkeys([*(acl for acl in rules if acl not in gone), *more]))
        # ``removed`` also has a random ACL, which may be in the table.
        rules = [acl for acl in rules if acl in of.rules]
        assert of.rules.count == len(rules)
        assert all(acl in before for acl in known)
        assert before.count == len(known)
        compare(of, rules, default=default)
        check_prefixes(of.rules, rules)
    of.rules = finish(of.rules.changed(removed=rules))
    assert of.rules.count == 0
    assert not of.rules._by_holder
    assert not of.rules._networks
    check_prefixes(of.rules, [])
    compare(of, [], default=default)


def test_authorizer_examines_only_acls_that_match_the_request(monkeypatch):
    texts = [f"ALLOW READ User:u{at} * TOPIC PREFIXED team{at}." for at in range(5_000)]
    texts += [
        f"ALLOW READ User:* 10.0.{at % 250}.{at % 99} TOPIC LITERAL t{at}" for at in range(5_000)
    ]
    of, looked = authorizer(*texts), []
    real = rules_module._HolderRules.on

    def counted(self, name):
        for grant in real(self, name):
            looked.append(grant)
            yield grant

    monkeypatch.setattr(rules_module._HolderRules, "on", counted)
    assert may(of, "u77", "READ T team77.orders")
    assert not may(of, "u77", "READ T team78.orders")
    assert len(looked) == 1


def test_grant_is_rebuilt_once_per_change_of_its_acls(monkeypatch):
    """These ACLs differ only in the spelling of an address."""
    hosts = [":".join("0" * (at >> bit & 1) + "1" for bit in range(8)) for at in range(256)]
    rules = [rule(f"ALLOW READ User:u {host} TOPIC LITERAL t") for host in hosts]
    write = rule(f"ALLOW WRITE User:u {hosts[0]} TOPIC LITERAL t")
    built, real = [], rules_module._grant

    def counted(of):
        built.append(len(of))
        return real(of)

    monkeypatch.setattr(rules_module, "_grant", counted)
    read = 1 << Operation.READ | 1 << Operation.DESCRIBE

    def allowed(table: RuleTable) -> int:
        return table.rights("User:u", canonical_host(hosts[0]), ResourceType.TOPIC, "t").allowed

    made = RuleTable.of(rules)
    assert (built, allowed(made)) == ([256], read)
    # An ACL that is both removed and added exists afterwards.
    most = dict.fromkeys([rules[7], write], NO_ID)
    left = finish(made.changed(removed=rules[1:], added=most))
    assert (built, allowed(left), left.count) == ([256, 3], read | 1 << Operation.WRITE, 3)
    last = finish(left.changed(removed=[rules[0], rules[7]]))
    assert (built[2:], last.count) == ([1], 1)
    assert allowed(last) == 1 << Operation.WRITE | 1 << Operation.DESCRIBE
    none = finish(last.changed(removed=[write]))
    assert (built[3:], allowed(none), none.count) == ([], 0, 0)
    assert not none._by_holder


def test_each_step_of_a_large_acl_change_is_short(request):
    texts = [
        f"ALLOW READ User:u{at % 7} * TOPIC PREFIXED {'x' * (at % 99)}{at}" for at in range(10_000)
    ]
    table, added = RuleTable(), dict.fromkeys(map(rule, texts), NO_ID)
    longest = 0.0
    gc.collect()
    gc.disable()  # a broker collects garbage between requests, too
    request.addfinalizer(gc.enable)
    rules = [*added]
    few = dict.fromkeys(rules[:5], NO_ID)
    for change in ({"added": added}, {"removed": rules[::2]}, {"added": few}):
        steps = table.changed(**change)
        try:
            while True:
                since = time.thread_time()
                next(steps)
                longest = max(longest, time.thread_time() - since)
        except StopIteration as end:
            table = end.value
    assert table.count == 5_003
    assert longest * 1000 <= MAX_STALL_MS * slowness()
