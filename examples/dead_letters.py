"""Records that cannot be processed go to a dead-letter topic, in the same transaction."""

from __future__ import annotations

import sys

from examples.broker import create_topics, fresh, produce, read_topic, run
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.records import OFFSET, REASON, Batch, Output
from fencepost.pipelines.serde import JSON

RECORDS = 1_000


async def example(bootstrap: str) -> str | None:
    """Process payments, of which every seventh is not JSON and every tenth is negative."""
    source, target, dead = fresh("payments"), fresh("booked"), fresh("refused")
    await create_topics(bootstrap, (source, 1), (target, 1), (dead, 1))

    def payment(n: int) -> bytes:
        return (
            b"{broken" if n % 7 == 0 else JSON.encode({"n": n, "amount": -1 if n % 10 == 0 else n})
        )

    await produce(bootstrap, source, [(b"k", payment(n), None) for n in range(RECORDS)])

    def book(batch: Batch) -> list[Output]:
        booked = []
        for record in batch:
            if record.value["amount"] < 0:
                batch.refuse(record, "negative amount")
            else:
                booked.append(Output(target, record.value, record.key))
        return booked

    group = fresh("bookkeeper")
    async with ExactlyOnce(
        bootstrap,
        group=group,
        topics=[source],
        handler=book,
        transactional_id=group,
        options=Options(value_serde=JSON, dead_letter=dead),
    ) as pipeline:
        await pipeline.run(to_end=True)
    booked = [JSON.load(r.value)["n"] for r in await read_topic(bootstrap, target)]
    letters = await read_topic(bootstrap, dead)
    refused = sorted(int(dict(letter.headers)[OFFSET]) for letter in letters)
    print(
        f"{len(booked)} booked, {len(letters)} refused, e.g. for "
        f"{dict(letters[0].headers)[REASON].decode()[:60]!r}"
    )
    wrong = [n for n in range(RECORDS) if n % 7 == 0 or n % 10 == 0]
    if refused != wrong or any(
        letter.value != payment(n)
        for letter, n in zip(
            sorted(letters, key=lambda letter: int(dict(letter.headers)[OFFSET])),
            wrong,
            strict=True,
        )
    ):
        return "the dead letters are not the bad records"
    return None if booked == sorted(set(range(RECORDS)) - set(wrong)) else "wrong bookings"


if __name__ == "__main__":
    sys.exit(run(__doc__, example))
