"""Settings of client metrics subscriptions."""

from __future__ import annotations

import pytest

from fencepost.coordinator.config.client_metrics import MATCH, check_expressions
from fencepost.coordinator.config.key import ConfigError
from fencepost.protocol.steps import finish


@pytest.mark.parametrize(
    "expression", ["(", "a{9999999999999}", "[z-a]", "*a", "a**", r"\i", "a=b"]
)
def test_match_with_expression_that_cannot_be_compiled_is_refused(expression: str) -> None:
    with pytest.raises(ConfigError, match="Illegal client matching pattern"):
        finish(check_expressions({MATCH: f"client_id={expression}"}))


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 50 + "a" + ")" * 50,
        "a=",
        "(?!test-).*",
        "(?<!a)b",
        "(?>a|b)",
        r"(?<name>a+)-\k<name>",
        r"(a)\1",
        "a++b*+c?+d{2}+",
        r"\++[*+]",
        r"(?x)a(?s-i:b)",
        r"[\u0041-\u005a]\p{javaLowerCase}\P{IsLatin}",
        r"\Q(?!\E",
        r"\\(?!a)",
    ],
)
def test_match_with_java_regex_syntax_is_accepted(expression: str) -> None:
    finish(check_expressions({MATCH: f"client_id={expression}"}))
