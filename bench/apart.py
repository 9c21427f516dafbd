"""Clients in processes of their own: ``python -m bench.apart init|init-to-all|read …``.

``init`` needs a new process, because a broker has more work with the first connection of a client.
``read`` needs one because the producer and the consumer would share Python's global interpreter
lock, and the consumer's wait for the lock would look like a wait for the broker.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from confluent_kafka import Consumer, Producer, TopicPartition

TIMEOUT_S = 60.0
"""The longest wait for a client, or of a consumer for its next record."""

STAMP_BYTES = 8
"""A record begins with the nanosecond at which it was passed to the producer."""


CONNECTING_TO_ALL: Mapping[str, str | int | float | bool] = {"enable.sparse.connections": False}
"""Makes librdkafka connect to each broker as soon as it knows the broker. By default a timer looks
for a connected broker, and connects to one if there is none."""


def transactional(
    bootstrap: str,
    transactional_id: str,
    settings: Mapping[str, str | int | float | bool] | None = None,
) -> Producer:
    """Return a transactional producer that does not linger."""
    named = {"bootstrap.servers": bootstrap, "transactional.id": transactional_id}
    return Producer({**named, "linger.ms": 0, **(settings or {})})


def stamp() -> bytes:
    """Return the present time, on the clock that all processes of a machine share."""
    return time.perf_counter_ns().to_bytes(STAMP_BYTES)


def init_ms(bootstrap: str, transactional_id: str, *, to_all: bool) -> float:
    """Return how long ``init_transactions`` takes in a new process, including the connection.

    With ``to_all`` the client connects to every broker at once, so that the figure does not include
    a timer of the client.
    """
    what = "init-to-all" if to_all else "init"
    command = [sys.executable, "-m", "bench.apart", what, bootstrap, transactional_id]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    return float(told.stdout)


@contextmanager
def reader(
    bootstrap: str, topic: str, skipped: int, count: int
) -> Iterator[Callable[[], list[float]]]:
    """Consume ``topic`` from its first record on, in a process of its own.

    The yielded function waits until the consumer has ``skipped + count`` records. It returns, for
    each record after the first ``skipped``, the milliseconds from its :func:`stamp` until the
    consumer had it.
    """
    command = [sys.executable, "-m", "bench.apart", "read", bootstrap, topic]
    with subprocess.Popen(
        [*command, str(skipped), str(count)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise RuntimeError("the consumer did not start")

            def delays() -> list[float]:
                told, _ = process.communicate(timeout=TIMEOUT_S)
                if process.returncode:
                    raise RuntimeError("the consumer failed")
                return [float(text) for text in told.split()]

            yield delays
        finally:
            process.kill()


def _init(bootstrap: str, transactional_id: str) -> None:
    _measured(transactional(bootstrap, transactional_id))


def _init_to_all(bootstrap: str, transactional_id: str) -> None:
    _measured(transactional(bootstrap, transactional_id, CONNECTING_TO_ALL))


def _measured(producer: Producer) -> None:
    begin = time.perf_counter()
    producer.init_transactions(30)
    print((time.perf_counter() - begin) * 1e3)


def _read(bootstrap: str, topic: str, skipped: str, count: str) -> None:
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": topic, "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    print("assigned", flush=True)
    delays: list[int] = []
    for _ in range(int(skipped) + int(count)):
        message = consumer.poll(TIMEOUT_S)
        now = time.perf_counter_ns()
        if message is None or message.error():
            sys.exit(f"no record: {message and message.error()}")
        delays.append(now - int.from_bytes(message.value()[:STAMP_BYTES]))
    print(*(delay / 1e6 for delay in delays[int(skipped) :]))
    consumer.close()


if __name__ == "__main__":
    {"init": _init, "init-to-all": _init_to_all, "read": _read}[sys.argv[1]](*sys.argv[2:])
