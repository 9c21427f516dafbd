"""CreateAcls, DescribeAcls and DeleteAcls on the wire, and their immediate effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.metrics import own
from tests.support.cluster import Cluster, unique
from tests.support.guarded import Guarded, cluster, topic
from tests.support.stalls import watched_loop

VERSIONS = [1, 2, 3]
ANY_FILTER = {
    "resource_type_filter": 1,
    "pattern_type_filter": 1,
    "operation": 1,
    "permission_type": 1,
}
FIELDS = ("resource_type", "pattern_type", "resource_name", "principal", "host", "operation")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Guarded]:
    with Guarded(tmp_path_factory.mktemp("data"), {}) as broker:
        yield broker


@pytest.fixture
def admin(guarded) -> Iterator[Cluster]:
    with guarded.admin() as connected:
        yield connected
        connected.call("delete_acls", 3, filters=[ANY_FILTER])


@pytest.fixture
def nobody(guarded) -> Iterator[Cluster]:
    with Cluster(guarded.bootstrap) as connected:
        yield connected


def acl(name: str, operation: int = 3, **fields) -> dict:
    return {
        "resource_type": 2,
        "resource_pattern_type": 3,
        "resource_name": name,
        "principal": "User:ANONYMOUS",
        "host": "*",
        "operation": operation,
        "permission_type": 3,
        **fields,
    }


def by_name(name: str, **fields) -> dict:
    return {**ANY_FILTER, "resource_name_filter": name, **fields}


def errors(answers: list[dict]) -> list[str]:
    return [answer["error_code"] for answer in answers]


def create(client: Cluster, *acls: dict, version: int = 3) -> list[dict]:
    return client.call("create_acls", version, creations=list(acls))["results"]


@pytest.mark.parametrize("version", VERSIONS)
def test_acls_are_created_described_and_deleted_in_every_version(admin, version):
    name = unique("t")
    made = create(admin, acl(name), acl(name, 4), acl(name, 4), acl("", 4), version=version)
    assert errors(made) == ["none", "none", "none", "invalid_request"]
    assert [result["error_message"] for result in made] == [None] * 3 + [
        "Invalid empty resource name"
    ]
    create(admin, acl(name[:1], resource_pattern_type=4, permission_type=2), version=version)

    described = admin.call("describe_acls", version, **by_name(name, pattern_type_filter=2))
    assert (described["error_code"], described["error_message"]) == ("none", None)
    found = {
        (resource["resource_name"], resource["pattern_type"]): [
            (each["principal"], each["host"], each["operation"], each["permission_type"])
            for each in resource["acls"]
        ]
        for resource in described["resources"]
    }
    assert found == {
        (name, 3): [("User:ANONYMOUS", "*", 3, 3), ("User:ANONYMOUS", "*", 4, 3)],
        (name[:1], 4): [("User:ANONYMOUS", "*", 3, 2)],
    }

    filters = [by_name(name, operation=4), by_name("nothing"), by_name(name, operation=0)]
    gone = admin.call("delete_acls", version, filters=filters)["filter_results"]
    assert errors(gone) == ["none", "none", "invalid_request"]
    assert [len(result["matching_acls"]) for result in gone] == [1, 0, 0]
    (matched,) = gone[0]["matching_acls"]
    assert matched["error_code"] == "none"
    assert [matched[key] for key in FIELDS] == [2, 3, name, "User:ANONYMOUS", "*", 4]
    described = admin.call("describe_acls", version, **by_name(name))
    assert len(described["resources"][0]["acls"]) == 1


def test_acl_change_takes_effect_at_once_on_open_connections(admin, nobody):
    name = admin.create_topic(unique("t"))
    asked = [{"name": name}]

    def seen() -> str:
        (described,) = nobody.call("metadata", 12, topics=asked)["topics"]
        return described["error_code"]

    assert seen() == "topic_authorization_failed"
    create(admin, acl(name))
    assert seen() == "none"
    create(admin, acl("*", 8, permission_type=2))
    assert seen() == "topic_authorization_failed"
    admin.call("delete_acls", 3, filters=[by_name("*")])
    assert seen() == "none"
    admin.call("delete_acls", 3, filters=[by_name(name)])
    assert seen() == "topic_authorization_failed"


@pytest.mark.parametrize("version", VERSIONS)
def test_acl_apis_need_describe_or_alter_on_the_cluster(guarded, nobody, version):
    def outcome() -> list[str]:
        described = nobody.call("describe_acls", version, **ANY_FILTER)
        made = create(nobody, acl(""), acl(""), version=version)
        gone = nobody.call("delete_acls", version, filters=[by_name("x")] * 2)["filter_results"]
        assert len(made) == len(gone) == 2
        assert len(set(errors(made))) == len(set(errors(gone))) == 1
        return [described["error_code"], *errors(made[:1]), *errors(gone[:1])]

    refused = "cluster_authorization_failed"
    guarded.allow()
    assert outcome() == [refused] * 3
    guarded.allow(topic(Operation.ALL, "*"))
    assert outcome() == [refused] * 3
    guarded.allow(cluster(Operation.DESCRIBE))
    assert outcome() == ["none", refused, refused]
    guarded.allow(cluster(Operation.ALTER))
    assert outcome() == ["none", "invalid_request", "none"]
    guarded.allow()


@pytest.mark.parametrize("field", ["resource_type", "operation", "permission_type"])
@pytest.mark.parametrize("number", [0, 1, 99, -1])
def test_acl_with_an_unknown_or_any_enum_value_is_refused(admin, field, number):
    (made,) = create(admin, acl("t", **{field: number}))
    assert made["error_code"] == "invalid_request"
    assert admin.call("describe_acls", 3, **ANY_FILTER)["resources"] == []
    if number != 1:
        name = "resource_type_filter" if field == "resource_type" else field
        asked = {**ANY_FILTER, name: number}
        # An unknown number matches no ACL. The number 0, UNKNOWN, makes the filter invalid.
        expected = "none" if number else "invalid_request"
        described = admin.call("describe_acls", 3, **asked)
        assert (described["error_code"], described["resources"]) == (expected, [])


def test_acl_changes_are_flushed_before_the_response(guarded, admin):
    def is_on_disk() -> bool:
        partition = guarded.services.metadata.partition
        return partition.recovery_point == partition.log_end_offset

    create(admin, acl("t"))
    assert is_on_disk()
    admin.call("delete_acls", 3, filters=[by_name("t")])
    assert is_on_disk()


def test_authorizations_and_acls_are_counted_in_metrics(guarded, admin, nobody):
    def told() -> dict[str, float]:
        return {
            f"{family.name} {labels}".strip(): value
            for family, samples in own.of_broker(guarded.services, "1")
            for labels, value in samples
            if family.name in {"fencepost_authorizations_total", "fencepost_acls"}
        }

    before = told()
    create(admin, acl("t"))
    create(nobody, acl("t"))
    assert {name: value - before[name] for name, value in told().items()} == {
        'fencepost_authorizations_total result="allowed"': 1,
        'fencepost_authorizations_total result="denied"': 1,
        "fencepost_acls": 1,
    }


def test_partially_applied_acl_request_grants_no_additional_access(guarded, admin):
    """The controller decides large requests in several steps; brokers apply the steps in turn."""
    rights = []

    def look(_old: MetadataImage, _new: MetadataImage) -> None:
        rules = guarded.services.authorizer.rules
        rights.append(rules.rights("User:ANONYMOUS", "127.0.0.1", ResourceType.TOPIC, "secret"))

    guarded.services.metadata.subscribe(Subscriber.HISTORY, look)
    others = [acl(f"t{at}") for at in range(1_200)]
    anything, denial = acl("*"), acl("secret", permission_type=2)
    for acls in ([anything, *others, denial], [denial, *others, anything]):
        made = create(admin, acl("", 4), *acls)
        assert errors(made) == ["invalid_request"] + ["none"] * len(acls)
        admin.call("delete_acls", 3, filters=[ANY_FILTER])
    assert len(rights) >= 2 * 2 * 3, "the requests were decided in pieces"
    read = 1 << Operation.READ
    assert [right for right in rights if right.allowed & ~right.denied & read] == []


def test_concurrent_acl_request_does_not_use_up_the_limit_of_a_split_request(guarded, admin):
    """A CreateAcls between two steps of another CreateAcls is refused if both exceed max_acls."""
    controller = guarded.services.active_controller.machine
    settings = controller.settings
    limits = replace(settings.acl_limits, max_acls=5_300)
    large = [acl(f"large{at}") for at in range(5_000)]
    small = [acl(f"small{at}") for at in range(600)]
    with guarded.admin() as other:
        pieces = []

        def send(_old: MetadataImage, new: MetadataImage) -> None:
            pieces.append(len(new.acls))
            if len(pieces) == 1:
                other.send("create_acls", 3, creations=small)

        guarded.services.metadata.subscribe(Subscriber.HISTORY, send)
        controller.settings = replace(settings, acl_limits=limits)
        try:
            made = create(admin, *large)
            refused = other.receive()["results"]
        finally:
            controller.settings = settings
    assert pieces == [*range(500, 5_001, 500)]
    assert (set(errors(made)), set(errors(refused))) == ({"none"}, {"policy_violation"})


@pytest.mark.slow
def test_ten_thousand_acls_do_not_block_the_event_loop(admin, nobody):
    """The loop stays responsive while ACLs are created, listed, deleted and evaluated."""
    names = [f"{'topic' * (at % 9)}{at}" for at in range(10_000)]
    many = [acl(name, resource_pattern_type=3 + at % 2) for at, name in enumerate(names)]
    asked = [{"name": name} for name in names]
    with watched_loop() as watch:
        assert set(errors(create(admin, *many))) == {"none"}
        described = admin.call("describe_acls", 3, **ANY_FILTER)["resources"]
        found = nobody.call("metadata", 12, topics=asked, allow_auto_topic_creation=False)
        gone = admin.call("delete_acls", 3, filters=[ANY_FILTER])["filter_results"]
    assert len(described) == len(found["topics"]) == len(gone[0]["matching_acls"]) == 10_000
    assert {row["error_code"] for row in found["topics"]} == {"unknown_topic_or_partition"}
    watch.check()


@pytest.mark.slow
def test_request_that_changes_more_than_ten_thousand_acls_is_refused(admin):
    many = [acl(f"t{at}") for at in range(10_001)]
    assert set(errors(create(admin, *many))) == {"policy_violation"}
    assert errors(create(admin, *many[:10_000])) == ["none"] * 10_000
    assert errors(create(admin, many[-1])) == ["none"]
    gone = admin.call("delete_acls", 3, filters=[ANY_FILTER, by_name("t1")])["filter_results"]
    assert errors(gone) == ["invalid_request"] * 2
    gone = admin.call("delete_acls", 3, filters=[by_name("t10000")])["filter_results"]
    assert len(gone[0]["matching_acls"]) == 1
