"""Mapping of distinguished names to users.

Some cases come from SslPrincipalMapperTest; the other cases show Java's replacement templates.
"""

from __future__ import annotations

import pytest

from fencepost.coordinator.security.principal_mapping import PrincipalMapping, split_rules

CERTIFICATE = "CN=Duke,OU=ServiceUsers,O=Org,C=US"


@pytest.mark.parametrize(
    "rules",
    [
        "DEFAULT",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/L, DEFAULT",
        "RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/",
        "RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/L",
        "RULE:^cn=(.?),ou=(.?),dc=(.?),dc=(.?)$/$1@$2/U",
        "RULE:^CN=([^,ADEFLTU,]+)(,.*|$)/$1/",
        "RULE:^CN=([^,DEFAULT,]+)(,.*|$)/$1/",
    ],
)
def test_valid_principal_mapping_rules_are_accepted(rules: str) -> None:
    PrincipalMapping(rules)


@pytest.mark.parametrize(
    "rules",
    [
        "default",
        "DEFAUL",
        "DEFAULT/L",
        "DEFAULT/U",
        "RULE:CN=(.*?),OU=ServiceUsers.*/$1",
        "rule:^CN=(.*?),OU=ServiceUsers.*$/$1/",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/L/U",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/L",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/U",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/LU",
        # With these rules, Java fails when the first client connects.
        "RULE:^CN=(.*$/$1/",
        "RULE:^CN=.*$/$1/",
        "RULE:^CN=(.*)$/$/",
        "RULE:^CN=(.*)$/${no}/",
    ],
)
def test_invalid_principal_mapping_rules_are_refused(rules: str) -> None:
    with pytest.raises(ValueError, match="Invalid rule: `"):
        PrincipalMapping(rules)


@pytest.mark.parametrize(
    ("name", "user"),
    [
        (CERTIFICATE, "duke"),
        ("CN=Duke,OU=SME,O=mycp,L=Fulton,ST=MD,C=US", "duke@sme"),
        ("cn=duke,ou=sme,dc=mycp,dc=com", "DUKE@SME"),
        ("cN=duke,OU=JavaSoft,O=Sun Microsystems", "DUKE"),
        ("OU=JavaSoft,O=Sun Microsystems,C=US", "OU=JavaSoft,O=Sun Microsystems,C=US"),
    ],
)
def test_first_matching_rule_maps_distinguished_name_to_user(name: str, user: str) -> None:
    rules = (
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/L",
        "RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/L",
        "RULE:^cn=(.*?),ou=(.*?),dc=(.*?),dc=(.*?)$/$1@$2/U",
        "RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/U",
        "DEFAULT",
    )
    assert PrincipalMapping(", ".join(rules)).name_of(name) == user


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ("", []),
        ("DEFAULT", ["DEFAULT"]),
        ("RULE://", ["RULE://"]),
        ("RULE:/.*/", ["RULE:/.*/"]),
        ("RULE:/.*/L", ["RULE:/.*/L"]),
        ("RULE://,DEFAULT", ["RULE://", "DEFAULT"]),
        ("  RULE:// ,  DEFAULT  ", ["RULE://", "DEFAULT"]),
        ("  RULE:   /     / ,  DEFAULT  ", ["RULE:   /     /", "DEFAULT"]),
        ("  RULE:  /     /U   ,DEFAULT  ", ["RULE:  /     /U", "DEFAULT"]),
        (
            "  RULE:([A-Z]*)/$1/U   ,RULE:([a-z]+)/$1/,   DEFAULT  ",
            ["RULE:([A-Z]*)/$1/U", "RULE:([a-z]+)/$1/", "DEFAULT"],
        ),
        (",   , , ,      , , ,   ", []),
        (",,RULE://,,,DEFAULT,,", ["RULE://", "DEFAULT"]),
        (",  , RULE: /   /    ,,,   DEFAULT, ,   ", ["RULE: /   /", "DEFAULT"]),
        ("     ,  , RULE:   /  /U    ,,  ,DEFAULT, ,", ["RULE:   /  /U", "DEFAULT"]),
        ("RULE:\\/\\\\\\(\\)\\n\\t/\\/\\/\\//", ["RULE:\\/\\\\\\(\\)\\n\\t/\\/\\/\\//"]),
        ("RULE:\\**\\/+/*/L,RULE:\\/*\\**/**/", ["RULE:\\**\\/+/*/L", "RULE:\\/*\\**/**/"]),
        (
            (
                "RULE:,RULE:,/,RULE:,\\//U,RULE:,/RULE:,/,RULE:,RULE:,/L,RULE:,/L,"
                "RULE:, DEFAULT, /DEFAULT/,DEFAULT"
            ),
            [
                "RULE:,RULE:,/,RULE:,\\//U",
                "RULE:,/RULE:,/",
                "RULE:,RULE:,/L,RULE:,/L",
                "RULE:, DEFAULT, /DEFAULT/",
                "DEFAULT",
            ],
        ),
    ],
)
def test_mapping_rules_are_split_as_in_kafka(rules: str, found: list[str]) -> None:
    assert list(filter(None, split_rules(rules))) == found


def test_escaped_comma_with_whitespace_stays_in_the_mapped_name() -> None:
    mapping = PrincipalMapping("RULE:^CN=((\\\\, *|\\w)+)(,.*|$)/$1/,DEFAULT")
    assert mapping.name_of("CN=Tkac\\, Adam,OU=ITZ,DC=geodis,DC=cz") == "Tkac\\, Adam"


@pytest.mark.parametrize(
    ("rule", "name", "user"),
    [
        # Java's replaceAll continues after a match, and an empty match may follow there.
        ("RULE:.*/x/", "abc", "xx"),
        ("RULE:(a)(b)?c/$1-$2-/", "ac", "a--"),
        ("RULE:(a)(b)(c)/$12$0/", "abc", "a2abc"),
        ("RULE:(a)(b)(c)/$4$3/", "abc", "$4c"),
        ("RULE:(a)bc/\\$1\\\\\\/$1/", "abc", "$1\\/a"),
        ("RULE:(?<who>a)bc/${who}!/U", "abc", "A!"),
        ("RULE:(?<=x)abc/no/,DEFAULT", "abc", "abc"),
        # The pattern must match the whole name.
        ("RULE:CN=a/no/", "CN=ab", None),
        ("", "CN=a", None),
        ("RULE:(\\w+)/$1/", "ü", None),
    ],
)
def test_replacement_templates_behave_as_in_java(rule: str, name: str, user: str | None) -> None:
    assert PrincipalMapping(rule).name_of(name) == user
