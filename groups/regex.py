"""Which topics the expressions of subscriptions match, found out slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fencepost.logcore.machine import InvalidRegularExpressionError
from fencepost.logcore.regex import MAX_KEPT_STATES, Regex
from fencepost.logcore.regex_syntax import parse
from fencepost.logcore.steps import Steps


def reason_against(pattern: str) -> Steps[str | None]:
    """Return why an expression is not valid, in steps; None if it is."""
    try:
        for _ in parse(pattern):
            yield
    except InvalidRegularExpressionError as error:
        return str(error)
    return None


class RegexScan:
    """Finds out, slice by slice, which of many names match which of many expressions.

    A name that the member may not see matches none.
    """

    def __init__(
        self,
        patterns: Iterable[str],
        names: Iterable[str],
        version: int,
        may_see: Callable[[str], bool] | None = None,
    ) -> None:
        self.version = version
        """The version of the names, which goes into what is written of them."""
        self.found: dict[str, tuple[str, ...]] = {}
        """The names that match, in order, of each expression that is done."""
        self.refused: dict[str, str] = {}
        """Why an expression can't be used."""
        self._regex: Regex | None = None
        self._may_see = may_see
        self._work = self._run(sorted(patterns), list(names))

    def go_on(self, steps: int) -> bool:
        """Take about so many steps; say whether nothing is left to do."""
        for taken in self._work:
            steps -= taken
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
            self.found[pattern] = tuple(sorted(matching))
