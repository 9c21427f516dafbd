"""Logins in the syntax of Kafka's `sasl.jaas.config`."""

from __future__ import annotations

import pytest

from fencepost.protocol.jaas import JaasError, parse_jaas

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (f"{PLAIN} required;", {}),
        (f'{PLAIN} required username="al" password="p w";', {"username": "al", "password": "p w"}),
        (
            f"{PLAIN}\n  REQUIRED\n  username='a'\n  user_b=\"c\"\n;",
            {"username": "a", "user_b": "c"},
        ),
        (f'{PLAIN} required password="a\\"b\\\\c;=";', {"password": 'a"b\\c;='}),
        (f'{PLAIN} required // of alice\n x = "\\101" /* b */ y=plain;', {"x": "A", "y": "plain"}),
    ],
)
def test_jaas_config_is_parsed_into_module_and_options(text: str, options: dict[str, str]) -> None:
    login = parse_jaas(text)
    assert (login.module, login.family, login.options) == (PLAIN, "PLAIN", options)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must begin"),
        (f'{PLAIN} username="a";', "must begin|after the module"),
        (f'{PLAIN} always username="hidden";', "after the module"),
        (f'{PLAIN} required username="a" password="hidden"', "semicolon"),
        (f'{PLAIN} required username="a" password="hidden;', "never closed"),
        (f'{PLAIN} required username="a" "hidden";', "NAME=.*after username"),
        (f'{PLAIN} required password="hidden"; {PLAIN} required;', "single login"),
        (f"{PLAIN} required username=;", "NAME="),
    ],
)
def test_invalid_jaas_config_is_refused_without_showing_values(text: str, complaint: str) -> None:
    with pytest.raises(JaasError, match=complaint) as caught:
        parse_jaas(text)
    assert "hidden" not in str(caught.value)


def test_unknown_login_module_has_no_family() -> None:
    assert parse_jaas("com.example.Login required;").family == ""
    assert "pw" not in repr(parse_jaas(f'{PLAIN} required password="pw";'))
