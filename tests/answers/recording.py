"""The files of recorded responses. Each request occurs in them once.

Below a request are the responses of all clusters; clusters with equal responses share a line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.answers import (
    script_access,
    script_cluster,
    script_controller,
    script_shares,
    script_topics,
)
from tests.answers.asking import Asker, Step, compact
from tests.answers.clusters import MODES, Places
from tests.oracle.tracer import leaves

RECORDED: Final = Path(__file__).with_name("recorded")

SCRIPTS: Final = (
    script_topics,
    script_access,
    script_cluster,
    script_controller,
    script_shares,
)
BROKEN: Final = "the part broke"
Part = Callable[[Asker], None]
Answers = dict[str, list[Step]]
"""Name of a file → the responses of one cluster for this file."""


def parts() -> Iterator[tuple[str, Part]]:
    """Yield the names of the parts of the script and the parts, in order."""
    for script in SCRIPTS:
        stem = script.__name__.rpartition("_")[2]
        for part in script.SCRIPT:
            yield f"{stem}_{part.__name__}", part


def play(places: Places, chosen: Iterable[tuple[str, Part]] = ()) -> Answers:
    """Run the parts on a cluster; return all its responses."""
    ask = Asker(places)
    found: Answers = {}
    try:
        for name, part in chosen or parts():
            ask.begin_part()
            try:
                part(ask)
            except Exception as error:  # noqa: BLE001 - the other parts must run as well
                ask.keep(BROKEN, None, repr(error))
            found[name] = json.loads(compact(ask.steps))
    finally:
        ask.close()
    return found


def broken(answers: Answers) -> list[str]:
    """Return the parts that ended with an exception, and must not be recorded."""
    return [
        f"{name}: {answer}"
        for name, steps in answers.items()
        for request, _, answer in steps
        if request == BROKEN
    ]


# --- files ---

Key = tuple[str, str, int]
"""A request, its body, and how often the same request was sent before."""


def _numbered(steps: Iterable[Step]) -> dict[Key, Any]:
    """Return the responses by :data:`Key`."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for request, body, answer in steps:
        key = request, compact(body, is_sorted=True)
        found[*key, seen[key]] = answer
        seen[key] += 1
    return found


def recorded(mode: str) -> Answers:
    """Return the recorded responses of a cluster."""
    found: Answers = {}
    for path in sorted(RECORDED.glob("*.json")):
        rows = json.loads(path.read_text())
        answers = [
            (row["request"], row["body"], answer)
            for row in rows
            for modes, answer in row.items()
            if mode in modes.split(", ")
        ]
        if answers:
            found[path.stem] = answers
    return found


def record(mode: str, answers: Answers) -> None:
    """Write the responses of a cluster; the responses of other clusters do not change."""
    others = {other: recorded(other) for other in MODES if other != mode}
    for name in {*answers, *recorded(mode)}:
        by_mode = {other: _numbered(found.get(name, ())) for other, found in others.items()}
        by_mode[mode] = _numbered(answers.get(name, ()))
        _write(RECORDED / f"{name}.json", by_mode)


def _write(path: Path, by_mode: Mapping[str, Mapping[Key, Any]]) -> None:
    keys: list[Key] = []
    for found in by_mode.values():
        at = 0
        for key in found:
            if key in keys:
                at = keys.index(key) + 1
            else:
                keys.insert(at, key)
                at += 1
    rows = []
    for key in keys:
        alike: dict[str, list[str]] = {}
        for mode in MODES:
            if key in by_mode.get(mode, {}):
                alike.setdefault(compact(by_mode[mode][key]), []).append(mode)
        request, body, _ = key
        lines = [f'{{"request":{compact(request)},"body":{body}']
        lines += [f' "{", ".join(modes)}":{told}' for told, modes in alike.items()]
        rows.append(",\n".join(lines) + "}")
    RECORDED.mkdir(exist_ok=True)
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n")


# --- comparison ---


def differences(found: Answers, expected: Answers) -> list[str]:
    """Return a line for each leaf in which a response differs from the recorded response."""
    return [
        line
        for name in {**expected, **found}
        for line in _compared(name, found.get(name, []), expected.get(name, []))
    ]


def _compared(name: str, found: Sequence[Step], expected: Sequence[Step]) -> Iterator[str]:
    now, then = _numbered(found), _numbered(expected)
    for key in {**then, **now}:
        if key not in now or key not in then:
            yield f"{name}: {'no longer asked' if key in then else 'not recorded'}: {key[:2]}"
            continue
        for where, ours, theirs in leaves(now[key], then[key]):
            yield (
                f"{name}: {key[0]} {key[1]}\n"
                f"    {where or 'answer'}: {compact(ours)} instead of {compact(theirs)}"
            )
