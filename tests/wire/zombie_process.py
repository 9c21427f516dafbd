"""A transactional producer in a separate process, which a test can suspend, resume and duplicate.

    python -m tests.wire.zombie_process paused CLIENT BOOTSTRAP TOPIC ID TIMEOUT_MS GO
    python -m tests.wire.zombie_process rival CLIENT BOOTSTRAP TOPIC ID NAME STOP

``paused`` opens a transaction, prints ``open``, and waits until the file GO exists. Then it writes
another record and commits, and prints ``committed``, or ``refused`` with the reason. ``rival`` runs
transactions of two records until the file STOP exists; whenever it is fenced, it sends
InitProducerId again. For each transaction it prints ``committed``, or ``unknown`` if the outcome is
unknown.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from tests.wire.transactional import AbortableError, Fenced, transactional

WAIT_S = 60.0
MOST = 20_000
"""The maximum number of transactions of a rival that is not stopped."""


def say(*words: object) -> None:
    print(*words, flush=True)


def is_there(path: str) -> bool:
    return Path(path).exists()


async def paused(
    client: str, bootstrap: str, topic: str, name: str, timeout_ms: str, go: str
) -> None:
    async with transactional(client, bootstrap, name, timeout_ms=int(timeout_ms)) as producer:
        await producer.begin()
        await producer.send(topic, b"before the pause")
        say("open")
        end = time.monotonic() + WAIT_S
        # Do not run the event loop meanwhile, because a suspended process does not run it either.
        while not is_there(go) and time.monotonic() < end:
            time.sleep(0.01)  # noqa: ASYNC251
        for step in ("send", "commit"):
            try:
                if step == "send":
                    await producer.send(topic, b"after the pause")
                else:
                    await producer.commit()
                    say("committed")
            except (Fenced, AbortableError) as refusal:
                say("refused", step, repr(refusal))


async def rival(client: str, bootstrap: str, topic: str, name: str, who: str, stop: str) -> None:
    number = 0
    while number < MOST and not is_there(stop):
        try:
            async with transactional(client, bootstrap, name) as producer:
                say("claimed")
                while number < MOST and not is_there(stop):
                    value = f"{who}-{number}"
                    number += 1
                    try:
                        await producer.begin()
                        for partition in (0, 1):
                            await producer.send(topic, value.encode(), partition)
                        await producer.commit()
                    except (Fenced, AbortableError):
                        say("unknown", value)
                        raise
                    say("committed", value)
        except (Fenced, AbortableError):
            continue
    say("done")


if __name__ == "__main__":
    asyncio.run({"paused": paused, "rival": rival}[sys.argv[1]](*sys.argv[2:]))
