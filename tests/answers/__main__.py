"""``python -m tests.answers [MODE...]`` records responses; ``--kafka`` compares them with Kafka."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.answers.clusters import MODES, kafka_alone
from tests.answers.recording import broken, differences, parts, play, record, recorded


def main() -> None:
    """Run the script on each kind of cluster; print changed responses, and record them."""
    parser = argparse.ArgumentParser(prog="python -m tests.answers", description=__doc__)
    parser.add_argument("modes", nargs="*", choices=[*MODES, []], help="by default all of them")
    parser.add_argument("--kafka", action="store_true", help="compare with Apache Kafka alone")
    parser.add_argument("--check", action="store_true", help="compare and do not write")
    parser.add_argument("--part", help="only this part of the script")
    options = parser.parse_args()
    chosen = [(name, part) for name, part in parts() if options.part in {None, name}]
    for mode in options.modes or MODES:
        with tempfile.TemporaryDirectory() as home, MODES[mode](Path(home)) as places:
            found = play(places, chosen)
        expected = recorded(mode)
        if options.part:
            expected = {name: told for name, told in expected.items() if name in found}
        changed = differences(found, expected)
        print(f"{mode}: {sum(map(len, found.values()))} requests, {len(changed)} differences")
        print("\n".join(changed[:400]))
        if broken(found):
            raise SystemExit("\n".join(broken(found)))
        if not options.check:
            record(mode, {**recorded(mode), **found} if options.part else found)
    if options.kafka:
        with tempfile.TemporaryDirectory() as home, kafka_alone(Path(home)) as places:
            theirs = play(places, chosen)
        print("\n".join(differences(recorded("alone"), theirs)))


if __name__ == "__main__":
    main()
