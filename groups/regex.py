"""Matching of topics against the expressions of subscriptions, in slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fencepost.logcore.machine import InvalidRegularExpressionError
from fencepost.logcore.regex import MAX_KEPT_STATES, Regex
from fencepost.logcore.regex_syntax import parse
from fencepost.logcore.steps import Steps


def reason_against(pattern: str) -> Steps[str | None]:
    """Return, in steps, why an expression is invalid; None if it is valid."""
    try:
        for _ in parse(pattern):
            yield
    except InvalidRegularExpressionError as error:
        return str(error)
    return None


class RegexScan:
    """Matches many names against many expressions, in slices.

    Names that the member may not see match no expression.
    """

    def __init__(
        self,
        patterns: Iterable[str],
        names: Iterable[str],
        version: int,
        may_see: Callable[[str], bool] | None = None,
    ) -> None:
        self.version = version
        """The version of the topic names, which the record of the result includes."""
        self.matches: dict[str, tuple[str, ...]] = {}
        """The matching names, in order, of each finished expression."""
        self.refused: dict[str, str] = {}
        """Unusable expressions, with the reasons."""
        self._regex: Regex | None = None
        self._may_see = may_see
        self._work = self._run(sorted(patterns), list(names))

    def advance(self, steps: int) -> bool:
        """Take about ``steps`` steps; return whether the scan is complete."""
        for work in self._work:
            steps -= work
            if steps <= 0:
                if self._regex is not None:
                    self._regex.forget(MAX_KEPT_STATES)
                return False
        return True

    def _run(self, patterns: list[str], names: list[str]) -> Iterator[int]:
        for pattern in patterns:
            regex = self._regex = Regex(pattern)
            try:
                yield from regex.build()
            except InvalidRegularExpressionError as error:
                self.refused[pattern] = str(error)
                continue
            matching: list[str] = []
            for name in names:
                does_match = yield from regex.walk(name)
                if does_match and (self._may_see is None or self._may_see(name)):
                    matching.append(name)
            self.matches[pattern] = tuple(sorted(matching))
