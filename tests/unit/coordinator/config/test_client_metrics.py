"""Settings of client metrics subscriptions."""

from __future__ import annotations

import pytest

from fencepost.coordinator.config.client_metrics import MATCH, check
from fencepost.coordinator.config.key import ConfigError


@pytest.mark.parametrize("expression", ["(", "(" * 10_000 + ")" * 10_000, "a{9999999999999}"])
def test_match_with_expression_that_cannot_be_compiled_is_refused(expression: str) -> None:
    with pytest.raises(ConfigError, match="Illegal client matching pattern"):
        check({MATCH: f"client_id={expression}"})


def test_match_with_nested_expression_is_accepted() -> None:
    check({MATCH: "client_id=" + "(" * 50 + "a" + ")" * 50})
